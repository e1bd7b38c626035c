"""The model's kernels for training on a GPU, and PyTorch's operators where they cannot run.

add_norm()    one kernel adds a branch to the residual stream and computes the norm (norm.py)
gelu_mlp()    on Hopper, the products before and after GELU compute it (mlp.py)

loss.py is for model/loss.py. The three files need Triton, so they are imported only where it is.

Dimensions: B batch, N tokens, C hidden_size.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.device import TRITON, hopper_multiprocessors, product_dtype

MAX_WIDTH = 8192  # the longest row that a program of the norm's kernel holds in its registers


def add_norm(x: Tensor, branch: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """x + branch and norm(x + branch), both (B, N, C); None adds nothing. norm is an nn.LayerNorm
    or nn.RMSNorm with a weight and eps.

    The kernel returns the norm in autocast's dtype, which the next product takes; PyTorch in x's.
    """
    if branch is not None and has_norm_kernel(x, branch):
        from model.kernels.norm import add_norm_forward

        centred = isinstance(norm, nn.LayerNorm)
        bias = norm.bias if centred else None
        dtype = product_dtype(x, x.dtype)
        x, normed, _ = add_norm_forward(x, branch, norm.weight, bias, norm.eps, centred, dtype)
        return x, normed
    x = x if branch is None else x + branch
    return x, norm(x)


def has_norm_kernel(x: Tensor, branch: Tensor) -> bool:
    """Whether add_norm() uses the kernel. Only with gradients: in a decoding step of a few tokens,
    calling our operator costs more than its kernel saves.
    """
    return TRITON and torch.is_grad_enabled() and x.is_cuda and fits_norm_kernel(x, branch)


def fits_norm_kernel(x: Tensor, branch: Tensor) -> bool:
    """has_norm_kernel() for any device: tests run the kernel in Triton's interpreter."""
    return (
        x.dtype != torch.float64
        and torch.promote_types(x.dtype, branch.dtype) == x.dtype
        and x.shape[-1] <= MAX_WIDTH
    )


def gelu_mlp(x: Tensor, up: nn.Linear, down: nn.Linear) -> Tensor:
    """down(gelu(up(x))), from x (..., C) to (..., C). Not for a part that the backward pass runs
    again: checkpointing leaves out a product that comes last, but not the end of this kernel.
    """
    if has_mlp_kernel(x, up, down):
        from model.kernels.mlp import GeluMLP

        return GeluMLP.apply(x, up.weight, up.bias, down.weight, down.bias)
    return down(gelu(up(x)))


def has_mlp_kernel(x: Tensor, up: nn.Linear, down: nn.Linear) -> bool:
    """Whether gelu_mlp() uses the kernel. Only with gradients: it also writes what a backward pass
    reads.
    """
    return (
        TRITON
        and torch.is_grad_enabled()
        and x.is_cuda
        and fits_mlp_kernel(x, up, down, hopper_multiprocessors(x.device))
    )


def fits_mlp_kernel(x: Tensor, up: nn.Linear, down: nn.Linear, multiprocessors: int) -> bool:
    """Whether the kernel takes these dtypes and sizes, and keeps the GPU busy. Under autocast, x
    must have the dtype of the products, as the norm before an MLP returns it.
    """
    if (
        up.bias is None
        or down.bias is None
        or x.dtype != product_dtype(x, up.weight.dtype)
        or x.dtype not in (torch.bfloat16, torch.float16)
        # whole tiles; each quarter of a tile needs a product
        or up.in_features % 64
        or up.in_features < 256
        or up.out_features % 256
    ):
        return False
    tokens, columns = x.numel() // up.in_features, up.out_features // 256
    # a program keeps its columns, so some multiprocessors may stay without one
    programs = multiprocessors // columns * columns
    return tokens // 128 * columns >= programs >= 0.85 * multiprocessors > 0


def gelu(x: Tensor) -> Tensor:
    """GELU in the tanh form (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""
    if torch.compiler.is_compiling() and x.is_cuda:
        return gelu_by_sigmoid(x)
    return F.gelu(x, approximate="tanh")


def gelu_by_sigmoid(x: Tensor) -> Tensor:
    """gelu(x) as x (1 + tanh(u)) / 2 = x sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3).

    For torch.compile: on a GPU its tanh takes more time than the memory traffic, forward and
    backward.
    """
    twice = 2 * math.sqrt(2 / math.pi)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.sigmoid(wide * (twice + twice * 0.044715 * wide.square()))).to(x.dtype)
