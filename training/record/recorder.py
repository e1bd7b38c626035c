"""Records and shows a run: in metrics.jsonl, a logger, the terminal and summary.json."""

import logging
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Thread

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from attention import Backend
from config import LoggerConfig
from model import sample_text
from training.launch.command_line import job_overrides, searched_folders
from training.launch.interrupt import Interrupt
from training.launch.sweep import job_names
from training.loop.evaluate import belies_exact
from training.loop.health import AttentionMonitor, to_blame
from training.loop.run import Run
from training.loop.step import Stepper, StepResult
from training.record.files import MetricsFile, Row, write_json
from training.record.loggers import build_logger
from training.record.names import attention_in_words
from training.record.outcome import after_training, outcome_of, resume_command, save_summary
from training.record.phases import current, phase
from training.record.plot import draw_loss_curve, draw_max_scores
from training.record.starts import stop_clock, write_settings
from training.record.text_table import printable
from training.record.throughput import Progress, WallClock

log = logging.getLogger("tilegpt")


class Recorder:
    """Records one start of a run. A context manager that on exit writes how the run ended.

    `summary` is what summary.json will say. Once this is built, the folder belongs to the run.
    """

    def __init__(
        self,
        run: Run,
        stepper: Stepper,
        monitor: AttentionMonitor,
        run_dir: Path,
        summary: Row,
    ) -> None:
        config, first = run.config, stepper.start
        self.run, self.run_dir, self.summary = run, run_dir, summary
        self.first, self.throughput, self.monitor = first, stepper.throughput, monitor
        self.metrics = MetricsFile(run_dir / "metrics.jsonl")
        self.memory = stepper.memory
        self.interrupt: Interrupt | None = None  # set by end()
        self.wall = WallClock(seconds=stop_clock(first.starts))
        self.progress = Progress(
            config.steps, tokens_per_step=run.tokens_per_step, first_step=first.step
        )
        summary |= {"steps_done": first.step, "tokens": first.tokens, "starts": first.starts}
        summary["compiled"] = stepper.compiled
        write_settings(run_dir, run.settings, job_overrides() + searched_folders())
        write_json(run_dir / "env.json", run.environment)
        self._announce()
        with phase("logging", f"starting logger={config.logger.name}"):
            names = job_names(run_dir, summary, config)
            chosen = config.logger if run.ranks.first else LoggerConfig(name="none")
            self.logger = build_logger(chosen, run_dir=run_dir, **names)

    def _announce(self) -> None:
        run, config = self.run, self.run.config
        attention = attention_in_words(self.summary | {"steps_done": None})  # with later ones
        log.info(
            f"{run.data.description}\n"
            f"model={config.model.name} {self.summary['parameters']:,} parameters, "
            f"attention={attention}"
        )
        ranks = f" on {run.ranks.world} ranks" if run.ranks.several else ""
        log.info(
            f"{run.device} {self.summary['dtype']}, {config.sequences_per_step} x "
            f"{config.seq_len} tokens a step{ranks}, in {self.run_dir}"
        )

    def __enter__(self) -> "Recorder":
        steps = self.run.config.steps
        self.terminal = ExitStack()
        self.terminal.enter_context(logging_redirect_tqdm())
        hidden = None if self.run.ranks.first else True  # None hides it without a terminal
        bar = tqdm(total=steps, initial=self.first.step, disable=hidden, unit="step")
        self.bar = self.terminal.enter_context(bar)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        self.terminal.close()
        summary = self.summary
        if self.interrupt:  # now, as a signal may come between end() and here
            summary["stopped"] = self.interrupt.requested
        if error is not None:
            summary |= outcome_of(
                error,
                self.run.device.type,
                self.run_dir,
                status=summary["status"],
            )
        elif summary["status"] == "interrupted":
            done = summary["steps_done"]
            log.warning(f"interrupted after step {done}; {resume_command(self.run_dir)}")
        summary["seconds_by_phase"] = current().seconds()  # so far
        save_summary(self.run_dir, summary)  # what follows may take long, or be killed
        with phase("logging", "ending the logger"):
            self.logger.summary(summary)
            if error is not None:  # else report() follows
                self.logger.finish(exit_code=1)

    def begin(self, row: dict[str, float]) -> None:
        """Record the state before the first step, and start the clock."""
        if row:
            row = {"step": self.first.step, "tokens": self.first.tokens, **row}
            self._write(row)
            log.info(self.progress.line(self.first.step, row))
        self.wall.begin(self.first.tokens)
        current().started()

    def row(self, result: StepResult) -> dict[str, float | None]:
        """Start a step's row of metrics: memory, loss, lr and gradient norm; {} if none is due."""
        due, row = result.due, {}
        if due.log or due.compare or due.evaluate:
            row |= self.memory.row()
        if due.log:
            row |= {"train/loss": result.loss, "lr": result.lr, "grad_norm": result.grad_norm}
        return row

    def diverged(self, result: StepResult, diagnosis: Row) -> dict[str, float]:
        """Record a divergence: a result of a run, not an error. Returns its entry in the row."""
        step, ranks = result.step, self.run.ranks
        if "sequence" in diagnosis:  # make this rank's number that of the step
            diagnosis["sequence"] += ranks.rows(self.run.config.sequences_per_step).start
        diagnosis = to_blame(ranks.gathered(diagnosis))
        self.summary.update(status="diverged", first_bad_step=step, diagnosis=diagnosis)
        log.error(f"step {step}: the run diverged: {diagnosis['message']}")
        return {"attention/max_score": diagnosis["max_score"]}

    def record(self, result: StepResult, row: dict[str, float | None]) -> None:
        """Show the step, and write its row if there is one."""
        # no line beside a progress bar
        say = self.progress.step(result.step, row=bool(row)) and self.bar.disable
        if row and result.due.log:
            row |= self.throughput.row()
        if say or result.finished or "val/loss" in row:
            log.info(self.progress.line(result.step, {"train/loss": result.loss} | row))
        if row:
            self._write({"step": result.step, "tokens": result.tokens, **row}, last=result.last)
        self.bar.update()
        self.bar.set_postfix(loss=f"{result.loss:.3f}", refresh=False)

    def announce_switch(self, step: int, backend: Backend) -> None:
        options = dict(backend.options) or ""
        log.info(f"step {step}: from here on attention={backend.name} {options}")

    def note_progress(self, result: StepResult) -> None:
        """Note what the next checkpoint will hold. Before the last one, prepare the end."""
        self.summary.update(steps_done=result.step, tokens=result.tokens)
        if result.last and self.run.ranks.first:
            prepare_end()

    def end(self, result: StepResult, interrupt: Interrupt) -> None:
        """Note how the loop ended; its last checkpoint is saved."""
        summary, self.interrupt = self.summary, interrupt
        summary["tokens_per_sec"] = self.wall.tokens_per_sec(result.tokens)
        if summary["status"] != "diverged":
            summary["status"] = "completed" if result.finished else "interrupted"

    def report(self) -> None:
        """After the run: draw its pictures, sample a text, and end the logger."""
        try:
            if self.run.ranks.first:
                self._report()
        finally:
            self.logger.finish(exit_code=0 if self.summary["status"] == "completed" else 1)

    def _report(self) -> None:
        run, summary, status = self.run, self.summary, self.summary["status"]
        peak_gib = summary.get("memory/peak_gib")
        if peak_gib:
            log.info(f"peak memory {peak_gib:.3g} GiB")
        if belies_exact(summary):
            log.warning(
                f"attention={attention_in_words(summary)} is labelled exact and is not: val/loss "
                f"{summary['val/loss']:.4f}, and {summary['val/loss_exact']:.4f} of the same "
                "weights under exact attention"
            )
        config, pictures, text = run.config, [], None
        with after_training("loss curve", summary), phase("drawing", "drawing the loss curve"):
            title = (
                f"{attention_in_words(summary)} model={config.model.name} "
                f"seq_len={config.seq_len} seed={config.seed}: {status}"
            )
            attention = run.schedule[0].name
            curve = draw_loss_curve(self.run_dir, title=title, attention=attention)
            log.info(f"loss curve: {curve or 'no loss was recorded'}")
            pictures.append(curve)
        drawing = phase("drawing", "drawing the largest scores")
        with after_training("picture of the largest scores", summary), drawing:
            pictures.append(draw_max_scores(self.run_dir, title=title))
        if config.sample_tokens and run.data.tokenizer is not None and status == "completed":
            sampling = phase("sampling", f"sampling {config.sample_tokens} tokens")
            with after_training("sample", summary), run.autocast, sampling:
                text = sample_text(
                    run.model,
                    run.data.tokenizer,
                    "def ",
                    max_new_tokens=config.sample_tokens,
                    seed=config.seed,
                )
                (self.run_dir / "sample.txt").write_text(text)
                log.info(f"\na sample:\n{printable(text)}\n")
        with phase("logging", "ending the logger"):
            pictures = [picture for picture in pictures if picture is not None]
            self.logger.media(summary["steps_done"], summary["tokens"], pictures, sample=text)
        if self.logger.url_or_hint:
            log.info(f"logs: {self.logger.url_or_hint}")

    @phase("logging")
    def _write(self, row: Row, *, last: bool = False) -> None:
        """Write a row to disk and then to the logger; the summary keeps the newest figures."""
        tokens, summary = row["tokens"], self.summary
        row |= self.wall.row(tokens)
        self.metrics.write(row)
        self.logger.log(row, tokens=tokens, last=last)
        summary |= {name: value for name, value in row.items() if name.startswith("val/")}
        summary |= self.monitor.summary() | self.memory.summary()
        summary |= {
            "steps_done": row["step"],
            "tokens": tokens,
            "step_tokens_per_sec": self.throughput.step_tokens_per_sec,
            "tokens_per_sec": self.wall.tokens_per_sec(tokens),
        }
        self.memory.reset()


def prepare_end() -> None:
    """Do in a thread, while the last checkpoint is written, what would take seconds after it."""

    def run() -> None:
        with suppress(Exception):  # drawing will report it
            import matplotlib.figure  # noqa: F401

    Thread(target=run, daemon=True).start()
