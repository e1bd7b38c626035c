"""The Triton flash-attention backend. Its kernels are imported at their first use, so that `import
attention` works without Triton.
"""

import importlib.util
import os
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention.interface import (
    FEATURES,
    AttentionOutput,
    Backend,
    Output,
    Refusal,
    ScoredOutput,
    ScoreMod,
    flag,
    needs_gradient,
)
from attention.kernels.select import SHIPPED, Choice, choose_kernel
from attention.mask import Window, is_fake, sides, visible_keys

# looked up once: torch.compile cannot trace the look-up
INSTALLED = importlib.util.find_spec("triton") is not None
TILE_SIZES = (16, 32, 64, 128)
UNLIMITED = 1 << 30  # keys of a window that hides none; twice as many fit into 32 bits


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
    return_max_score: bool | Tensor = False,
    sinks: Tensor | None = None,
) -> Output:
    """q (B, H, N, D); k (B, H_kv, M, D), v (B, H_kv, M, D_v), any strides; sinks (H,). block_q,
    block_kv: a tile size, or 0 for the one tuned for the device.

    The kernels take one head dim. Where D_v differs from D, the narrower tensors are padded to the
    width of the wider.

    softmax: "online", or a defect at the speed of the kernels, with the gradient of what it
    computes and without lse.

    kernel: "portable", "hopper", or "auto" for whichever the device and the inputs allow; see
    attention/kernels/select.py.
    """
    from attention.kernels import op
    from attention.kernels.launch import Settings, forward

    value_dim = v.shape[-1]
    if (narrower := q.shape[-1] - value_dim) > 0:
        v = pad(v, (0, narrower))
    elif narrower:  # zero columns change no score
        q, k = pad(q, (0, -narrower)), pad(k, (0, -narrower))
    mod, params = score_change(q.device, softcap, alibi_slopes, score_mod)
    lo = hi = None
    mask = {
        "window": window,
        "document_ids": document_ids,
        "key_lengths": key_lengths,
        "cu_seqlens": cu_seqlens,
    }
    if any(x is not None for x in mask.values()):
        lo, hi = key_intervals(q, k, causal=causal, **mask)
        causal = causal and key_lengths is None and cu_seqlens is None  # lo and hi contain it
    packed = document_ids is not None or cu_seqlens is not None
    settings = Settings(
        causal, scale, mod, softmax, block_q, block_kv, kernel, packed and window is None
    )
    sinks = None if sinks is None else sinks.float().contiguous()
    tensors = q, k, v, lo, hi, params, sinks
    if torch.compiler.is_compiling():
        out, lse, _, max_score = op.flash_attention(*tensors, flag(return_max_score), *settings)
    else:
        inputs = *tensors, bool(return_max_score)
        if needs_gradient(*tensors):
            out, lse, _, top = op.FlashAttention.apply(*inputs, *settings)
        else:
            out, lse, _, top = forward(*inputs, settings)
        max_score = None if top is None else top.amax(-1)
    if narrower:
        out = out[..., :value_dim]
    if softmax != "online":  # the kernels of a defect save something else there
        lse = None
    if return_max_score is False:
        return AttentionOutput(out, lse)
    return ScoredOutput(out, lse, max_score)


def key_intervals(q: Tensor, k: Tensor, *, causal: bool, **mask: Any) -> tuple[Tensor, Tensor]:
    """lo and hi (B or 1, N) int32, contiguous. Eager calls on a GPU take a kernel for the masks of
    training: PyTorch's launches take longer than a short window's attention.
    """
    given = {name: x for name, x in mask.items() if x is not None}
    fused = causal and q.is_cuda and not torch.compiler.is_compiling()
    if fused and given.keys() <= {"window", "document_ids"}:
        from attention.kernels.intervals import causal_intervals

        return causal_intervals(q, k, **given)
    visible = visible_keys(q, k, causal=causal, **given)
    lo, hi = torch.broadcast_tensors(visible.lo, visible.hi)
    return lo.contiguous(), hi.contiguous()


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
    from attention.kernels.decoding import split_attention, split_attention_op

    if q.shape[-1] != v.shape[-1]:
        raise Refusal(
            f"attention=triton decodes over values as wide as the keys, {q.shape[-1]}, not "
            f"{v.shape[-1]}: make the cache with columns of zeros"
        )
    left, right = (
        UNLIMITED if side is None else min(side, UNLIMITED) for side in sides(window, causal=causal)
    )
    mod, params = score_change(q.device, softcap, None, None)
    # eager mode needs no operator, and calling one takes longer than the kernel
    run = split_attention_op if torch.compiler.is_compiling() else split_attention
    masks = cache_lengths, block_table, params, left, right
    return AttentionOutput(*run(q, k, v, *masks, scale, mod, str(splits)))


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


def refusals(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, **options: Any
) -> list[str]:
    if not INSTALLED:
        return [
            "Triton is not installed here (pip install triton, Linux only); attention=tiled is the "
            "same loop in plain PyTorch"
        ]
    if q.is_cpu and os.environ.get("TRITON_INTERPRET") != "1" and not is_fake(q):
        return [
            "Triton needs a GPU; set TRITON_INTERPRET=1 before the start to run its kernels in "
            "the interpreter (slow, for tests), or use attention=tiled, the same loop in plain "
            "PyTorch"
        ]
    for name in ("block_q", "block_kv"):
        if options.get(name) and options[name] not in TILE_SIZES:
            sizes = ", ".join(map(str, TILE_SIZES))
            return [f"a kernel's tile has {sizes} rows and keys, not {name}={options[name]}"]
    if "kernel" in options and not torch.compiler.is_compiling():
        # torch.compile cannot trace these checks; they ran before it
        try:
            if options["kernel"] != "auto":  # which is always possible
                inputs = {"device": q.device, "dtype": q.dtype, "head_dim": q.shape[-1]}
                choose_kernel(options["kernel"], scale=scale, **inputs)
        except ValueError as error:
            return [str(error)]
    return []


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
    features=FEATURES,
    options={"kernel": "auto"},
    requirements=refusals,
    decode=decode,
)


def broken_triton_backend(name: str, **declared: Any) -> Backend:
    """What attention=NAME runs on a GPU: the kernels with the softmax of that name. Their tiles
    have block_kv keys, as in the tile loop.
    """
    return Backend(
        name,
        partial(triton_attention, softmax=name),
        dtypes=TRITON.dtypes,
        head_dims=range(1, 129),
        features=TRITON.features - {"lse", "sinks"},
        options={"kernel": "portable", "block_q": 128, "block_kv": 64},
        requirements=refusals,
        exact=False,
        **declared,
    )
