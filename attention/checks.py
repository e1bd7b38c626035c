"""Check a call once for each kind of call: the checks take longer than launching a kernel."""

from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from attention.interface import (
    Backend,
    Plans,
    check_inputs,
    check_key_lengths_fit,
    prepared,
    prepared_window,
)
from attention.mask import Window
from attention.own import check_module

# kinds of calls that passed: a reference to the backend, because another one may later get its id,
# and the prepared window
passed: Plans[tuple[ref[Backend], Window]] = Plans()


def checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    backend: Backend,
    causal: bool,
    scale: float | None,
    sinks: Tensor | None,
    module: nn.Module | None,
    optional: dict[str, Any],
) -> dict[str, Any]:
    """The optional arguments in the form that every backend takes. Raises ValueError for inputs
    that no backend or this backend does not take.
    """
    kind = known = None
    if module is None and optional["score_mod"] is None and not torch.compiler.is_compiling():
        inputs = (causal, scale, q, k, v, sinks, *optional.values())
        kind = (id(backend), torch.is_grad_enabled(), *map(outline, inputs))
        try:
            known = passed.get(kind)
        except TypeError:  # an argument that should be a number cannot be hashed
            kind = None
    if known is None or known[0]() is not backend:
        inputs = {name: x for name, x in optional.items() if name != "cu_seqlens"}
        check_inputs(q, k, v, causal=causal, scale=scale, sinks=sinks, **inputs)
        backend.check_supported(q, k, v, causal=causal, scale=scale, sinks=sinks, **optional)
        check_module(backend, module)
        known = ref(backend), prepared_window(q, k, optional["window"], causal=causal)
        if kind is not None:
            passed[kind] = known
    else:  # checks that depend on more than the kind
        if optional["key_lengths"] is not None:
            check_key_lengths_fit(k, optional["key_lengths"])
        backend.check_requirements(q, k, v, causal=causal, scale=scale)
    return prepared(q, optional | {"window": known[1]})


def outline(x: Any) -> Any:
    """Everything about an argument that the checks depend on."""
    if x is None:
        return None
    if isinstance(x, Tensor):
        return type(x), x.shape, x.dtype, x.device, x.requires_grad
    return type(x), tuple(map(outline, x)) if isinstance(x, tuple) else x  # as True == 1
