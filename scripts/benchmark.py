"""Peak memory and time of one attention call, forward and backward apart, over backends and lengths.

    python -m scripts.benchmark --attention naive tiled sdpa --seq-len 256 512 1024 --out benchmark.json

A backend whose results are wrong is not timed. Memory is the peak above what was allocated before the call (q, k, v and the incoming
gradient are inputs, not the attention's). Time is the median with the 20th and 80th percentile, after a warm-up, by device events on a
GPU. Running out of memory is a result: the row says what was asked for. Options of a backend follow its name: tiled:block_q=512.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor

from attention import Backend, attention, get_backend, probe_backend
from training.device import DTYPES, pick_device, pick_dtype
from training.memory import MemoryMeter, cpu_memory_limit, describe_out_of_memory, is_out_of_memory, release_memory
from training.metrics import environment, write_json


def parse_backend(text: str) -> Backend:
    """A backend and its options, from name:option=value,option=value."""
    name, _, options = text.partition(":")
    pairs = dict(option.split("=", 1) for option in options.split(",") if option)
    return get_backend(name, **{key: int(value) if value.isdigit() else value for key, value in pairs.items()})


def seconds(function, *, repeats: int, device: torch.device) -> list[float]:
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
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1000 for start, end in events]


def peak_bytes(function, *, device: torch.device) -> tuple[int, int | None]:
    """Peak memory of one call above what was there before: allocated (resident on a CPU), and reserved from the GPU."""
    release_memory(device)
    meter = MemoryMeter(device)
    before = torch.cuda.memory_allocated(device) / 2**30 if device.type == "cuda" else meter.peak_gib()
    kept = function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    peak, reserved = meter.peak_gib() - before, meter.reserved_gib()
    del kept
    return round(peak * 2**30), None if reserved is None else round(reserved * 2**30)


def measure(backend: Backend, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, *, causal: bool, repeats: int) -> dict[str, Any]:
    device = q.device

    def forward() -> Tensor:
        return attention(q, k, v, backend=backend, causal=causal).out

    def forward_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), (q, k, v), d_out)

    def forward_only() -> Tensor:
        with torch.no_grad():
            return forward()

    forward_backward()  # compiles what is compiled
    row: dict[str, Any] = {}
    row["forward_bytes"], row["forward_reserved_bytes"] = peak_bytes(forward_only, device=device)
    row["training_bytes"], row["training_reserved_bytes"] = peak_bytes(forward_backward, device=device)
    # long calls need no warm-up of the clocks, and nobody wants to wait for 20 of them
    once = seconds(forward_backward, repeats=1, device=device)[0]
    repeats = max(3, min(repeats, int(5 / max(once, 1e-6))))
    for name, function in (("forward", forward_only), ("training", forward_backward)):
        seconds(function, repeats=max(1, repeats // 4), device=device)
        times = sorted(seconds(function, repeats=repeats, device=device))
        p20, *_, p80 = quantiles(times, n=5)
        row |= {f"{name}_seconds": times[len(times) // 2], f"{name}_p20": p20, f"{name}_p80": p80, "repeats": repeats}
    batch, heads, length, head_dim = q.shape
    flops = 4 * batch * heads * length * k.shape[2] * head_dim / (2 if causal else 1)
    row["forward_tflops"] = flops / row["forward_seconds"] / 1e12
    # the backward's five products against the forward's two; its time is what training takes beyond the forward
    row["backward_tflops"] = 2.5 * flops / (row["training_seconds"] - row["forward_seconds"]) / 1e12
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", nargs="+", default=["naive", "tiled", "sdpa"], metavar="NAME[:OPTION=VALUE,...]")
    parser.add_argument("--seq-len", nargs="+", type=int, default=[256, 512, 1024, 2048])
    parser.add_argument("--head-dim", nargs="+", type=int, default=[64])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument(
        "--tokens", type=int, help="keep batch * seq_len at this, and heads * head_dim at 2048, instead of --batch and --heads"
    )
    parser.add_argument("--full", action="store_true", help="no causal mask (default: causal)")
    parser.add_argument("--dtype", default="auto", choices=["auto", *DTYPES])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of each; fewer where one takes long")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    options = parser.parse_args()
    try:
        device = pick_device(options.device)
        dtype = pick_dtype(options.dtype, device)
        backends = {text: parse_backend(text) for text in options.attention}
        for backend in backends.values():
            probe_backend(backend, num_heads=4, num_kv_heads=4, head_dim=options.head_dim[0], dtype=dtype, device=device)
    except ValueError as error:
        sys.exit(f"benchmark: {error}")
    rows = []
    for head_dim in options.head_dim:
        for length in options.seq_len:
            batch, heads = options.batch, options.heads
            if options.tokens:
                batch, heads = max(1, options.tokens // length), max(1, 2048 // head_dim)
            for text, backend in backends.items():
                row = {
                    "attention": text,
                    "seq_len": length,
                    "head_dim": head_dim,
                    "batch": batch,
                    "heads": heads,
                    "causal": not options.full,
                }
                row["dtype"] = str(dtype).removeprefix("torch.")
                try:
                    with cpu_memory_limit():
                        q, k, v = (
                            torch.randn(batch, heads, length, head_dim, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
                        )
                        row |= measure(backend, q, k, v, torch.randn_like(q), causal=not options.full, repeats=options.repeats)
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
                    row["oom"] = describe_out_of_memory(error, device)
                q = k = v = None
                release_memory(device)
                rows.append(row)
                print(describe(row), flush=True)
                if options.out:
                    write_json(options.out, {"environment": environment("", device), "rows": rows})


def describe(row: dict[str, Any]) -> str:
    head = f"{row['attention']:<28} N={row['seq_len']:<7} D={row['head_dim']:<4}"
    if "oom" in row:
        return f"{head} out of memory: {row['oom']['message'][:90]}"
    memory = f"{row['forward_bytes'] / 2**20:>10,.1f} MiB forward {row['training_bytes'] / 2**20:>10,.1f} MiB training"
    times = " ".join(
        f"{row[f'{name}_seconds'] * 1e3:>9.3f} ms {name} ({row[f'{rate}_tflops']:.1f} TFLOP/s {rate})"
        for name, rate in (("forward", "forward"), ("training", "backward"))
    )
    return f"{head} {memory} {times}"


if __name__ == "__main__":
    main()
