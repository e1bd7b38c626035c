"""Layouts that q, k, v and gradients come in: views of other tensors, with NaN around them, and
offsets past 2^31.

Dimensions: B batch, H heads, N tokens, D head dim.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def packed(tensors: list[Tensor]) -> list[Tensor]:
    """Views of one projection (B, N, 3, H, D), as a model hands them in."""
    return list(
        torch.stack(tensors).permute(1, 3, 0, 2, 4).contiguous().permute(2, 0, 3, 1, 4).unbind()
    )


def misaligned(x: Tensor) -> Tensor:
    """Neither the start nor the rows fall on 16 bytes; between them lies NaN."""
    around = x.new_full((*x.shape[:3], x.shape[3] + 3), torch.nan)
    return around[..., 1:-2].copy_(x)


def spread_out(x: Tensor) -> Tensor:
    """Every other row and column of a larger tensor."""
    around = x.new_full((*x.shape[:2], 2 * x.shape[2], 2 * x.shape[3]), torch.nan)
    return around[:, :, ::2, ::2].copy_(x)


def cached(x: Tensor) -> Tensor:
    """The first rows of a cache with room for more, which has not been written."""
    around = x.new_full((*x.shape[:2], 2 * x.shape[2], x.shape[3]), torch.nan)
    return around[:, :, : x.shape[2]].copy_(x)


def far_apart(x: Tensor, *, dim: int) -> Tensor:
    """The steps along dim take offsets past 2^31 elements. On a CPU only what is written takes
    memory.
    """
    steps = list(torch.empty(x.shape, device="meta").stride())
    steps[dim] = 2**31 // (x.shape[dim] - 1) // 16 * 16 + 16
    around = x.new_empty(sum(s * (n - 1) for s, n in zip(steps, x.shape, strict=True)) + 1)
    return around.as_strided(x.shape, steps).copy_(x)


EACH = (spread_out, cached, misaligned)
LAYOUTS: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "packed": packed,
    "misaligned": lambda tensors: [misaligned(x) for x in tensors],
    "transposed": lambda tensors: [x.mT.contiguous().mT for x in tensors],
    "spread out": lambda tensors: [spread_out(x) for x in tensors],
    "cached": lambda tensors: [cached(x) for x in tensors],
    "each another": lambda tensors: [f(x) for f, x in zip(EACH, tensors, strict=True)],
}
FAR: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "sequences past 2^31": lambda tensors: [far_apart(x, dim=0) for x in tensors],
    "rows past 2^31": lambda tensors: [far_apart(x, dim=2) for x in tensors],
}
