"""The streaming softmax: three numbers per row, updated by one tile of scores at a time.

    row_max  (m in the papers)  the largest score so far
    row_sum  (l)                sum of exp(score - row_max) so far
    acc      (O, unnormalised)  sum of exp(score - row_max) * value so far

The statistics are those of Milakov & Gimelshein, "Online normalizer calculation for softmax"
(2018), algorithm 3. The accumulator is that of Dao et al., "FlashAttention" (2022), algorithm 1.
As in "FlashAttention-2" (2023), section 3.1.1, it is divided only once, at the end.

Dimensions: ... leading dims, R query rows, T keys of a tile, D head dim, D_v head dim of the
values.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor


def finite(row_max: Tensor) -> Tensor:
    """The maximum to subtract. A row that has seen no key has -inf, and -inf - -inf is NaN:
    subtract 0 there instead.
    """
    return torch.where(row_max == -torch.inf, 0.0, row_max)


@dataclass(frozen=True)
class OnlineSoftmax:
    row_max: Tensor  # (..., R, 1)
    row_sum: Tensor  # (..., R, 1)
    acc: Tensor  # (..., R, D_v)

    @classmethod
    def empty(
        cls,
        q: Tensor,
        *,
        dtype: torch.dtype,
        value_dim: int | None = None,
    ) -> Self:
        """The state before any key, for rows q (..., R, D) and values of value_dim columns (default
        D). It is the identity of `merge`.
        """
        row_sum = q.new_zeros((*q.shape[:-1], 1), dtype=dtype)
        return cls(
            torch.full_like(row_sum, -torch.inf),
            row_sum,
            row_sum.new_zeros((*q.shape[:-1], value_dim or q.shape[-1])),
        )

    def next_max(self, tile_max: Tensor) -> Tensor:
        return torch.maximum(self.row_max, tile_max)

    def correction(self, next_max: Tensor) -> Tensor:
        """alpha: the factor of the past sums after the maximum moves from row_max to next_max."""
        return torch.exp(self.row_max - finite(next_max))

    def update(self, scores: Tensor, v: Tensor) -> Self:
        """Absorb one tile of scores (..., R, T), -inf where masked, with its values v (..., T,
        D_v).
        """
        next_max = self.next_max(scores.amax(-1, keepdim=True))
        alpha = self.correction(next_max)
        p = torch.exp(scores - finite(next_max))
        row_sum = alpha * self.row_sum + p.sum(-1, keepdim=True)
        acc = alpha * self.acc + weighted_sum(p, v)
        return replace(self, row_max=next_max, row_sum=row_sum, acc=acc)

    def merge(self, other: Self) -> Self:
        """The state over the keys of both. Associative and commutative: tiles, splits and ranks may
        be merged in any order.
        """
        next_max = torch.maximum(self.row_max, other.row_max)
        alpha, beta = (torch.exp(state.row_max - finite(next_max)) for state in (self, other))
        return replace(
            self,
            row_max=next_max,
            row_sum=alpha * self.row_sum + beta * other.row_sum,
            acc=alpha * self.acc + beta * other.acc,
        )

    def finalize(self) -> tuple[Tensor, Tensor]:
        """out (..., R, D_v) and lse (..., R); 0 and -inf for a row that saw no key."""
        no_key = self.row_max == -torch.inf
        # divide by 1 instead of masking afterwards: 0/0 would poison the gradient even of the
        # branch not taken
        row_sum = torch.where(no_key, 1.0, self.row_sum)
        return self.acc / row_sum, (self.row_max + torch.log(row_sum)).squeeze(-1)


def weighted_sum(p: Tensor, v: Tensor) -> Tensor:
    """p @ v accumulated in p's dtype. p is first rounded to v's dtype, as for a tensor core."""
    return p.to(v.dtype).to(p.dtype) @ v.to(p.dtype)
