"""The Triton flash-attention for autograd: an operator, which torch.compile does not trace into,
and the same for eager mode, where calling an operator takes longer than launching a kernel.

Dimensions: B batch, H query heads, H_kv key/value heads, N queries, M keys, D head dim.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attention.interface import empty_heads, operator
from attention.kernels.launch import (
    Settings,
    backward,
    empty_gradients,
    empty_state,
    forward,
    is_packed,
    unpacked,
)

# the fields of Settings, one by one; Inductor itself uses the name `kernel`
SETTINGS = (
    "bool causal, float scale, str score_mod, str softmax, SymInt block_q, SymInt block_kv, "
    "str kernel_choice, bool documents"
)


@operator(
    "flash_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? lo, Tensor? hi, Tensor? params, Tensor? sinks, "
    f"Tensor? look, {SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def flash_attention(*inputs: Any) -> tuple[Tensor, ...]:
    """launch.forward() as an operator. The last result is max_score (B, H), which is undefined
    where `look` (0-d, bool, on the CPU) holds False.
    """
    *tensors, look = inputs[:8]
    looked = look is not None and bool(look)
    out, lse, state, top = forward(*tensors, looked, Settings(*inputs[8:]))
    return out, lse, state, lse.new_empty(lse.shape[:2]) if top is None else top.amax(-1)


@torch.library.register_fake("tilegpt::flash_attention")
def _(q: Tensor, *_: Any) -> tuple[Tensor, ...]:
    lse, max_score = (q.new_empty(q.shape[:dims], dtype=torch.float32) for dims in (3, 2))
    return empty_heads(q.shape, q), lse, empty_state(lse, q.dtype), max_score


def run_backward(*inputs: Any) -> list[Tensor]:
    """launch.backward() with the arguments of the operator."""
    return backward(*inputs[:13], Settings(*inputs[13:]))


flash_attention_backward = operator(
    "flash_attention_backward",
    "(Tensor d_out, Tensor? d_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor state, Tensor? lo, Tensor? hi, Tensor? params, Tensor? sinks, bool packed, "
    f"{SETTINGS}) -> Tensor[]",
)(run_backward)


@torch.library.register_fake("tilegpt::flash_attention_backward")
def _(*inputs: Any) -> list[Tensor]:
    q, k, v, *_, sinks, packed = inputs[2:13]
    gradients = empty_gradients(q, k, v, packed)
    return gradients if sinks is None else [*gradients, torch.empty_like(sinks)]


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep what the backward pass needs. inputs: those of the operator."""
    q, k, v, *others = inputs[:7]
    ctx.settings = inputs[8:]
    ctx.packed = is_packed(q, k, v)  # now: saved tensors may come back with other strides
    ctx.set_materialize_grads(False)  # no zeros for an unused gradient of lse
    ctx.save_for_backward(q, k, v, *output[:3], *others)


def gradients_of(ctx: Any, run: Any, d_out: Any, d_lse: Any, *_: Any) -> tuple[Any, ...]:
    """The gradients of the operator's inputs, from those of its outputs (None where unused). run:
    run_backward(), or the operator of it.
    """
    q, k, v, out, *others, sinks = ctx.saved_tensors
    d_out = torch.zeros_like(out) if d_out is None else d_out
    gradients = run(d_out, d_lse, q, k, v, out, *others, sinks, ctx.packed, *ctx.settings)
    d_sinks = None
    if sinks is not None:
        *gradients, d_sinks = gradients
    dq, dk, dv = unpacked(gradients, q.shape[1], k.shape[1])
    return dq, dk, dv, None, None, None, d_sinks, None, *[None] * len(ctx.settings)


def _backward(ctx: Any, *d_outputs: Tensor | None) -> Any:
    return gradients_of(ctx, flash_attention_backward, *d_outputs)


torch.library.register_autograd("tilegpt::flash_attention", _backward, setup_context=save)


class FlashAttention(torch.autograd.Function):
    """flash_attention without the operator, for eager mode: the last result is each row's largest
    score (B, H, N) or None.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        output = forward(*inputs[:8], Settings(*inputs[8:]))
        ctx.mark_non_differentiable(*[x for x in output[2:] if x is not None])
        save(ctx, inputs, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outputs: Tensor | None) -> Any:
        return gradients_of(ctx, run_backward, *d_outputs)
