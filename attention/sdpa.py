"""PyTorch's own kernels, as trusted baselines: torch.nn.functional.scaled_dot_product_attention.

`backend=` names the kernel (flash, efficient, cudnn, math); "auto" lets PyTorch choose. A kernel
that cannot take the inputs is an error with PyTorch's reasons in it, never another kernel. Causal
attention of 1 < N < M queries (a prefill in chunks) needs a boolean N x M mask, because PyTorch's
own causal flag is aligned to the other corner. key_lengths and packed sequences always need a mask.
"""

import warnings
from contextlib import nullcontext, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attention.interface import AttentionOutput, Backend, Refusal, needs_gradient
from attention.mask import VisibleKeys, visible_keys

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def aligned(x: Tensor) -> Tensor:
    """x, or a copy of it if it is not aligned to 16 bytes. PyTorch's CUDA kernels read 16 bytes at
    a time without checking: a view that starts or steps between such granules makes the GPU
    unusable for the process."""
    if x.device.type != "cuda" or torch.compiler.is_compiling():
        return x
    steps = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    fine = x.data_ptr() % 16 == 0 and all(step * x.element_size() % 16 == 0 for step in steps)
    return x if fine else x.clone(memory_format=torch.contiguous_format)


def sdpa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    key_lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> AttentionOutput:
    """q (B, H, N, D); k (B, H_kv, M, D); v (B, H_kv, M, D_v). Returns no lse."""
    q, k, v = aligned(q), aligned(k), aligned(v)
    if key_lengths is not None or cu_seqlens is not None:
        mask = {"key_lengths": key_lengths, "cu_seqlens": cu_seqlens}
        visible = visible_keys(q, k, causal=causal, **mask)
        return masked(q, k, v, visible, scale=scale, backend=backend)
    num_queries, num_keys = q.shape[2], k.shape[2]
    # PyTorch's is_causal is aligned top-left. The first N - M rows of a longer q see no key;
    # without them the rest is square
    no_key = max(num_queries - num_keys, 0) if causal else 0
    q = q[:, :, no_key:]
    is_causal = causal and q.shape[2] > 1
    mask = visible_keys(q, k, causal=True).mask() if is_causal and q.shape[2] < num_keys else None
    arguments = {
        "attn_mask": mask,
        "is_causal": is_causal and mask is None,
        "scale": scale,
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    out = by_kernel(q, k, v, backend=backend, **arguments)
    return AttentionOutput(torch.nn.functional.pad(out, (0, 0, no_key, 0)) if no_key else out)


def masked(
    q: Tensor, k: Tensor, v: Tensor, visible: VisibleKeys, *, scale: float, backend: str
) -> AttentionOutput:
    """Attention under a boolean N x M mask. Kernels disagree on a row without a key, so such a row
    sees all keys here, and its result is discarded.
    """
    no_key = (visible.lo == visible.hi)[:, None, :, None]  # (B or 1, 1, N, 1)
    gqa = q.shape[1] != k.shape[1]
    mask = visible.mask() | no_key
    out = by_kernel(q, k, v, backend=backend, attn_mask=mask, scale=scale, enable_gqa=gqa)
    return AttentionOutput(out.masked_fill(no_key, 0.0))


class OneGradientLayout(torch.autograd.Function):
    """The identity, but its gradient always has the memory layout of out: heads outside, or a
    token's heads side by side. If out has neither layout, the gradient has the second.

    PyTorch 2.11 and 2.13 cache cuDNN's backward by the strides of q, k and v, but not of d_out. If
    d_out has other strides than in the first such call, dq, dk and dv are off by their own size.
    PyTorch fixed this for its varlen function (https://github.com/pytorch/pytorch/pull/191576).
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        ctx.heads_outside = out.is_contiguous()
        return out.view_as(out)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, d_out: Tensor
    ) -> Tensor:
        # no branch on the strides of d_out: torch.compile would guess them while it traces
        if ctx.heads_outside:
            return aligned(d_out.contiguous())
        return aligned(d_out.transpose(1, 2).contiguous().transpose(1, 2))


def by_kernel(q: Tensor, k: Tensor, v: Tensor, *, backend: str, **arguments: Any) -> Tensor:
    """PyTorch's function with only this kernel; "auto" lets PyTorch choose."""
    kernels = [] if backend == "auto" else [KERNELS[backend]]
    if q.is_cuda and cudnn_loses_dq(q, k, v, is_causal=arguments.get("is_causal", False)):
        if backend == "cudnn":
            raise Refusal(
                f"attention=sdpa cannot take these inputs: with {k.shape[2]} keys, a multiple of "
                "128 and 64 more, that are not causal, cuDNN makes NaN of dq where all scores of a "
                "row are low; attention.backend=auto takes another kernel"
            )
        kernels = kernels or [kernel for name, kernel in KERNELS.items() if name != "cudnn"]
    with sdpa_kernel(kernels) if kernels else nullcontext():
        if torch.compiler.is_compiling():
            out = scaled_dot_product_attention(q, k, v, **arguments)
        else:
            out = called(q, k, v, backend=backend, **arguments)
    return OneGradientLayout.apply(out) if out.is_cuda and out.requires_grad else out


def cudnn_loses_dq(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> bool:
    """Whether cuDNN's backward may return NaN in dq: it gives the padding of the last tile of 128
    keys a score of 0, https://github.com/pytorch/pytorch/issues/196678. Its own causal mask hides
    the padding.
    """
    return needs_gradient(q, k, v) and not is_causal and k.shape[2] % 128 == 64


def called(q: Tensor, k: Tensor, v: Tensor, *, backend: str, **arguments: Any) -> Tensor:
    """PyTorch's function. Raises a Refusal with PyTorch's reasons if the requested kernel does not
    take the inputs.
    """
    try:
        return scaled_dot_product_attention(q, k, v, **arguments)
    except RuntimeError as error:
        if backend == "auto" or isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError)):
            raise
        reason = _reason(q, k, v, error, backend=backend, **arguments)
        raise Refusal(f"attention=sdpa cannot take these inputs: {reason}") from error


def _reason(
    q: Tensor, k: Tensor, v: Tensor, error: RuntimeError, *, backend: str, **arguments: Any
) -> str:
    """PyTorch gives its reasons as warnings; the error that follows has none. Call it again and
    record the warnings.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with suppress(RuntimeError):
            scaled_dot_product_attention(q, k, v, **arguments)
    words = [str(warning.message).split(" (Triggered internally")[0] for warning in caught]
    # drop headings and remarks on other kernels
    words = [
        each
        for each in words
        if not each.endswith(("not used because:", "has been runtime disabled."))
    ]
    # on a CPU, PyTorch only says that no kernel is left
    elsewhere = (
        ["it runs on a GPU alone"]
        if backend in ("efficient", "cudnn") and q.device.type != "cuda"
        else []
    )
    said = "; ".join(words or elsewhere or [str(error)])
    return (
        f"PyTorch's {backend} kernel refuses them: {said}; attention.backend=auto lets "
        "PyTorch choose"
    )


def refusals(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, backend: str
) -> list[str]:
    """Why the chosen kernel does not take these inputs, in PyTorch's words; or that it takes them
    and computes a wrong result.
    """
    if backend != "auto" and backend not in KERNELS:
        return [f"backend={backend} is not one of: auto, {', '.join(KERNELS)}"]
    reasons = []
    # PyTorch's flash kernel masks a score with -inf before it scales: -inf * 0 is NaN. On a GPU it
    # also masks its ragged tails this way
    if scale <= 0 and backend in ("auto", "flash") and (causal or q.device.type == "cuda"):
        reasons.append(
            f"with scale={scale}, which is not positive, PyTorch's flash kernel makes NaN of "
            "hidden scores; "
            "attention.backend=math and attention=tiled take it"
        )
    if backend != "auto" and not torch.compiler.is_compiling():
        # two sequences of a batch are as good a test as all
        layouts = (((min(len(x), 2), *x.shape[1:]), x.stride()) for x in (q, k, v))
        backward = needs_gradient(q, k, v)
        reasons += _tried(backend, causal, backward, q.device, q.dtype, *layouts)
    return reasons


@cache
def _tried(
    backend: str,
    causal: bool,
    backward: bool,
    device: torch.device,
    dtype: torch.dtype,
    *layouts: tuple[tuple[int, ...], tuple[int, ...]],
) -> tuple[str, ...]:
    """Only PyTorch knows all its conditions: try tensors with these shapes and strides once."""
    tensors = (
        torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_()
        for shape, strides in layouts
    )
    q, k, v = (x.requires_grad_(backward) for x in tensors)
    with warnings.catch_warnings(), torch.set_grad_enabled(backward):
        warnings.simplefilter("ignore")  # the refusal contains them
        try:
            sdpa_attention(q, k, v, causal=causal, scale=1.0, backend=backend)
        except Refusal as refusal:
            return (str(refusal).partition(": ")[2],)
    return ()


SDPA = Backend(
    "sdpa",
    sdpa_attention,
    features=frozenset(
        {"gqa", "non_causal", "cross_length", "key_lengths", "cu_seqlens", "value_dim"}
    ),
    options={"backend": "auto"},
    requirements=refusals,
)
