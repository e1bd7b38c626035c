"""Attention with its own parameters: the module that a backend makes for each layer.

    class Gated(nn.Module):
        def __init__(self, *, num_heads, **_):
            super().__init__()
            self.gate = nn.Parameter(torch.zeros(num_heads, 1, 1))

        def forward(self, q, k, v, *, causal, scale):
            out = attention(q, k, v, backend=TILED, causal=causal, scale=scale).out
            return AttentionOutput((out * self.gate.sigmoid()).to(q.dtype))

    BACKEND = Backend("gated", module=Gated, exact=False)

A model builds the module of each layer, trains it and saves it as blocks.0.attention.own. The
module holds whatever the attention needs besides q, k and v: parameters, buffers, or just the
layer's number.
"""

import torch
from torch import nn

from attention.interface import Backend, dtype_name
from attention.look.blame import with_place


def build_module(
    backend: Backend,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_seq_len: int,
    layer: int,
) -> nn.Module:
    """The backend's module for one layer; `layer` counts from 0. max_seq_len: the model's longest
    sequence, in tokens. Raises ValueError for anything that a model could not move, train and save.
    """
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    name = f"attention={backend.name}"
    assert backend.module is not None
    try:
        module = backend.module(**shape, max_seq_len=max_seq_len, layer=layer)
    except Exception as error:  # the user's class may raise anything
        raise ValueError(
            f"{name} cannot build its module for layer {layer}: {with_place(error)}"
        ) from error
    if not isinstance(module, nn.Module):
        raise ValueError(f"{name}: module= must make an nn.Module, it made {type(module).__name__}")
    for key, x in module.named_parameters():
        here = torch.get_default_device().type
        if (x.device.type, x.dtype) != (here, torch.float32):
            raise ValueError(
                f"{name} makes own.{key} in {dtype_name(x.dtype)} on {x.device}: make parameters "
                "in float32 and name no device, the model moves them to its own"
            )
    return module


def check_module(backend: Backend, module: nn.Module | None) -> None:
    """Raise ValueError if a backend lacks the module it needs, or gets one without need."""
    if backend.module is not None and module is None:
        raise ValueError(
            f"attention={backend.name} has parameters of its own, and there are none here: hand in "
            "module=build_module(backend, ...), or use it in a model that was made for it"
        )
    if backend.module is None and module is not None:
        raise ValueError(f"attention={backend.name} takes no module= (got {type(module).__name__})")
