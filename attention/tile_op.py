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
from attention.mask import Window, pair

Tensors = tuple[Tensor, ...]
# what the loop takes beside q, k and v. score_mod and observer are functions, which an operator
# cannot take
TENSORS = ("alibi_slopes", "document_ids", "key_lengths", "cu_seqlens")
SCHEMA = (
    "Tensor? alibi_slopes, Tensor? document_ids, Tensor? key_lengths, Tensor? cu_seqlens, *, "
    "str loop, bool causal, float scale, SymInt[] window, float? softcap=None, SymInt block_q, "
    "SymInt block_kv, str softmax_dtype) -> (Tensor, Tensor, Tensor)"
)


def operator_attention(
    loop: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_max_score: bool | Tensor = False,
    window: Window = None,
    score_mod: None = None,
    **settings: Any,
) -> Output:
    """Run the loop of that name in BACKENDS as one operator of a graph. PyTorch refuses a setting
    that the operator does not have.
    """
    tensors = [settings.pop(name, None) for name in TENSORS]
    settings |= {"loop": loop, "window": pair(window)}
    out, lse, max_score = tile_loop(q, k, v, flag(return_max_score), *tensors, **settings)
    if return_max_score is False:
        return AttentionOutput(out, lse)
    return ScoredOutput(out, lse, max_score)


def settings_of(tensors: tuple[Any, ...], plain: dict[str, Any]) -> dict[str, Any]:
    """The settings in the form that TiledAttention.make_loop() takes."""
    return plain | dict(zip(TENSORS, tensors, strict=True)) | {"window": tuple(plain["window"])}


@torch.library.custom_op(
    "tilegpt::tile_loop",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor? look, {SCHEMA}",
)
def tile_loop(
    q: Tensor, k: Tensor, v: Tensor, look: Tensor | None, *tensors: Any, loop: str, **plain: Any
) -> Tensors:
    """out (B, H, N, D_v), lse (B, H, N) and max_score (B, H) for q (B, H, N, D), k (B, H_kv, M, D)
    and v (B, H_kv, M, D_v), any strides. max_score is computed where `look` holds True.
    """
    looked = look is not None and bool(look)
    function: Any = BACKENDS[loop].fn
    settings = settings_of(tensors, plain)
    out, lse, *scores = function(q, k, v, return_max_score=looked, **settings)
    max_score = scores[0] if looked else q.new_empty(q.shape[:2], dtype=statistics_dtype(q))
    return out.contiguous(), lse.contiguous(), max_score


@tile_loop.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any, **plain: Any) -> Tensors:
    dtype = statistics_dtype(q)
    lse, max_score = (q.new_empty(q.shape[:dims], dtype=dtype) for dims in (3, 2))
    return q.new_empty(*q.shape[:3], v.shape[3]), lse, max_score


@torch.library.custom_op(
    "tilegpt::tile_loop_backward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor d_out, Tensor d_lse, "
    + SCHEMA,
)
def tile_loop_backward(
    q: Tensor, k: Tensor, v: Tensor, *others: Any, loop: str, **plain: Any
) -> Tensors:
    """dq, dk, dv in the dtypes and shapes of q, k, v, from the inputs and results of tile_loop."""
    results, tensors = others[:4], others[4:]
    function: Any = BACKENDS[loop].fn
    walk = function.make_loop(q, k, **settings_of(tensors, plain))
    return tuple(x.contiguous() for x in walk.backward(q, k, v, *results))


@tile_loop_backward.register_fake
def _(*inputs: Any, **plain: Any) -> Tensors:
    return tuple(x.new_empty(x.shape) for x in inputs[:3])


def _save(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Any, ...]
) -> None:
    q, k, v, _, *tensors = inputs
    ctx.save_for_backward(q, k, v, *output[:2], *tensors)
    ctx.plain = keyword_only_inputs


def _backward(ctx: Any, d_out: Tensor, d_lse: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    inputs, tensors = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
    gradients = tile_loop_backward(*inputs, d_out, d_lse, *tensors, **ctx.plain)
    return *gradients, None, *(None for _ in TENSORS)


tile_loop.register_autograd(_backward, setup_context=_save)
