"""Score modifiers in the Hopper kernels: whether Gluon compiles a function written for Triton."""

from functools import cache

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompilationError
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from attention.kernels.score_mods import find_score_mod


@gluon.jit
def change_kernel(scores_ptr, params_ptr, batch, head, SCORE_MOD: gl.constexpr):
    """Change a tile of 64 scores by 64."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    i = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), 1)
    j = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, LAYOUT)), 0)
    places = scores_ptr + i * 64 + j
    scores, derivative = SCORE_MOD(gl.load(places), batch, head, i, j, params_ptr)
    gl.store(places, scores * derivative)


@cache
def why_not_in_gluon(name: str) -> str:
    """Why Gluon does not compile the score modifier pkg.module:NAME; "" if it does. In Gluon a new
    tensor needs a layout, so tl.full and tl.zeros are errors.
    """
    types = {"scores_ptr": "*fp32", "params_ptr": "*fp32", "batch": "i32", "head": "i32"}
    source = GluonASTSource(
        change_kernel, types | {"SCORE_MOD": "constexpr"}, constexprs={(4,): find_score_mod(name)}
    )
    try:
        triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    except CompilationError as error:
        return str(error.__cause__ or error).strip().splitlines()[-1]
    return ""
