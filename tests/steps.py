"""The steps of a run as train.py takes them, without evaluation and records."""

from collections.abc import Iterator

from training.loop.optimizer import set_learning_rate
from training.loop.step import Figures, Stepper, gradients, update


def take_steps(stepper: Stepper) -> Iterator[tuple[Figures, dict]]:
    """For each step what train.py has seen by then, and the figures of its row. Ends at the last
    step, or where the run diverged.
    """
    run, config = stepper.run, stepper.run.config
    for step in range(stepper.step + 1, config.steps + 1):
        due, last = config.due(step), step == config.steps
        set_learning_rate(run.optimizer, step - 1, config.steps, config.optimizer())
        look = due.log or due.compare
        now = Figures(step, *stepper.queue(gradients, stepper.passes(step), look=look))
        seen = stepper.see(now, due, last=last)
        if not seen.diverged:
            stepper.queue(update, now)
        yield seen, stepper.row(seen, due)
        if seen.diverged:
            return
        if due.switch:
            stepper.use_attention(run.schedule[step])
