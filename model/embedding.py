"""The embeddings of tokens and positions, with kernels for training on a GPU
(model/embedding_kernel.py).

Dimensions: B batch, N tokens of a sequence, C hidden_size, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from model.loss import TRITON
from model.norm import MAX_WIDTH


def has_kernel(weight: Tensor) -> bool:
    return TRITON and torch.is_grad_enabled() and weight.is_cuda and fits_kernel(weight)


def fits_kernel(weight: Tensor) -> bool:
    return weight.requires_grad and weight.dtype != torch.float64 and weight.shape[1] <= MAX_WIDTH


class TiedEmbedding(torch.autograd.Function):
    """x = weight[tokens] + position_weight[positions], (B, N, C), and the weight for the output
    layer.

    The backward pass gets both gradients. It adds the rows of x's to the weight's, in place.
    tokens (B, N), positions (N,) without repetitions.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weight: Tensor, positions: Tensor, position_weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.weight = weight.shape, weight.dtype
        ctx.positions = None if position_weight is None else position_weight.shape
        ctx.save_for_backward(tokens, positions)
        return lookup(tokens, weight, positions, position_weight), weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor | None, d_weight: Tensor | None) -> tuple:
        tokens, positions = ctx.saved_tensors
        if d_x is None:
            return None, d_weight, None, None
        d_x = d_x.contiguous()
        if d_weight is None:
            shape, dtype = ctx.weight
            d_weight = d_x.new_zeros(shape, dtype=dtype)
        add_gradient(d_weight, tokens.flatten(), d_x.flatten(0, 1))
        d_positions = None
        if ctx.positions is not None:
            d_positions = d_x.new_zeros(ctx.positions)
            d_positions.index_copy_(0, positions, d_x.sum(0))
        return None, d_weight, None, d_positions


# operators, each one node for torch.compile
@torch.library.custom_op("tilegpt::lookup", mutates_args=())
def lookup(
    tokens: Tensor,
    weight: Tensor,
    positions: Tensor | None,
    position_weight: Tensor | None,
) -> Tensor:
    """weight[tokens] + position_weight[positions]; a token outside the vocabulary gives NaN."""
    from model.embedding_kernel import lookup

    return lookup(tokens, weight, positions, position_weight)


@lookup.register_fake
def _(tokens, weight, positions, position_weight):
    return weight.new_empty(*tokens.shape, weight.shape[1])


@torch.library.custom_op("tilegpt::add_gradient", mutates_args=("total",))
def add_gradient(total: Tensor, tokens: Tensor, d_x: Tensor) -> None:
    """total[tokens] += d_x for total (V, C), tokens (T,) and d_x (T, C)."""
    from model.embedding_kernel import add_gradient

    add_gradient(total, tokens, d_x)


@add_gradient.register_fake
def _(total, tokens, d_x):
    return None
