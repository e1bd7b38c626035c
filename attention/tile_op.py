"""The tile loop as a PyTorch operator: torch.compile keeps the graph around it whole, and the loop
runs inside as it does without.

Traced, a Python loop would be unrolled, into a graph that grows with the number of tiles.

Dimensions: B batch, H query heads, H_kv key/value heads, N queries, M keys, D head dim.
"""

from typing import Any

import torch
from torch import Tensor

from attention.interface import LOOPS, AttentionOutput

# what it hands on to the loop, with the types of PyTorch's schemas: no score_mod and no observer,
# which are functions too
SETTINGS = {
    "alibi_slopes": "Tensor?",
    "document_ids": "Tensor?",
    "causal": "bool",
    "scale": "float",
    "window": "SymInt?",
    "softcap": "float?",
    "block_q": "SymInt",
    "block_kv": "SymInt",
    "softmax_dtype": "str",
    "detach_max": "bool?",
}
REST = "str loop, " + ", ".join(f"{kind} {name}" for name, kind in SETTINGS.items())


def operator_attention(
    loop: str, q: Tensor, k: Tensor, v: Tensor, **settings: Any
) -> AttentionOutput:
    """LOOPS[loop](q, k, v, **settings), as one operator of a graph. Raises TypeError for a setting
    that it cannot hand on.
    """
    unknown = [
        name for name, value in settings.items() if name not in SETTINGS and value is not None
    ]
    if unknown:
        raise TypeError(f"the tile loop {loop} in a compiled graph takes no {', '.join(unknown)}")
    return AttentionOutput(*tile_loop(q, k, v, loop, *(settings.get(name) for name in SETTINGS)))


def run_loop(
    loop: str, *tensors: Tensor, settings: tuple[Any, ...], **known: Any
) -> AttentionOutput:
    given = {
        name: value for name, value in zip(SETTINGS, settings, strict=True) if value is not None
    }
    return LOOPS[loop](*tensors, **given, **known)


@torch.library.custom_op(
    "tilegpt::tile_loop",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {REST}) -> (Tensor, Tensor)",
)
def tile_loop(q: Tensor, k: Tensor, v: Tensor, loop: str, *settings: Any) -> tuple[Tensor, Tensor]:
    """out (B, H, N, D) and lse (B, H, N) of LOOPS[loop] for q (B, H, N, D); k, v (B, H_kv, M, D),
    any strides.
    """
    out, lse = run_loop(loop, q, k, v, settings=settings)
    return out.contiguous(), lse.contiguous()


@tile_loop.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(
        q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32)
    )


@torch.library.custom_op(
    "tilegpt::tile_loop_backward",
    mutates_args=(),
    schema="(Tensor d_out, Tensor d_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{REST}) -> (Tensor, Tensor, Tensor)",
)
def tile_loop_backward(
    d_out: Tensor,
    d_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    loop: str,
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, in the dtypes and shapes of q, k, v, from what tile_loop took and gave."""
    # an operator's body lies below autograd, and the loop's own backward pass is wanted
    with (
        torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False),
        torch.enable_grad(),
    ):
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        outputs = run_loop(loop, *inputs, settings=settings, known=(out, lse))
        dq, dk, dv = torch.autograd.grad(outputs, inputs, (d_out, d_lse))
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@tile_loop_backward.register_fake
def _(
    d_out: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output) -> None:
    q, k, v, ctx.loop, alibi_slopes, document_ids, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, alibi_slopes, document_ids)


def _backward(ctx, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, alibi_slopes, document_ids = ctx.saved_tensors
    grads = tile_loop_backward(
        d_out, d_lse, *tensors, ctx.loop, alibi_slopes, document_ids, *ctx.settings
    )
    return *grads, None, *([None] * len(SETTINGS))


tile_loop.register_autograd(_backward, setup_context=_save)
