"""Memory layouts of q, k, v and gradients: views of other tensors with NaN around them, and offsets
past 2^31.

The script of a failing call repeats the source of a layout, so these functions name nothing but
torch and one another.

Dimensions: B batch, H heads, N tokens, D head dim.
"""

from functools import partial
from itertools import accumulate

import torch
from torch import Tensor


def misaligned(*tensors):
    """Neither the start nor the rows are aligned to 16 bytes; NaN lies between the rows."""
    return [torch.nn.functional.pad(x, (1, 2), value=torch.nan)[..., 1:-2] for x in tensors]


def transposed(*tensors):
    return [x.mT.contiguous().mT for x in tensors]


def spread_out(*tensors):
    """Every other row and column of a larger tensor."""
    return [
        torch.full_like(x.repeat(1, 1, 2, 2), torch.nan)[:, :, ::2, ::2].copy_(x) for x in tensors
    ]


def cached(*tensors):
    """The first rows of a cache whose other half is unwritten (NaN)."""
    return [
        torch.nn.functional.pad(x, (0, 0, 0, x.shape[2]), value=torch.nan)[:, :, : x.shape[2]]
        for x in tensors
    ]


def packed(q, k, v):
    """Views of one projection (B, N, 3, H, D), as in a model."""
    return torch.stack((q, k, v)).permute(1, 3, 0, 2, 4).contiguous().permute(2, 0, 3, 1, 4)


def each_another(q, k, v):
    return *spread_out(q), *cached(k), *misaligned(v)


# of q, k and v
LAYOUTS = {
    change.__name__.replace("_", " "): change
    for change in (packed, misaligned, transposed, spread_out, cached, each_another)
}


def far_apart(*tensors: Tensor, dim: int) -> list[Tensor]:
    """Views whose stride along dim makes offsets pass 2^31 elements. All share one allocation; on a
    CPU only the pages that are written use memory.
    """
    step = 2**31 // (min(x.shape[dim] for x in tensors) - 1) // 16 * 16 + 16
    starts = [0, *accumulate(x.numel() for x in tensors)]
    assert starts[-1] < step  # all views fit between two steps
    longest = max(x.shape[dim] for x in tensors)
    around = tensors[0].new_empty(step * (longest - 1) + starts[-1])
    views = []
    for x, start in zip(tensors, starts[:-1], strict=True):
        strides = list(torch.empty(x.shape, device="meta").stride())
        strides[dim] = step
        views.append(around.as_strided(x.shape, strides, start).copy_(x))
    return views


FAR = {
    "sequences past 2^31": partial(far_apart, dim=0),
    "rows past 2^31": partial(far_apart, dim=2),
}
