"""The Triton kernels of the model compile for sm_90. The interpreter runs code that Triton's
compiler refuses, and no GPU runs these tests in CI.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

# every kernel, with each constant that adds code or takes it away
COMPILE = """
from itertools import product
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from model.gelu_kernel import gelu_backward_kernel
from model.loss_kernel import cross_entropy_kernel
from model.norm_kernel import add_norm_backward_kernel, add_norm_kernel
from model.step_kernel import features_of_a_program, heads_kernel, product_kernel

def compile(kernel, warps=1, **constants):
    types = {}
    for name in kernel.arg_names:
        pointer = "*bf16"
        if name in ("targets_ptr", "positions_ptr"):
            pointer = "*i64"
        elif name in ("loss_ptr", "statistics_ptr", "partial_ptr", "cos_ptr", "sin_ptr"):
            pointer = "*fp32"
        types[name] = pointer if name.endswith("_ptr") else "fp32" if name == "eps" else "i32"
    types |= dict.fromkeys(constants, "constexpr")
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, types, constexprs=values)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    print(kernel.__name__)

for gradient, z_loss in product((False, True), (0.0, 1e-4)):
    compile(
        cross_entropy_kernel, 8, IGNORED=-100, GRADIENT=gradient, Z_LOSS=z_loss, BLOCK=8192, RUN=8
    )
compile(gelu_backward_kernel, 1, ROWS=4, BLOCK=256, STAGES=2)
for centred, absent in product((False, True), ((), ("bias_ptr",))):
    meta = {"CENTRED": centred, "ROWS": 1, "BLOCK": 1024, **dict.fromkeys(absent)}
    compile(add_norm_kernel, **meta)
    compile(add_norm_backward_kernel, **meta, STAGES=2)
    compile(add_norm_backward_kernel, **meta | dict.fromkeys(("y_ptr", "d_total_ptr")), STAGES=2)
without_norm = ("norm_weight_ptr", "norm_bias_ptr")
for width, activation, absent in (
    (768, "gelu", ("residual_ptr",)),
    (768, "swiglu", ("norm_bias_ptr", "bias_ptr", "residual_ptr")),
    (3072, "", without_norm),
):
    sizes = {
        "BLOCK_F": features_of_a_program(2 * width, 768, 132),
        "BLOCK_K": triton.next_power_of_2(width),
    }
    meta = {"CENTRED": activation == "gelu", "ACTIVATION": activation, "K": width} | sizes
    compile(product_kernel, 4, **meta, **dict.fromkeys(absent))
heads = {"H": 12, "H_KV": 4, "D": 64, "BLOCK_D": 64}
compile(heads_kernel, **heads, QK_NORM=True)
compile(heads_kernel, **heads, QK_NORM=False, **dict.fromkeys(("cos_ptr", "sin_ptr")))
"""


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton's compiler, not a GPU"
)
@pytest.mark.slow
def test_the_kernels_of_the_model_compile_for_sm_90(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        capture_output=True,
        text=True,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 22
