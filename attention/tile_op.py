"""The tile loop as a PyTorch operator: torch.compile does not break the graph, and the loop runs
inside the operator as in eager mode.

If torch.compile traced the Python loop, it would unroll it into a graph that grows with the number
of tiles.

Dimensions: B batch, H query heads, H_kv key/value heads, N queries, M keys, D head dim.
"""

from typing import Any

import torch
from torch import Tensor

from attention.backends import BACKENDS
from attention.interface import AttentionOutput, Output, ScoredOutput, flag, statistics_dtype

# the loop's settings, with their types in PyTorch's schemas. score_mod and observer are functions,
# which an operator cannot take
SETTINGS = {
    "alibi_slopes": "Tensor?",
    "document_ids": "Tensor?",
    "key_lengths": "Tensor?",
    "cu_seqlens": "Tensor?",
    "causal": "bool",
    "scale": "float",
    "window": "SymInt[]?",  # one number, or left and right
    "softcap": "float?",
    "block_q": "SymInt",
    "block_kv": "SymInt",
    "softmax_dtype": "str?",
    "detach_max": "bool?",
}
TENSORS = list(SETTINGS.values()).count("Tensor?")  # they come first in SETTINGS
SCHEMA = "str backend, " + ", ".join(f"{kind} {name}" for name, kind in SETTINGS.items())


def operator_attention(
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_max_score: bool | Tensor = False,
    **settings: Any,
) -> Output:
    """Run the loop of that name in BACKENDS as one operator of a graph. Raises TypeError for a
    setting that the operator cannot take.
    """
    unknown = [
        name for name, value in settings.items() if name not in SETTINGS and value is not None
    ]
    if unknown:
        names = ", ".join(unknown)
        raise TypeError(f"the tile loop {backend} in a compiled graph takes no {names}")
    out, lse, max_score = tile_loop(q, k, v, flag(return_max_score), backend, *values_of(settings))
    if return_max_score is False:
        return AttentionOutput(out, lse)
    return ScoredOutput(out, lse, max_score)


def values_of(settings: dict[str, Any]) -> list[Any]:
    """The settings in the order and form of SETTINGS."""
    window = settings.get("window")
    if window is not None:
        window = list(window) if isinstance(window, tuple) else [window]
    return [(settings | {"window": window}).get(name) for name in SETTINGS]


def loop_of(backend: str, values: tuple[Any, ...]) -> tuple[Any, dict[str, Any]]:
    """The TiledAttention of that name, and its settings by their names."""
    pairs = zip(SETTINGS, values, strict=True)
    settings = {name: value for name, value in pairs if value is not None}
    if window := settings.get("window"):
        settings["window"] = tuple(window) if len(window) == 2 else window[0]
    return BACKENDS[backend].fn, settings


@torch.library.custom_op(
    "tilegpt::tile_loop",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor? look, {SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
def tile_loop(
    q: Tensor, k: Tensor, v: Tensor, look: Tensor | None, backend: str, *values: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """out (B, H, N, D_v), lse (B, H, N) and max_score (B, H) for q (B, H, N, D), k (B, H_kv, M, D)
    and v (B, H_kv, M, D_v), any strides. `values` are those of SETTINGS. max_score is computed
    where `look` holds True.
    """
    loop, settings = loop_of(backend, values)
    looked = look is not None and bool(look)
    out, lse, *scores = loop(q, k, v, return_max_score=looked, **settings)
    max_score = scores[0] if looked else q.new_empty(q.shape[:2], dtype=statistics_dtype(q))
    return out.contiguous(), lse.contiguous(), max_score


@tile_loop.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dtype = statistics_dtype(q)
    lse, max_score = (q.new_empty(q.shape[:dims], dtype=dtype) for dims in (3, 2))
    return q.new_empty(*q.shape[:3], v.shape[3]), lse, max_score


@torch.library.custom_op(
    "tilegpt::tile_loop_backward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor d_out, Tensor d_lse, "
    f"{SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
def tile_loop_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor,
    backend: str,
    *values: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the dtypes and shapes of q, k, v, from the inputs and results of tile_loop."""
    loop, settings = loop_of(backend, values)
    dq, dk, dv = loop.backward(q, k, v, out, lse, d_out, d_lse, **settings)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@tile_loop_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, _, ctx.backend, *others = inputs
    tensors, ctx.values = others[:TENSORS], others[TENSORS:]
    ctx.save_for_backward(q, k, v, *output[:2], *tensors)


def _backward(ctx: Any, d_out: Tensor, d_lse: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    tensors, settings = saved[:-TENSORS], saved[-TENSORS:]
    gradients = tile_loop_backward(*tensors, d_out, d_lse, ctx.backend, *settings, *ctx.values)
    return *gradients, None, None, *([None] * len(SETTINGS))


tile_loop.register_autograd(_backward, setup_context=_save)
