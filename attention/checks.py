"""What is refused: inputs that no backend takes, inputs that one does not take, and outputs that
break its promise.

checked() checks a call once for each kind of call, as the checks take longer than launching a
kernel.

Dimensions: B batch, H query heads, H_kv key/value heads, N queries, M keys, D head dim, D_v head
dim of the values.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attention.interface import (
    ALL_DTYPES,
    INTEGERS,
    OPTIONAL_ARGUMENTS,
    AttentionOutput,
    Backend,
    ScoredOutput,
    ScoreMod,
    dtype_name,
    needs_gradient,
    statistics_dtype,
    values_can_be_read,
)
from attention.mask import plain_window
from attention.own import check_module

# what a backend receives where the caller gives nothing; only attention_varlen() has cu_seqlens
NOT_GIVEN = {name: None for name in OPTIONAL_ARGUMENTS if name != "cu_seqlens"}
MOST_KINDS = 1024  # that a backend remembers


def checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    backend: Backend,
    arguments: dict[str, Any],
    module: nn.Module | None = None,
) -> dict[str, Any]:
    """The arguments of a call in the form that every backend takes. scale is a number, and window
    has its simplest form. Slopes and params have the dtype of the statistics, and params are on the
    device of q. Raises ValueError for inputs that no backend or this backend does not take.
    """
    arguments = NOT_GIVEN | arguments
    kind = None
    if module is None and arguments["score_mod"] is None and not torch.compiler.is_compiling():
        outlines = map(outline, (q, k, v, *arguments.values()))
        kind = (torch.is_grad_enabled(), *arguments, *outlines)
    if kind is None or kind not in backend.passed:
        check_inputs(q, k, v, arguments)
        backend.check_supported(q, k, v, **arguments)
        check_module(backend, module)
        if kind is not None:
            # such as a growing cache's, which never come again
            if len(backend.passed) >= MOST_KINDS:
                backend.passed.clear()
            backend.passed.add(kind)
    if arguments["key_lengths"] is not None:
        check_key_lengths_fit(k, arguments["key_lengths"])
    if arguments["scale"] is None:
        arguments["scale"] = q.shape[-1] ** -0.5
    causal, window = arguments["causal"], arguments["window"]
    longest = k.shape[2] if causal else q.shape[2] + k.shape[2]
    arguments["window"] = plain_window(window, causal=causal, longest=longest)
    slopes, score_mod = arguments["alibi_slopes"], arguments["score_mod"]
    if slopes is not None:
        arguments["alibi_slopes"] = slopes.detach().to(statistics_dtype(q))
    if score_mod is not None and score_mod.params is not None:
        params = score_mod.params.detach().to(q.device, statistics_dtype(q))
        arguments["score_mod"] = replace(score_mod, params=params)
    return arguments


def outline(x: Any) -> Any:
    """Everything about an argument that the checks depend on."""
    if isinstance(x, Tensor):
        return type(x), x.shape, x.stride(), x.dtype, x.device, x.requires_grad
    return repr(x)  # True == 1, and a list has no hash


def check_inputs(q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any]) -> None:
    """Raise ValueError, with the shapes in it, for inputs that no backend could take."""
    _check_tensors(q, k, v)
    causal, softcap = arguments["causal"], arguments["softcap"]
    if not isinstance(causal, bool):
        raise ValueError(f"{causal=} must be True or False")
    _check_scale_and_softcap(arguments["scale"], softcap, statistics_dtype(q))
    _check_window(arguments["window"], causal=causal)
    batch, num_heads, num_queries, _ = q.shape
    if arguments["document_ids"] is not None and num_queries != k.shape[2]:
        raise ValueError(
            f"document_ids need as many queries as keys; got N={num_queries}, M={k.shape[2]}"
        )
    for name, dims, shape, dtypes in (
        ("alibi_slopes", "(H,)", (num_heads,), None),
        ("sinks", "(H,)", (num_heads,), None),
        ("document_ids", "(B, N)", (batch, num_queries), INTEGERS),
        ("key_lengths", "(B,)", (batch,), INTEGERS),
    ):
        if (x := arguments[name]) is not None:
            check_tensor(name, x, q, dtypes)
            if x.shape != shape:
                raise ValueError(f"{name} must have shape {dims} = {shape}; got {tuple(x.shape)}")
    _check_score_mod(arguments["score_mod"], softcap, arguments["alibi_slopes"])


def check_tensor(name: str, x: Any, q: Tensor, dtypes: Sequence[torch.dtype] | None) -> None:
    """Raise ValueError unless x is a tensor on the device of q, of one of these dtypes, or of any
    floating dtype for None.
    """
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor, its type is {type(x).__name__}")
    if x.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}; got {x.device}")
    if x.dtype not in dtypes if dtypes else not x.is_floating_point():
        kinds = ", ".join(map(dtype_name, dtypes)) if dtypes else "a floating dtype"
        raise ValueError(f"{name} must be of {kinds}; got {dtype_name(x.dtype)}")


def shapes_of(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = shapes_of(q, k, v)
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q must be (B, H, N, D) and k, v (B, H_kv, M, D); got {shapes}")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q, k and v must share B, q and k D, and k and v all but their width; got {shapes}"
        )
    if min(*q.shape, *v.shape) < 1:
        raise ValueError(f"every dimension must be at least 1; got {shapes}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"the query heads must be a multiple of the key/value heads; got H={q.shape[1]}, "
            f"H_kv={k.shape[1]}"
        )
    kinds = [(x.dtype, x.device) for x in (q, k, v)]
    if kinds != 3 * kinds[:1] or q.dtype not in ALL_DTYPES:
        got = ", ".join(f"{dtype_name(dtype)} on {device}" for dtype, device in kinds)
        raise ValueError(f"q, k and v must have one floating dtype and one device; got {got}")


def _check_window(window: Any, *, causal: bool) -> None:
    if isinstance(window, tuple):
        if len(window) != 2 or not all(_is_number(side, int) and side >= -1 for side in window):
            raise ValueError(
                f"{window=} must be (left, right), two integers of at least 0, or -1 for no limit"
            )
    elif window is not None and not (_is_number(window, int) and window >= 1 and causal):
        raise ValueError(
            f"{window=} must be an integer of at least 1 and needs causal=True (got {causal=}); "
            "without it give (left, right)"
        )


def _check_scale_and_softcap(
    scale: float | None, softcap: float | None, statistics: torch.dtype
) -> None:
    limits, name = torch.finfo(statistics), dtype_name(statistics)
    if scale is not None and not (_is_number(scale, int, float) and abs(scale) <= limits.max):
        raise ValueError(
            f"{scale=} must be a number that is finite in {name}, in which scores are kept"
        )
    if softcap is None:
        return
    largest = limits.eps / limits.tiny  # with a larger cap, score / softcap would underflow
    if not (_is_number(softcap, int, float) and limits.tiny <= softcap <= largest):
        raise ValueError(
            f"{softcap=} must be a positive number, {limits.tiny:.1e} to {largest:.1e} as scores "
            f"are kept in {name}; None is no cap"
        )


def _check_score_mod(mod: Any, softcap: float | None, alibi_slopes: Tensor | None) -> None:
    constants = {"alibi_slopes": alibi_slopes}
    if mod is not None:
        if not isinstance(mod, ScoreMod):
            raise ValueError(
                f"score_mod must be an attention.ScoreMod, its type is {type(mod).__name__}"
            )
        if softcap is not None or alibi_slopes is not None:
            raise ValueError(
                "score_mod takes the place of softcap and alibi_slopes: write all of the change "
                "into it"
            )
        if mod.params is not None and not isinstance(mod.params, Tensor):
            raise ValueError(
                f"a score_mod's params must be a tensor, their type is {type(mod.params).__name__}"
            )
        constants["a score_mod's params"] = mod.params
    for name, x in constants.items():
        if needs_gradient(x):
            raise ValueError(
                f"{name} must not require a gradient, which attention does not compute: hand in "
                "x.detach() for x"
            )


def check_key_lengths_fit(k: Tensor, key_lengths: Tensor) -> None:
    """Raise ValueError if a value of key_lengths is not in 0 to M, for k (B, H_kv, M, D)."""
    if values_can_be_read():
        lengths, num_keys = key_lengths.tolist(), k.shape[2]
        if not 0 <= min(lengths) <= max(lengths) <= num_keys:
            raise ValueError(f"key_lengths must lie in 0 to M = {num_keys}; got {lengths}")


def check_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    by_position: bool,
) -> None:
    """Raise ValueError for packed inputs that attention_varlen() cannot take. by_position: whether
    scores depend on the positions of query and key.
    """
    if not q.ndim == k.ndim == v.ndim == 3:
        raise ValueError(
            f"q must be (T, H, D) and k, v (T_k, H_kv, D or D_v); got {shapes_of(q, k, v)}"
        )
    given = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    for name, ends in given.items():
        check_tensor(name, ends, q, (torch.int32, torch.int64))
    if cu_seqlens_q.ndim != 1 or cu_seqlens_q.shape != cu_seqlens_k.shape or len(cu_seqlens_q) < 2:
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must have shape (S + 1,) for S sequences; got "
            f"{tuple(cu_seqlens_q.shape)} and {tuple(cu_seqlens_k.shape)}"
        )
    if not values_can_be_read():
        return
    positions = [ends.tolist() for ends in given.values()]
    for name, values, length in zip(given, positions, (len(q), len(k)), strict=True):
        if values[0] != 0 or values[-1] != length or values != sorted(values):
            raise ValueError(
                f"{name} must rise from 0 to the number of tokens, {length}, and may not fall; "
                f"got {values}"
            )
    if by_position and positions[0] != positions[1]:
        raise ValueError(
            "alibi_slopes and score_mod need cu_seqlens_q equal to cu_seqlens_k: otherwise "
            "positions among the packed keys are not those in a sequence"
        )


def _is_number(x: Any, *kinds: type) -> bool:
    return isinstance(x, kinds) and not isinstance(x, bool)


def check_output(backend: Backend, q: Tensor, v: Tensor, output: Any) -> None:
    """Raise ValueError if a backend's output does not have the type, shapes and dtypes of
    AttentionOutput, or is not on the device of q.
    """
    if not isinstance(output, (AttentionOutput, ScoredOutput)):
        raise ValueError(
            f"attention={backend.name} must return AttentionOutput(out, lse), it returned "
            f"{type(output).__name__}"
        )
    shape, dtype = (*q.shape[:3], v.shape[3]), statistics_dtype(q)
    results = [("out", output.out, shape, q.dtype), ("lse", output.lse, shape[:3], dtype)]
    if isinstance(output, ScoredOutput):
        results.append(("max_score", output.max_score, shape[:2], dtype))
    for name, x, shape, dtype in results:
        if x is not None and (x.shape != shape or x.dtype != dtype or x.device != q.device):
            raise ValueError(
                f"attention={backend.name} must return {name} of shape {shape} and "
                f"{dtype_name(dtype)} on {q.device}, where q is; it returned {tuple(x.shape)} and "
                f"{dtype_name(x.dtype)} on {x.device}"
            )
