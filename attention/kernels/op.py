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


@operator(
    "flash_attention_backward",
    "(Tensor d_out, Tensor? d_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor state, Tensor? lo, Tensor? hi, Tensor? params, Tensor? sinks, bool packed, "
    f"{SETTINGS}) -> Tensor[]",
)
def flash_attention_backward(*inputs: Any) -> list[Tensor]:
    """launch.backward() as an operator."""
    return backward(*inputs[:13], Settings(*inputs[13:]))


@torch.library.register_fake("tilegpt::flash_attention_backward")
def _(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    state: Tensor, lo: Tensor | None, hi: Tensor | None, params: Tensor | None,
    sinks: Tensor | None, packed: bool, *_: Any,
) -> list[Tensor]:  # fmt: skip
    gradients = empty_gradients(q, k, v, packed)
    return gradients if sinks is None else [*gradients, torch.empty_like(sinks)]


def save(ctx: Any, tensors: tuple[Tensor | None, ...], output: tuple[Tensor, ...]) -> None:
    """Keep what the backward pass needs. tensors: q, k, v, lo, hi, params, sinks."""
    ctx.packed = is_packed(*tensors[:3])  # now: saved tensors may come back with other strides
    ctx.set_materialize_grads(False)  # no zeros for an unused gradient of lse
    ctx.save_for_backward(*tensors[:3], *output[:3], *tensors[3:])


def gradients_of(
    ctx: Any, run: Any, d_out: Tensor | None, d_lse: Tensor | None, *settings: Any
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, lo, hi, params, sinks. run: one of the two backward functions."""
    q, k, v, out, *others, sinks = ctx.saved_tensors
    d_out = torch.zeros_like(out) if d_out is None else d_out
    gradients = run(d_out, d_lse, q, k, v, out, *others, sinks, ctx.packed, *settings)
    d_sinks = None
    if sinks is not None:
        *gradients, d_sinks = gradients
    return *unpacked(gradients, q.shape[1], k.shape[1]), None, None, None, d_sinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.settings = inputs[8:]
    save(ctx, inputs[:7], output)


def _backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, *_: Tensor | None) -> Any:
    gradients = gradients_of(ctx, flash_attention_backward, d_out, d_lse, *ctx.settings)
    return *gradients, None, *[None] * len(ctx.settings)


torch.library.register_autograd("tilegpt::flash_attention", _backward, setup_context=_save)


class FlashAttention(torch.autograd.Function):
    """flash_attention without the operator, for eager mode: the last result is each row's largest
    score (B, H, N) or None.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        *tensors, look, settings = inputs
        output = forward(*tensors, look, settings)
        ctx.mark_non_differentiable(*[x for x in output[2:] if x is not None])
        ctx.settings = settings
        save(ctx, tuple(tensors), output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, *_: Tensor | None) -> Any:
        return *gradients_of(ctx, backward, d_out, d_lse, ctx.settings), None, None
