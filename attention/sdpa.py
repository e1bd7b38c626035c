"""PyTorch's own kernels, as trusted baselines: torch.nn.functional.scaled_dot_product_attention.

`backend=` names the kernel (flash, efficient, cudnn, math); "auto" lets PyTorch choose. A kernel
that cannot take the inputs is an error with PyTorch's reasons in it, never another kernel. Causal
attention of several queries to another number of keys (a prefill in chunks) needs a boolean N x M
mask, because PyTorch's own causal flag is aligned to the other corner. So do key_lengths and packed
sequences.
"""

import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attention.interface import AttentionOutput, Backend, Refusal, needs_gradient
from attention.mask import visible_keys

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
    settings = {"backend": backend, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    is_causal, needs_mask = flag_or_mask(q, k, causal=causal)
    if key_lengths is None and cu_seqlens is None and not needs_mask:
        return AttentionOutput(by_kernel(q, k, v, is_causal=is_causal, **settings))
    visible = visible_keys(q, k, causal=causal, key_lengths=key_lengths, cu_seqlens=cu_seqlens)
    # kernels disagree on a row without a key: it sees all keys here, and its result is discarded
    no_key = (visible.lo == visible.hi)[:, None, :, None]  # (B or 1, 1, N, 1)
    out = by_kernel(q, k, v, attn_mask=visible.mask() | no_key, **settings)
    return AttentionOutput(out.masked_fill(no_key, 0.0))


def flag_or_mask(q: Tensor, k: Tensor, *, causal: bool) -> tuple[bool, bool]:
    """PyTorch's is_causal, and whether a mask must stand in for it."""
    causal = causal and q.shape[2] > 1
    needs_mask = causal and q.shape[2] != k.shape[2]
    return causal and not needs_mask, needs_mask


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


def by_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    backend: str,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    **settings: Any,
) -> Tensor:
    """PyTorch's function with only this kernel; "auto" lets PyTorch choose."""
    kernels = [] if backend == "auto" else [KERNELS[backend]]
    if q.is_cuda and cudnn_loses_dq(q, k, v, is_causal=is_causal):
        if backend == "cudnn":
            raise Refusal(
                f"attention=sdpa cannot take these inputs: with {k.shape[2]} keys, a multiple of "
                "128 and 64 more, that are not causal, cuDNN makes NaN of dq where all scores of a "
                "row are low; attention.backend=auto takes another kernel"
            )
        kernels = kernels or [kernel for name, kernel in KERNELS.items() if name != "cudnn"]
    if q.is_cuda and backend == "flash" and attn_mask is not None:
        raise Refusal(
            "attention=sdpa cannot take these inputs: on a GPU PyTorch's flash kernel takes no "
            "mask, which they need; attention.backend=auto takes another kernel"
        )
    with sdpa_kernel(kernels) if kernels else nullcontext():
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, is_causal=is_causal, **settings
        )
    return OneGradientLayout.apply(out) if out.is_cuda and out.requires_grad else out


def cudnn_loses_dq(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> bool:
    """Whether cuDNN's backward may return NaN in dq: it gives the padding of the last tile of 128
    keys a score of 0, https://github.com/pytorch/pytorch/issues/196678. Its own causal mask hides
    the padding.
    """
    return needs_gradient(q, k, v) and not is_causal and k.shape[2] % 128 == 64


def refusals(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, backend: str
) -> list[str]:
    """Why the chosen kernel does not take these inputs, in PyTorch's words; or that it takes them
    and computes a wrong result.
    """
    if backend != "auto" and backend not in KERNELS:
        return [f"backend={backend} is not one of: auto, {', '.join(KERNELS)}"]
    # PyTorch's flash kernel masks a score with -inf before it scales: -inf * 0 is NaN. On a GPU it
    # also masks its ragged tails this way
    if scale <= 0 and backend in ("auto", "flash") and (causal or q.device.type == "cuda"):
        return [
            f"with scale={scale}, which is not positive, PyTorch's flash kernel makes NaN of "
            "hidden scores; attention.backend=math and attention=tiled take it"
        ]
    if backend == "auto" or torch.compiler.is_compiling():
        return []
    is_causal, needs_mask = flag_or_mask(q, k, causal=causal)
    mask = q.new_empty(q.shape[2], k.shape[2], dtype=torch.bool) if needs_mask else None
    settings = {"is_causal": is_causal, "enable_gqa": q.shape[1] != k.shape[1]}
    # let PyTorch choose among this one kernel. Why it cannot, it says as warnings
    with sdpa_kernel(KERNELS[backend]), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            torch._fused_sdp_choice(  # pyright: ignore[reportPrivateImportUsage]
                aligned(q), aligned(k), aligned(v), mask, **settings
            )
        except RuntimeError as error:
            # without the place in PyTorch's source
            words = [str(warning.message).partition(" (Triggered")[0] for warning in said]
            return [
                f"PyTorch's {backend} kernel cannot run on {q.device.type}: "
                f"{'; '.join(words) or error}; attention.backend=auto lets PyTorch choose"
            ]
    return []


SDPA = Backend(
    "sdpa",
    sdpa_attention,
    features=frozenset(
        {"gqa", "non_causal", "cross_length", "key_lengths", "cu_seqlens", "value_dim"}
    ),
    options={"backend": "auto"},
    requirements=refusals,
)
