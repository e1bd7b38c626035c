"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864, section 3.2).

Features i and i + D/2 of a head form a plane. Position n rotates it by the angle n * theta^(-2i/D).
The rotation keeps the lengths of q and k, and makes q_n . k_m depend only on n - m. GPT-NeoX and
Llama also pair the halves, not neighbours.

Dimensions: B batch, H heads, N tokens, D head dim.
"""

import torch
from torch import Tensor


def rope_tables(positions: Tensor, *, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every angle, float32 (N, D/2) each, for positions (N,)."""
    # float64: in float32 the angle of position 2**20 is off by 0.03
    exponents = (
        torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim
    )
    angles = positions[:, None] * theta**-exponents  # (N, D/2)
    return angles.cos().float(), angles.sin().float()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (B, H, N, D). The tables are float32, so the result is too, unless x is wider."""
    first, second = x.chunk(2, dim=-1)  # (B, H, N, D/2) each
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
