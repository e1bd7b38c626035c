"""The Triton flash-attention: declared here, imported only when it is first used, so that `import attention` works without Triton."""

import importlib.util
import os

import torch
from torch import Tensor

from attention.interface import AttentionOutput, Backend


def triton_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> AttentionOutput:
    """q (B, H, N, D); k, v (B, H_kv, M, D), any strides."""
    from attention.kernels.op import flash_attention

    return AttentionOutput(*flash_attention(q, k, v, causal, scale))


def refusals(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> list[str]:
    if importlib.util.find_spec("triton") is None:
        return ["Triton is not installed here (pip install triton, Linux only); attention=tiled is the same loop in plain PyTorch"]
    if q.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return [
            "Triton needs a GPU; set TRITON_INTERPRET=1 before the start to run its kernels in the interpreter (slow, for tests), "
            "or use attention=tiled, the same loop in plain PyTorch"
        ]
    return []


TRITON = Backend(
    "triton",
    triton_attention,
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    head_dims=range(1, 257),
    features=frozenset({"gqa", "non_causal", "cross_length", "lse"}),
    requirements=refusals,
)
