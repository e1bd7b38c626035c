"""Records and shows a run: in metrics.jsonl, a logger, the terminal and summary.json.

It receives numbers: steps, rows of figures, a diagnosis. It knows no model and no optimizer.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from time import monotonic

import yaml

from config import RunConfig
from training.record.checkpoint import Checkpoints
from training.record.clock import PHASES, WallClock, phase
from training.record.files import Row, append_row, write_file, write_json
from training.record.loggers import start_logger
from training.record.names import attention_in_words, belies_exact
from training.record.outcome import after_training, outcome_of, resume_command, save_summary
from training.record.plot import draw_loss_curve
from training.record.starts import Start, stop_clock
from training.record.text_table import printable

log = logging.getLogger("tilegpt")

EVERY = 5.0  # seconds from one line of progress to the next


class Recorder:
    """Records one start of a run.

    `summary` is what summary.json will say, and `environment` is for env.json. Once this is built,
    the folder belongs to the run.
    """

    def __init__(
        self,
        run_dir: Path,
        config: RunConfig,
        start: Start,
        checkpoints: Checkpoints,
        summary: Row,
        environment: Row,
    ) -> None:
        self.run_dir, self.config, self.start, self.summary = run_dir, config, start, summary
        self.checkpoints, self.writes = checkpoints, checkpoints.writes
        (run_dir / "metrics.jsonl").touch()
        self.tokens_per_step = config.sequences_per_step * config.seq_len
        self.wall = WallClock(seconds=stop_clock(checkpoints.starts))
        self.called_inexact = False
        summary |= {"steps_done": start.step, "tokens": start.tokens, "starts": checkpoints.starts}
        # first: if this start is killed, the summary of an earlier one is not its result
        write_json(run_dir / "summary.json", summary)
        settings = yaml.safe_dump(checkpoints.config, sort_keys=False, allow_unicode=True)
        write_file(run_dir / "config.yaml", settings)
        write_json(run_dir / "env.json", environment)
        ranks = f" on {summary['ranks']} ranks" if "ranks" in summary else ""
        log.info(
            f"model={config.model.name} {summary['parameters']:,} parameters, "
            f"attention={summary['variant']}\n{summary['device']} {summary['dtype']}, "
            f"{config.sequences_per_step} x {config.seq_len} tokens a step{ranks}, in {run_dir}"
        )
        with phase("logging"):
            self.logger = start_logger(config, run_dir, summary, writes=self.writes)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Notes how this block, the training, ended."""
        summary = self.summary
        try:
            with self.checkpoints:
                yield
        except BaseException as error:
            summary |= outcome_of(error, self.run_dir)
            save_summary(self.run_dir, summary)  # what follows may take long, or be killed
            with phase("logging"):
                self.logger.finish(summary)
            raise
        done = summary["steps_done"]
        summary["tokens_per_sec"] = self.wall.tokens_per_sec(summary["tokens"])
        if summary["status"] == "unfinished" and done == self.config.steps:
            summary["status"] = "completed"
        elif summary["status"] == "unfinished":
            summary["status"] = "interrupted"
            log.warning(f"interrupted after step {done}; {resume_command(self.run_dir)}")
        save_summary(self.run_dir, summary)  # report() follows

    def tokens(self, step: int) -> int:
        return self.start.tokens + (step - self.start.step) * self.tokens_per_step

    def begin(self, row: Row) -> None:
        """Record the state before the first step, and start the clock."""
        if row:
            self._write(self.start.step, row)
            log.info(self._line(self.start.step, row))
        self.wall.begin(self.start.tokens)
        self.next_line = monotonic() + EVERY
        PHASES.change("other")

    def diverged(self, step: int, diagnosis: Row) -> Row:
        """Note a divergence: a result of a run, not an error. Returns its entry in the row."""
        self.summary.update(status="diverged", first_bad_step=step, diagnosis=diagnosis)
        log.error(f"step {step}: the run diverged: {diagnosis['message']}")
        return {"attention/max_score": diagnosis["max_score"]}

    def step(self, step: int, loss: float, row: Row, *, last: bool) -> None:
        """Write the row of a step if there is one, and a line of progress if one is due."""
        self.summary |= {"steps_done": step, "tokens": self.tokens(step)}
        if row:
            self._write(step, row)
        if last or "val/loss" in row or monotonic() >= self.next_line:
            self.next_line = monotonic() + EVERY
            log.info(self._line(step, {"train/loss": loss} | row))

    def save(self, step: int, val_loss: float | None, *, due: bool, last: bool) -> None:
        """Save a checkpoint if it is due, the best so far, or the last."""
        self.checkpoints.save(step, self.tokens(step), val_loss, due=due, last=last)

    def report(self, sample: Callable[[], str | None]) -> None:
        """After the run: draw its loss curve, sample a text, and end the logger."""
        try:
            if self.writes:
                self._draw()
                self._sample(sample)
        finally:
            with phase("logging"):
                self.logger.finish(self.summary)
        if self.logger.url_or_hint:
            log.info(f"logs: {self.logger.url_or_hint}")

    def _draw(self) -> None:
        config, summary = self.config, self.summary
        title = (
            f"{summary['variant']} model={config.model.name} "
            f"seq_len={config.seq_len} seed={config.seed}: {summary['status']}"
        )
        with after_training("loss curve", summary), phase("drawing"):
            own = {"title": title, "attention": summary["attention"]}
            if picture := draw_loss_curve(self.run_dir, **own):
                log.info(f"loss curve: {picture}")

    def _sample(self, sample: Callable[[], str | None]) -> None:
        with after_training("sample", self.summary):
            text = sample() if self.summary["status"] == "completed" else None
            if text is not None:
                write_file(self.run_dir / "sample.txt", text)
                log.info(f"\na sample:\n{printable(text)}\n")

    @phase("logging")
    def _write(self, step: int, row: Row) -> None:
        """Write a row to disk and then to the logger; the summary keeps the newest figures."""
        tokens, summary = self.tokens(step), self.summary
        row = {"step": step, "tokens": tokens, **row, **self.wall.row(tokens)}
        append_row(self.run_dir / "metrics.jsonl", row)
        self.logger.log(row)
        summary |= {name: value for name, value in row.items() if name.startswith("val/")}
        summary["tokens_per_sec"] = self.wall.tokens_per_sec(tokens)
        if belies_exact(summary) and not self.called_inexact:
            self.called_inexact = True
            log.warning(
                f"attention={attention_in_words(summary)} is labelled exact and is not: val/loss "
                f"{summary['val/loss']:.4f}, and {summary['val/loss_exact']:.4f} of the same "
                "weights under exact attention"
            )

    def _line(self, step: int, row: Row) -> str:
        """The progress: step, tokens, losses, the speed by the wall clock, and the time left."""
        steps, tokens = self.config.steps, self.tokens(step)
        parts = [f"step {step:>5}/{steps}", f"{tokens:,} tokens"]
        parts += [
            f"{name} {value:.4f}"
            for name, value in row.items()
            if name == "train/loss" or name.startswith("val/")
        ]
        if speed := self.wall.tokens_per_sec(tokens):
            seconds = round((steps - step) * self.tokens_per_step / speed)
            left = f", {timedelta(seconds=seconds)} left" if step < steps else ""
            parts.append(f"{speed:,.0f} tokens/s{left}")
        return "  ".join(parts)
