"""Memory layouts of q, k, v and gradients: views of other tensors with NaN around them, and offsets
past 2^31.

Dimensions: B batch, H heads, N tokens, D head dim.
"""

from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

# layouts as code that the script of a failing call repeats: of one tensor x
VIEWS = {
    # neither the start nor the rows are aligned to 16 bytes; NaN lies between the rows
    "misaligned": "torch.nn.functional.pad(x, (1, 2), value=torch.nan)[..., 1:-2]",
    "transposed": "x.mT.contiguous().mT",
    # every other row and column of a larger tensor
    "spread out": "x.new_full((*x.shape[:2], 2 * x.shape[2], 2 * x.shape[3]), torch.nan)"
    "[:, :, ::2, ::2].copy_(x)",
    # the first rows of a cache whose other half is unwritten (NaN)
    "cached": "torch.nn.functional.pad(x, (0, 0, 0, x.shape[2]), value=torch.nan)"
    "[:, :, : x.shape[2]]",
}
EACH = {"q": "spread out", "k": "cached", "v": "misaligned"}
# of q, k and v
LAYOUTS = {
    # views of one projection (B, N, 3, H, D), as in a model
    "packed": "torch.stack((q, k, v)).permute(1, 3, 0, 2, 4).contiguous().permute(2, 0, 3, 1, 4)",
    **{name: f"({view} for x in (q, k, v))" for name, view in VIEWS.items()},
    "each another": ", ".join(f"(lambda x: {VIEWS[name]})({x})" for x, name in EACH.items()),
}


def view(name: str, x: Tensor) -> Tensor:
    """x in a layout of VIEWS."""
    return eval(VIEWS[name], {"torch": torch, "x": x})


def laid_out(layout: str, tensors: list[Tensor]) -> list[Tensor]:
    """q, k and v in a layout of LAYOUTS."""
    return list(eval(LAYOUTS[layout], {"torch": torch, **dict(zip("qkv", tensors, strict=True))}))


def far_apart(tensors: list[Tensor], *, dim: int) -> list[Tensor]:
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
