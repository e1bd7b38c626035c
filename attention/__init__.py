"""Attention with interchangeable backends: one function and one table of backends.

attention(q, k, v, backend="tiled")                                       # a name in BACKENDS
attention(q, k, v, backend=get_backend("tiled", block_q=32, block_kv=16)) # with options
register(Backend("mine", my_function))                                    # then backend="mine"
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attention.backends import (
    BACKENDS,
    get_backend,
    get_score_mod,
    is_operator,
    is_shipped,
    register,
)
from attention.checks import check_output, check_packed, checked
from attention.decoding import check_cache
from attention.interface import (
    AttentionOutput,
    Backend,
    Output,
    Refusal,
    ScoredOutput,
    ScoreMod,
    dtype_name,
    needs_gradient,
    without_padding,
)
from attention.kernels import kernel_choice
from attention.look.diagnose import (
    LIMITS,
    Breakdown,
    Recorder,
    companion_max_score,
    compare_with_exact,
    max_score,
)
from attention.mask import Window
from attention.own import build_module
from attention.ranks import Shards
from attention.sinks import with_sinks
from attention.tile_op import operator_attention

__all__ = [
    "BACKENDS",
    "LIMITS",
    "AttentionOutput",
    "Backend",
    "Breakdown",
    "Recorder",
    "ScoreMod",
    "ScoredOutput",
    "Shards",
    "attention",
    "attention_varlen",
    "attention_with_cache",
    "build_module",
    "compare_with_exact",
    "dtype_name",
    "get_backend",
    "get_score_mod",
    "is_operator",
    "is_shipped",
    "kernel_choice",
    "max_score",
    "register",
]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    backend: str | Backend,
    causal: bool = True,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    document_ids: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    key_lengths: Tensor | None = None,
    sinks: Tensor | None = None,
    module: nn.Module | None = None,
    return_max_score: bool | Tensor = False,
) -> Output:
    """Compute softmax(q k^T * scale, masked) v with this backend; there is no fallback. Inputs that
    the backend does not take raise a ValueError that lists every reason.

    q             (B, H, N, D), floating
    k             (B, H_kv, M, D), same dtype and device as q; H a multiple of H_kv (grouped-query,
                  multi-query)
    v             (B, H_kv, M, D_v), the same; out is (B, H, N, D_v)
    causal        query i sees key j iff j <= i + (M - N): aligned bottom-right, so N=1 decodes
                  against a cache
    scale         default D**-0.5; any finite number
    window        query i sees only the w most recent keys it may see, its own position included;
                  needs causal. Or (left, right): it sees keys p - left <= j <= p + right, where p
                  = i + (M - N) is its position; -1 is no limit, and causal makes right 0
    softcap       scores become softcap * tanh(score / softcap)
    alibi_slopes  (H,) floating: adds -slope * (i + M - N - j) to the scores; a constant, no
                  gradient flows to it
    document_ids  (B, N) integers: a run of equal ids is a document, and attention stays inside it;
                  an id that comes again after another is a new document; needs N == M
    score_mod     any other change of the scores, given with its derivative, in place of softcap and
                  alibi_slopes
    key_lengths   (B,) integers from 0 to M: sequence b has keys 0 <= j < key_lengths[b], and the
                  rest is padding, which may hold anything, NaN included. Padding moves no position:
                  causal and window still count from M. Checking the values waits for a GPU; a
                  compiled graph does not check them
    sinks         (H,) floating: one extra logit per head in the softmax's denominator, like a key
                  whose value is zero. lse includes it, max_score does not, and gradients flow to
                  it; needs a backend that returns lse
    module        this layer's module, from build_module(), if the backend has parameters
    return_max_score
                  return ScoredOutput(out, lse, max_score), with the largest score of each head (B,
                  H): nearly free from backends with the feature max_score, a pass of the tile loop
                  from others. A 0-d bool tensor on the CPU is read when the call runs, so one
                  compiled graph serves both values. Where it holds False, max_score is None, or
                  undefined in a compiled graph

    Order: scale, softcap, alibi, mask, sinks, softmax. A row that sees no key gives out = 0 and lse
    = -inf (or the sink's logit), with zero gradients. A score of -inf hides its key, even if it
    overflowed to -inf. A score of inf or NaN makes its row NaN. Statistics, sums and score changes
    are float32 (float64 for float64 inputs). Autocast is off inside.
    """
    arguments = {
        "causal": causal,
        "scale": scale,
        "window": window,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "document_ids": document_ids,
        "score_mod": score_mod,
        "key_lengths": key_lengths,
        "sinks": sinks,
    }
    return _answer(q, k, v, backend, arguments, module, return_max_score)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    backend: str | Backend,
    causal: bool = True,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    sinks: Tensor | None = None,
) -> AttentionOutput:
    """attention() for S sequences of any lengths, packed one after the other as for
    flash_attn_varlen_func of flash-attention. No padding, no loop over sequences.

    q             (T, H, D), floating: the queries of all sequences
    k, v          (T_k, H_kv, D) and (T_k, H_kv, D_v), same dtype and device as q
    cu_seqlens_q  (S + 1,) int32 or int64: sequence s has the queries cu_seqlens_q[s] <= i <
                  cu_seqlens_q[s + 1]. It rises from 0 to T; a sequence may have none
    cu_seqlens_k  (S + 1,) the same for the keys, from 0 to T_k

    Returns out (T, H, D_v) and lse (H, T). causal and window apply within each sequence: aligned
    bottom-right, with its own N and M. A sequence without keys gives out = 0 and lse = -inf. The
    other arguments are those of attention(). alibi_slopes and score_mod need as many queries as
    keys in every sequence; a score_mod gets b = 0 and positions among all T. Raises ValueError as
    attention() does. Checking the values of cu_seqlens waits for a GPU; a compiled graph does not
    check them.
    """
    by_position = alibi_slopes is not None or score_mod is not None
    check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, by_position=by_position)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # (1, H, T, D)
    arguments = {
        "causal": causal,
        "scale": scale,
        "window": window,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "score_mod": score_mod,
        "cu_seqlens": torch.stack((cu_seqlens_q.int(), cu_seqlens_k.int())),
        "sinks": sinks,
    }
    output = _answer(q, k, v, backend, arguments)
    lse = None if output.lse is None else output.lse[0]
    return AttentionOutput(output.out[0].transpose(0, 1), lse)


def attention_with_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache_lengths: Tensor,
    *,
    backend: str | Backend,
    block_table: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    splits: str | int = "auto",
) -> AttentionOutput:
    """Let the last N tokens of each sequence attend to all its keys, which lie in a cache of fixed
    shape, as in flash_attn_with_kvcache of flash-attention. There is no gradient.

    q              (B, H, N, D), floating
    k, v           (B, H_kv, M, D) and (B, H_kv, M, D_v), same dtype and device as q: room for M
                   keys a sequence
    cache_lengths  (B,) integers from 0 to M: how many keys sequence b has, those of its N queries
                   included. causal and window count from there
    block_table    (B, max_pages) int32 or int64: the cache lies in pages, k and v are (num_pages,
                   page_size, H_kv, D), and key j of sequence b is row j % page_size of page
                   block_table[b, j // page_size]
    splits         how many programs share the keys of a head: a number from 1 to 128, "fixed", or
                   "auto" for as many as keep the device busy. With "fixed" or a number, triton
                   gives a row the same bits whatever else is in the batch, wherever its pages lie,
                   and however large the cache is

    Returns out (B, H, N, D_v) and lse (B, H, N). The other arguments are those of attention().
    Raises ValueError as attention() does, and for a backend that cannot decode. On a GPU the values
    of cache_lengths and block_table are not checked, because reading them would wait for the GPU. A
    sequence whose values point outside the cache becomes NaN there.
    """
    check_cache(q, k, v, cache_lengths, block_table)
    if isinstance(backend, str):
        backend = get_backend(backend)
    keys, values = k, v
    if block_table is not None:
        k, v = k.transpose(1, 2), v.transpose(1, 2)  # (P, H_kv, page_size, D)
        # one row stands for all that a sequence has room for
        room = block_table.shape[1] * k.shape[2]
        keys, values = (x[:1, :, :1].expand(len(q), -1, room, -1) for x in (k, v))
    function = {"causal": causal, "scale": scale, "window": window, "softcap": softcap}
    arguments = checked(q, keys, values, backend, function | {"sinks": sinks})
    if backend.decode is None or not backend.can_decode:
        able = ", ".join(name for name, each in BACKENDS.items() if each.can_decode)
        raise Refusal(
            f"attention={backend.name} cannot decode over a cache; these can, but not with "
            f"softmax_dtype=input: {able}"
        )
    if needs_gradient(q, k, v, sinks):
        raise Refusal("attention_with_cache() has no gradient: call it under torch.no_grad()")
    with _without_autocast(q):
        function = {name: arguments[name] for name in function}
        out, lse = backend.decode(q, k, v, cache_lengths, block_table, **function, splits=splits)
        if sinks is not None:
            assert lse is not None
            out, lse = with_sinks(out, lse, sinks)
    return AttentionOutput(out, lse)


def _answer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    backend: str | Backend,
    arguments: dict[str, Any],
    module: nn.Module | None = None,
    return_max_score: bool | Tensor = False,
) -> Output:
    """Check the inputs, call the backend, check its output."""
    if isinstance(backend, str):
        backend = get_backend(backend)
    arguments = checked(q, k, v, backend, arguments, module)
    if arguments["key_lengths"] is not None:
        k, v = without_padding(k, v, arguments["key_lengths"])
    asked = return_max_score
    if isinstance(asked, Tensor) and not torch.compiler.is_compiling():
        asked = bool(asked)
    given = {
        name: value
        for name, value in arguments.items()
        if name in ("causal", "scale") or name in backend.features
    }
    if asked is not False and "max_score" in backend.features:
        given["return_max_score"] = asked
    if module is not None:
        given["module"] = module
    function = _function_of(backend, arguments["score_mod"])
    sinks = arguments.pop("sinks")
    with _without_autocast(q):
        output = function(q, k, v, **given, **backend.options)
        check_output(backend, q, v, output)
        if sinks is not None and "sinks" not in given:
            out, lse = with_sinks(output.out, output.lse, sinks)
            output = output._replace(out=out, lse=lse)
        if return_max_score is False:
            return output
        max_score = getattr(output, "max_score", None)
        if max_score is None and asked is not False:
            max_score = companion_max_score(q, k, asked, **arguments)
    return ScoredOutput(output.out, output.lse, None if max_score is None else max_score.detach())


def _function_of(backend: Backend, score_mod: ScoreMod | None) -> Callable[..., Any]:
    """What to call: in a graph of torch.compile, a tile loop is one operator, and a function that
    is not traceable is not traced.
    """
    if torch.compiler.is_compiling() and score_mod is None and is_operator(backend):
        return partial(operator_attention, backend.name)
    if backend.traceable or "torch._dynamo" not in sys.modules:  # importing it takes seconds
        return backend.fn
    return torch.compiler.disable(backend.fn)


def _without_autocast(q: Tensor) -> AbstractContextManager[Any]:
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(q.device.type):
        return torch.autocast(q.device.type, enabled=False)
    return nullcontext()  # in a fifth of the time
