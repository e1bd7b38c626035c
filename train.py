"""Train a small GPT with any attention.

    python train.py                                            minutes on two CPU cores
    python train.py attention=triton seq_len=8192 model=gpt2   our Triton flash-attention, on a GPU
    python train.py -m attention=tiled,sdpa,no_max seed=0,1    a sweep, with a table at the end
    python train.py resume=outputs/DAY/TIME steps=1200         resume a run; or a sweep

A run directory holds config.yaml, env.json, metrics.jsonl, summary.json, checkpoint/,
checkpoint.best/ and loss_curve.png.
"""

import time

BEGAN = time.time()  # before the imports: they are a part of what a run costs
from training.launch.interrupt import hide_ctrl_c

if __name__ == "__main__":
    hide_ctrl_c()
from pathlib import Path
from typing import Any, NoReturn

import hydra
from omegaconf import DictConfig

from config import RunConfig, register
from training.launch.command_line import launch

register()


def train(config: RunConfig, run_dir: Path, summary: dict[str, Any]) -> None:
    """One run, from settings to files. It fills `summary` as it goes, so an error loses nothing."""
    # imported here, so that --help and a mistyped key are answered without loading torch
    from training.launch.interrupt import Interrupt
    from training.launch.settings import check_settings
    from training.loop.build import build_run
    from training.loop.health import AttentionMonitor
    from training.loop.step import Stepper
    from training.record.checkpoint import Checkpoints
    from training.record.files import read_metrics
    from training.record.memory import cpu_memory_limit
    from training.record.recorder import Recorder
    from training.record.starts import new_start

    # Build. What can be refused is refused here.
    check_settings(config, summary)
    run = build_run(config, summary)

    # Begin at step 0, or where the checkpoint of resume= stopped.
    checkpoints = Checkpoints(
        run_dir, **run.state, config=run.settings, keep=2, writes=run.ranks.first
    )
    stepper = Stepper(run, checkpoints.begin(new_start(run, summary["started"])))
    # the largest scores of earlier starts belong to this run too
    monitor = AttentionMonitor(run.model, run.autocast, read_metrics(run_dir / "metrics.jsonl"))
    recorder = Recorder(run, stepper, monitor, run_dir, summary)

    # the recorder is first, so that it sees how all the others end
    with recorder, cpu_memory_limit(), Interrupt() as interrupt, checkpoints, stepper:
        recorder.begin(run.evaluate() if stepper.start.step == 0 and config.eval_every else {})

        # Step: forward and backward are done; where nothing is due, the next step is queued too.
        for result in stepper.steps(stop=interrupt):
            step, due, row = result.step, result.due, recorder.row(result)

            # Look before the update: these weights produced this loss.
            row |= monitor.inspect(result)
            if result.diverged:
                stepper.restore_gradients(result)
                row |= recorder.diverged(result, monitor.diagnose(step, result.sequences()))
            else:
                stepper.update(result)

            # Evaluate; at a switch, under the next attention too: val/loss_switched.
            checkpoints.write_ahead(last=result.last)
            switch_to = run.schedule[step] if due.switch else None
            if due.evaluate:
                row |= run.evaluate(also={"_switched": switch_to} if switch_to else {})

            # Record, and save.
            recorder.record(result, row)
            if switch_to:
                recorder.announce_switch(step, switch_to)
                stepper.use_attention(switch_to)
            if result.last or due.save or checkpoints.is_best(step, row.get("val/loss")):
                recorder.note_progress(result)
                checkpoints.save(step, result.tokens, row.get("val/loss"), last=result.last)
        recorder.end(result, interrupt)

    recorder.report()


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float:
    """One job. Returns what a sweeper minimises: val/loss of a completed run, else infinity."""
    from training.launch.job import run_job
    from training.record.outcome import Objective

    summary, _ = run_job(train, cfg)
    return Objective(summary)


def resume_sweep(sweep: Path) -> NoReturn:
    """The jobs of this sweep that are left."""
    from hydra_plugins import gpus

    gpus.resume_sweep(sweep)


if __name__ == "__main__":
    launch(main, BEGAN, resume_sweep)
