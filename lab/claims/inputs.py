"""Inputs for the measurements, and ways to run attention on them.

Dimensions: B batch, H heads, N queries and keys, D head dim.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from attention import Backend, attention, get_backend
from lab.claims.claim import Figures, distribution

CHAPTER_SHAPE = (2, 4, 256, 32)  # B, H, N, D of the check in the chapter


def inputs(
    seed: int, *shape: int, std: float = 1.0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k with standard deviation std, so that scores have std**2; v with 1."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    return (q * std).to(dtype), (k * std).to(dtype), v.to(dtype)


def over_seeds(measure: Callable[[Tensor, Tensor, Tensor], Figures], seeds: int) -> Figures:
    """The distribution of each figure of measure(q, k, v) over the inputs of many seeds."""
    rows = [measure(*inputs(seed, *CHAPTER_SHAPE)) for seed in range(seeds)]
    return {name: distribution(row[name] for row in rows) for name in rows[0]}


def run(
    name: str | Backend, q: Tensor, k: Tensor, v: Tensor, *, block: int | None = None, **arguments
) -> Tensor:
    """The output of a backend, by default not causal; block sets both tile sizes."""
    backend = get_backend(name) if isinstance(name, str) else name
    if block is not None:
        backend = backend.configured(block_q=block, block_kv=block)
    with torch.no_grad():
        return attention(q, k, v, backend=backend, **{"causal": False} | arguments).out


def exact(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    """float64 attention on the same rounded inputs."""
    return run("naive", q.double(), k.double(), v.double(), causal=causal)


def textbook(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Naive attention as in the documents, entirely in the dtype of the inputs."""
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def largest(difference: Tensor) -> float:
    return difference.abs().max().item()


def relative(out: Tensor, reference: Tensor) -> float:
    """The rms of the error over the rms of the float64 `reference`."""
    return ((out.double() - reference).norm() / reference.norm()).item()
