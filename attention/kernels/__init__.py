"""The Triton flash-attention: declared here, imported only when it is first used, so that `import
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

from attention.interface import (
    AttentionOutput,
    Backend,
    Output,
    Refusal,
    ScoredOutput,
    ScoreMod,
    flag,
)
from attention.kernels.select import KERNELS, Choice, choose_kernel, why_not_hopper
from attention.mask import VisibleKeys, Window, visible_keys
from attention.online_softmax import OnlineSoftmax
from attention.ring import Ring

# looked up once: torch.compile cannot trace the look-up
INSTALLED = importlib.util.find_spec("triton") is not None
TILE_SIZES = (16, 32, 64, 128)


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
) -> Output:
    """q (B, H, N, D); k, v (B, H_kv, M, D), any strides. block_q, block_kv: a tile size, or 0 for
    the one tuned for the device.

    kernel: "portable", "hopper", or "auto" for whichever the device and the inputs allow; see
    attention/kernels/select.py.
    """
    from attention.kernels import op

    params, mod = None, ""
    mask = {"document_ids": document_ids, "key_lengths": key_lengths, "cu_seqlens": cu_seqlens}
    lo, hi, causal = key_intervals(q, k, causal, window, **mask)
    if softcap is not None or alibi_slopes is not None:
        changes = {"softcap": softcap, "alibi": alibi_slopes}
        shipped = {name: value for name, value in changes.items() if value is not None}
        mod = f"attention.kernels.score_mods:{'_'.join(shipped)}"
        params = torch.cat(
            [
                torch.as_tensor(value, dtype=torch.float32, device=q.device).reshape(-1)
                for value in shipped.values()
            ]
        )
    elif score_mod is not None:
        if score_mod.kernel is None:
            raise Refusal(
                "attention=triton needs the score_mod as a @triton.jit function too: ScoreMod(fn, "
                "kernel='pkg.module:NAME')"
            )
        mod = score_mod.kernel
        params = (
            None
            if score_mod.params is None
            else score_mod.params.to(q.device, torch.float32).contiguous()
        )
    tensors = q, k, v, lo, hi, params
    settings = causal, scale, mod, softmax, block_q, block_kv, kernel, flag(return_max_score)
    if torch.compiler.is_compiling():
        out, lse, max_score = op.flash_attention(*tensors, *settings)
    elif torch.is_grad_enabled():
        out, lse, max_score = op.FlashAttention.apply(*tensors, settings)
    else:
        out, lse, max_score = op.flash_attention_forward(*tensors, *settings)
    if return_max_score is False:
        return AttentionOutput(out, lse)
    return ScoredOutput(out, lse, max_score)


def key_intervals(
    q: Tensor,
    k: Tensor,
    causal: bool,
    window: Window,
    document_ids: Tensor | None,
    key_lengths: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, bool]:
    """lo and hi (B or 1, N) int32, None where `causal` says it all, and what is left of causal."""
    by_length = key_lengths is not None or cu_seqlens is not None
    if window is None and document_ids is None and not by_length:
        return None, None, causal
    from attention.kernels.intervals import intervals, kept_intervals

    sizes, sided = (q.shape[2], k.shape[2]), isinstance(window, tuple)
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
    # where the intervals say it all, hi need not follow from causal
    return lo, hi, causal and not sided and not by_length


def broken_triton_attention(
    *tensors: Tensor, softmax: str, detach_max: bool, impl: str, **arguments: Any
) -> Output:
    """A defect at the speed of the kernels, with the gradient of what it computes. It returns no
    lse: what the kernel saves is not the log-sum-exp.

    impl is an option so that a run records it.
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
    """Which kernels a backend runs for such inputs and why, for a run's log; None for a backend
    that has no option kernel. `inputs` are those of why_not_hopper().
    """
    kernel = backend.options.get("kernel")
    return None if kernel is None else choose_kernel(kernel, **inputs)


class TritonBlocks:
    """The portable kernels on one block of the keys; see attention.ring.Blockwise."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, visible: VisibleKeys, *, look: bool, **settings: Any
    ) -> tuple[OnlineSoftmax, Tensor | None]:
        from attention.kernels.op import flash_attention

        arguments = self.arguments(q, visible, **settings)
        out, lse, max_score = flash_attention(q, k, v, *arguments, flag(look), wide=True)
        # exp(lse - lse) = 1 is the sum, and out the sum of values: a state like any other
        lse = lse.unsqueeze(-1)
        state = OnlineSoftmax(lse, torch.ones_like(lse), out)
        return state, max_score if look else None

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor,
        d_lse: Tensor,
        visible: VisibleKeys,
        **settings: Any,
    ) -> tuple[Tensor, ...]:
        from attention.kernels.op import flash_attention_backward

        known = (d_out, d_lse, q, k, v, out, lse.contiguous())
        arguments = self.arguments(q, visible, **settings)
        return tuple(flash_attention_backward(*known, *arguments, wide=True))

    def arguments(
        self,
        q: Tensor,
        visible: VisibleKeys,
        *,
        scale: float,
        softcap: float | None = None,
        block_q: int = 0,
        block_kv: int = 0,
    ) -> tuple[Any, ...]:
        """What follows q, k and v in the operators' lists, to the choice of kernels."""
        lo, hi = (x.to(torch.int32).contiguous() for x in (visible.lo, visible.hi))
        mod, params = "", None
        if softcap is not None:
            mod = "attention.kernels.score_mods:softcap"
            params = torch.tensor([softcap], dtype=torch.float32, device=q.device)
        return lo, hi, params, False, scale, mod, "online", block_q, block_kv, "portable"


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
            "softcap",
            "alibi_slopes",
            "document_ids",
            "score_mod",
            "lse",
            "max_score",
        }
    ),
    options={"kernel": "auto"},
    requirements=refusals,
    ring=Ring(TritonBlocks()),
)


def broken_triton_backend(name: str, defect: str | None) -> Backend:
    """attention=NAME attention.impl=triton: the softmax of that name in the kernels, in tiles of
    block_kv keys as in the tile loop.
    """
    return Backend(
        name,
        partial(broken_triton_attention, softmax=name),
        dtypes=TRITON.dtypes,
        head_dims=range(1, 129),
        features=TRITON.features - {"lse"},
        options={"impl": "triton", "block_q": 128, "block_kv": 64, "detach_max": False},
        requirements=refusals,
        exact=False,
        defect=defect,
    )
