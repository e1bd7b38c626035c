"""Attention with exchangeable kernels: one function, one table of backends.

attention(q, k, v, backend="tiled")                                       # a name in BACKENDS
attention(q, k, v, backend=get_backend("tiled", block_q=32, block_kv=16)) # with options
register(Backend("mine", my_function))                                    # your own, then
backend="mine"
"""

import importlib
import os
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attention.defects import DEFECTS
from attention.diagnose import (
    LIMITS,
    Breakdown,
    Recorder,
    compare_with_exact,
    find_breakdown,
    max_score,
)
from attention.exact_variants import EXACT_VARIANTS
from attention.flex import FLEX
from attention.interface import (
    AttentionOutput,
    Backend,
    ScoreMod,
    check_inputs,
    check_output,
    prepared,
)
from attention.kernels import TRITON, kernel_choice
from attention.naive import NAIVE
from attention.probe import probe
from attention.sdpa import SDPA
from attention.tile_op import operator_attention
from attention.tiled import TILED

__all__ = [
    "BACKENDS",
    "LIMITS",
    "AttentionOutput",
    "Backend",
    "Breakdown",
    "Recorder",
    "ScoreMod",
    "attention",
    "compare_with_exact",
    "find_breakdown",
    "get_backend",
    "kernel_choice",
    "max_score",
    "probe_backend",
    "register",
]

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (NAIVE, TILED, TRITON, SDPA, FLEX, *EXACT_VARIANTS, *DEFECTS)
}


def register(backend: Backend) -> None:
    """Add a backend of your own to the table. Raises ValueError where the name is taken."""
    if backend.name in BACKENDS:
        raise ValueError(
            f"a backend named {backend.name!r} exists already; names in use: {', '.join(BACKENDS)}"
        )
    BACKENDS[backend.name] = backend


def get_backend(name: str, **options: Any) -> Backend:
    """The backend of that name, with its options set. Raises ValueError for an unknown name or
    option, listing the valid ones.

    `pkg.module:NAME` is a user's Backend, found from the current folder or anywhere Python looks.
    It goes by that name, since two of them may call themselves alike.
    """
    if name in BACKENDS:
        return BACKENDS[name].configured(**options)
    if ":" in name:
        return _load(name).configured(**options)
    raise ValueError(
        f"attention={name} is not known; valid: {', '.join(BACKENDS)}, or pkg.module:NAME for a "
        "Backend of your own"
    )


def _load(target: str) -> Backend:
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise ValueError(f"attention={target} must read pkg.module:NAME")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (
        Exception,
        SystemExit,
    ) as error:  # whatever the user's module raises while it is imported
        raise ValueError(
            f"attention={target} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, Backend):
        raise ValueError(
            f"attention={target} must be an attention.Backend, it is a {type(found).__name__}"
        )
    return replace(found, name=target)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    backend: str | Backend,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    document_ids: Tensor | None = None,
    score_mod: ScoreMod | None = None,
) -> AttentionOutput:
    """softmax(q k^T * scale, masked) v by the named backend, and no other: what it cannot do is a
    ValueError with every reason.

    q             (B, H, N, D), floating
    k, v          (B, H_kv, M, D), same dtype and device as q; H a multiple of H_kv (grouped-query,
                  multi-query)
    causal        query i sees key j iff j <= i + (M - N): aligned bottom-right, so N=1 decodes
                  against a cache
    scale         default D**-0.5; any finite number
    window        query i sees only the w most recent keys it may see, its own position included;
                  needs causal
    softcap       scores become softcap * tanh(score / softcap)
    alibi_slopes  (H,) floating: adds -slope * (i + M - N - j) to the scores; a constant, no
                  gradient flows to it
    document_ids  (B, N) integers: a run of equal ids is a document, and attention stays inside it;
                  an id that comes again after another is a new document; needs N == M
    score_mod     any other change of the scores, given with its derivative, in place of softcap and
                  alibi_slopes

    Order: scale, softcap, alibi, mask, softmax. A row that sees no key gives out = 0 and lse =
    -inf, with zero gradients. A score of -inf is that of a hidden key, wherever it comes from: so
    does a row whose every score falls to -inf by overflow. A score of inf or NaN makes its row NaN.
    Statistics, sums and all that changes a score are float32 (float64 for float64), and autocast
    has no say inside.
    """
    if isinstance(backend, str):
        backend = get_backend(backend)
    optional = {
        "window": window,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "document_ids": document_ids,
        "score_mod": score_mod,
    }
    check_inputs(q, k, v, causal=causal, scale=scale, **optional)
    backend.check_supported(q, k, v, causal=causal, scale=scale, **optional)
    optional = prepared(q, k, optional)
    if torch.compiler.is_compiling() and backend.operator and score_mod is None:
        function = partial(operator_attention, backend.name)
    else:
        function = backend.fn if backend.traceable else torch.compiler.disable(backend.fn)
    arguments = {name: value for name, value in optional.items() if name in backend.features}
    with torch.autocast(q.device.type, enabled=False):
        output = function(
            q,
            k,
            v,
            causal=causal,
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            **arguments,
            **backend.options,
        )
    check_output(backend, q, output)
    return output


def probe_backend(backend: Backend, **model: Any) -> None:
    """Try a backend out before training with it; see attention.probe. Raises ValueError with what
    is wrong with it.
    """
    probe(backend, attention, **model)
