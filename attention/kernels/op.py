"""The Triton flash-attention as PyTorch operators, which torch.compile does not trace into and
autograd differentiates.

Dimensions: B batch, H query heads, H_kv key/value heads, N queries, M keys, D head dim.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from attention.interface import Plans, empty_heads, operator
from attention.kernels import portable
from attention.kernels.launch import layout, place_of
from attention.kernels.select import choose_kernel


def is_packed(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether q, k, v are parts of one projection (B, N, H + 2 H_kv, D). Their gradients should
    have the same layout.
    """
    _, num_heads, length, head_dim = q.shape
    row = (num_heads + 2 * k.shape[1]) * head_dim
    # compare sizes last: comparing symbolic sizes costs a guard
    return (
        q.stride()[1:] == k.stride()[1:] == v.stride()[1:] == (head_dim, row, 1)
        and k.shape[2] == length
    )


def empty_gradients(
    q: Tensor, k: Tensor, v: Tensor, packed: bool, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Memory for dq, dk, dv; if packed, one tensor (B, N, H + 2 H_kv, D) that they are views of."""
    if not packed:
        return [empty_heads(x.shape, x, dtype) for x in (q, k, v)]
    batch, num_heads, length, head_dim = q.shape
    return [q.new_empty(batch, length, num_heads + 2 * k.shape[1], head_dim)]


def unpacked(gradients: Sequence[Tensor], num_heads: int, num_kv_heads: int) -> Sequence[Tensor]:
    """dq, dk, dv (B, H or H_kv, N, D) from the result of flash_attention_backward."""
    if len(gradients) == 3:
        return gradients
    # split before transposing: Inductor copies to make the gradient of a transposed tensor's parts
    parts = gradients[0].split_with_sizes((num_heads, num_kv_heads, num_kv_heads), 2)
    return [x.transpose(1, 2) for x in parts]


def readable(x: Tensor) -> Tensor:
    """x, or a copy that a tensor descriptor can point at: contiguous along D, every other stride a
    positive multiple of 16 bytes.

    A view of a packed qkv projection needs no copy. The interpreter computes bfloat16 on raw bits,
    so there x becomes float32.
    """
    if x.is_cpu and x.dtype == torch.bfloat16:
        x = x.float()
    granule = 16 // x.element_size()
    *outer, last = x.stride()
    aligned = [
        size == 1 or (stride > 0 and stride % granule == 0)
        for size, stride in zip(x.shape, outer, strict=False)
    ]
    if last == 1 and all(aligned) and x.data_ptr() % 16 == 0:
        return x
    head_dim = x.shape[-1]
    return x.new_empty(*x.shape[:3], head_dim + -head_dim % granule)[..., :head_dim].copy_(x)


def kernels_for(
    kernel: str, q: Tensor, scale: float, score_mod: str, softmax: str, tile: int
) -> ModuleType:
    """The module that launches the kernels of this choice."""
    inputs = {"device": q.device, "dtype": q.dtype, "head_dim": q.shape[-1], "scale": scale}
    choice = choose_kernel(kernel, **inputs, score_mod=score_mod, softmax=softmax, tile=tile)
    if choice.kernel == "portable":
        return portable
    from attention.kernels.hopper import launch

    return launch


# for each kind of call: whether readable() must copy a tensor, and the launches
forward_plans: Plans = Plans()
backward_plans: Plans = Plans()


def kind_of(
    device: torch.device, tensors: tuple[Tensor | None, ...], *settings: Any
) -> tuple[Any, ...]:
    """Everything that a plan depends on."""
    return place_of(device), *settings, *map(layout, tensors)


def differ(given: tuple[Tensor, ...], used: tuple[Tensor, ...]) -> bool:
    return any(x is not y for x, y in zip(given, used, strict=True))


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lo: Tensor | None,
    hi: Tensor | None,
    params: Tensor | None,
    causal: bool,
    scale: float,
    score_mod: str,
    softmax: str,
    block_q: int,
    block_kv: int,
    kernel_choice: str = "portable",
    look: Tensor | None = None,
    wide: bool = False,
    sinks: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """out (B, H, N, D), lse (B, H, N) and max_score (B, H) float32, for q (B, H, N, D); k, v (B,
    H_kv, M, D).

    lo, hi: (B or 1, N) int32, the interval of keys that each query sees; if None, `causal` decides.
    score_mod: pkg.module:NAME of a @triton.jit function or "", params (float32) its numbers.
    softmax: a name in SOFTMAXES. block_q, block_kv: the tile, or 0 for the table's. kernel_choice:
    auto, portable or hopper, see select.py (inductor uses the name `kernel`). max_score is computed
    where `look` holds True. wide: out in float32. sinks: (H,) float32, a logit of each head in the
    denominator. starts: of block_starts(), if lo and hi are those of packed documents; kernels
    that gain nothing from it ignore it.
    """
    dtype = torch.float32 if wide else q.dtype
    looked = look is not None and bool(look)
    settings = causal, scale, score_mod, softmax, block_q, block_kv
    given = q, k, v
    tensors = (*given, lo, hi, starts, params, sinks)
    kind = kind_of(q.device, tensors, kernel_choice, looked, wide, *settings)
    copies, launch = forward_plans.get(kind, (True, None))
    if copies:
        q, k, v = map(readable, given)
    out = empty_heads(q.shape, q, torch.float32 if wide else None)
    batch, num_heads, num_queries, _ = q.shape
    lse = q.new_empty(batch, num_heads, num_queries, dtype=torch.float32)
    top = torch.empty_like(lse) if looked else None  # each row's largest score
    if launch is None:
        kernels = kernels_for(kernel_choice, q, scale, score_mod, softmax, block_q or block_kv)
        launch = kernels.Forward(q, k, out, top, lo, starts, *settings)
        forward_plans[kind] = differ(given, (q, k, v)), launch
    launch(q, k, v, out, lse, top, lo, hi, starts, params, sinks)
    if out.dtype != dtype:
        out = out.to(dtype)
    return out, lse, largest(lse, top)


flash_attention = operator("flash_attention")(_forward)
# without a gradient, so that autograd has nothing to look up
flash_attention_forward = operator("flash_attention_forward")(_forward)


def largest(lse: Tensor, top: Tensor | None) -> Tensor:
    """max_score (B, H) from `top` (B, H, N); undefined values if `top` is None."""
    batch, num_heads, _ = lse.shape
    return lse.new_empty(batch, num_heads) if top is None else top.amax(-1)


@torch.library.register_fake("tilegpt::flash_attention")
@torch.library.register_fake("tilegpt::flash_attention_forward")
def _(
    q: Tensor, k: Tensor, v: Tensor, lo: Tensor | None, hi: Tensor | None, params: Tensor | None,
    causal: bool, scale: float, score_mod: str, softmax: str, block_q: int, block_kv: int,
    kernel_choice: str = "portable", look: Tensor | None = None, wide: bool = False,
    sinks: Tensor | None = None, starts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    lse, max_score = (q.new_empty(q.shape[:dims], dtype=torch.float32) for dims in (3, 2))
    return empty_heads(q.shape, q, torch.float32 if wide else None), lse, max_score


@operator("flash_attention_backward")
def flash_attention_backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    lo: Tensor | None,
    hi: Tensor | None,
    params: Tensor | None,
    causal: bool,
    scale: float,
    score_mod: str,
    softmax: str,
    block_q: int,
    block_kv: int,
    kernel_choice: str = "portable",
    packed: bool = False,
    wide: bool = False,
    sinks: Tensor | None = None,
    starts: Tensor | None = None,
) -> list[Tensor]:
    """dq, dk, dv in the dtypes and shapes of q, k, v, from the inputs and results of
    flash_attention; then, with sinks, d_sinks (H,) float32.

    packed, for N = M: return one tensor (B, N, H + 2 H_kv, D) for unpacked(), because an operator
    may not return views of one tensor. A compiler can then see that it is the gradient of a
    projection to q, k and v. wide: all three in float32; not packed.
    """
    dtype = torch.float32 if wide else q.dtype
    d_lse = None if d_lse is None else d_lse.contiguous()
    if torch.are_deterministic_algorithms_enabled():
        kernel_choice = "portable"  # the Hopper kernels sum dq in any order
    settings = causal, scale, score_mod, softmax, block_q, block_kv
    given = d_out, q, k, v, out
    tensors = (*given, d_lse, lse, lo, hi, starts, params)
    kind = kind_of(q.device, tensors, kernel_choice, packed, wide, *settings)
    copies, launch = backward_plans.get(kind, (True, None))
    if copies:
        d_out, q, k, v, out = map(readable, given)
    gradients = empty_gradients(q, k, v, packed, torch.float32 if wide else None)
    dq, dk, dv = unpacked(gradients, q.shape[1], k.shape[1])
    if launch is None:
        kernels = kernels_for(kernel_choice, q, scale, score_mod, softmax, block_q or block_kv)
        launch = kernels.Backward(d_out, q, k, out, dq, dk, dv, lo, starts, *settings)
        backward_plans[kind] = differ(given, (d_out, q, k, v, out)), launch
    delta = launch(d_out, d_lse, q, k, v, out, lse, dq, dk, dv, lo, hi, starts, params)
    gradients = gradients if dq.dtype == dtype else [x.to(dtype) for x in gradients]
    if sinks is None:
        return gradients
    return [*gradients, gradient_of_sinks(sinks, lse, delta)]


def gradient_of_sinks(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """d_sinks (H,) from p (dp - delta), as of any score. A sink's dp is 0, because its value is."""
    p = (sinks[:, None] - lse.masked_fill(lse == -torch.inf, torch.inf)).exp()
    return -(p * delta).sum((0, 2))


@torch.library.register_fake("tilegpt::flash_attention_backward")
def _(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    lo: Tensor | None, hi: Tensor | None,
    params: Tensor | None, causal: bool, scale: float, score_mod: str, softmax: str, block_q: int,
    block_kv: int,
    kernel_choice: str = "portable", packed: bool = False, wide: bool = False,
    sinks: Tensor | None = None, starts: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    gradients = empty_gradients(q, k, v, packed, torch.float32 if wide else None)
    return gradients if sinks is None else [*gradients, torch.empty_like(sinks)]


def _save(ctx, inputs, output) -> None:
    q, k, v, lo, hi, params, *settings, look, wide, sinks, starts = inputs
    ctx.settings = settings
    ctx.packed = is_packed(q, k, v)  # now: saved tensors may come back with other strides
    ctx.set_materialize_grads(False)  # no zeros for an unused gradient of lse
    ctx.save_for_backward(q, k, v, *output[:2], lo, hi, params, sinks, starts)


class FirstDerivative(torch.autograd.Function):
    """flash_attention_backward, with an error for its derivative, which autograd would take for
    zero.
    """

    @staticmethod
    def forward(ctx, *inputs: Any) -> tuple[Tensor, ...]:
        return tuple(flash_attention_backward(*inputs))

    @staticmethod
    def backward(ctx, *_: Tensor) -> None:
        raise RuntimeError("attention=triton has no second derivative: use attention=naive")


def _backward(
    ctx, d_out: Tensor | None, d_lse: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    q, k, v, out, *others, sinks, starts = ctx.saved_tensors
    d_out = torch.zeros_like(out) if d_out is None else d_out
    # grad mode is on here only with create_graph=True
    run = FirstDerivative.apply if torch.is_grad_enabled() else flash_attention_backward
    last = ctx.packed, False, sinks, starts
    gradients = run(d_out, d_lse, q, k, v, out, *others, *ctx.settings, *last)
    d_sinks = None
    if sinks is not None:
        *gradients, d_sinks = gradients
    # no gradient for lo, hi, params, the settings, look and wide
    rest = [None] * (len(ctx.settings) + 5)
    return *unpacked(gradients, q.shape[1], k.shape[1]), *rest, d_sinks, None


torch.library.register_autograd("tilegpt::flash_attention", _backward, setup_context=_save)


class FlashAttention(torch.autograd.Function):
    """The same gradient for eager mode. The registered one reads the schema in each call, which
    takes 50 microseconds.
    """

    @staticmethod
    def forward(ctx, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs are flash_attention's tensors, its sinks and starts, and a tuple of its settings,
        because autograd looks at each input.
        """
        *tensors, sinks, starts, settings = inputs
        output = flash_attention_forward(*tensors, *settings, sinks=sinks, starts=starts)
        _save(ctx, (*tensors, *settings, False, sinks, starts), output)
        return output

    @staticmethod
    def backward(ctx, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        dq, dk, dv, *_, d_sinks, _ = _backward(ctx, *gradients)
        return dq, dk, dv, None, None, None, d_sinks, None, None
