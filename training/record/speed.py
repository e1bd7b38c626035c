"""The speed of a run's steps alone, and its share of what the GPU's data sheet promises."""

import re
from time import perf_counter
from typing import Any

import torch

# dense peak FLOP/s of the matrix units for 16-bit floats with float32 accumulation, from NVIDIA's
# data sheets (half of the sparse figure, where only that is printed). The first entry that the
# device's name contains counts
PEAK_FLOPS = {
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,  # SXM
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def peak_flops(device: torch.device | str, dtype: torch.dtype) -> float | None:
    """Dense peak of a known GPU in FLOP/s, for bfloat16 and float16; None for other types, for a
    CPU and for an unknown GPU.
    """
    device = torch.device(device)
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name(device)
    if "Laptop" in name:  # its parts share a name with faster ones
        return None
    found = (peak for words, peak in PEAK_FLOPS.items() if re.search(rf"\b{words}\b", name))
    return next(found, None)


class Throughput:
    """step_tokens_per_sec: tokens per second of the steps alone, without the first ones
    (compilation, warm-up) and what happens between pause() and resume().

    for step in ...:
        throughput.resume(); train(); throughput.step(tokens)
        throughput.pause(); evaluate()
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
        # starts and stops of the clock that are not in _seconds yet
        self._stretches: list[tuple[Any, Any]] = []
        self._since: Any = None  # when the clock last started; None while it is stopped
        self._row = 0, 0.0  # tokens and seconds at the last row()

    def step(self, tokens: int) -> None:
        """Count one optimizer step; the clock starts after the warm-up."""
        if self._cold:
            self._cold -= 1
            self.resume()
        else:
            self.tokens += tokens

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

    @property
    def step_tokens_per_sec(self) -> float | None:
        """Average of this start of the run; None until a step after the warm-up is done. Pauses."""
        return self.tokens / self._elapsed() if self.tokens else None

    def row(self) -> dict[str, float | None]:
        """step_tokens_per_sec since the last call, and the share of the peak for each name in
        flops_per_token; None if unknown. Call it between two steps. Pauses.
        """
        tokens, seconds = self._row
        self._row = self.tokens, self._elapsed()
        speed = None
        if self.tokens > tokens:
            speed = (self.tokens - tokens) / (self._row[1] - seconds)
        shares = {
            name: speed * flops / self.peak if speed and self.peak else None
            for name, flops in self.flops_per_token.items()
        }
        return {"step_tokens_per_sec": speed, **shares}

    def _elapsed(self) -> float:
        self.pause()
        self._seconds += sum(seconds_between(*stretch) for stretch in self._stretches)
        self._stretches.clear()
        return self._seconds


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
