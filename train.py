"""Train a small GPT with any attention.

    python train.py                                            minutes on two CPU cores
    python train.py attention=triton seq_len=8192 model=gpt2   our Triton flash-attention, on a GPU
    python train.py -m attention=tiled,sdpa,no_max seed=0,1    a sweep, with a table at the end
    python train.py resume=outputs/DAY/TIME steps=1200         resume a run

A run directory holds config.yaml, env.json, metrics.jsonl, summary.json, checkpoint/,
checkpoint.best/ and loss_curve.png.
"""

from training.record.clock import program_began  # isort: skip - first, so that imports count

from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from config import RunConfig, register
from training.launch.command_line import launch

register()


def train(config: RunConfig, run_dir: Path, summary: dict[str, Any]) -> None:
    """One run, from settings to files. It fills `summary` as it goes, so an error loses nothing."""
    # imported here, so that --help and a mistyped key are answered without loading torch
    from training.launch.interrupt import Interrupt
    from training.loop.health import AttentionMonitor
    from training.loop.optimizer import set_learning_rate
    from training.loop.run import build_run
    from training.loop.step import Figures, Stepper, gradients, update
    from training.record.checkpoint import Checkpoints
    from training.record.files import read_metrics
    from training.record.recorder import Recorder
    from training.record.starts import new_start

    # Build. What can be refused is refused here.
    run = build_run(config, summary)

    # Begin at step 0, or where the checkpoint of resume= stopped.
    told = {"config": run.settings, "overrides": summary["overrides"]}
    checkpoints = Checkpoints(run_dir, **run.state, **told, writes=run.ranks.first)
    entry = new_start(config.attention, run.data, run.environment, run.init_from)
    start = checkpoints.begin(entry)
    rows = read_metrics(run_dir / "metrics.jsonl")  # of earlier starts of this run
    monitor = AttentionMonitor(run, rows, summary)
    stepper = Stepper(run, start.step, summary)
    recorder = Recorder(run_dir, config, start, checkpoints, summary, run.environment)

    with recorder.recording(), Interrupt(summary) as interrupt, stepper:  # the recorder ends last
        recorder.begin(run.evaluate() if start.step == 0 and config.eval_every else {})
        for step in range(start.step + 1, config.steps + 1):
            due = config.due(step)

            # Forward and backward, over the passes of the step. Nothing here waits for a GPU.
            set_learning_rate(run.optimizer, step - 1, config.steps, config.optimizer())
            look = due.log or due.compare
            loss, norm, max_scores = stepper.queue(gradients, stepper.passes(step), look=look)
            now = Figures(step, loss, norm, max_scores)

            # Look before the update: these weights produced this loss. Where nothing is due, a GPU
            # works on this step and its update meanwhile, and `seen` is the step before.
            last = run.ranks.any(interrupt.requested) or step == config.steps
            seen = stepper.see(now, due, last=last)
            if seen.diverged:
                due, last = config.due(seen.step, diverged=True), True
            row = monitor.inspect(seen.step, seen.max_scores, due)

            # The update. A GPU skips it by itself if the loss or the gradient is not finite.
            if seen.diverged:
                row |= recorder.diverged(seen.step, monitor.diagnose(seen.step))
            else:
                stepper.queue(update, now)
            row = stepper.row(seen, due) | row

            # Evaluate; at a switch, under the next attention too: val/loss_switched.
            switch_to = run.schedule[step] if due.switch else None
            if due.evaluate:
                row |= run.evaluate(switch_to)

            # Record, and save.
            recorder.step(seen.step, seen.loss, row, last=last)
            if switch_to:
                stepper.use_attention(switch_to)
            recorder.save(seen.step, row.get("val/loss"), due=due.save, last=last)
            if last:
                break

    recorder.report(run.sample)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float:
    """One job. Returns what a sweeper minimises: val/loss of a completed run, else infinity."""
    from training.launch.job import end_job, run_job
    from training.record.outcome import objective

    summary, _ = run_job(train, cfg, began=program_began())
    end_job(summary)
    return objective(summary)


if __name__ == "__main__":
    launch(main)
