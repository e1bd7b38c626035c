"""Compile the Hopper kernels without running them: spills, shared memory, and whether the machine
code overlaps exponentials with products.

    python -m tests.attention.kernels.hopper_offline forward bf16 64 causal,full

It prints a line of JSON for each variant and needs no GPU. TRITON_INTERPRET=1 must not be set: the
interpreter compiles nothing.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from attention.kernels.hopper import backward, forward, launch
from attention.kernels.select import SHIPPED
from tests.attention.kernels.portable_offline import assemble

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


# arguments that some variants do without
OF_INTERVALS = ("lo_ptr", "hi_ptr", "ranges_ptr")
OF_SCORE_MOD = {
    "forward": ("params_ptr", "scale"),
    "backward": ("params_ptr", "past", "num_heads"),
}
OF_STARTS = {
    "forward": ("starts_ptr", "out_ptr", "stride_ob", "stride_oh", "stride_on"),
    "backward": ("starts_ptr", "dk_ptr", "dv_ptr")
    + tuple(f"stride_{name}{dimension}" for name in ("dk", "dv") for dimension in "bhn"),
}


def constants_of(kernel: str, head_dim: int, variant: Variant) -> dict[str, Any]:
    """The kernel's arguments that are constants in this variant; None is an absent tensor."""
    q_shape = torch.Size((1, 4, variant.num_queries, head_dim))
    k_shape = torch.Size((1, 4 // variant.groups, variant.num_keys, head_dim))
    mod = variant.score_mod and f"{SHIPPED}{variant.score_mod}"
    masks = variant.causal, variant.intervals
    if kernel == "forward":
        constants = launch.forward_constants(q_shape, variant.num_keys, *masks, mod)
        constants["TOP"] = variant.top
    else:
        constants = launch.backward_constants(q_shape, k_shape, *masks, variant.shares, mod)
    absent = [] if variant.intervals else [*OF_INTERVALS]
    absent += [] if mod else OF_SCORE_MOD[kernel]
    absent += [] if variant.starts else OF_STARTS[kernel]
    absent += [] if variant.sinks else ["sinks_ptr"]
    absent += [] if variant.top else ["top_ptr"]
    absent += [] if variant.shares > 1 else ["shares_ptr"]
    return constants | dict.fromkeys(absent)


def tensordesc(block: tuple[int, ...], dtype: torch.dtype) -> str:
    name = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    return f"tensordesc<{name}{list(block)},{launch.shared_layout(block, dtype)!r}>"


def type_of(name: str, dtype: str, constants: dict[str, Any]) -> str:
    """The type of a kernel's argument, as Triton writes it."""
    head_dim, block_q = constants["D"], constants["BLOCK_Q"]
    block_kv = constants.get("BLOCK_KV", launch.BLOCK_KV // 2)
    if name in constants:
        return "constexpr"
    if name == "dq_desc":
        return tensordesc(launch.sum_block(head_dim, block_q), torch.float32)
    if name.endswith("_desc"):
        columns, element = head_dim, DTYPES[dtype]
        if name in ("dk_desc", "dv_desc"):
            columns = min(head_dim, launch.gradient_columns(element, head_dim, block_q))
        rows = block_q if name in ("q_desc", "do_desc", "out_desc") else block_kv
        return tensordesc((1, 1, rows, columns), element)
    if name in ("out_ptr", "dk_ptr", "dv_ptr"):
        return f"*{dtype}"
    if name in (*OF_INTERVALS, "starts_ptr", "counter_ptr"):
        return "*i32"
    if name.endswith("_ptr"):
        return "*fp32"
    return "fp32" if name.startswith("scale") else "i32"


def compile_variant(kernel: str, dtype: str, head_dim: int, variant: str) -> dict[str, Any]:
    """Compile one variant. kernel: forward or backward; dtype: bf16 or fp16. Raises Triton's error
    if it cannot be compiled.
    """
    function = {"forward": forward.forward_kernel, "backward": backward.backward_kernel}[kernel]
    constants = constants_of(kernel, head_dim, VARIANTS[variant])
    names = function.arg_names
    types = {name: type_of(name, dtype, constants) for name in names}
    values = {(i,): constants[name] for i, name in enumerate(names) if name in constants}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name not in constants and name.endswith("_ptr")
    }
    source = GluonASTSource(function, types, constexprs=values, attrs=aligned)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    made = assemble(binary.asm["ptx"], 90)
    code = disassemble(made.cubin)
    return {
        "variant": variant,
        "spilled": made.spilled,  # bytes per thread
        "shared": binary.metadata.shared,  # bytes per program
        "warnings": made.warnings,  # ptxas' warning numbers for products that it serialises
        "products": len(re.findall(r"\bHGMMA\b", code)),
        # for each loop over tiles: how many exponentials lie between the wait that leaves a product
        # running and the next wait
        "overlapped": exponentials_under_way(code),
    }


def disassemble(cubin: bytes) -> str:
    nvdisasm = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [nvdisasm, "-c", file.name], capture_output=True, text=True, check=True
        ).stdout


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
