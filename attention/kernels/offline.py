"""Compile a kernel without running it, with Triton's own compiler and ptxas: registers, spills,
shared memory. No GPU is needed.

    python -m attention.kernels.offline forward bf16 64 causal,intervals 128 64 4 3

It prints a line of JSON for each variant. TRITON_INTERPRET=1 must not be set: the interpreter
compiles nothing.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from attention.decoding import FIXED_SPLITS
from attention.kernels import backward, decoding, forward, portable
from attention.kernels.launch import Tile, padded_head_dim

KERNELS = {
    "forward": forward.forward_kernel,
    "dkdv": backward.dkdv_kernel,
    "dkdv_general": backward.dkdv_kernel,
    "dq": backward.dq_kernel,
    "decoding": decoding.split_kernel,
}


class Compiled(NamedTuple):
    variant: str
    registers: int  # per thread
    spilled: int  # bytes per thread
    shared: int  # bytes per program
    warnings: list[str]  # ptxas' warning numbers for products that it serialises


def signature(
    kernel: str, dtype: str, head_dim: int, variant: str, block_q: int, block_kv: int
) -> tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], Any]]:
    """Types, constants and alignments of the kernel's arguments, as a launch gives them."""
    function, block_d = KERNELS[kernel], padded_head_dim(head_dim)
    softmax = portable.SOFTMAXES[variant if variant in portable.SOFTMAXES else "online"]
    constants = {
        "CAUSAL": variant != "full",
        "INTERVALS": variant == "intervals",
        "SCORE_MOD": portable.find_score_mod(
            "attention.kernels.score_mods:softcap_alibi" if variant == "score_mod" else ""
        ),
        "GROUPS": 4 if variant == "grouped" else 1,
        **{name.upper(): step for name, step in softmax._asdict().items()},
        **{
            "D": head_dim,
            "BLOCK_Q": block_q,
            "BLOCK_KV": block_kv,
            "BLOCK_D": block_d,
            "PRECISION": "ieee",
        },
        **({} if variant == "intervals" else dict.fromkeys(("lo_ptr", "hi_ptr", "ranges_ptr"))),
        **({} if variant == "score_mod" else {"params_ptr": None}),
        **({} if variant == "top" else {"top_ptr": None}),
        **({} if variant == "pages" else {"table_ptr": None}),
        **{"SPLITS": FIXED_SPLITS, "PAGE_SIZE": 64 if variant == "pages" else 0},
    }
    types, values, aligned = {}, {}, {}
    for i, name in enumerate(function.arg_names):
        if name in constants:
            types[name], values[i,] = "constexpr", constants[name]
        elif name.endswith("_desc"):
            types[name] = (
                f"tensordesc<{dtype}[1, 1, "
                f"{block_q if name in ('q_desc', 'do_desc') else block_kv}, {block_d}]>"
            )
        elif name.endswith("_ptr"):
            statistics = ("lse_ptr", "top_ptr", "delta_ptr", "params_ptr")
            wide = name in statistics or (kernel == "decoding" and name == "out_ptr")
            types[name] = "*fp32" if wide else f"*{dtype}"
            if name in ("lo_ptr", "hi_ptr", "ranges_ptr", "lengths_ptr", "table_ptr"):
                types[name] = "*i32"
        else:
            types[name] = "fp32" if name.startswith("scale") else "i32"
        if name not in constants and (name.endswith("_ptr") or name.startswith("stride")):
            aligned[i,] = [["tt.divisibility", 16]]
    return types, values, aligned


class Assembled(NamedTuple):
    """The output of ptxas for a kernel, and its report."""

    cubin: bytes
    registers: int  # per thread
    spilled: int  # bytes per thread
    stack: int  # bytes per thread
    warnings: list[str]  # warning numbers for products that ptxas serialises


def assemble(ptx: str, capability: int) -> Assembled:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        architecture = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
        command = [
            get_ptxas(capability).path,
            "-v",
            f"--gpu-name={architecture}",
            file,
            "-o",
            file.with_suffix(".cubin"),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        said = done.stderr
        if done.returncode:
            raise RuntimeError(f"ptxas refuses it ({done.returncode}): {said or done.stdout}")
        cubin = file.with_suffix(".cubin").read_bytes()
    figures = (
        int(re.search(pattern, said)[1])
        for pattern in (
            r"Used (\d+) registers",
            r"(\d+) bytes spill stores",
            r"(\d+) bytes stack frame",
        )
    )
    return Assembled(cubin, *figures, sorted(set(re.findall(r"C75\d\d", said))))


def compile_tile(
    kernel: str, dtype: str, head_dim: int, variant: str, tile: Tile, *, capability: int = 90
) -> Compiled:
    """Compile one variant. dtype as Triton writes it: bf16, fp16 or fp32. Raises Triton's error if
    the tile cannot be compiled.
    """
    types, values, aligned = signature(
        kernel, dtype, head_dim, variant, tile.block_q, tile.block_kv
    )
    source = ASTSource(KERNELS[kernel], types, constexprs=values, attrs=aligned)
    stages = decoding.stages_of(tile, paged=variant == "pages")
    options = {"num_warps": tile.num_warps, "num_stages": stages}
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    made = assemble(binary.asm["ptx"], capability)
    return Compiled(variant, made.registers, made.spilled, binary.metadata.shared, made.warnings)


def main() -> None:
    kernel, dtype, head_dim, variants, *tile = sys.argv[1:]
    for variant in variants.split(","):
        print(
            json.dumps(
                compile_tile(kernel, dtype, int(head_dim), variant, Tile(*map(int, tile)))._asdict()
            )
        )


if __name__ == "__main__":
    main()
