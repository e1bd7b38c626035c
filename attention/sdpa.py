"""PyTorch's own kernels, as trusted baselines: torch.nn.functional.scaled_dot_product_attention.

`backend=` names the kernel (flash, efficient, cudnn, math); "auto" lets PyTorch choose. A kernel that cannot take the inputs is an
error with PyTorch's reasons in it, never another kernel. Causal attention of 1 < N < M queries (a prefill in pieces) needs a boolean
N x M mask here, because PyTorch's own causal flag is aligned to the other corner.
"""

import warnings
from contextlib import nullcontext
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attention.interface import AttentionOutput, Backend
from attention.mask import visible_keys

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def aligned(x: Tensor) -> Tensor:
    """x as PyTorch's CUDA kernels read it, 16 bytes at a time: they do not check, and a view that starts or steps between such granules
    ends the process's use of the GPU. A copy where it must be one."""
    if x.device.type != "cuda" or torch.compiler.is_compiling():
        return x
    steps = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    fine = x.data_ptr() % 16 == 0 and all(step * x.element_size() % 16 == 0 for step in steps)
    return x if fine else x.clone(memory_format=torch.contiguous_format)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, backend: str = "auto") -> AttentionOutput:
    """q (B, H, N, D); k, v (B, H_kv, M, D). Returns no lse."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    q, k, v = aligned(q), aligned(k), aligned(v)
    # PyTorch's is_causal is aligned top-left. The first N - M rows of a longer q see no key: cut off, the rest is square
    no_key = max(num_queries - num_keys, 0) if causal else 0
    q = q[:, :, no_key:]
    is_causal = causal and q.shape[2] > 1
    mask = visible_keys(q, k, causal=True).mask() if is_causal and q.shape[2] < num_keys else None
    with nullcontext() if backend == "auto" else sdpa_kernel(KERNELS[backend]):
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal and mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return AttentionOutput(torch.nn.functional.pad(out, (0, 0, no_key, 0)) if no_key else out)


def refusals(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, backend: str) -> list[str]:
    """Why the chosen kernel does not take these inputs, in PyTorch's words."""
    if backend == "auto":
        return []
    if backend not in KERNELS:
        return [f"backend={backend} is not one of: auto, {', '.join(KERNELS)}"]
    if torch.compiler.is_compiling():
        return []
    return [*_tried(backend, causal, q.device, q.dtype, *((x.shape[1:], x.stride()) for x in (q, k, v)))]


@cache
def _tried(
    backend: str, causal: bool, device: torch.device, dtype: torch.dtype, *layouts: tuple[torch.Size, tuple[int, ...]]
) -> tuple[str, ...]:
    """The only complete answer is PyTorch's own: try one sequence of this layout, once."""
    q, k, v = (torch.empty_strided((1, *shape), strides, dtype=dtype, device=device).zero_() for shape, strides in layouts)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        try:
            sdpa_attention(q, k, v, causal=causal, scale=1.0, backend=backend)
        except RuntimeError as error:
            words = [str(warning.message).split(" (Triggered internally")[0] for warning in caught]
            # headings, and what it says of the kernels that were not asked for
            words = [each for each in words if not each.endswith(("not used because:", "has been runtime disabled."))]
            # on a CPU PyTorch only says that no kernel was left
            elsewhere = ["it runs on a GPU alone"] if backend in ("efficient", "cudnn") and device.type != "cuda" else []
            reason = "; ".join(words or elsewhere or [str(error)])
            return (f"PyTorch's {backend} kernel refuses them: {reason}; attention.backend=auto lets PyTorch choose",)
    return ()


SDPA = Backend(
    "sdpa",
    sdpa_attention,
    features=frozenset({"gqa", "non_causal", "cross_length"}),
    options={"backend": "auto"},
    requirements=refusals,
)
