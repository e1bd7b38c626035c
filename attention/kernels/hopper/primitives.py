"""What the Hopper kernels need beside Gluon's own words: rings of buffers, named barriers, masks, and names that changed between releases.

A Hopper kernel divides its warps: one warp (the producer) asks the copy engine (TMA) for tiles, groups of four warps (the consumers)
multiply them on the tensor cores. They meet at barriers in shared memory, of which every buffer has two: full and empty.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate

# the releases after 3.6 have shorter names
load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_box = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
await_own_warps = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@builtin
def add_box(desc, coordinates, source, _semantic=None):
    """Add a box of shared memory to global memory, as store_box does otherwise; Triton 3.6 has the operation, but no word for it."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coordinates, source.handle)


@aggregate
class Ring:
    """Buffers that are filled and emptied in turn: item i lies in slot i % depth, from when `full` says so until `empty` does.

    A barrier has two phases, so that item i of a slot is told from item i + depth, which is never awaited before it.
    """

    buffers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    depth: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, buffers, full, empty, depth):
        self.buffers = buffers
        self.full = full
        self.empty = empty
        self.depth = gl.constexpr(depth)

    @gluon.jit
    def buffer(self, item):
        return self.buffers.index(item % self.depth)

    @gluon.jit
    def full_barrier(self, item):
        return self.full.index(item % self.depth)

    @gluon.jit
    def await_full(self, item, pred=True):
        mbarrier.wait(self.full.index(item % self.depth), (item // self.depth) & 1, pred=pred)

    @gluon.jit
    def await_empty(self, item):
        # the first round finds every slot empty: the phase before the first counts as over
        mbarrier.wait(self.empty.index(item % self.depth), (item // self.depth) & 1 ^ 1)

    @gluon.jit
    def release(self, item):
        """This consumer is done with the item."""
        # an arrival, in other words: behind mbarrier.arrive Triton has the consumer's warps wait for one another once more
        await_own_warps()
        mbarrier.expect(self.empty.index(item % self.depth), 0)


@gluon.jit
def make_ring(buffers, DEPTH: gl.constexpr, FILLS: gl.constexpr, READERS: gl.constexpr):
    """FILLS: how many arrivals fill a slot; READERS: how many consumers release it."""
    full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(DEPTH):
        mbarrier.init(full.index(slot), FILLS)
        mbarrier.init(empty.index(slot), READERS)
    return Ring(buffers, full, empty, DEPTH)


@gluon.jit
def place(program, num_blocks, num_heads, section):
    """head, block: as in attention/kernels/forward.py, of which this is Gluon's copy: the two languages cannot call one another."""
    first = gl.to_tensor(0)
    size = num_heads - (gl.cdiv(num_heads, section) - 1) * section
    if program >= size * num_blocks:
        program -= size * num_blocks
        first = size + program // (section * num_blocks) * section
        program %= section * num_blocks
        size = section
    return first + program % size, program // size


@gluon.jit
def await_all(barrier):
    """Wait at named barrier `barrier` until 256 threads, two consumers, have come to it or signalled it."""
    gl.inline_asm_elementwise("bar.sync $1, 256; mov.b32 $0, $1;", "=r,r", [barrier], gl.int32, is_pure=False, pack=1)


@gluon.jit
def signal(barrier):
    """Count as having come to named barrier `barrier`, without waiting."""
    gl.inline_asm_elementwise("bar.arrive $1, 256; mov.b32 $0, $1;", "=r,r", [barrier], gl.int32, is_pure=False, pack=1)


@gluon.jit
def computed_here(x):
    """x, of which the compiler knows nothing more: what follows from it cannot be moved out of a loop, where it would take registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.int32, is_pure=False, pack=1)


@gluon.jit
def rounded(x, dtype: gl.constexpr):
    """x in dtype, two numbers a register, here: left to the compiler it is done later, or number by number and then put together."""
    gl.static_assert(dtype == gl.bfloat16 or dtype == gl.float16)
    if dtype == gl.bfloat16:
        x = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.bfloat16, is_pure=False, pack=2)
    else:
        x = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.float16, is_pure=False, pack=2)
    return x


@gluon.jit
def where_less(x, a, b, OTHERWISE: gl.constexpr):
    """x where a < b, else 0 or -inf. Written in PTX because LLVM packs a tile of comparisons into 64-bit masks and unpacks them again."""
    gl.static_assert(OTHERWISE == "0" or OTHERWISE == "-inf")
    if OTHERWISE == "0":
        x = gl.inline_asm_elementwise(
            "{.reg .pred p; setp.lt.s32 p, $2, $3; selp.f32 $0, $1, 0f00000000, p;}", "=r,r,r,r", [x, a, b], gl.float32,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        x = gl.inline_asm_elementwise(
            "{.reg .pred p; setp.lt.s32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p;}", "=r,r,r,r", [x, a, b], gl.float32,
            is_pure=True, pack=1,
        )  # fmt: skip
    return x
