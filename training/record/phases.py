"""Counts where the seconds of a run go, and reports what it is doing if that takes long.

    with phase("evaluating", "evaluating on 64 sequences"):
        ...

The names of phases, which are the keys of seconds_by_phase in summary.json:

    starting     imports, data, model. It counts from the first line of train.py, without the
                 start of Python itself
    compiling    torch.compile and Triton, whichever phase needs them
    training     the steps, without what is compiled in them
    evaluating   val/loss and the like
    looking      the metrics of the attention, and how a run diverged
    saving       checkpoints; on a GPU only what the training waits for
    logging      metrics.jsonl, and wandb or another logger with its start and its end
    drawing      loss_curve.png, with the import of matplotlib
    sampling     sample.txt
    other        the rest

Seconds count for the innermost phase only. They add up to the time of the newest start of a run,
which is wall_seconds unless it was resumed. GPU time counts in the phase that waits for it.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import time
from typing import Any

log = logging.getLogger("tilegpt")

BETWEEN = ("starting", "other")  # not worth a line


class Phases:
    """The phases of one start of a run. A context manager: within it a thread watches the clock."""

    tick_seconds = 0.2

    def __init__(self, began: float | None = None):
        self.began = self._charged = time() if began is None else began
        self.spent: dict[str, float] = {}
        self.stack = [Phase("starting", "loading PyTorch", self.began)]
        self.signal: str | None = None  # one that came and is not reported yet
        self._over = threading.Event()

    def __enter__(self) -> "Phases":
        global _current
        self._outer, _current = _current, self
        threading.Thread(target=self._watch, name="progress", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        global _current
        _current = self._outer
        self._over.set()

    def push(self, name: str, words: str) -> None:
        self.charge()
        self.stack.append(Phase(name, words, time()))

    def cut(self, depth: int) -> None:
        """End all phases but the first `depth`: an error may have left some of them open."""
        self.charge()
        del self.stack[max(depth, 1) :]
        if depth <= 1:  # another part of it begins
            self.stack[0] = Phase(self.stack[0].name, self.stack[0].name, time())

    def started(self) -> None:
        """The training begins: from here on, time outside of phases counts as `other`."""
        self.charge()
        self.stack[0] = Phase("other", "other", time())

    def charge(self, seconds_compiling: float = 0.0) -> None:
        """Count the time since the last call for the innermost phase, and for compiling."""
        now, name = time(), self.stack[-1].name
        past = now - self._charged - seconds_compiling
        self._charged = now
        self.spent[name] = self.spent.get(name, 0.0) + past
        if seconds_compiling:
            self.spent["compiling"] = self.spent.get("compiling", 0.0) + seconds_compiling

    def seconds(self) -> dict[str, float]:
        """Seconds by phase so far, the largest first."""
        self.charge()
        by_size = sorted(self.spent.items(), key=lambda item: -item[1])
        return {name: round(seconds, 3) for name, seconds in by_size}

    def _watch(self) -> None:
        while not self._over.wait(self.tick_seconds):
            self.tick()

    def tick(self) -> None:
        """Report what takes long, and a signal that came. No lock: this only reads the stack."""
        phase, now = self.stack[-1], time()
        so_far = f"{phase.words}, {now - phase.began:.0f} s so far"
        if self.signal is not None:
            name, self.signal = self.signal, None
            log.warning(
                f"{name}: the run ends and saves after what it is doing now ({so_far}); "
                "Ctrl-C or SIGTERM once more ends it at once, without saving"
            )
        elif now - phase.began > phase.patience and phase.words not in BETWEEN:
            # the line of each step says enough, once there has been one
            enough = phase.patience == 2 and phase.name == "training" and "training" in self.spent
            while phase.patience < now - phase.began:
                phase.patience = max(15, 2 * phase.patience)
            if not enough:
                log.info(so_far)


class Phase:
    """A phase: what goes on, since when, and after how many seconds to report it."""

    def __init__(self, name: str, words: str, began: float):
        self.name, self.words, self.began, self.patience = name, words, began, 2


_current = Phases()  # of the run in this process; outside of a run, nobody reads it
process_began: float | None = None  # set by train.py for the first run of its process


def new_run() -> Phases:
    global process_began
    began, process_began = process_began, None
    return Phases(began)


def current() -> Phases:
    return _current


@contextmanager
def phase(name: str, words: str | None = None) -> Iterator[None]:
    """Count this block for the phase `name`; also decorates a function."""
    phases = _current
    depth = len(phases.stack)
    phases.push(name, words or name)
    try:
        yield
    finally:
        phases.cut(depth)


def doing(words: str) -> None:
    """Describe what the current phase is doing now."""
    _current.stack[-1].words = words


def count_compiling() -> None:
    """From here on, count the time of torch.compile and Triton as compiling. Imports both."""
    from torch._dynamo.callback import callback_handler

    # torch._dynamo.reset(), which follows each run, removes these callbacks
    if _began_compiling not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_began_compiling)
        callback_handler.register_end_callback(_ended_compiling)
    with suppress(ImportError):
        from triton import knobs

        knobs.compilation.listener = _compiled_by_triton


def _began_compiling(_: Any) -> None:
    _current.push("compiling", "compiling the model")


def _ended_compiling(_: Any) -> None:
    _current.cut(len(_current.stack) - 1)


def _compiled_by_triton(*, times: Any, **_: Any) -> None:
    _current.charge(seconds_compiling=times.total / 1e6)


def in_words(seconds: dict[str, float]) -> str:
    """79 s: 31 compiling, 17 training, ... Phases below a second are left out, unless all are."""
    total, digits = sum(seconds.values()), 0
    shown = {name: each for name, each in seconds.items() if each >= 1}
    if not shown:
        shown, digits = {name: each for name, each in seconds.items() if each >= 0.05}, 1
    parts = [f"{each:.{digits}f} {name}" for name, each in shown.items()]
    return f"{total:.{digits}f} s: {', '.join(parts)}"
