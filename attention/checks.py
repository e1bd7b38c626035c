"""Check a call once for each kind of call: the checks take longer than launching a kernel."""

from typing import Any

import torch
from torch import Tensor, nn

from attention.interface import (
    OPTIONAL_ARGUMENTS,
    Backend,
    check_inputs,
    check_key_lengths_fit,
    plain_window,
    prepared,
)
from attention.mask import Window
from attention.own import check_module

# what `optional` holds where a caller gives nothing; attention_varlen() adds cu_seqlens
NOT_GIVEN = {name: None for name in OPTIONAL_ARGUMENTS if name != "cu_seqlens"}
MOST_KINDS = 1024
# the prepared window of each kind of call that passed
passed: dict[tuple[Any, ...], Window] = {}


def checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    backend: Backend,
    causal: bool,
    scale: float | None,
    sinks: Tensor | None,
    optional: dict[str, Any],
    module: nn.Module | None = None,
) -> dict[str, Any]:
    """The optional arguments in the form that every backend takes. Raises ValueError for inputs
    that no backend or this backend does not take.
    """
    kind = None
    if module is None and optional["score_mod"] is None and not torch.compiler.is_compiling():
        inputs = (causal, scale, q, k, v, sinks, *optional.values())
        kind = (backend, torch.is_grad_enabled(), *map(outline, inputs))
    if kind is not None and is_known(kind):  # what depends on more than the kind is left to check
        if optional["key_lengths"] is not None:
            check_key_lengths_fit(k, optional["key_lengths"])
        backend.refuse(q, k, backend.unmet_requirements(q, k, v, causal=causal, scale=scale))
        optional["window"] = passed[kind]
        return prepared(q, optional)
    function = {"causal": causal, "scale": scale, "sinks": sinks}
    check_inputs(q, k, v, **function, optional=optional)
    backend.check_supported(q, k, v, **function, **optional)
    check_module(backend, module)
    longest = k.shape[2] if causal else q.shape[2] + k.shape[2]
    optional["window"] = plain_window(optional["window"], causal=causal, longest=longest)
    if kind is not None:
        if len(passed) >= MOST_KINDS:  # such as a growing cache's, which never come again
            passed.clear()
        passed[kind] = optional["window"]
    return prepared(q, optional)


def is_known(kind: tuple[Any, ...]) -> bool:
    try:
        return kind in passed
    except TypeError:  # an argument that should be a number cannot be hashed: the checks say so
        return False


def outline(x: Any) -> Any:
    """Everything about an argument that the checks depend on."""
    if x is None:
        return None
    if isinstance(x, Tensor):
        return type(x), x.shape, x.dtype, x.device, x.requires_grad
    return type(x), tuple(map(outline, x)) if isinstance(x, tuple) else x  # as True == 1
