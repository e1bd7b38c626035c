"""The error of a ring of ranks against float64, compared with one rank: merging must not add any.

    python -m lab.ring_error device=cuda out=ring_error_h200.json

Arguments are key=value, lists with commas; all have a default:

    attention   backends that run on a ring (triton:kernel=hopper,triton:kernel=portable)
    seq_len     (16384)
    heads       (8)
    kv_heads    (heads)
    dtype, device, out    as in scripts.benchmark

An error is the norm of the difference from the tile loop in float64, divided by the norm of the
latter. Inputs are normal, attention is causal, forward and backward, on rings of 1 to 16 ranks that
this process simulates. `alone` is the same attention without a ring; `most` is the largest error of
any number of ranks divided by that of `alone`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attention import Backend, dtype_name, get_backend
from attention.played_ring import RING, PlayedRing
from conformance.cases import run
from lab.claims.inputs import relative
from scripts.arguments import Count, Device, Dtype, Json, command, default, parse_backend
from scripts.tables import Row
from training.device import pick_device, pick_dtype
from training.environment import measured_on
from training.files import write_json

RANKS, HEAD_DIMS = (1, 2, 4, 8, 16), (64, 128)
RESULTS = ("out", "lse", "dq", "dk", "dv")
OF_BLOCKS = ("block_q", "block_kv", "kernel")  # options of the kernel that computes a block


@dataclass
class Options:
    attention: list[str] = default("triton:kernel=hopper", "triton:kernel=portable")
    seq_len: Count = 16384
    heads: Count = 8
    kv_heads: Count | None = None
    dtype: Dtype = "auto"
    device: Device = "auto"
    out: Json | None = None

    def __post_init__(self) -> None:
        for name in self.attention:
            if parse_backend(name).ring is None:
                raise ValueError(f"attention={name} does not run on a ring")


def on_a_ring(backend: Backend, ranks: int) -> Backend:
    """The backend's blocks, merged by a ring whose ranks this process simulates."""
    options = {name: x for name, x in backend.options.items() if name in OF_BLOCKS}
    return replace(RING, fn=PlayedRing(backend.ring), options=options | {"ranks": ranks})


def results(backend: Backend, inputs: list[Tensor]) -> dict[str, Tensor]:
    """RESULTS in float64, from q, k, v and d_out."""
    *tensors, d_out = inputs
    return run(backend, tensors, {}, d_out.double(), None)


def errors(backend: Backend, inputs: list[Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    found = results(backend, inputs)
    return {name: relative(found[name], truth[name]) for name in RESULTS}


def rows(options: Options, head_dim: int, device: torch.device) -> Iterator[Row]:
    """A row for each attention."""
    torch.manual_seed(0)
    counts = options.heads, *[options.kv_heads or options.heads] * 2, options.heads
    shapes = [(1, heads, options.seq_len, head_dim) for heads in counts]
    dtype = pick_dtype(options.dtype, device)
    inputs = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    tile = min(2048, options.seq_len)
    exact = get_backend("tiled", block_q=tile, block_kv=tile)
    truth = results(exact, [x.double() for x in inputs])
    for name in options.attention:
        backend = parse_backend(name)
        alone = errors(backend, inputs, truth)
        ring = {str(n): errors(on_a_ring(backend, n), inputs, truth) for n in RANKS}
        most = {x: max(each[x] for each in ring.values()) / alone[x] for x in RESULTS}
        sizes = {"seq_len": options.seq_len, "heads": counts[0], "kv_heads": counts[1]}
        head = {"attention": name, "head_dim": head_dim, **sizes, "dtype": dtype_name(dtype)}
        yield head | {"alone": alone, "ring": ring, "most": most}


@command
def main(options: Options) -> None:
    device = pick_device(options.device)
    result: Row = {"environment": measured_on(device), "rows": []}
    for head_dim in HEAD_DIMS:
        for row in rows(options, head_dim, device):
            result["rows"].append(row)
            most = ", ".join(f"{name} {ratio:.4f}" for name, ratio in row["most"].items())
            print(f"{row['attention']} head_dim {head_dim}: at most {most} of alone", flush=True)
            if options.out:
                write_json(options.out, result)


if __name__ == "__main__":
    main()
