"""Measures how fast a run is, by the wall clock and by its steps alone, and shows its progress."""

import contextlib
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from model.gpt import GPT
from training.record.hardware import PEAK_FLOPS, data_sheet


def flops_per_token(model: GPT, seq_len: int, *, causal: bool = False) -> int:
    """Matrix-product FLOPs of one token's forward and backward pass: 6 N + 12 L H Q T (PaLM,
    arXiv:2204.02311, appendix B).

    N counts every parameter except the position and token embeddings, which are looked up, not
    multiplied. The output layer's vocab_size * C counts, even if it is tied to the token embedding.
    L, H and Q are num_layers, num_heads and head_dim, T is seq_len: each query meets T keys, though
    a causal mask hides half of them. With causal=True only the visible keys count, (T + 1) / 2 on
    average, or fewer under a window. Recomputation never counts, and documents packed into one
    sequence count as one.
    """
    multiplied = count_parameters(model)
    if model.position_embedding is not None:
        multiplied -= model.position_embedding.weight.numel()
    if model.output_layer is not None:  # otherwise the token embedding is also the output layer
        multiplied -= model.token_embedding.weight.numel()
    keys_twice = 2 * seq_len * model.config.num_layers
    if causal:
        windows = (block.attention.function.get("window") for block in model.blocks)
        keys_twice = sum(visible_keys_twice(seq_len, window) for window in windows)
    return round(6 * multiplied + 6 * model.config.hidden_size * keys_twice)


def visible_keys_twice(seq_len: int, window: int | None) -> float:
    """Twice the mean number of keys that a query sees under a causal mask: T + 1, or fewer in a
    window.

    The first `window` queries see 1, 2, ..., window keys, the others see window keys.
    """
    width = min(window or seq_len, seq_len)
    return width * (2 * seq_len - width + 1) / seq_len


def count_parameters(model: nn.Module) -> int:
    """The number of parameters; a shared one counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


class WallClock:
    """The time that a user waits. A run has two speeds, in every row of metrics after the first
    step and in summary.json:

    tokens_per_sec        by the wall clock, with everything in it. In a row: the tokens trained
                          since the row before, divided by the seconds since that row was written.
                          These include steps, compilation, metrics and evaluation of this row, and
                          logging and checkpoint of the row before. In the summary: from the first
                          step to the end of the training.
    step_tokens_per_sec   the steps alone, for comparing variants. Throughput measures it, and
                          computes mfu from it.

    A row's `seconds` is the time since the run began, including start-up and earlier starts, like
    wall_seconds in the summary. So tokens_per_sec is the difference of tokens between two rows
    divided by that of seconds. The first row of each start counts from its first step, with or
    without a row of step 0. In the summary of a resumed run, both speeds are those of the newest
    start, on the hardware in env.json.

    clock.begin(tokens)                             # before the first step; earlier starts have
                                                    trained `tokens`
    for step in ...: train(); row |= clock.row(tokens)

    Only tokens of steps whose loss the host has waited for count, not those of a queued step.
    """

    def __init__(self, *, seconds: float) -> None:
        self._zero = perf_counter() - seconds  # when the run would have begun without a break
        self._began: tuple[int, float] | None = None  # tokens and time at the first step
        self._row: tuple[int, float] | None = None  # and at the last row

    def begin(self, tokens: int) -> None:
        self._began = self._row = tokens, perf_counter()

    def row(self, tokens: int) -> dict[str, float]:
        """seconds and, once the training has begun, tokens_per_sec of a row that is written now."""
        now = perf_counter()
        found = {"seconds": now - self._zero}
        if self._row is not None:
            found["tokens_per_sec"] = (tokens - self._row[0]) / (now - self._row[1])
            self._row = tokens, now
        return found

    def tokens_per_sec(self, tokens: int) -> float | None:
        """The speed of all steps so far; None before the first is done."""
        if self._began is None or tokens == self._began[0]:
            return None
        return (tokens - self._began[0]) / (perf_counter() - self._began[1])


class Throughput:
    """step_tokens_per_sec: tokens per second of the steps alone, without the first ones
    (compilation, warm-up) and what is in paused().

    for step in ...:
        train(); throughput.step(tokens)
        with throughput.paused(): evaluate()
        row |= throughput.row()

    flops_per_token: {name: FLOPs of one token}; each is reported under its name as a share of
    `peak` FLOP/s. On a GPU the time is taken by events in its stream, so nothing here waits for the
    GPU until a number is requested.
    """

    WARM_UP = 3  # steps

    def __init__(
        self, device: torch.device, *, flops_per_token: dict[str, float], peak: float | None
    ) -> None:
        self.device = device
        self.flops_per_token = flops_per_token
        self.peak = peak
        self.tokens = 0
        self._cold = self.WARM_UP  # steps that will not count
        self._seconds = 0.0
        self._stretches: list[
            tuple[Any, Any]
        ] = []  # starts and stops of the clock that are not in _seconds yet
        self._since: Any = None  # when the clock last started; None while it is stopped
        self._window = (0, 0.0)  # tokens and seconds at the last window()

    def step(self, tokens: int) -> None:
        """Count one optimizer step; the clock starts after the warm-up."""
        if not self._cold:
            self.tokens += tokens
            return
        self._cold -= 1
        if not self._cold:
            self._since = stamp(self.device)

    def warm_up(self) -> None:
        """Do not count the next steps. They are slow like the first ones, for example because
        another attention is compiled in them.
        """
        self.pause()
        self._cold = self.WARM_UP

    def pause(self) -> None:
        if self._since is not None:
            self._stretches.append((self._since, stamp(self.device)))
            self._since = None

    def resume(self) -> None:
        if not self._cold and self._since is None:
            self._since = stamp(self.device)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.pause()
        try:
            yield
        finally:
            self.resume()

    @property
    def step_tokens_per_sec(self) -> float | None:
        """Average of this start of the run; None until a step after the warm-up is done."""
        return self.tokens / self._elapsed() if self.tokens else None

    def window(self) -> float | None:
        """Average since the last call, for one row of metrics; None if no step was measured. Call
        it between two steps.
        """
        tokens, seconds = self._window
        self._window = (self.tokens, self._elapsed())
        return (
            (self.tokens - tokens) / (self._window[1] - seconds) if self.tokens > tokens else None
        )

    def row(self) -> dict[str, float | None]:
        """window() as step_tokens_per_sec, and the share of the peak for each name in
        flops_per_token; None if unknown.
        """
        speed = self.window()
        shares = {
            name: speed * flops / self.peak if speed and self.peak else None
            for name, flops in self.flops_per_token.items()
        }
        return {"step_tokens_per_sec": speed, **shares}

    def _elapsed(self) -> float:
        running = [] if self._since is None else [(self._since, stamp(self.device))]
        self._seconds += sum(seconds_between(*stretch) for stretch in self._stretches)
        self._stretches.clear()
        return self._seconds + sum(seconds_between(*stretch) for stretch in running)


def stamp(device: torch.device) -> Any:
    """The time, for seconds_between(): on a CPU by the clock, on a GPU an event in its stream."""
    if device.type != "cuda":
        return perf_counter()
    # kernels run asynchronously, so the host's clock would only time their launches
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(start: Any, stop: Any) -> float:
    if isinstance(stop, float):
        return stop - start
    stop.synchronize()
    return start.elapsed_time(stop) / 1000  # from milliseconds


class Progress:
    """The lines that show the progress of a run.

    for step in ...:
        train(); due = progress.step(step)
        if due: print(progress.line(step, row))
    """

    EVERY = 15.0  # seconds

    def __init__(self, steps: int, *, tokens_per_step: int, first_step: int) -> None:
        self.steps = steps
        self.tokens_per_step = tokens_per_step
        self._since: tuple[int, float] | None = (
            None  # step and time from which the time left is estimated
        )
        self._said = first_step, perf_counter()  # step and time of the last line

    def step(self, step: int, *, row: bool = True) -> bool:
        """Count `step` as done; returns whether a line is due. It is due if the last line is
        EVERY seconds old and this step has a row of metrics, or four times as old without one.
        The clock starts after the first step, which compiles.
        """
        now = perf_counter()
        self._since = self._since or (step, now)
        return now - self._said[1] >= self.EVERY * (1 if row else 4)

    def line(self, step: int, row: dict[str, Any]) -> str:
        """Step and tokens so far, the losses in `row`, the wall-clock speed since the last line,
        and the time left if it is known.
        """
        (said_step, said), now = self._said, perf_counter()
        self._said = step, now
        parts = [f"step {step:>5}/{self.steps}", f"{step * self.tokens_per_step:,} tokens"]
        parts += [
            f"{name} {value:.4f}"
            for name, value in row.items()
            if name == "train/loss" or name.startswith("val/")
        ]
        if step > said_step:
            parts.append(
                f"{(step - said_step) * self.tokens_per_step / (now - said):,.0f} tokens/s"
            )
        if self._since and self._since[0] < step < self.steps:
            seconds = (now - self._since[1]) / (step - self._since[0]) * (self.steps - step)
            parts.append(f"{tqdm.format_interval(seconds)} left")
        return "  ".join(parts)


def peak_flops(device: torch.device | str, dtype: torch.dtype) -> float | None:
    """Dense peak of a known GPU in FLOP/s, for bfloat16 and float16; None for other types, for a
    CPU and for an unknown GPU.
    """
    device = torch.device(device)
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    return data_sheet(PEAK_FLOPS, torch.cuda.get_device_name(device))
