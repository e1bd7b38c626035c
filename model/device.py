"""What the model asks of PyTorch's build and of a tensor's device."""

import importlib.util

import torch
from torch import Tensor

# looked up once: torch.compile cannot trace the look-up
TRITON = importlib.util.find_spec("triton") is not None


def product_dtype(x: Tensor, otherwise: torch.dtype) -> torch.dtype:
    """The dtype of a product of x under autocast, and `otherwise` without it."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else otherwise


def hopper_multiprocessors(device: torch.device) -> int:
    """0 where the kernels for Hopper cannot run."""
    from attention.kernels.select import obstacle_of_the_place
    from attention.kernels.tiles import multiprocessors

    return 0 if obstacle_of_the_place(device) else multiprocessors(device)


# for torch.compile. Its assume_constant_result() does the same, and loads all of its modules
hopper_multiprocessors._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
