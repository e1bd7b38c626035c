"""Peak memory and time of one attention call, forward and backward apart, over backends, lengths, head dims and dtypes.

    python -m scripts.benchmark --attention naive tiled sdpa --seq-len 256 512 --out benchmark.json
    python -m scripts.benchmark --attention naive triton --max-length --memory-gib 8 24 40 --out longest.json

A backend whose results are wrong is not timed; --allow-broken times it and marks its rows. Memory is the peak above what was allocated
before the call (q, k, v and the incoming gradient are inputs, not the attention's): PyTorch's allocator's on a GPU, with what it reserved;
on a CPU the tensors that operators make. Time is the median with the 20th and 80th percentile, after a warm-up, by device events on a
GPU; the backward's is its own, over a graph that is kept. Running out of memory is a result: the row says what was asked for.

--max-length searches the longest sequence, of forward alone and of forward and backward, by doubling and then halving the gap to 12%;
--memory-gib does so as if the card were smaller. Options follow a backend's name: tiled:block_q=512, and your own is pkg.module:BACKEND.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attention import Backend, attention, get_backend
from training.device import DTYPES, pick_device, pick_dtype
from training.memory import GIB, available_bytes, cpu_memory_limit, describe_out_of_memory, is_out_of_memory, release_memory
from training.metrics import environment, write_json

PASSES = ("forward", "backward", "training")


def parse_backend(text: str) -> Backend:
    """A backend and its options, from name:option=value,option=value or pkg.module:NAME:option=value."""
    name, _, rest = text.partition(":")
    target, _, options = rest.partition(":") if rest and "=" not in rest.partition(":")[0] else ("", "", rest)
    pairs = dict(option.split("=", 1) for option in options.split(",") if "=" in option)
    values = {key: int(value) if value.isdigit() else {"true": True, "false": False}.get(value, value) for key, value in pairs.items()}
    return get_backend("custom", target=f"{name}:{target}", **values) if target else get_backend(name, **values)


class LiveTensors(TorchDispatchMode):
    """Bytes of the tensors that operators make, while they are alive; tensors made outside do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        outside = {storage_of(x)._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)} - self.alive.keys()
        result = func(*args, **kwargs)
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and storage_of(x)._cdata not in outside:
                self.alive[storage_of(x)._cdata] = (StorageWeakRef(storage_of(x)), storage_of(x).nbytes())
        self.peak = max(self.peak, self.bytes)
        return result

    @property
    def bytes(self) -> int:
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        return sum(size for _, size in self.alive.values())


def storage_of(x: Tensor) -> torch.UntypedStorage:
    return x.untyped_storage()


class MemoryProbe:
    """Allocated bytes above what is there when it starts, and bytes reserved from a GPU, as `with MemoryProbe(device) as probe`."""

    def __init__(self, device: torch.device):
        self.device = device
        self.live = LiveTensors()

    def __enter__(self) -> "MemoryProbe":
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            self.before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self.live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.device.type == "cpu":
            self.live.__exit__(*error)

    @property
    def now(self) -> int:
        return torch.cuda.memory_allocated(self.device) - self.before if self.device.type == "cuda" else self.live.bytes

    def take_peak(self) -> tuple[int, int | None]:
        """The peak since the start or the last call, allocated and (on a GPU) reserved."""
        if self.device.type == "cpu":
            peak, self.live.peak = self.live.peak, self.live.bytes
            return peak, None
        torch.cuda.synchronize(self.device)
        peaks = torch.cuda.max_memory_allocated(self.device) - self.before, torch.cuda.max_memory_reserved(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peaks


def seconds(function: Callable[[], Any], *, repeats: int, device: torch.device) -> list[float]:
    """Wall time of each of `repeats` calls."""
    if device.type == "cpu":
        found = []
        for _ in range(repeats):
            start = time.perf_counter()
            function()
            found.append(time.perf_counter() - start)
        return found
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        function()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) / 1000 for start, end in events]


class Call:
    """One attention call on random inputs."""

    def __init__(self, backend: Backend, shape: dict[str, Any], *, device: torch.device, dtype: torch.dtype):
        self.backend, self.causal, self.device = backend, shape["causal"], device
        sizes = (shape["batch"], shape["heads"], shape["seq_len"], shape["head_dim"])
        self.inputs = [torch.randn(*sizes, device=device, dtype=dtype) for _ in range(3)]
        # a long sequence leaves no room for a gradient that a backend without a backward pass never sees
        self.trainable = not backend.unsupported_reasons(
            *(x[:1, :, :128].detach().requires_grad_() for x in self.inputs), causal=self.causal
        )
        if self.trainable:
            for x in self.inputs:
                x.requires_grad_()

    def forward(self) -> Tensor:
        return attention(*self.inputs, backend=self.backend, causal=self.causal).out

    def forward_only(self) -> Tensor:
        with torch.no_grad():
            return self.forward()

    def backward(self, out: Tensor, d_out: Tensor, *, keep: bool = False) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.inputs, d_out, retain_graph=keep)


def measure(call: Call, *, repeats: int) -> dict[str, Any]:
    """Bytes and seconds of a call: forward without gradients, backward on its own, and training: the two together."""
    row: dict[str, Any] = {}
    device = call.device
    d_out = torch.randn_like(call.inputs[0]) if call.trainable else None
    # compiles what is compiled, and lets libraries take their workspaces, which stay
    if call.trainable:
        call.backward(call.forward(), d_out)
    call.forward_only()
    row |= measure_memory(call, d_out)

    functions: dict[str, Callable[[], Any]] = {"forward": call.forward_only}
    out = call.forward() if call.trainable else None
    if call.trainable:
        functions["backward"] = lambda: call.backward(out, d_out, keep=True)
    for name, function in functions.items():
        once = seconds(function, repeats=1, device=device)[0]
        # long calls need no warm-up of the clocks, and nobody wants to wait for 20 of them
        count = max(3, min(repeats, int(3 / max(once, 1e-6))))
        seconds(function, repeats=max(1, count // 4), device=device)
        times = seconds(function, repeats=count, device=device)
        p20, *_, p80 = quantiles(times, n=5)
        row |= {f"{name}_seconds": median(times), f"{name}_p20": p20, f"{name}_p80": p80, f"{name}_repeats": count}
    batch, heads, length, head_dim = call.inputs[0].shape
    flops = 4 * batch * heads * length**2 * head_dim / (2 if call.causal else 1)
    row["forward_tflops"] = flops / row["forward_seconds"] / 1e12
    if call.trainable:
        row["training_seconds"] = row["forward_seconds"] + row["backward_seconds"]
        # the backward's five products against the forward's two
        row["backward_tflops"] = 2.5 * flops / row["backward_seconds"] / 1e12
    return row


def measure_memory(call: Call, d_out: Tensor | None) -> dict[str, int | None]:
    """forward: without gradients. saved: what the graph holds, out included. backward: peak while it runs, the saved included."""
    row: dict[str, int | None] = {}
    if call.device.type == "cpu" and call.backend.name == "flex":
        return row  # one operator there, that no dispatch mode can look into
    with MemoryProbe(call.device) as probe:
        out = call.forward_only()
        row["forward_bytes"], row["forward_reserved_bytes"] = probe.take_peak()
    del out
    if not call.trainable:
        return row
    with MemoryProbe(call.device) as probe:
        out = call.forward()
        forward, forward_reserved = probe.take_peak()
        row["saved_bytes"] = probe.now
        grads = call.backward(out, d_out)
        row["backward_bytes"], row["backward_reserved_bytes"] = probe.take_peak()
    del out, grads
    row["training_bytes"] = max(forward, row["backward_bytes"])
    row["training_reserved_bytes"] = None if forward_reserved is None else max(forward_reserved, row["backward_reserved_bytes"])
    return row


@contextmanager
def memory_cap(gib: float | None, device: torch.device):
    """Let this process have that much of the memory, as if the card were smaller; None leaves it all that is free."""
    release_memory(device)
    if device.type == "cpu":
        margin = 512 * 1024**2 if gib is None else max(0, available_bytes() - round(gib * GIB))
        with cpu_memory_limit(margin_bytes=margin):
            yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    if gib is not None and gib * GIB > total:
        raise ValueError(f"--memory-gib {gib:g} is more than the {total / GIB:.1f} GiB of {torch.cuda.get_device_name(device)}")
    torch.cuda.set_per_process_memory_fraction(1.0 if gib is None else gib * GIB / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def longest(
    fits: Callable[[int], float | dict], *, start: int, precision: float = 0.12, multiple: int = 64, limit_s: float = 20.0
) -> dict[str, Any]:
    """The longest length that fits: doubling from `start`, then halving the gap until it is below `precision`.

    fits(length) returns the seconds it took, or what is known of the failure. A trial that would take longer than limit_s by the square
    of the last one's time is not made: limited_by is then "time", and the length is a lower bound.
    """
    length, best, failure, first_failure, took = start, 0, None, 0, 0.0
    while True:
        if best and took * (length / best) ** 2 > limit_s:
            return {"max_seq_len": best, "limited_by": "time", "seconds": took, "oom": failure, "oom_seq_len": first_failure or None}
        found = fits(length)
        if isinstance(found, dict):
            failure, first_failure = found, length
        else:
            best, took = length, found
        if not first_failure:
            length *= 2
            continue
        if first_failure - best <= max(multiple, precision * best) or first_failure <= multiple:
            return {"max_seq_len": best, "limited_by": "memory", "seconds": took, "oom": failure, "oom_seq_len": first_failure}
        length = max(multiple, (best + first_failure) // 2 // multiple * multiple)
        if length in (best, first_failure):
            return {"max_seq_len": best, "limited_by": "memory", "seconds": took, "oom": failure, "oom_seq_len": first_failure}


def try_length(backend: Backend, shape: dict[str, Any], *, device: torch.device, dtype: torch.dtype, train: bool) -> float | dict:
    """Seconds of one forward, or forward and backward, or the out-of-memory it ended with."""

    def run(call: Call) -> float:
        start = time.perf_counter()
        if train:
            call.backward(call.forward(), torch.ones_like(call.inputs[0]))
        else:
            call.forward_only()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    try:
        call = Call(backend, shape, device=device, dtype=dtype)
        took = run(call)
        # the first call may have compiled: what the next length will take is told by the second
        return run(call) if took > 1 else took
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return describe_out_of_memory(error, device)
    finally:
        call = None
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def check_results(
    backend: Backend, *, text: str, device: torch.device, dtypes: list[torch.dtype], allow: bool
) -> dict[torch.dtype, list[str]]:
    """The red properties of a backend by dtype. Raises ValueError for one that has any, unless they are allowed."""
    from attention.properties import red_properties

    found = {dtype: red_properties(backend, device=device, dtype=dtype) for dtype in dtypes if dtype in backend.dtypes}
    for dtype, red in found.items():
        if red and not allow:
            raise ValueError(
                f"{text} is wrong in {short(dtype)}, so its speed means nothing: red in {', '.join(red)}; see python -m scripts.verify "
                f"attention={backend.name}, or add --allow-broken to time it and have its rows marked"
            )
    return found


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", nargs="+", default=["naive", "tiled", "sdpa"], metavar="NAME[:OPTION=VALUE,...]")
    parser.add_argument(
        "--seq-len", nargs="+", type=int, default=[256, 512, 1024, 2048], help="with --max-length, the first one is tried first"
    )
    parser.add_argument("--head-dim", nargs="+", type=int, default=[64])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument(
        "--tokens", type=int, help="keep batch * seq_len at this, and heads * head_dim at 2048, instead of --batch and --heads"
    )
    parser.add_argument("--full", action="store_true", help="no causal mask (default: causal)")
    parser.add_argument("--dtype", nargs="+", default=["auto"], choices=["auto", *DTYPES])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of each; fewer where one takes long")
    parser.add_argument("--allow-broken", action="store_true", help="time backends whose results are wrong, and mark their rows")
    parser.add_argument("--max-length", action="store_true", help="search the longest sequence instead of timing")
    parser.add_argument("--memory-gib", nargs="+", type=float, default=[None], metavar="GIB", help="with this much memory (default: all)")
    parser.add_argument("--limit-s", type=float, default=20.0, help="--max-length: no single trial longer than this (default: 20)")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    parser.add_argument(
        "--append", action="store_true", help="keep the rows that the file has, if the same code on the same machine made them"
    )
    options = parser.parse_args()
    for name in ("seq_len", "head_dim", "heads", "batch", "tokens", "repeats", "memory_gib", "limit_s"):
        values = getattr(options, name)
        for value in values if isinstance(values, list) else [values]:
            if value is not None and not value > 0:
                sys.exit(f"benchmark: --{name.replace('_', '-')} {value} must be positive")
    if options.memory_gib != [None] and not options.max_length:
        sys.exit("benchmark: --memory-gib belongs to --max-length; add it")
    return options


def kept_rows(path: Path | None, where: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an earlier run. Raises ValueError for one by another commit or version, or on another machine."""
    if path is None:
        raise ValueError("--append needs --out FILE")
    if not path.exists():
        return []
    try:
        data = json.loads(path.read_text())
        other = [key for key in ("commit", "versions", "hardware") if data["environment"][key] != where[key]]
        rows = data["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--append: {path} is no benchmark's file") from error
    if other:
        raise ValueError(f"--append: {path} was measured with another {' and '.join(other)}; write to a new file")
    return rows


def shape_of(options: argparse.Namespace, head_dim: int, length: int) -> dict[str, Any]:
    batch, heads = options.batch, options.heads
    if options.tokens:
        batch, heads = max(1, options.tokens // length), max(1, 2048 // head_dim)
    return {"seq_len": length, "head_dim": head_dim, "batch": batch, "heads": heads, "causal": not options.full}


def main() -> None:
    options = read_options()
    # a graph that is kept for timing must not give its buffers away
    torch._functorch.config.donated_buffer = False
    try:
        device = pick_device(options.device)
        dtypes = list(dict.fromkeys(pick_dtype(name, device) for name in options.dtype))
        backends = {text: parse_backend(text) for text in options.attention}
        red = {
            text: check_results(backend, text=text, device=device, dtypes=dtypes, allow=options.allow_broken)
            for text, backend in backends.items()
        }
        if options.max_length:
            for gib in options.memory_gib:
                with memory_cap(gib, device):
                    pass
    except ValueError as error:
        sys.exit(f"benchmark: {error}")
    where = {key: value for key, value in environment("", device).items() if key not in ("command", "data_fingerprint")}
    try:
        rows = kept_rows(options.out, where) if options.append else []
    except ValueError as error:
        sys.exit(f"benchmark: {error}")
    lengths = options.seq_len[:1] if options.max_length else options.seq_len
    for dtype, head_dim, length, (text, backend) in product(dtypes, options.head_dim, lengths, backends.items()):
        row = {"attention": text, **shape_of(options, head_dim, length), "dtype": short(dtype)}
        if red[text].get(dtype):
            row["broken"] = red[text][dtype]
        found = search(backend, row, options, device, dtype) if options.max_length else [measured(backend, row, options, device, dtype)]
        rows += found
        if options.out:
            write_json(options.out, {"environment": where, "rows": rows})
    if all("refused" in row for row in rows):
        sys.exit(f"benchmark: nothing was measured: {rows[0]['refused']}")


def measured(
    backend: Backend, row: dict[str, Any], options: argparse.Namespace, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """The row with its measurements, or with how it ran out of memory, or why the backend does not take it."""
    try:
        with cpu_memory_limit():
            row = row | measure(Call(backend, row, device=device, dtype=dtype), repeats=options.repeats)
    except ValueError as error:
        row = row | {"refused": str(error)}
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        row = row | {"oom": describe_out_of_memory(error, device)}
    release_memory(device)
    print(describe(row), flush=True)
    return row


def search(backend: Backend, row: dict[str, Any], options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> list[dict]:
    """One row for each memory size and pass: the longest sequence that ran."""
    first, rows = row["seq_len"], []
    for gib, train in product(options.memory_gib, (False, True)):
        found = {key: value for key, value in row.items() if key != "seq_len"}
        found |= {"pass": "training" if train else "forward", "memory_gib": gib}

        def fits(length: int, train: bool = train) -> float | dict:
            shape = shape_of(options, row["head_dim"], length)
            return try_length(backend, shape, device=device, dtype=dtype, train=train)

        try:
            if train:
                brief = torch.zeros(1, row["heads"], 128, row["head_dim"], device=device, dtype=dtype, requires_grad=True)
                backend.check_supported(brief, brief, brief, causal=row["causal"])
            with memory_cap(gib, device):
                found |= longest(fits, start=first, limit_s=options.limit_s)
        except ValueError as error:
            found["refused"] = str(error)
        print(describe_longest(found), flush=True)
        rows.append(found)
    return rows


def describe(row: dict[str, Any]) -> str:
    head = f"{row['attention']:<28} {row['dtype']:<8} N={row['seq_len']:<7} D={row['head_dim']:<4}" + ("BROKEN " if "broken" in row else "")
    if "oom" in row:
        return f"{head} out of memory: {row['oom']['message'][:90]}"
    if "refused" in row:
        return f"{head} refused: {row['refused']}"
    parts = []
    for name in ("forward", "backward"):
        if f"{name}_seconds" in row:
            memory = f"{row[f'{name}_bytes'] / 2**20:>10,.1f} MiB" if row.get(f"{name}_bytes") is not None else " " * 14
            parts.append(f"{name} {memory} {row[f'{name}_seconds'] * 1e3:>9.3f} ms {row[f'{name}_tflops']:>6.3g} TFLOP/s")
    return f"{head} " + "   ".join(parts)


def describe_longest(row: dict[str, Any]) -> str:
    memory = "all memory" if row["memory_gib"] is None else f"{row['memory_gib']:g} GiB"
    head = f"{row['attention']:<28} {row['dtype']:<8} D={row['head_dim']:<4} {memory:<10} {row['pass']:<8}"
    if "refused" in row:
        return f"{head} refused: {row['refused']}"
    sign = ">=" if row["limited_by"] == "time" else "  "
    end = f"{row['oom_seq_len']:,} ran out of memory" if row["oom_seq_len"] else "no limit met"
    return f"{head} {sign} {row['max_seq_len']:>10,} tokens ({end}; the last took {row['seconds']:.2f} s)"


if __name__ == "__main__":
    main()
