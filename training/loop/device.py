"""Where a run computes and in which dtype."""

import os

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def pick_device(name: str) -> torch.device:
    """auto picks a GPU if PyTorch sees one. Raises ValueError for cuda without a GPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device=cuda, but PyTorch sees no GPU here; use device=cpu, or device=auto"
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of the matrix products. auto is bfloat16 on a GPU that has it, else float32.

    Raises ValueError for bf16 on a GPU without it.
    """
    # emulated bfloat16 is slow, and counts as missing
    has_bf16 = device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" and has_bf16 else torch.float32
    if name == "bf16" and not has_bf16:
        raise ValueError(
            f"dtype=bf16, but {torch.cuda.get_device_name(device)} has no bfloat16; use "
            "dtype=fp16 or dtype=fp32"
        )
    return DTYPES[name]


def autocast_to(dtype: torch.dtype, device: torch.device) -> torch.autocast:
    """The context of a forward pass whose matrix products are of this dtype; off for float32."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


def set_deterministic(deterministic: bool) -> None:
    """Switch deterministic kernels on or off. Call it before the first matrix product.

    cuBLAS reads its environment variable then.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # the call imports torch's compiler, which takes seconds
    if deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(deterministic)
