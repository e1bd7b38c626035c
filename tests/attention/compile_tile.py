"""Compile one kernel for sm_90 with Triton's own compiler and ptxas; no GPU is needed.

    python tests/attention/compile_tile.py forward bf16 64 causal,intervals 128 64 4 3

Prints, a line of JSON a variant: registers and spilled bytes of a thread, shared memory in bytes, and the numbers of ptxas' warnings of
serialised products.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from attention.kernels import backward, forward, op
from attention.kernels.launch import padded_head_dim

KERNELS = {
    "forward": forward.forward_kernel,
    "dkdv": backward.dkdv_kernel,
    "dkdv_general": backward.dkdv_kernel,
    "dq": backward.dq_kernel,
}


def signature(kernel: str, dtype: str, head_dim: int, variant: str, block_q: int, block_kv: int) -> tuple[dict, dict, dict]:
    """Types, constants and alignments of the kernel's arguments, as a launch gives them."""
    function, block_d = KERNELS[kernel], padded_head_dim(head_dim)
    softmax = op.SOFTMAXES[variant if variant in op.SOFTMAXES else "online"]
    constants = {
        "CAUSAL": variant != "full",
        "INTERVALS": variant == "intervals",
        "SCORE_MOD": op.SCORE_MODS["softcap_alibi" if variant == "score_mod" else ""],
        "GROUPS": 4 if variant == "grouped" else 1,
        **{name.upper(): step for name, step in softmax._asdict().items()},
        **{"D": head_dim, "BLOCK_Q": block_q, "BLOCK_KV": block_kv, "BLOCK_D": block_d, "PRECISION": "ieee"},
        **({} if variant == "intervals" else dict.fromkeys(("lo_ptr", "hi_ptr", "ranges_ptr"))),
        **({} if variant == "score_mod" else {"params_ptr": None}),
    }
    types, values, aligned = {}, {}, {}
    for i, name in enumerate(function.arg_names):
        if name in constants:
            types[name], values[i,] = "constexpr", constants[name]
        elif name.endswith("_desc"):
            types[name] = f"tensordesc<{dtype}[1, 1, {block_q if name in ('q_desc', 'do_desc') else block_kv}, {block_d}]>"
        elif name.endswith("_ptr"):
            types[name] = {"lse_ptr": "*fp32", "delta_ptr": "*fp32", "params_ptr": "*fp32"}.get(name, f"*{dtype}")
            if name in ("lo_ptr", "hi_ptr", "ranges_ptr"):
                types[name] = "*i32"
        else:
            types[name] = "fp32" if name.startswith("scale") else "i32"
        if name not in constants and (name.endswith("_ptr") or name.startswith("stride")):
            aligned[i,] = [["tt.divisibility", 16]]
    return types, values, aligned


def main() -> None:
    kernel, dtype, head_dim, variants, *tile = sys.argv[1:]
    block_q, block_kv, num_warps, num_stages = map(int, tile)
    for variant in variants.split(","):
        types, values, aligned = signature(kernel, dtype, int(head_dim), variant, block_q, block_kv)
        source = ASTSource(KERNELS[kernel], types, constexprs=values, attrs=aligned)
        binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps, "num_stages": num_stages})
        with tempfile.TemporaryDirectory() as folder:
            ptx = Path(folder) / "kernel.ptx"
            ptx.write_text(binary.asm["ptx"])
            command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", ptx, "-o", ptx.with_suffix(".cubin")]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        found = {
            "variant": variant,
            "registers": int(re.search(r"Used (\d+) registers", said)[1]),
            "spilled": int(re.search(r"(\d+) bytes spill stores", said)[1]),
            "shared": binary.metadata.shared,
            "warnings": sorted(set(re.findall(r"C75\d\d", said))),
        }
        print(json.dumps(found))


if __name__ == "__main__":
    main()
