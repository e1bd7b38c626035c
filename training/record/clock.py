"""The clocks of a run: where its seconds go, its speed by the wall clock, and its progress.

    with phase("evaluating"):
        ...

The names of phases, which are the keys of seconds_by_phase in summary.json:

    starting     imports, data, model. It counts from the first line of train.py, without the
                 start of Python itself
    compiling    torch.compile, whichever phase needs it
    training     the steps, without what torch.compile does in them
    evaluating   val/loss and the like
    looking      the metrics of the attention, and how a run diverged
    saving       checkpoints; on a GPU only what the training waits for
    logging      metrics.jsonl, and wandb or another logger with its start and its end
    drawing      loss_curve.png, with the import of matplotlib
    sampling     sample.txt
    other        the rest

Seconds count for the innermost phase only. They add up to the time of the newest start of a run,
which is wall_seconds unless it was resumed. GPU time counts in the phase that waits for it.

train.py imports this module first, and it imports nothing that takes long.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter, time
from typing import Any

log = logging.getLogger("tilegpt")

_program_began = [time()]


def program_began() -> float:
    """When this program began, for its first run, which pays for the imports; else now."""
    return _program_began.pop() if _program_began else time()


class Phases:
    """The seconds by phase of one start of a run."""

    def __init__(self) -> None:
        self.begin(time())

    def begin(self, began: float) -> None:
        """A run starts, or did at `began`."""
        self.began = self._since = began
        self.spent: Counter[str] = Counter()
        self._name = "starting"

    def change(self, name: str) -> str:
        """From here on, count for the phase `name`. Returns the phase that was counted."""
        now, before = time(), self._name
        self.spent[before] += now - self._since
        self._name, self._since = name, now
        return before

    def seconds(self) -> dict[str, float]:
        """Seconds by phase so far, the largest first."""
        self.change(self._name)
        return {name: round(seconds, 3) for name, seconds in self.spent.most_common()}


PHASES = Phases()  # of the run in this process


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Count this block for the phase `name`; also decorates a function."""
    before = PHASES.change(name)
    try:
        yield
    finally:
        PHASES.change(before)


def count_compiling() -> None:
    """From here on, count the time of torch.compile as compiling. Imports it."""
    from torch._dynamo.callback import callback_handler

    # torch._dynamo.reset(), which follows each run, removes these callbacks
    if _begin_compiling not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_begin_compiling)
        callback_handler.register_end_callback(_end_compiling)


_before_compiling = "other"


def _begin_compiling(_: Any) -> None:
    global _before_compiling
    if "compiling" not in PHASES.spent:
        log.info("compiling the model")  # the first time takes long
    _before_compiling = PHASES.change("compiling")


def _end_compiling(_: Any) -> None:
    PHASES.change(_before_compiling)


def in_words(seconds: dict[str, float]) -> str:
    """79.2 s: 31.0 compiling, 17.1 training, ..."""
    parts = [f"{each:.1f} {name}" for name, each in seconds.items() if each >= 0.05]
    return f"{sum(seconds.values()):.1f} s: {', '.join(parts)}"


class WallClock:
    """The time that a user waits. A run has two speeds, in every row of metrics after the first
    step and in summary.json:

    tokens_per_sec        by the wall clock, with everything in it. In a row: the tokens trained
                          since the row before, divided by the seconds since that row was written.
                          These include steps, compilation, metrics and evaluation of this row, and
                          logging and checkpoint of the row before. In the summary: from the first
                          step to the end of the training.
    step_tokens_per_sec   the steps alone, for comparing variants. record/speed.py measures it.

    A row's `seconds` is the time since the run began, including start-up and earlier starts, like
    wall_seconds in the summary. So tokens_per_sec is the difference of tokens between two rows
    divided by that of seconds. The first row of each start counts from its first step, with or
    without a row of step 0. In the summary of a resumed run, both speeds are those of the newest
    start, on the hardware in env.json.

    clock.begin(tokens)                             # before the first step; earlier starts have
                                                    trained `tokens`
    for step in ...:
        train(); row |= clock.row(tokens)

    Only tokens of steps whose loss the host has waited for count, not those of a queued step.
    """

    def __init__(self, seconds: float) -> None:
        self._zero = perf_counter() - seconds  # when the run would have begun without a break
        self._began: tuple[int, float] | None = None  # tokens, and the time
        self._row: tuple[int, float] | None = None  # when the last row was written

    def begin(self, tokens: int) -> None:
        self._began = self._row = tokens, perf_counter()

    def row(self, tokens: int) -> dict[str, float]:
        """seconds and, once the training has begun, tokens_per_sec of a row that is written now."""
        now = perf_counter()
        found = {"seconds": now - self._zero}
        if self._row:
            found["tokens_per_sec"] = (tokens - self._row[0]) / (now - self._row[1])
            self._row = tokens, now
        return found

    def tokens_per_sec(self, tokens: int) -> float | None:
        """The speed of all steps so far; None before the first is done."""
        if self._began is None or tokens == self._began[0]:
            return None
        return (tokens - self._began[0]) / (perf_counter() - self._began[1])
