"""Compile the portable kernels in bfloat16 with the tiles that an H200 gets, without running them.

TRITON_INTERPRET=1 must not be set: the interpreter compiles nothing.
"""

from typing import Any

import torch

from attention.kernels.decoding import split_attention
from attention.kernels.launch import SOFTMAXES, Settings, backward, empty_state, forward
from attention.kernels.select import SHIPPED
from tests.attention.kernels.offline import launches_compile, on_meta

NAMES = {"dkdv_general": "dkdv_kernel", "decoding": "split_kernel"}


def compile_tile(kernel: str, head_dim: int, variant: str) -> dict[str, Any]:
    """Compile one variant; for the names see VARIANTS of attention/kernels/tiles.py."""
    groups = 4 if variant == "grouped" else 1
    q = on_meta(2, 4, 256, head_dim, dtype=torch.bfloat16)
    k = q.new_empty(2, 4 // groups, 256, head_dim)
    lo = on_meta(2, 256, dtype=torch.int32) if variant == "intervals" else None
    params, mod = None, ""
    if variant == "score_mod":
        params, mod = on_meta(5), f"{SHIPPED}softcap_alibi"
    softmax = variant if variant in SOFTMAXES else "online"
    settings = Settings(variant != "full", head_dim**-0.5, mod, softmax)
    with launches_compile(NAMES.get(kernel, f"{kernel}_kernel")) as found:
        if kernel == "forward":
            forward(q, k, k, lo, lo, params, None, False, settings)
        elif kernel == "decoding":
            lengths, table = on_meta(2, dtype=torch.int32), None
            if variant == "pages":
                k, table = k.new_empty(9, 4, 64, head_dim), on_meta(2, 4, dtype=torch.int32)
            window = 100 if variant == "intervals" else 256
            inputs = lengths, table, params, window, 0, settings.scale, mod, "fixed"
            split_attention(q, k, k, *inputs)
        else:
            lse = on_meta(2, 4, 256)
            saved = q, lse, empty_state(lse, q.dtype)
            backward(q, None, q, k, k, *saved, lo, lo, params, None, False, settings)
    found = found[0]._asdict()
    return {name: found[name] for name in ("shared", "spilled", "warnings")}
