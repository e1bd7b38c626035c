"""Compile kernels for sm_90 without a GPU, as their launchers call them: Triton's own compiler and
ptxas tell of spills, shared memory, and products that ptxas serialises.

    with launches_compile("forward_kernel") as found:
        launch.forward(q, k, v, ...)  # tensors without values, on the device "meta"
    found[0].spilled

TRITON_INTERPRET=1 must not be set: the interpreter compiles nothing.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import JITFunction

DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
}
H200 = SimpleNamespace(
    major=9,
    minor=0,
    multi_processor_count=132,
    L2_cache_size=60 * 2**20,
    shared_memory_per_block_optin=232448,
)


class Compiled(NamedTuple):
    """What Triton and ptxas make of a kernel."""

    name: str
    shared: int  # bytes per program
    spilled: int  # bytes per thread
    warnings: list[str]  # ptxas' warning numbers for products that it serialises
    cubin: bytes


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without values: a launcher reads its shape alone."""
    return torch.empty(*shape, dtype=dtype, device="meta")


@contextmanager
def launches_compile(*names: str) -> Iterator[list[Compiled]]:
    """Launches of these kernels compile them as on an H200, and those of others do nothing. Raises
    Triton's error if a kernel cannot be compiled.
    """
    found = []

    def run(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        if kernel.__name__ in names:
            options = {x: named.pop(x) for x in ("num_warps", "num_stages") if x in named}
            given = dict(zip(kernel.arg_names, arguments, strict=False)) | named
            found.append(compile_call(kernel, given, options))

    def properties(device: torch.device) -> SimpleNamespace:
        return H200

    with (
        patch.object(JITFunction, "run", run),
        patch("torch.cuda.get_device_properties", properties),
    ):
        yield found


def compile_call(kernel: JITFunction, given: dict[str, Any], options: dict[str, int]) -> Compiled:
    names = kernel.arg_names
    fixed = {each.name for each in kernel.params if each.is_constexpr}
    fixed |= {name for name in names if given[name] is None}
    types = {name: "constexpr" if name in fixed else type_of(given[name]) for name in names}
    # as a launch finds them: pointers and strides are multiples of 16 bytes
    aligned = {name for name, type in types.items() if type[0] == "*"}
    aligned |= {name for name in names if name.startswith("stride") and name not in fixed}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        kernel,
        types,
        constexprs={(i,): given[name] for i, name in enumerate(names) if name in fixed},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in aligned},
    )
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return Compiled(kernel.__name__, binary.metadata.shared, *assemble(binary.asm["ptx"]))


def type_of(x: Any) -> str:
    """The type of a kernel's argument, as Triton writes it."""
    if isinstance(x, Tensor):
        return f"*{DTYPES[x.dtype]}"
    if hasattr(x, "block_shape"):  # a descriptor; Gluon's has a layout
        layout = f",{x.layout!r}" if hasattr(x, "layout") else ""
        return f"tensordesc<{DTYPES[x.base.dtype]}{x.block_shape}{layout}>"
    return "fp32" if isinstance(x, float) else "i32"


def assemble(ptx: str) -> tuple[int, list[str], bytes]:
    """spilled, warnings and cubin of Compiled."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ptx")
        file.write_text(ptx)
        out = file.with_suffix(".cubin")
        said = said_by(get_ptxas(90).path, "-v", "--gpu-name=sm_90a", file, "-o", out).stderr
        cubin = out.read_bytes()
    spilled = re.search(r"(\d+) bytes spill stores", said)
    return int(spilled[1]), sorted(set(re.findall(r"C75\d\d", said))), cubin


def machine_code(cubin: bytes) -> str:
    nvdisasm = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return said_by(nvdisasm, "-c", file.name).stdout


def said_by(*command: str | Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{command[0]} refuses it: {done.stderr or done.stdout}"
    return done
