"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864, section 3.2).

Feature i and feature i + D/2 of a head form a plane, which position n turns by the angle n *
theta^(-2i/D). Turning q and k leaves their lengths alone and makes q_n . k_m depend on n - m only.
Pairing the halves, not neighbours, is the layout of GPT-NeoX and Llama.

Dimensions: B batch, H heads, N tokens, D head dim.
"""

import torch
from torch import Tensor


def rope_tables(positions: Tensor, *, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every angle, float32 (N, D/2) each, for positions (N,)."""
    # the angle of position 2**20 is off by 0.03 in float32
    exponents = (
        torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim
    )
    angles = positions[:, None] * theta**-exponents  # (N, D/2)
    return angles.cos().float(), angles.sin().float()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x (B, H, N, D). The tables are float32, so the result is too, unless x is wider."""
    first, second = x.chunk(2, dim=-1)  # (B, H, N, D/2) each
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
