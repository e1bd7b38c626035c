"""The checks of a call, once for calls of one kind: they take longer than to launch a kernel."""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from attention.interface import (
    Backend,
    check_inputs,
    check_key_lengths_fit,
    prepared,
    prepared_window,
)
from attention.kernels.launch import Plans
from attention.mask import Window
from attention.own import check_module

# kinds of calls that passed: the backend, whose id is in the key, and the window as prepared
passed: Plans[tuple[Backend, Window]] = Plans()


def checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    backend: Backend,
    causal: bool,
    scale: float | None,
    sinks: Tensor | None,
    module: nn.Module | None,
    **optional: Any,
) -> dict[str, Any]:
    """The optional arguments in the form that every backend takes. Raises ValueError for inputs
    that no backend or this backend does not take.
    """
    kind, known = None, None
    if module is None and optional["score_mod"] is None and not torch.compiler.is_compiling():
        kind = kind_of_call(backend, q, k, v, causal, scale, sinks, **optional)
        with contextlib.suppress(TypeError):  # an argument that should be a number cannot be hashed
            known = passed.get(kind)
    if known is None:
        inputs = {name: x for name, x in optional.items() if name != "cu_seqlens"}
        check_inputs(q, k, v, causal=causal, scale=scale, sinks=sinks, **inputs)
        backend.check_supported(q, k, v, causal=causal, scale=scale, sinks=sinks, **optional)
        check_module(backend, module)
        known = backend, prepared_window(q, k, optional["window"], causal=causal)
        if kind is not None:
            passed[kind] = known
    else:  # what depends on more than the kind
        if optional.get("key_lengths") is not None:
            check_key_lengths_fit(k, optional["key_lengths"])
        backend.check_requirements(q, k, v, causal=causal, scale=scale)
    return prepared(q, optional | {"window": known[1]})


def kind_of_call(
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    sinks: Tensor | None,
    *,
    window: Window,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    document_ids: Tensor | None,
    key_lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    **_: None,
) -> tuple[Any, ...]:
    """All that those checks look at, but for a score_mod and a module."""
    sides = window if isinstance(window, tuple) else (window,)
    numbers = (causal, scale, softcap, *sides)
    tensors = (q, k, v, alibi_slopes, document_ids, key_lengths, cu_seqlens, sinks)
    return (
        id(backend),
        torch.is_grad_enabled(),
        numbers,
        *map(type, numbers),  # as True == 1
        *map(outline, tensors),
    )


def outline(x: Tensor | None) -> Any:
    if x is None:
        return None
    if not isinstance(x, Tensor):
        return type(x)
    return type(x), x.shape, x.dtype, x.device, x.requires_grad
