"""Time one attention beside other people's kernels: large shapes, grouped heads and masks.

    python -m lab.peers out=peers.json
    python -m lab.peers attention=triton,flex shapes=16k,window-1024 out=peers.json

Arguments are key=value, lists with commas; all have a default:

    shapes     names in SHAPES, or all (all)
    attention  names as in scripts.benchmark; the others are peers of the first, and flex is one too
               (triton,lab.peers:FLASH_ATTENTION_4,sdpa:backend=cudnn)
    repeats    timed calls of each (16)
    dtype      auto, fp32, bf16, fp16 (bf16)
    device, out    as in scripts.benchmark

Before it is timed, each attention is compared with the first one on the same inputs. `apart` is the
largest difference of out, dq, dk or dv, relative to the largest element. A result that is further
apart than 0.02 is marked `wrong` and not timed. A shape that a peer refuses or fails on, or that
does not fit in memory, is a row that says so. The file is written after every shape. On a CPU one
shape may take an hour.

Device time is measured as in scripts.benchmark: a cold cache, and calls in turns.

FLASH_ATTENTION_4 is also a backend for scripts.benchmark. It needs `pip install flash-attn-4`.
Documents go to its flash_attn_varlen_func, with their bounds found before the timed calls.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import geometric_mean
from typing import Literal

import torch
import torch._functorch.config
from torch import Tensor

from attention import AttentionOutput, Backend, dtype_name
from conformance.cases import distance
from conformance.outside.adapter import sequence_bounds
from scripts.arguments import Count, Device, Dtype, Json, command, default, parse_backend
from scripts.attention_call import Call, Measurement, attempt, take_turns
from scripts.tables import Row, by, text_table
from training.loop.device import pick_device, pick_dtype
from training.record.environment import measured_on
from training.record.files import write_json

DIRECTIONS = ("forward", "backward")
TOLERANCE = 2e-2  # between results in 16 bits
UNTIMED = ("wrong", "refused", "oom", "failed")  # why a row has no figures


def __getattr__(name: str) -> Backend:
    """FLASH_ATTENTION_4, whose package is loaded where it is used."""
    if name != "FLASH_ATTENTION_4":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    try:
        from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
    except ModuleNotFoundError as error:
        way_out = "pip install flash-attn-4, or leave it out of attention="
        raise ModuleNotFoundError(f"{error}; {way_out}") from error

    def call(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, window: int | None = None,
        document_ids: Tensor | None = None,
    ) -> AttentionOutput:  # fmt: skip
        # views: an adapter of conformance.outside would copy q, k and v, which would be timed too
        tensors = [x.transpose(1, 2) for x in (q, k, v)]
        reach = (None, None) if window is None else (window - 1, 0)
        same = {"softmax_scale": scale, "causal": causal, "window_size": reach, "return_lse": True}
        if document_ids is None:
            out, lse, *_ = flash_attn_func(*tensors, **same)
            return AttentionOutput(out.transpose(1, 2), lse)
        bounds, longest = packed_documents(document_ids)
        packed = (x.flatten(0, 1) for x in tensors)  # views too, of a single sequence
        sizes = {"max_seqlen_q": longest, "max_seqlen_k": longest}
        out, lse, *_ = flash_attn_varlen_func(
            *packed, cu_seqlens_q=bounds, cu_seqlens_k=bounds, **sizes, **same
        )
        by_sequence = document_ids.shape
        lse = lse.unflatten(1, by_sequence).transpose(0, 1)
        return AttentionOutput(out.unflatten(0, by_sequence).transpose(1, 2), lse)

    features = frozenset({"gqa", "non_causal", "cross_length", "lse", "window", "document_ids"})
    # leaves out what conformance finds wrong in it: other head dims, and lse with a softcap
    dtypes = (torch.bfloat16, torch.float16)
    return Backend(name, call, dtypes=dtypes, head_dims=(64, 128), features=features)


@lru_cache(maxsize=1)
def packed_documents(document_ids: Tensor) -> tuple[Tensor, int]:
    """The bounds of the documents, and the length of the longest. Calls with the same tensor find
    them once, as our kernels do.
    """
    bounds = sequence_bounds(*document_ids.shape, document_ids, document_ids.device)
    return bounds, int(bounds.diff().max())


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    kv_heads: int
    seq_len: int
    head_dim: int = 128
    causal: bool = True
    window: int | None = None
    documents: int | None = None  # tokens of each document

    @property
    def row(self) -> Row:
        """The fields of a row that say what is called; Call reads them."""
        kind = "MHA" if self.kv_heads == self.heads else "MQA" if self.kv_heads == 1 else "GQA"
        if self.window or self.documents:
            kind = "masks"
        return {"kind": kind, **vars(self), "groups": self.heads // self.kv_heads}


SHAPES = {
    "GQA-64:8-32k": Shape(1, 64, 8, 32768),
    "GQA-64:8-4k": Shape(4, 64, 8, 4096),
    "GQA-32:8-8k": Shape(1, 32, 8, 8192),
    "GQA-32:8-4k": Shape(2, 32, 8, 4096),
    "MQA-16:1-16k": Shape(1, 16, 1, 16384),
    "16k": Shape(1, 16, 16, 16384),
    "4k": Shape(4, 16, 16, 4096),
    "64k": Shape(1, 8, 8, 65536),
    "ragged-3001": Shape(4, 16, 16, 3001),
    "full-8k": Shape(2, 16, 16, 8192, causal=False),
    "GPT-2-1k": Shape(32, 12, 12, 1024, 64),
    "GPT-2-8k": Shape(4, 12, 12, 8192, 64),
    "GPT-2-32k": Shape(1, 12, 12, 32768, 64),
    "ragged-full-1999": Shape(8, 16, 16, 1999, 64, causal=False),
    "ViT-577": Shape(64, 16, 16, 577, 64, causal=False),
    "512": Shape(64, 12, 12, 512, 64),
    "window-1024": Shape(1, 16, 16, 16384, window=1024),
    "window-1024-D64": Shape(1, 32, 32, 16384, 64, window=1024),
    "window-4096": Shape(1, 16, 16, 16384, window=4096),
    "window-256-D64": Shape(1, 32, 32, 16384, 64, window=256),
    "documents-1000": Shape(1, 16, 16, 16384, documents=1000),
    "documents-1000-D64": Shape(1, 32, 32, 16384, 64, documents=1000),
}


@dataclass
class Options:
    shapes: list[Literal[("all", *SHAPES)]] = default("all")
    attention: list[str] = default("triton", "lab.peers:FLASH_ATTENTION_4", "sdpa:backend=cudnn")
    repeats: Count = 16
    dtype: Dtype = "bf16"
    device: Device = "auto"
    out: Json | None = None


def compared(make: Callable[[], Call], expected: list[Tensor]) -> Row:
    """How far out, dq, dk and dv are from `expected`, which the first call fills."""
    torch.manual_seed(0)  # the same inputs and d_out for all
    call = make()
    d_out = torch.randn_like(call.inputs[0])
    found = [call.forward() if call.trainable else call.forward_only()]
    if call.trainable:
        found += call.backward(found[0], d_out)
    found = [x.detach().float() for x in found]
    expected[:] = expected or found
    pairs = zip(found, expected, strict=False)  # only out if one has no backward pass
    # if the largest is NaN, so is every quotient, and the distance is infinite
    apart = max(distance(x / y.abs().max(), y / y.abs().max()) for x, y in pairs)
    return {"apart": apart} | ({"wrong": f"{apart:.2g} apart"} if apart > TOLERANCE else {})


def measured(
    name: str, backends: dict[str, Backend], options: Options, device: torch.device
) -> list[Row]:
    """The rows of one shape. Any error of a peer is a row; the first attention may only refuse the
    shape or run out of memory.
    """
    dtype = pick_dtype(options.dtype, device)
    shape = SHAPES[name].row | {"dtype": dtype_name(dtype)}
    calls = {
        text: partial(Call, backend, shape, device=device, dtype=dtype)
        for text, backend in backends.items()
    }
    expected: list[Tensor] = []
    ours, found = next(iter(calls)), {}
    for text, make in calls.items():
        step = partial(compared, make, expected)
        found[text] = attempt(step, device, tolerant=text != ours) or {}
    expected.clear()  # the measurements need the memory
    timed = {
        text: Measurement(calls[text], repeats=options.repeats, tolerant=text != ours)
        for text, row in found.items()
        if not any(key in row for key in UNTIMED)
    }
    for text, row in zip(timed, take_turns(list(timed.values()), device), strict=True):
        found[text] |= row
    return [{"shape": name, "attention": text} | shape | row for text, row in found.items()]


def ratio(rows: list[Row], ours: str, peer: str, direction: str) -> float | None:
    """The speed of `ours` over a peer's in the rows of one shape; None if one has none."""
    speed = {row["attention"]: row.get(f"{direction}_tflops") for row in rows}
    return speed[ours] / speed[peer] if speed.get(ours) and speed.get(peer) else None


def mean_and_lowest(ratios: list[float]) -> str:
    return f"{geometric_mean(ratios):.2f} ({min(ratios):.2f}), n={len(ratios)}"


def summary(rows: list[Row]) -> list[list[str]]:
    """The lines of a table: the first attention's speed over each peer's, geometric mean, lowest
    and number of shapes, for each kind of shape.
    """
    ours, *peers = dict.fromkeys(row["attention"] for row in rows)
    lines = [["shapes", f"{ours} over", *DIRECTIONS]]
    for kind, own in (by(rows, "kind") | {"all": rows}).items():
        for peer in peers:
            cells = []
            for direction in DIRECTIONS:
                each = (ratio(shape, ours, peer, direction) for shape in by(own, "shape").values())
                found = [x for x in each if x is not None]
                cells.append(mean_and_lowest(found) if found else "-")
            lines.append([kind, peer, *cells])
    return lines


def describe(row: Row) -> str:
    head = f"{row['shape']:<20} {row['attention']:<28}"
    for name in DIRECTIONS:
        if f"{name}_tflops" in row:
            head += f" {name} {row[f'{name}_tflops']:>6.3g} TFLOP/s"
    return head + "".join(f" {key}: {row[key]}" for key in ("apart", *UNTIMED) if key in row)


@command
def main(options: Options) -> None:
    # a graph that is kept for timing must not donate its buffers
    torch._functorch.config.donated_buffer = False
    device = pick_device(options.device)
    backends = {text: parse_backend(text) for text in options.attention}
    result: Row = {"environment": measured_on(device), "rows": []}
    for name in SHAPES if "all" in options.shapes else options.shapes:
        rows = measured(name, backends, options, device)
        for row in rows:
            print(describe(row), flush=True)
        result["rows"] += rows
        if options.out:
            write_json(options.out, result)
    if result["rows"]:
        print("speed over each peer's, geometric mean (lowest):")
        print(text_table(summary(result["rows"])))


if __name__ == "__main__":
    main()
