"""Helpers for the Hopper kernels: rings of buffers, named barriers, masks, and names that changed
between Triton's releases.

A Hopper kernel divides its warps: one warp (the producer) requests tiles from the copy engine
(TMA), and groups of four warps (the consumers) multiply them on the tensor cores. They meet at
barriers in shared memory. Every buffer has two: full and empty.
"""

import struct

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate

# releases after 3.6 have shorter names
load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_box = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
reinterpret = (
    getattr(gl.shared_memory_descriptor, "reinterpret", None)
    or gl.shared_memory_descriptor._reinterpret
)
await_own_warps = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


WITH_PRODUCER = gl.constexpr(288)  # threads of two consumers and one warp of the producer
PIECES = gl.constexpr(4)  # numbers of block_starts() about a block


@builtin
def add_box(desc, coordinates, source, _semantic=None):
    """Add a box of shared memory to global memory, where store_box would overwrite. Triton 3.6 has
    the operation, but no function for it.
    """
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coordinates, source.handle
    )


@aggregate
class Ring:
    """Buffers that are filled and emptied in turn: item i is in slot i % depth, from the signal of
    `full` to that of `empty`.

    A barrier has two phases. They distinguish item i from item i + depth in the same slot, which
    nobody awaits before item i.

    named: 0 if consumers release a slot at `empty`. Otherwise the first of `depth` named barriers,
    at which two consumers release the slots to a producer of one warp. A consumer's warps arrive at
    a named barrier independently; before `empty` they wait for one another.
    """

    buffers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    depth: gl.constexpr
    named: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, buffers, full, empty, depth, named):
        self.buffers = buffers
        self.full = full
        self.empty = empty
        self.depth = gl.constexpr(depth)
        self.named = gl.constexpr(named)

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
        # every slot starts empty: the phase before the first counts as completed
        if self.named == 0:
            mbarrier.wait(self.empty.index(item % self.depth), (item // self.depth) & 1 ^ 1)
        elif item >= self.depth:
            await_all(self.named + item % self.depth, WITH_PRODUCER)

    @gluon.jit
    def release(self, item):
        """Release the item: this consumer no longer needs it."""
        if self.named == 0:
            # expect() of 0 bytes is an arrival; for mbarrier.arrive, Triton would make the
            # consumer's warps wait for one another once more
            await_own_warps()
            mbarrier.expect(self.empty.index(item % self.depth), 0)
        else:
            signal(self.named + item % self.depth, WITH_PRODUCER)

    @gluon.jit
    def await_last(self, item):
        """Wait for the release of the last items before `item`, so that no named barrier stays half
        full.
        """
        if self.named > 0:
            for late in range(gl.maximum(item - self.depth, 0), item):
                await_all(self.named + late % self.depth, WITH_PRODUCER)


@gluon.jit
def make_ring(
    buffers,
    DEPTH: gl.constexpr,
    FILLS: gl.constexpr,
    READERS: gl.constexpr,
    NAMED: gl.constexpr = 0,
):
    """FILLS: how many arrivals fill a slot; READERS: how many consumers release it; NAMED: see
    Ring.
    """
    full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    empty = full
    if NAMED == 0:
        empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(DEPTH):
        mbarrier.init(full.index(slot), FILLS)
        if NAMED == 0:
            mbarrier.init(empty.index(slot), READERS)
    return Ring(buffers, full, empty, DEPTH, NAMED)


@gluon.jit
def note_tensor(words, first: gl.constexpr, ptr, stride_b, stride_h, stride_n):
    """Note the address and the strides of a tensor (B, H, N, D) in four words of shared memory, for
    store_rows(): as arguments they would take a consumer's registers.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    words.index(first).store(gl.full([1], ptr.to(gl.int64), gl.int64, LAYOUT))
    words.index(first + 1).store(gl.full([1], stride_b, gl.int64, LAYOUT))
    words.index(first + 2).store(gl.full([1], stride_h, gl.int64, LAYOUT))
    words.index(first + 3).store(gl.full([1], stride_n, gl.int64, LAYOUT))


@gluon.jit
def store_rows(x, words, first: gl.constexpr, batch, head, start, stop, dtype: gl.constexpr):
    """Write the rows of x (rows, D) that belong to start : stop of a head, x[0] to row `start` of
    the tensor that note_tensor() has noted.
    """
    LAYOUT: gl.constexpr = x.type.layout
    rows = start + gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT))
    columns = gl.expand_dims(gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT)), 0)
    ptr = told(words.index(first)).to(gl.pointer_type(dtype))
    ptr += batch * told(words.index(first + 1)) + head * told(words.index(first + 2))
    places = gl.expand_dims(rows * told(words.index(first + 3)), 1) + columns
    gl.store(ptr + places, x.to(dtype), mask=gl.expand_dims(rows < stop, 1) & (columns >= 0))


@gluon.jit
def tell(word, number):
    """Write a number for the consumers into a word of shared memory. Only the producer (one warp)
    calls this.
    """
    word.store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def told(word):
    """Read the number of tell(), in every thread of a consumer."""
    return gl.max(word.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def leave_zeros(counter_ptr, programs):
    """The last program resets the two counters for the next launch."""
    if gl.atomic_add(counter_ptr + 1, 1) == programs - 1:
        gl.store(counter_ptr, 0)
        gl.store(counter_ptr + 1, 0)


@gluon.jit
def place(program, num_blocks, num_heads, section):
    """head, block: as place() in attention/kernels/forward.py, but with a branch."""
    first = gl.to_tensor(0)
    size = num_heads - (gl.cdiv(num_heads, section) - 1) * section
    if program >= size * num_blocks:
        program -= size * num_blocks
        first = size + program // (section * num_blocks) * section
        program %= section * num_blocks
        size = section
    return first + program % size, program // size


@gluon.jit
def piece_of(starts_ptr, block, piece):
    """start, stop, more: the rows of a piece of a block, and whether another one follows.
    starts_ptr: from block_starts(); block: numbered across the batch.
    """
    starts_ptr += block * PIECES
    start = gl.load(starts_ptr + piece)
    stop = gl.load(starts_ptr + piece + 1)
    return start, stop, stop < gl.load(starts_ptr + (PIECES - 1))


@gluon.jit
def await_all(barrier, THREADS: gl.constexpr = 256):
    """Wait at named barrier `barrier` until THREADS threads have reached or signalled it; two
    consumers have 256.
    """
    gl.inline_asm_elementwise(
        f"bar.sync $1, {THREADS}; mov.b32 $0, $1;",
        "=r,r",
        [barrier],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def signal(barrier, THREADS: gl.constexpr = 256):
    """Arrive at named barrier `barrier` without waiting."""
    gl.inline_asm_elementwise(
        f"bar.arrive $1, {THREADS}; mov.b32 $0, $1;",
        "=r,r",
        [barrier],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def await_own_stores():
    """Wait until this thread's stores and additions have read shared memory. Unlike store_wait,
    this does not make a consumer's warps meet.
    """
    zero = gl.to_tensor(0)
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group.read 0; mov.b32 $0, $1;",
        "=r,r",
        [zero],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def computed_here(x):
    """x, with its origin hidden from the compiler. So the compiler cannot move computations on x
    out of a loop, where the results would take registers.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def rounded(x, dtype: gl.constexpr):
    """Round x to dtype at this point, two numbers per register. The compiler would do it later, or
    one number at a time.
    """
    gl.static_assert(dtype == gl.bfloat16 or dtype == gl.float16)
    if dtype == gl.bfloat16:
        x = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.bfloat16, is_pure=False, pack=2
        )
    else:
        x = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.float16, is_pure=False, pack=2
        )
    return x


@gluon.constexpr_function
def rescale_code(count):
    """PTX that scales `count` of a thread's numbers in place ($0 ...) by their factors. The numbers
    come in turn: two of one row, two of another.
    """
    factors = [f"${2 * count + i}" for i in range(count)]
    lines = [
        "{.reg .pred p;",
        f"setp.neu.f32 p, {factors[0]}, 0f3F800000;",
        f"setp.neu.or.f32 p, {factors[2]}, 0f3F800000, p;",
        "vote.sync.any.pred p, p, -1;",
        "@!p bra.uni SAME;",
        *(f"mul.rn.f32 ${i}, ${i}, {factor};" for i, factor in enumerate(factors)),
        "SAME: }",
    ]
    return " ".join(lines)


@gluon.constexpr_function
def rescale_operands(count):
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def rescaled(acc, alpha):
    """acc * alpha, for an accumulator (rows, columns) and a factor per row (rows, 1). A warp whose
    rows all have factor 1 skips the product.
    """
    COUNT: gl.constexpr = acc.shape[1] // 2  # of a thread
    return gl.inline_asm_elementwise(
        rescale_code(COUNT), rescale_operands(COUNT), [acc, alpha], gl.float32, is_pure=False,
        pack=COUNT
    )  # fmt: skip


@gluon.jit
def where_less(x, a, b, OTHERWISE: gl.constexpr):
    """x where a < b, else 0 or -inf. Written in PTX because LLVM packs a tile of comparisons into
    64-bit masks and unpacks them again.
    """
    gl.static_assert(OTHERWISE == "0" or OTHERWISE == "-inf")
    if OTHERWISE == "0":
        x = gl.inline_asm_elementwise(
            "{.reg .pred p; setp.lt.s32 p, $2, $3; selp.f32 $0, $1, 0f00000000, p;}", "=r,r,r,r",
            [x, a, b], gl.float32,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        x = gl.inline_asm_elementwise(
            "{.reg .pred p; setp.lt.s32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p;}", "=r,r,r,r",
            [x, a, b], gl.float32,
            is_pure=True, pack=1,
        )  # fmt: skip
    return x


BY_POLYNOMIAL = (
    4,
    11,
    # indices in sixteen of a thread's numbers, which come in turn as two of one row and two of
    # another; these two lie in different rows
)
COEFFICIENTS = (0.6932829273885215, 0.24221096221649277, 0.05500893142298349)
ROUNDS = (
    1.5 * 2**16 + 385 / 128
)  # w + ROUNDS is rounded to multiples of 1 / 128; its last nine bits are 128 w - 127


def exp2_code() -> str:
    """PTX that computes the powers $0 ... $15 of sixteen of a thread's numbers, $16 ... $31."""

    def number(x: float) -> str:
        return "0f" + struct.pack(">f", x).hex().upper()

    c1, c2, c3 = (number(c * 128**power) for power, c in enumerate(COEFFICIENTS, 1))
    lines = ["{.reg .b32 w, y, f, p;"]
    for i in range(16):
        if i not in BY_POLYNOMIAL:
            lines.append(f"ex2.approx.ftz.f32 ${i}, ${16 + i};")
            continue
        lines += [
            f"fma.rn.ftz.sat.f32 w, ${16 + i}, {number(1 / 128)}, {number(127 / 128)};",
            f"add.rn.ftz.f32 y, w, {number(ROUNDS)};",
            f"sub.rn.ftz.f32 f, y, {number(ROUNDS)};",
            "sub.rn.ftz.f32 f, w, f;",
            f"fma.rn.ftz.f32 p, f, {c3}, {c2};",
            f"fma.rn.ftz.f32 p, p, f, {c1};",
            f"fma.rn.ftz.f32 p, p, f, {number(1)};",
            "shl.b32 y, y, 23;",
            f"add.s32 ${i}, y, p;",
        ]
    return " ".join([*lines, "}"])


EXP2_CODE = gl.constexpr(exp2_code())
EXP2_OPERANDS = gl.constexpr(",".join(["=r"] * 16 + ["r"] * 16))


@gluon.jit
def exp2_by_two_units(x):
    """2^x for x <= 1. The special function unit computes seven eighths of a thread's numbers, a
    polynomial on the FMA units one eighth.

    The special function unit computes 16 numbers a clock and limits the backward. The FMA units do
    128 operations a clock, and a number takes nine. w = (x + 127) / 128 is clamped to 0 to 1 and
    split as n + f, n a multiple of 1/128. Then 2^(128 f) = 1 + f (c1 + f (c2 + f c3)), the
    polynomial of degree 3 with the least maximal relative error: 1.0e-4, where rounding adds up to
    2.0e-3 in bfloat16 and 4.9e-4 in float16. 128 n - 127 is added to the exponent.

    x below -127, including -inf, counts as -127: f is 0, the polynomial 1, and the result exactly
    0. So does NaN. A query whose scores are NaN, if it is one of 8 to 14 or 17 to 23 of 32, adds
    nothing to dv of half of the keys. It adds NaN to dv of the others, to all of dk through delta,
    and to its dq. A maximum that keeps NaN instead of the saturation made the backward 2% slower at
    head_dim 64.
    """
    return gl.inline_asm_elementwise(
        EXP2_CODE, EXP2_OPERANDS, [x], gl.float32, is_pure=True, pack=16
    )
