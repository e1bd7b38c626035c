"""Compile the portable kernels with their tiles by Triton's own compiler and ptxas, without running
them: registers, spills, shared memory, and products that ptxas serialises. No GPU is needed.

TRITON_INTERPRET=1 must not be set: the interpreter compiles nothing.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from attention.decoding import FIXED_SPLITS
from attention.kernels import backward, decoding, forward
from attention.kernels.launch import SOFTMAXES
from attention.kernels.score_mods import find_score_mod
from attention.kernels.tiles import Tile, padded_head_dim

FUNCTIONS = {
    "forward": forward.forward_kernel,
    "dkdv": backward.dkdv_kernel,
    "dkdv_general": backward.dkdv_kernel,
    "dq": backward.dq_kernel,
    "decoding": decoding.split_kernel,
}
INTERVALS = {"lo_ptr", "hi_ptr", "ranges_ptr"}
INTEGERS = {*INTERVALS, "lengths_ptr", "table_ptr"}
FLOATS = {"lse_ptr", "sum_ptr", "delta_ptr", "params_ptr"}
# given for other dtypes, on request, and for these variants alone
ABSENT = {"max_ptr", "row_sum_ptr", "top_ptr", "sinks_ptr", *INTERVALS, "params_ptr", "table_ptr"}
GIVEN = {"intervals": INTERVALS, "score_mod": {"params_ptr"}, "pages": {"table_ptr"}}


def compile_tile(kernel: str, head_dim: int, variant: str, tile: Tile) -> dict[str, Any]:
    """Compile one variant in bfloat16 for sm_90. Raises Triton's error if it cannot be compiled."""
    function = FUNCTIONS[kernel]
    constants = constants_of(head_dim, variant, tile)
    names = function.arg_names
    types = {name: type_of(name, kernel, constants) for name in names}
    values = {(i,): constants[name] for i, name in enumerate(names) if name in constants}
    # as a launch finds them: pointers and strides are multiples of 16 bytes
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name not in constants and (name.endswith("_ptr") or name.startswith("stride"))
    }
    source = ASTSource(function, types, constexprs=values, attrs=aligned)
    stages = decoding.stages_of(tile, paged=variant == "pages")
    options = {"num_warps": tile.num_warps, "num_stages": stages}
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    made = assemble(binary.asm["ptx"], 90)
    found = {"spilled": made.spilled, "warnings": made.warnings}
    return found | {"variant": variant, "shared": binary.metadata.shared}


def constants_of(head_dim: int, variant: str, tile: Tile) -> dict[str, Any]:
    """The kernel's arguments that are constants in this variant; None is an absent tensor."""
    softmax = SOFTMAXES.get(variant, SOFTMAXES["online"])
    mod = "attention.kernels.score_mods:softcap_alibi" if variant == "score_mod" else ""
    return {
        **dict.fromkeys(ABSENT - GIVEN.get(variant, set())),
        **{name.upper(): step for name, step in softmax._asdict().items()},
        "CAUSAL": variant != "full",
        "INTERVALS": variant == "intervals",
        "SCORE_MOD": find_score_mod(mod),
        "GROUPS": 4 if variant == "grouped" else 1,
        "D": head_dim,
        "BLOCK_Q": tile.block_q,
        "BLOCK_KV": tile.block_kv,
        "BLOCK_D": padded_head_dim(head_dim),
        "PRECISION": "ieee",
        "SPLITS": FIXED_SPLITS,
        "PAGE_SIZE": 64 if variant == "pages" else 0,
    }


def type_of(name: str, kernel: str, constants: dict[str, Any]) -> str:
    """The type of a kernel's argument, as Triton writes it."""
    if name in constants:
        return "constexpr"
    if name.endswith("_desc"):
        rows = constants["BLOCK_Q" if name in ("q_desc", "do_desc") else "BLOCK_KV"]
        return f"tensordesc<bf16[1, 1, {rows}, {constants['BLOCK_D']}]>"
    if name in INTEGERS:
        return "*i32"
    if name in FLOATS or (kernel == "decoding" and name == "out_ptr"):
        return "*fp32"
    if name.endswith("_ptr"):
        return "*bf16"
    return "fp32" if "scale" in name else "i32"


class Assembled(NamedTuple):
    """The output of ptxas for a kernel, and its report."""

    cubin: bytes
    spilled: int  # bytes per thread
    warnings: list[str]  # warning numbers for products that ptxas serialises


def assemble(ptx: str, capability: int) -> Assembled:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        out = file.with_suffix(".cubin")
        ptxas, target = get_ptxas(capability).path, f"--gpu-name=sm_{capability}a"
        done = subprocess.run(
            [ptxas, "-v", target, file, "-o", out], capture_output=True, text=True
        )
        said = done.stderr
        if done.returncode:
            raise RuntimeError(f"ptxas refuses it ({done.returncode}): {said or done.stdout}")
        cubin = out.read_bytes()
    spilled = int(re.search(r"(\d+) bytes spill stores", said)[1])
    return Assembled(cubin, spilled, sorted(set(re.findall(r"C75\d\d", said))))
