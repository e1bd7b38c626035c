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

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attention.interface import Backend, Output, dtype_name
from attention.look.blame import with_place

STANDALONE_SEQ_LEN = 1024


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


def standalone(backend: Backend, *, noise: float = 0.0) -> Backend:
    """The backend as a function of q, k and v, for calls outside a model. It makes a module for
    each new shape, always with the same random numbers.

    noise: standard deviation of the noise added to every parameter. A parameter that starts at zero
    may hide what it multiplies.
    """
    if backend.module is None:
        return backend
    modules: dict[tuple[int, int, int, bool], nn.Module] = {}

    def module_for(q: Tensor, k: Tensor) -> nn.Module:
        wide = q.dtype == torch.float64
        key = (q.shape[1], k.shape[1], q.shape[3], wide)
        if key not in modules:
            sizes = dict(zip(("num_heads", "num_kv_heads", "head_dim"), key[:3], strict=True))
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(0)
                module = build_module(backend, **sizes, max_seq_len=STANDALONE_SEQ_LEN, layer=0)
                for x in module.parameters():
                    x.add_(torch.randn(x.shape), alpha=noise)
            modules[key] = module.to(q.device, torch.float64 if wide else None)
        return modules[key]

    def bound(fn: Callable[..., Output]) -> Callable[..., Output]:
        def attend(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Output:
            return fn(q, k, v, module=module_for(q, k), **arguments)

        return attend

    reference = None if backend.reference is None else bound(backend.reference)
    return replace(backend, fn=bound(backend.fn), reference=reference, module=None)
