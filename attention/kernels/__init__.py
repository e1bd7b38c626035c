"""The Triton flash-attention: declared here, imported only when it is first used, so that `import attention` works without Triton."""

import importlib.util
import os
from importlib.metadata import version

import numpy
import torch
from torch import Tensor

from attention.interface import AttentionOutput, Backend


# looked up once: torch.compile cannot trace the look-up
INSTALLED = importlib.util.find_spec("triton") is not None


def triton_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> AttentionOutput:
    """q (B, H, N, D); k, v (B, H_kv, M, D), any strides."""
    from attention.kernels.op import flash_attention

    return AttentionOutput(*flash_attention(q, k, v, causal, scale))


def refusals(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> list[str]:
    if not INSTALLED:
        return ["Triton is not installed here (pip install triton, Linux only); attention=tiled is the same loop in plain PyTorch"]
    if q.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return [
            "Triton needs a GPU; set TRITON_INTERPRET=1 before the start to run its kernels in the interpreter (slow, for tests), "
            "or use attention=tiled, the same loop in plain PyTorch"
        ]
    if q.device.type == "cpu" and version("triton") < "3.7" and numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0":
        return [f"the interpreter of Triton {version('triton')} fails with numpy {numpy.__version__}; pip install 'numpy<2.4' or 'triton>=3.7'"]
    return []


TRITON = Backend(
    "triton",
    triton_attention,
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    head_dims=range(1, 257),
    features=frozenset({"gqa", "non_causal", "cross_length", "lse"}),
    requirements=refusals,
)
