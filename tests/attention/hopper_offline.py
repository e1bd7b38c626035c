"""Compile the Hopper kernels without running them: spills, shared memory, and whether the machine
code overlaps exponentials with products.

    python -m tests.attention.hopper_offline forward bf16 64 causal,full

It prints a line of JSON for each variant and needs no GPU. TRITON_INTERPRET=1 must not be set: the
interpreter compiles nothing.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from attention.kernels.hopper import backward, forward, launch
from attention.kernels.select import SHIPPED
from tests.attention.portable_offline import assemble

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


class Compiled(NamedTuple):
    variant: str
    spilled: int  # bytes per thread
    stack: int  # bytes per thread
    shared: int  # bytes per program
    warnings: list[str]  # ptxas' warning numbers for products that it serialises
    products: int  # HGMMA instructions
    overlapped: list[
        int
        # for each loop over tiles: how many exponentials lie between the wait that leaves a product
        # running and the next wait
    ]


def tensordesc(block: tuple[int, ...], dtype: torch.dtype) -> str:
    name = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    return f"tensordesc<{name}{list(block)},{launch.shared_layout(block, dtype)!r}>"


def compile_variant(kernel: str, dtype: str, head_dim: int, name: str) -> Compiled:
    """Compile one variant. kernel: forward or backward; dtype: bf16 or fp16. Raises Triton's error
    if it cannot be compiled.
    """
    variant = VARIANTS[name]
    q_shape = torch.Size((1, 4, variant.num_queries, head_dim))
    k_shape = torch.Size((1, 4 // variant.groups, variant.num_keys, head_dim))
    mod = variant.score_mod and f"{SHIPPED}{variant.score_mod}"
    if kernel == "forward":
        function = forward.forward_kernel
        constants = launch.forward_constants(
            q_shape, variant.num_keys, variant.causal, variant.intervals, mod
        ) | {"TOP": variant.top}
        block_kv = constants["BLOCK_KV"]
    else:
        function = backward.backward_kernel
        constants = launch.backward_constants(
            q_shape, k_shape, variant.causal, variant.intervals, variant.shares, mod
        )
        block_kv = launch.BLOCK_KV // 2
    if not variant.intervals:
        constants |= dict.fromkeys(("lo_ptr", "hi_ptr", "ranges_ptr"))
    if not mod:
        names = (
            ("params_ptr", "scale") if kernel == "forward" else ("params_ptr", "past", "num_heads")
        )
        constants |= dict.fromkeys(names)
    if not variant.sinks:
        constants["sinks_ptr"] = None
    if not variant.starts:
        written = ("out",) if kernel == "forward" else ("dk", "dv")
        constants |= {"starts_ptr": None} | {f"{x}_ptr": None for x in written}
        names = ("o",) if kernel == "forward" else ("dk", "dv")
        constants |= {f"stride_{x}{dimension}": None for x in names for dimension in "bhn"}
    if variant.shares == 1:
        constants["shares_ptr"] = None
    if not variant.top:
        constants["top_ptr"] = None
    rows = {"q": constants["BLOCK_Q"], "do": constants["BLOCK_Q"], "out": constants["BLOCK_Q"]}
    types, values, aligned = {}, {}, {}
    for i, argument in enumerate(function.arg_names):
        if argument in constants:
            types[argument], values[i,] = "constexpr", constants[argument]
        elif argument == "dq_desc":
            types[argument] = tensordesc(
                launch.sum_block(head_dim, constants["BLOCK_Q"]), torch.float32
            )
        elif argument.endswith("_desc"):
            element = DTYPES[dtype]
            gradient = argument in ("dk_desc", "dv_desc")
            columns = (
                launch.gradient_columns(element, head_dim, constants["BLOCK_Q"])
                if gradient
                else head_dim
            )
            block = (
                1, 1, rows.get(argument.removesuffix("_desc"), block_kv), min(columns, head_dim)
            )  # fmt: skip
            types[argument] = tensordesc(block, element)
        elif argument.endswith("_ptr"):
            numbers = ("lo_ptr", "hi_ptr", "ranges_ptr", "starts_ptr", "counter_ptr")
            types[argument] = "*i32" if argument in numbers else "*fp32"
            if argument in ("out_ptr", "dk_ptr", "dv_ptr"):
                types[argument] = f"*{dtype}"
            aligned[i,] = [["tt.divisibility", 16]]
        else:
            types[argument] = "fp32" if argument.startswith("scale") else "i32"
    source = GluonASTSource(function, types, constexprs=values, attrs=aligned)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    made = assemble(binary.asm["ptx"], 90)
    code = disassemble(made.cubin)
    return Compiled(
        variant=name,
        spilled=made.spilled,
        stack=made.stack,
        shared=binary.metadata.shared,
        warnings=made.warnings,
        products=len(re.findall(r"\bHGMMA\b", code)),
        overlapped=exponentials_under_way(code),
    )


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
        print(json.dumps(compile_variant(kernel, dtype, int(head_dim), name)._asdict()))


if __name__ == "__main__":
    main()
