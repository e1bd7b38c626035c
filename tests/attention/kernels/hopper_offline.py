"""Compile the Hopper kernels without running them: spills, shared memory, and whether the machine
code overlaps exponentials with products.

    python -m tests.attention.kernels.hopper_offline forward bf16 64 causal,full

It prints a line of JSON for each variant and needs no GPU. TRITON_INTERPRET=1 must not be set: the
interpreter compiles nothing.
"""

import json
import re
import sys
from typing import Any, NamedTuple

import torch

from attention.kernels.hopper import launch
from attention.kernels.launch import Settings
from attention.kernels.select import SHIPPED
from tests.attention.kernels.offline import launches_compile, machine_code, on_meta

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Variant(NamedTuple):
    """A call for which the launcher sets the constants of this variant."""

    causal: bool = True
    num_queries: int = 4096
    num_keys: int = 4096
    groups: int = 1
    shares: int = 1  # backward: shares of a key/value head's query heads
    intervals: bool = False
    starts: bool = False  # blocks start where documents do
    top: bool = False  # forward: with each row's largest score
    score_mod: str = ""  # of attention/kernels/score_mods.py
    sinks: bool = False


VARIANTS = {
    "causal": Variant(),
    "short": Variant(num_queries=1024, num_keys=1024),
    "full": Variant(causal=False),
    "ragged": Variant(causal=False, num_keys=4000),  # the last tile of keys is incomplete
    "shifted": Variant(num_keys=4000),  # the diagonal crosses two tiles
    "short_shifted": Variant(num_queries=1024, num_keys=1000),
    "grouped": Variant(groups=4),
    "grouped_full": Variant(causal=False, groups=4),
    "shared": Variant(groups=4, shares=4),
    "grouped_shared": Variant(groups=4, shares=2),
    "grouped_short": Variant(num_queries=512, num_keys=512, groups=4),
    "intervals": Variant(intervals=True),
    "grouped_intervals": Variant(groups=4, intervals=True),
    "documents": Variant(intervals=True, starts=True),
    "full_documents": Variant(causal=False, intervals=True, starts=True),
    "grouped_documents": Variant(groups=4, intervals=True, starts=True),
    "top": Variant(top=True),
    "top_short": Variant(num_queries=1024, num_keys=1024, top=True),
    "top_intervals": Variant(intervals=True, top=True),
    "sinks": Variant(sinks=True),
    "softcap": Variant(score_mod="softcap"),
    "alibi": Variant(score_mod="alibi"),
    "both": Variant(score_mod="softcap_alibi"),
    "grouped_both": Variant(groups=4, score_mod="softcap_alibi"),
    "both_intervals": Variant(intervals=True, score_mod="softcap_alibi"),
}


def compile_variant(kernel: str, dtype: str, head_dim: int, name: str) -> dict[str, Any]:
    """Compile one variant. kernel: forward or backward; dtype: bf16 or fp16."""
    variant = VARIANTS[name]
    q = on_meta(1, 4, variant.num_queries, head_dim, dtype=DTYPES[dtype])
    k = q.new_empty(1, 4 // variant.groups, variant.num_keys, head_dim)
    lse, numbers = on_meta(*q.shape[:3]), on_meta(4)
    lo = on_meta(1, variant.num_queries, dtype=torch.int32) if variant.intervals else None
    params = numbers if variant.score_mod else None
    mod = variant.score_mod and f"{SHIPPED}{variant.score_mod}"
    settings = Settings(variant.causal, head_dim**-0.5, mod, documents=variant.starts)
    launch.counters = lambda device: on_meta(2, dtype=torch.int32)
    launch.shares_of = lambda *_, **__: variant.shares
    with launches_compile(f"{kernel}_kernel") as found:
        if kernel == "forward":
            top, sinks = lse if variant.top else None, numbers if variant.sinks else None
            launch.forward(q, k, k, q, lse, top, lo, lo, params, sinks, settings)
        else:
            launch.backward(q, None, q, k, k, q, lse, q, k, k, lo, lo, params, settings)
    compiled = found[0]._asdict()
    code = machine_code(compiled.pop("cubin"))
    return compiled | {
        "variant": name,
        "products": len(re.findall(r"\bHGMMA\b", code)),
        # for each loop over tiles: how many exponentials lie between the wait that leaves a product
        # running and the next wait
        "overlapped": exponentials_under_way(code),
    }


def exponentials_under_way(code: str) -> list[int]:
    """Count the exponentials that overlap with a product. ptxas may move a wait for all products up
    to the wait for all but one; then the code between them overlaps with nothing.
    """
    events = re.findall(r"WARPGROUP\.DEPBAR\S* gsb0, 0x([01])|(MUFU\.EX2)", code)
    found, count = [], None
    for outstanding, exponential in events:
        if exponential:
            count = None if count is None else count + 1
        elif outstanding == "1":
            count = 0
        elif count is not None:
            found.append(count)
            count = None
    return found


def main() -> None:
    kernel, dtype, head_dim, variants = sys.argv[1:]
    for name in variants.split(","):
        print(json.dumps(compile_variant(kernel, dtype, int(head_dim), name)))


if __name__ == "__main__":
    main()
