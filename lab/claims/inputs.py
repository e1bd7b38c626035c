"""What the measurements of claims share: inputs, and ways to run attention on them.

Dimensions: B batch, H heads, N queries and keys, D head dim.
"""

import torch
from torch import Tensor

from attention import Backend, attention, get_backend

STEP_4 = (2, 4, 256, 32)  # B, H, N, D of the chapter's own check


def inputs(
    seed: int, *shape: int, std: float = 1.0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k of that standard deviation, so that scores have std**2; v of 1."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    return (q * std).to(dtype), (k * std).to(dtype), v.to(dtype)


def run(
    name: str | Backend, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, **options
) -> Tensor:
    """out of that backend; block=T stands for block_q=T and block_kv=T."""
    if "block" in options:
        options["block_q"] = options["block_kv"] = options.pop("block")
    backend = get_backend(name, **options) if isinstance(name, str) else name.configured(**options)
    with torch.no_grad():
        return attention(q, k, v, backend=backend, causal=causal).out


def exact(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    """float64 attention of the same rounded inputs."""
    return run("naive", q.double(), k.double(), v.double(), causal=causal)


def textbook(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The three lines every document starts from, all of it in the dtype of the inputs."""
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def largest(difference: Tensor) -> float:
    return difference.abs().max().item()


def relative(out: Tensor, reference: Tensor) -> float:
    return ((out.double() - reference).norm() / reference.norm()).item()
