"""The Triton flash-attention backend. Its kernels are imported at their first use, so that `import
attention` works without Triton.
"""

import importlib.util
import os
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy
import torch
from numpy.lib import NumpyVersion
from torch import Tensor
from torch.nn.functional import pad

from attention.decoding import num_splits
from attention.interface import (
    OWN_SINKS,
    AttentionOutput,
    Backend,
    Output,
    Refusal,
    ScoredOutput,
    ScoreMod,
    flag,
    needs_gradient,
)
from attention.kernels.select import (
    KERNELS,
    SHIPPED,
    Choice,
    choose_kernel,
    why_not_hopper,
)
from attention.mask import Window, visible_keys
from attention.mask import intervals as intervals_of
from attention.sinks import with_sinks

# looked up once: torch.compile cannot trace the look-up
INSTALLED = importlib.util.find_spec("triton") is not None
TILE_SIZES = (16, 32, 64, 128)
MOST_QUERIES = 16  # in a decoding step


def triton_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    window: Window = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    document_ids: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    key_lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    softmax: str = "online",
    block_q: int = 0,
    block_kv: int = 0,
    kernel: str = "portable",
    splits: str | int = "auto",
    return_max_score: bool | Tensor = False,
    sinks: Tensor | None = None,
) -> Output:
    """q (B, H, N, D); k (B, H_kv, M, D), v (B, H_kv, M, D_v), any strides; sinks (H,). block_q,
    block_kv: a tile size, or 0 for the one tuned for the device.

    The kernels take one head dim. Where D_v differs from D, the narrower tensors are padded to the
    width of the wider.

    kernel: "portable", "hopper", or "auto" for whichever the device and the inputs allow; see
    attention/kernels/select.py. Calls of few queries, more keys and no gradient use the split
    kernel, unless kernel is "hopper". splits: see attention_with_cache().
    """
    from attention.kernels import op

    value_dim = v.shape[-1]
    if (narrower := q.shape[-1] - value_dim) > 0:
        v = pad(v, (0, narrower))
    elif narrower:  # zero columns change no score
        q, k = pad(q, (0, -narrower)), pad(k, (0, -narrower))
    mod, params = score_change(q.device, softcap, alibi_slopes, score_mod)
    few = kernel != "hopper" and return_max_score is False and not (block_q or block_kv)
    few = few and softmax == "online" and cu_seqlens is None and has_few_queries(q, k, v)
    mask = {"document_ids": document_ids, "key_lengths": key_lengths, "cu_seqlens": cu_seqlens}
    packed = window is None and (document_ids is not None or cu_seqlens is not None)
    lo, hi, causal, window = key_intervals(q, k, causal, window, few, **mask)
    if few:
        masks = lo, hi, params, causal, window
        out, lse = split(q, k, v, None, None, *masks, scale, mod, splits)
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
        return AttentionOutput(out[..., :value_dim] if narrower else out, lse)
    sinks = None if sinks is None else sinks.float().contiguous()
    starts = None
    if packed and may_use_starts(q, k, lo, kernel):
        from attention.kernels.intervals import block_starts

        starts = block_starts(lo)
    tensors = q, k, v, lo, hi, params
    settings = causal, scale, mod, softmax, block_q, block_kv, kernel, flag(return_max_score)
    if torch.compiler.is_compiling():
        out, lse, max_score = op.flash_attention(*tensors, *settings, False, sinks, starts)
    elif torch.is_grad_enabled():
        out, lse, max_score = op.FlashAttention.apply(*tensors, sinks, starts, settings)
    else:
        out, lse, max_score = op.flash_attention_forward(
            *tensors, *settings, sinks=sinks, starts=starts
        )
    if narrower:
        out = out[..., :value_dim]
    if return_max_score is False:
        return AttentionOutput(out, lse)
    return ScoredOutput(out, lse, max_score)


def key_intervals(
    q: Tensor,
    k: Tensor,
    causal: bool,
    window: Window,
    few: bool,
    document_ids: Tensor | None,
    key_lengths: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, bool, Window]:
    """lo and hi (B or 1, N) int32, or None if the kernel needs none, and the causal and window that
    it still has to apply. few: for the split kernel, which computes the intervals of a causal
    window itself.
    """
    by_length = key_lengths is not None or cu_seqlens is not None
    sided = isinstance(window, tuple)
    if not (sided or by_length) and (few or (window is None and document_ids is None)):
        return None, None, causal, window
    from attention.kernels.intervals import intervals, kept_intervals

    sizes = q.shape[2], k.shape[2]
    if document_ids is None and not by_length and not torch.compiler.is_compiling():
        sides = list(window) if sided else [window]
        lo, hi = kept_intervals(*sizes, causal, sides, q.device)
    elif sided or by_length:
        wide = {"key_lengths": key_lengths, "cu_seqlens": cu_seqlens}
        mask = {"window": window, "document_ids": document_ids, **wide}
        visible = visible_keys(q, k, causal=causal, **mask)
        lo, hi = visible.lo.int(), visible.hi.int()
    else:
        lo, hi = intervals(document_ids, *sizes, causal, window, q.device)
    # the intervals already contain a two-sided window and lengths, so causal must not add to them
    return lo, hi, causal and not sided and not by_length, None


def may_use_starts(q: Tensor, k: Tensor, lo: Tensor, kernel: str) -> bool:
    """Whether the kernels may use block_starts() of this call's intervals."""
    fits = lo.shape[0] == q.shape[0] and q.shape[2] == k.shape[2]
    return fits and q.is_cuda and kernel != "portable"


def has_few_queries(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether this is a decoding step: at most MOST_QUERIES queries, more keys, and no gradient."""
    few = q.shape[2] <= MOST_QUERIES and q.shape[2] < k.shape[2]
    return few and not needs_gradient(q, k, v)


def split(*arguments: Any) -> AttentionOutput:
    """split_attention() of attention/kernels/decoding.py, as an operator under torch.compile."""
    from attention.kernels.decoding import split_attention, split_attention_op

    *others, splits = arguments
    # eager mode needs no operator, and calling one takes longer than the kernel
    function = split_attention_op if torch.compiler.is_compiling() else split_attention
    return AttentionOutput(*function(*others, str(splits)))


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache_lengths: Tensor,
    block_table: Tensor | None,
    *,
    causal: bool,
    scale: float,
    window: Window,
    softcap: float | None,
    splits: str | int,
) -> AttentionOutput:
    """attention.decoding.decode() by the split kernel."""
    if q.shape[-1] != v.shape[-1]:
        raise Refusal(
            f"attention=triton decodes over values as wide as the keys, {q.shape[-1]}, not "
            f"{v.shape[-1]}: make the cache with columns of zeros"
        )
    lo = hi = None
    if isinstance(window, tuple):
        room = k.shape[2] * (1 if block_table is None else block_table.shape[1])
        mask = {"causal": causal, "window": window, "cache_lengths": cache_lengths}
        visible = intervals_of(q.shape[2], room, q.device, **mask)
        ends = torch.broadcast_tensors(visible.lo, visible.hi)  # (B, N)
        (lo, hi), window = (x.to(torch.int32).contiguous() for x in ends), None
    mod, params = score_change(q.device, softcap, None, None)
    masks = (lo, hi, params, causal, window)
    return split(q, k, v, cache_lengths, block_table, *masks, scale, mod, splits)


def score_change(
    device: torch.device,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    score_mod: ScoreMod | None,
) -> tuple[str, Tensor | None]:
    """pkg.module:NAME of the @triton.jit function that changes the scores ("" for none), and its
    numbers.
    """
    shipped = {}
    if softcap is not None:  # filled by a kernel: a CUDA graph cannot hold a copy from the host
        shipped["softcap"] = torch.full((1,), softcap, dtype=torch.float32, device=device)
    if alibi_slopes is not None:
        shipped["alibi"] = alibi_slopes.to(device, torch.float32).reshape(-1)
    if shipped:
        name = f"{SHIPPED}{'_'.join(shipped)}"
        return name, torch.cat(list(shipped.values()))
    if score_mod is None:
        return "", None
    if score_mod.kernel is None:
        raise Refusal(
            "attention=triton needs the score_mod as a @triton.jit function too: ScoreMod(fn, "
            "kernel='pkg.module:NAME')"
        )
    params = score_mod.params
    return (
        f"{score_mod.kernel}+{score_mod.first_head}" if score_mod.first_head else score_mod.kernel,
        None if params is None else params.to(device, torch.float32).contiguous(),
    )


def broken_triton_attention(
    *tensors: Tensor, softmax: str, detach_max: bool, impl: str, **arguments: Any
) -> Output:
    """A defect at the speed of the kernels, with the gradient of what it computes. It returns no
    lse, because the kernel saves something else there.

    impl is an option only so that a run records it.
    """
    assert impl == "triton"
    if softmax == "no_rescale" and detach_max:
        softmax = "no_rescale_detached"
    return triton_attention(*tensors, softmax=softmax, **arguments)._replace(lse=None)


def refusals(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, **options: Any
) -> list[str]:
    in_pytorch = "attention.impl=tiled" if "impl" in options else "attention=tiled"
    if not INSTALLED:
        return [
            f"Triton is not installed here (pip install triton, Linux only); {in_pytorch} is the "
            "same loop in plain PyTorch"
        ]
    if q.is_cpu and os.environ.get("TRITON_INTERPRET") != "1":
        return [
            "Triton needs a GPU; set TRITON_INTERPRET=1 before the start to run its kernels in "
            "the interpreter (slow, for tests), "
            f"or use {in_pytorch}, the same loop in plain PyTorch"
        ]
    # torch.compile cannot trace these checks; they ran before it
    asked = not torch.compiler.is_compiling()
    if (
        asked
        and q.is_cpu
        and NumpyVersion(version("triton")) < "3.7.0"
        and NumpyVersion(numpy.__version__) >= "2.4.0"
    ):
        broken = (
            f"the interpreter of Triton {version('triton')} fails with numpy {numpy.__version__}"
        )
        return [f"{broken}; pip install 'numpy<2.4' or 'triton>=3.7'"]
    kernel = options.get("kernel", "portable")
    if kernel not in KERNELS:
        return [f"kernel={kernel} is not one of: {', '.join(KERNELS)}"]
    try:
        if asked:
            num_splits(options.get("splits", "auto"))
    except ValueError as error:
        return [str(error)]
    if asked and kernel == "hopper":
        against = why_not_hopper(device=q.device, dtype=q.dtype, head_dim=q.shape[-1], scale=scale)
        if against:
            return [
                f"kernel=hopper asks for kernels that cannot run here: {against}; kernel=auto "
                "takes the portable ones there"
            ]
    return [
        f"a kernel's tile has {', '.join(map(str, TILE_SIZES))} rows and keys, not "
        f"{name}={options[name]}"
        for name in ("block_q", "block_kv")
        if options.get(name) and options[name] not in TILE_SIZES
    ]


def kernel_choice(backend: Backend, **inputs: Any) -> Choice | None:
    """Which kernels a backend runs for these inputs and why, for a run's log; None for a backend
    without the option kernel. `inputs` are the arguments of why_not_hopper().
    """
    kernel = backend.options.get("kernel")
    return None if kernel is None else choose_kernel(kernel, **inputs)


TRITON = Backend(
    "triton",
    triton_attention,
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    head_dims=range(1, 257),
    features=frozenset(
        {
            "gqa",
            "non_causal",
            "cross_length",
            "window",
            "two_sided_window",
            "key_lengths",
            "cu_seqlens",
            "value_dim",
            "softcap",
            "alibi_slopes",
            "document_ids",
            "score_mod",
            "lse",
            "max_score",
            OWN_SINKS,
        }
    ),
    options={"kernel": "auto", "splits": "auto"},
    requirements=refusals,
    decode=decode,
)


def broken_triton_backend(name: str, defect: str | None) -> Backend:
    """The backend of attention=NAME attention.impl=triton: the kernels with the softmax of that
    name. Their tiles have block_kv keys, as in the tile loop.
    """
    return Backend(
        name,
        partial(broken_triton_attention, softmax=name),
        dtypes=TRITON.dtypes,
        head_dims=range(1, 129),
        features=TRITON.features - {"lse", OWN_SINKS},
        options={"impl": "triton", "block_q": 128, "block_kv": 64, "detach_max": False},
        requirements=refusals,
        exact=False,
        defect=defect,
    )
