"""Matrix products of the MLP that also compute GELU, for Hopper GPUs.

    forward     hidden = x weight^T + bias,  activated = gelu(hidden)
    backward    d_hidden = (d_y weight) * gelu'(hidden), and its sum over the tokens

A program stays on its multiprocessor, keeps a block of COLUMNS features and takes one block of 128
tokens after the other. One warp, the producer, requests copies of tiles to shared memory. Two
consumers of four warps multiply 64 tokens each. While the tensor cores multiply the next tile, a
consumer computes the activations of this one, a quarter of the columns at a time. Until then its
numbers wait in registers, rounded, two in a register.

Dimensions: T tokens, K features of x or d_y, F features of hidden.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attention.kernels.hopper.launch import shared_layout
from attention.kernels.hopper.primitives import (
    await_own_stores,
    load_box,
    make_ring,
    rounded,
    store_box,
)
from attention.kernels.tiles import multiprocessors, tiles_of

ROWS = gl.constexpr(64)  # tokens of a consumer
CONSUMERS = gl.constexpr(2)
COLUMNS = gl.constexpr(256)  # features of a tile
QUARTER = gl.constexpr(64)  # features whose activations are computed at a time
STEP = gl.constexpr(64)  # features of x or d_y in a slot of the ring


@gluon.jit
def halves(x):
    """The left and the right half of the columns. A thread has numbers of both: nothing moves."""
    WIDTH: gl.constexpr = x.shape[1] // 2
    left, right = gl.split(x.reshape([ROWS, 2, WIDTH]).permute((0, 2, 1)))
    return gl.convert_layout(left, accumulator(WIDTH)), gl.convert_layout(right, accumulator(WIDTH))


@gluon.constexpr_function
def accumulator(width):
    """The layout of a product (ROWS, width)."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])


@gluon.jit
def packed(x, dtype: gl.constexpr):
    """x rounded to dtype, two columns in an int32. As tensors of 16 bits the compiler would keep
    some of them in a register each.
    """
    even, odd = gl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))
    TYPE: gl.constexpr = "bf16" if dtype == gl.bfloat16 else "f16"
    return gl.inline_asm_elementwise(
        f"cvt.rn.{TYPE}x2.f32 $0, $2, $1;", "=r,r,r", [even, odd], gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unpacked(x, dtype: gl.constexpr):
    """The inverse of packed(), in float32."""
    if dtype == gl.bfloat16:
        even, odd = gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x],
            (gl.float32, gl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        even, odd = gl.inline_asm_elementwise(
            "{.reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b;}",
            "=r,=r,r", [x], (gl.float32, gl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    WIDTH: gl.constexpr = 2 * x.shape[1]
    return gl.convert_layout(gl.join(even, odd).reshape([ROWS, WIDTH]), accumulator(WIDTH))


@gluon.jit
def quarters(product, bias_ptr, dtype: gl.constexpr):
    """The four quarters of a tile's columns, plus their biases, packed."""
    left, right = halves(product)
    a, b = halves(left)
    c, d = halves(right)
    if bias_ptr is not None:
        a = add_bias(a, bias_ptr)
        b = add_bias(b, bias_ptr + QUARTER)
        c = add_bias(c, bias_ptr + 2 * QUARTER)
        d = add_bias(d, bias_ptr + 3 * QUARTER)
    return packed(a, dtype), packed(b, dtype), packed(c, dtype), packed(d, dtype)


@gluon.jit
def add_bias(x, bias_ptr):
    bias = gl.load(bias_ptr + gl.arange(0, QUARTER, gl.SliceLayout(0, x.type.layout)))
    return x + gl.expand_dims(bias.to(gl.float32), 0)


@gluon.jit
def sigmoid(x):
    """The s of gelu(x) = x s: see gelu_by_sigmoid() in model/kernels/__init__.py."""
    # -2 sqrt(2 / pi) log2(e) for exp2, and 0.044715 times that
    power = gl.exp2(x * (-2.302208198144325 - 0.10294323897942917 * (x * x)))
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [1.0 + power], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def derivative(x):
    """gelu'(x), where x s' = x s (1 - s) (2 u)' and 2 u = 1.5957691 x + 0.0713548 x^3."""
    s = sigmoid(x)
    return s + x * s * (1.0 - s) * (1.5957691216057308 + 0.2140644488378008 * (x * x))


@gluon.jit
def column_sums(tile):
    """Sums over the 16 rows that each warp reads, (4, QUARTER): a thread adds up two columns."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([ROWS // 4, QUARTER // 32], [1, 32], [4, 1], [1, 0])
    sums = gl.sum(tile.load(LAYOUT).to(gl.float32).reshape([4, ROWS // 4, QUARTER]), 1)
    return gl.convert_layout(sums, zero_sums().type.layout)


@gluon.jit
def zero_sums():
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    return gl.zeros([4, QUARTER], gl.float32, LAYOUT)


@gluon.jit
def store_sums(partial_ptr, sums, first, width):
    """Store the four rows of sums as rows of partial from `first` on."""
    LAYOUT: gl.constexpr = sums.type.layout
    rows = (first + gl.arange(0, 4, gl.SliceLayout(1, LAYOUT))).to(gl.int64) * width
    columns = gl.arange(0, QUARTER, gl.SliceLayout(0, LAYOUT))
    gl.store(partial_ptr + gl.expand_dims(rows, 1) + gl.expand_dims(columns, 0), sums)


@gluon.jit
def produce(
    x_desc, weight_desc, hidden_desc, ring, x_tiles, hidden_ring, blocks,
    K: gl.constexpr, BACKWARD: gl.constexpr,
):  # fmt: skip
    column = gl.program_id(0) * COLUMNS
    item = gl.to_tensor(0)
    hidden_item = gl.to_tensor(0)
    section: gl.constexpr = K // STEP // 4
    for block in range(gl.program_id(1), blocks, gl.num_programs(1)):
        row = block * ROWS * CONSUMERS
        for step in range(0, K // STEP):
            ring.await_empty(item)
            full = ring.full_barrier(item)
            BYTES: gl.constexpr = CONSUMERS * x_desc.block_type.nbytes
            mbarrier.expect(full, BYTES + weight_desc.block_type.nbytes)
            for consumer in gl.static_range(CONSUMERS):
                load_box(
                    x_desc,
                    [row + ROWS * consumer, step * STEP],
                    full,
                    x_tiles.index(item % ring.depth * CONSUMERS + consumer),
                )
            if BACKWARD:
                load_box(weight_desc, [step * STEP, column], full, ring.buffer(item))
            else:
                load_box(weight_desc, [column, step * STEP], full, ring.buffer(item))
            item += 1
            if BACKWARD:  # noqa: SIM102, a constant around a value
                # the consumers need a tile's hidden values while they multiply the next tile. If
                # this warp requested them earlier, it would wait for a free slot, and the products
                # would wait for this warp
                if (step % section == 0) & (step < 4 * section):
                    if step == 3 * section:
                        hidden_item = request_hidden(
                            hidden_desc, hidden_ring, hidden_item, row, column
                        )
                    elif block > gl.program_id(1):
                        before = row - gl.num_programs(1) * ROWS * CONSUMERS
                        hidden_item = request_hidden(
                            hidden_desc, hidden_ring, hidden_item, before, column
                        )
        if BACKWARD:  # noqa: SIM102, a constant around a value
            if block + gl.num_programs(1) >= blocks:
                for _ in range(3):
                    hidden_item = request_hidden(hidden_desc, hidden_ring, hidden_item, row, column)


@gluon.jit
def request_hidden(hidden_desc, hidden_ring, item, row, column):
    """Request the next quarter of a tile's hidden values for both consumers."""
    hidden_ring.await_empty(item)
    full = hidden_ring.full_barrier(item)
    mbarrier.expect(full, CONSUMERS * hidden_desc.block_type.nbytes)
    for consumer in gl.static_range(CONSUMERS):
        load_box(
            hidden_desc,
            [row + ROWS * consumer, column + item % 4 * QUARTER],
            full,
            hidden_ring.buffers.index(item % 4 * CONSUMERS + consumer),
        )
    return item + 1


@gluon.jit
def multiply(
    acc, item, ring, x_tiles, SELF: gl.constexpr, BACKWARD: gl.constexpr, FIRST: gl.constexpr
):
    """Issue the products of one slot, and wait for those of the slot before."""
    ring.await_full(item)
    weight = ring.buffer(item)
    if not BACKWARD:
        weight = weight.permute((1, 0))
    x = x_tiles.index(item % ring.depth * CONSUMERS + SELF)
    acc = warpgroup_mma(x, weight, acc, use_acc=not FIRST, is_async=True)
    acc = warpgroup_mma_wait(1, deps=(acc,))
    if not FIRST:
        ring.release(item - 1)
    return acc


@gluon.jit
def multiply_more(acc, item, count, ring, x_tiles, SELF: gl.constexpr, BACKWARD: gl.constexpr):
    for _ in range(0, count):
        acc = multiply(acc, item, ring, x_tiles, SELF, BACKWARD, False)
        item += 1
    return acc, item


@gluon.jit
def activate(part, row, column, hidden_desc, out_desc, tiles, SELF: gl.constexpr):
    """Store a quarter of hidden, and its activations."""
    dtype: gl.constexpr = tiles.dtype
    hidden = unpacked(part, dtype)
    tma.store_wait(0)
    tiles.index(2 * SELF).store(rounded(hidden, dtype))
    tiles.index(2 * SELF + 1).store(rounded(hidden * sigmoid(hidden), dtype))
    fence_async_shared()
    store_box(hidden_desc, [row, column], tiles.index(2 * SELF))
    store_box(out_desc, [row, column], tiles.index(2 * SELF + 1))


@gluon.jit
def differentiate(part, row, column, out_desc, hidden_ring, item, SELF: gl.constexpr):
    """Store a quarter of d_hidden in the place of hidden. Returns the sums of its columns."""
    dtype: gl.constexpr = out_desc.dtype
    d_activated = unpacked(part, dtype)
    if item > 0:
        await_own_stores()
        hidden_ring.release(item - 1)
    hidden_ring.await_full(item)
    tile = hidden_ring.buffers.index(item % 4 * CONSUMERS + SELF)
    hidden = tile.load(d_activated.type.layout).to(gl.float32)
    tile.store(rounded(d_activated * derivative(hidden), dtype))
    fence_async_shared()
    store_box(out_desc, [row, column], tile)
    return column_sums(tile)


@gluon.jit
def finish(
    part, sums, row, column, visit, where, NUMBER: gl.constexpr, SELF: gl.constexpr,
    BACKWARD: gl.constexpr,
):  # fmt: skip
    """Finish quarter NUMBER of the tile before. The first tile has none before it.

    where: hidden_desc, out_desc and hidden_ring.
    """
    hidden_desc, out_desc, hidden_ring = where
    # the branch also keeps ptxas from mixing quarters: without it registers spill
    if visit >= 0:
        place: gl.constexpr = NUMBER * QUARTER
        if BACKWARD:
            item = 4 * visit + NUMBER
            sums += differentiate(part, row, column + place, out_desc, hidden_ring, item, SELF)
        else:
            tiles = hidden_ring.buffers
            activate(part, row, column + place, hidden_desc, out_desc, tiles, SELF)
    return sums


@gluon.jit
def consume(
    hidden_desc, out_desc, bias_ptr, partial_ptr, ring, x_tiles, hidden_ring, width, blocks,
    SELF: gl.constexpr, K: gl.constexpr, BACKWARD: gl.constexpr,
):  # fmt: skip
    """SELF: the number of this consumer."""
    dtype: gl.constexpr = x_tiles.dtype
    zeros = gl.zeros([ROWS, COLUMNS], gl.float32, accumulator(COLUMNS))
    column = gl.program_id(0) * COLUMNS
    item = gl.to_tensor(0)
    visit = gl.to_tensor(-1)
    row = gl.to_tensor(0)
    section: gl.constexpr = K // STEP // 4
    # the second consumer computes its activations this many slots later, so that one multiplies
    # while the other computes them. On an H100 these shifts were the fastest of those tried
    shift: gl.constexpr = SELF * (section // 2 if BACKWARD else section - 1)
    where = (hidden_desc, out_desc, hidden_ring)
    a, b, c, d = quarters(zeros, None, dtype)
    sum_a = zero_sums()
    sum_b = zero_sums()
    sum_c = zero_sums()
    sum_d = zero_sums()
    for block in range(gl.program_id(1), blocks, gl.num_programs(1)):
        acc = multiply(zeros, item, ring, x_tiles, SELF, BACKWARD, True)
        acc, item = multiply_more(acc, item + 1, shift, ring, x_tiles, SELF, BACKWARD)
        sum_a = finish(a, sum_a, row, column, visit, where, 0, SELF, BACKWARD)
        acc, item = multiply_more(acc, item, section, ring, x_tiles, SELF, BACKWARD)
        sum_b = finish(b, sum_b, row, column, visit, where, 1, SELF, BACKWARD)
        acc, item = multiply_more(acc, item, section, ring, x_tiles, SELF, BACKWARD)
        sum_c = finish(c, sum_c, row, column, visit, where, 2, SELF, BACKWARD)
        acc, item = multiply_more(acc, item, section, ring, x_tiles, SELF, BACKWARD)
        sum_d = finish(d, sum_d, row, column, visit, where, 3, SELF, BACKWARD)
        rest: gl.constexpr = K // STEP - 3 * section - shift - 1
        acc, item = multiply_more(acc, item, rest, ring, x_tiles, SELF, BACKWARD)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        ring.release(item - 1)
        a, b, c, d = quarters(acc, bias_ptr if BACKWARD else bias_ptr + column, dtype)
        visit += 1
        row = block * ROWS * CONSUMERS + ROWS * SELF
    sum_a = finish(a, sum_a, row, column, visit, where, 0, SELF, BACKWARD)
    sum_b = finish(b, sum_b, row, column, visit, where, 1, SELF, BACKWARD)
    sum_c = finish(c, sum_c, row, column, visit, where, 2, SELF, BACKWARD)
    sum_d = finish(d, sum_d, row, column, visit, where, 3, SELF, BACKWARD)
    tma.store_wait(0)
    if BACKWARD:
        first = (gl.program_id(1) * CONSUMERS + SELF) * 4
        store_sums(partial_ptr + column, sum_a, first, width)
        store_sums(partial_ptr + column + QUARTER, sum_b, first, width)
        store_sums(partial_ptr + column + 2 * QUARTER, sum_c, first, width)
        store_sums(partial_ptr + column + 3 * QUARTER, sum_d, first, width)


# the number of tokens is not specialised, so another number does not recompile
@gluon.jit(do_not_specialize=["blocks"])
def mlp_kernel(
    x_desc, weight_desc, hidden_desc, out_desc, bias_ptr, partial_ptr, width, blocks,
    K: gl.constexpr, STAGES: gl.constexpr, BACKWARD: gl.constexpr,
):  # fmt: skip
    """Forward: x (T, K), weight (F, K) and bias (F,) are inputs, hidden and out (T, F) results.

    Backward: x is d_y (T, K), weight (K, F), hidden is an input, and out is d_hidden. partial
    (4 * CONSUMERS * num_programs(1), F) receives sums over some of its rows.

    width: F. blocks: of ROWS * CONSUMERS tokens. K is a multiple of STEP, and at least 4 * STEP.
    """
    dtype: gl.constexpr = x_desc.dtype
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS, ROWS, STEP], x_desc.layout)
    tile: gl.constexpr = weight_desc.block_type.shape
    weights = gl.allocate_shared_memory(dtype, [STAGES, tile[0], tile[1]], weight_desc.layout)
    COUNT: gl.constexpr = 4 * CONSUMERS if BACKWARD else 2 * CONSUMERS
    tiles = gl.allocate_shared_memory(dtype, [COUNT, ROWS, QUARTER], out_desc.layout)
    ring = make_ring(weights, STAGES, 1, CONSUMERS)
    hidden_ring = make_ring(tiles, 4, 1, CONSUMERS)
    fence_async_shared()
    gl.warp_specialize([
        (consume, (hidden_desc, out_desc, bias_ptr, partial_ptr, ring, x_tiles, hidden_ring,
                   width, blocks, 0, K, BACKWARD)),
        (consume, (hidden_desc, out_desc, bias_ptr, partial_ptr, ring, x_tiles, hidden_ring,
                   width, blocks, 1, K, BACKWARD)),
        (produce, (x_desc, weight_desc, hidden_desc, ring, x_tiles, hidden_ring, blocks, K,
                   BACKWARD)),
    ], [4, 1], [240, 24])  # fmt: skip


def launch(
    x: Tensor, weight: Tensor, hidden: Tensor, out: Tensor, bias: Tensor | None
) -> Tensor | None:
    """Run mlp_kernel() on matrices; without a bias backward. Then it returns the sum over the
    tokens, (F,) in float32, which has the same order every time.
    """
    backward, (rows, width) = bias is None, hidden.shape
    columns, blocks = width // COLUMNS.value, tiles_of(rows, ROWS.value * CONSUMERS.value)
    programs = min(blocks, max(1, multiprocessors(x.device) // columns))
    partial = None
    if backward:
        shape = (4 * CONSUMERS.value * programs, width)
        partial = torch.empty(shape, dtype=torch.float32, device=x.device)
    box = (STEP.value, COLUMNS.value) if backward else (COLUMNS.value, STEP.value)
    mlp_kernel[columns, programs](
        descriptor(x, ROWS.value, STEP.value),
        descriptor(weight, *box),
        descriptor(hidden, ROWS.value, QUARTER.value),
        descriptor(out, ROWS.value, QUARTER.value),
        bias, partial, width, blocks,
        K=x.shape[1], STAGES=3 if backward else 4, BACKWARD=backward, num_warps=4,
    )  # fmt: skip
    return None if partial is None else partial.sum(0)


def descriptor(x: Tensor, *box: int) -> TensorDescriptor:
    layout = shared_layout(box, x.dtype)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(box), layout)


def readable(x: Tensor) -> Tensor:
    """x as rows that a descriptor can address."""
    x = x.contiguous().flatten(0, -2)
    return x.clone() if x.data_ptr() % 16 else x


# operators, each one node for torch.compile. They return new tensors, not views
@torch.library.custom_op("tilegpt::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    """x weight^T + bias, and GELU of it, both (..., F), for x (..., K) and weight (F, K) of one
    dtype and bias (F,) of any.
    """
    hidden = x.new_empty(*x.shape[:-1], len(weight))
    activated = torch.empty_like(hidden)
    results = hidden.flatten(0, -2), activated.flatten(0, -2)
    launch(readable(x), readable(weight), *results, bias.contiguous())
    return [hidden, activated]


@linear_gelu.register_fake
def _(x, weight, bias):
    shape = *x.shape[:-1], weight.shape[0]
    return [x.new_empty(shape), x.new_empty(shape)]


@torch.library.custom_op("tilegpt::product_gelu_backward", mutates_args=())
def product_gelu_backward(d_y: Tensor, weight: Tensor, hidden: Tensor) -> list[Tensor]:
    """The gradient of hidden (..., F), and its sum over all tokens, (F,) in float32.

    d_y (..., K), weight (K, F), all of one dtype. d_y weight is the gradient of gelu(hidden).
    """
    hidden_rows, d_hidden = readable(hidden), hidden.new_empty(hidden.shape)
    sums = launch(readable(d_y), readable(weight), hidden_rows, d_hidden.flatten(0, -2), None)
    return [d_hidden, sums]


@product_gelu_backward.register_fake
def _(d_y, weight, hidden):
    return [hidden.new_empty(hidden.shape), hidden.new_empty(hidden.shape[-1], dtype=torch.float32)]


class GeluMLP(torch.autograd.Function):
    """gelu_mlp() of model/kernels/__init__.py. As under autocast, the products of 16 bits are the
    gradients of the weights.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor
    ) -> Tensor:
        ctx.dtypes = [parameter.dtype for parameter in (up, up_bias, down, down_bias)]
        up, down = up.to(x.dtype), down.to(x.dtype)
        hidden, activated = linear_gelu(x, up, up_bias)
        ctx.save_for_backward(x, hidden, activated, up, down)
        return F.linear(activated, down, down_bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, hidden, activated, up, down = ctx.saved_tensors
        d_hidden, d_up_bias = product_gelu_backward(d_y, down, hidden)
        gradients = (
            d_hidden.flatten(0, -2).mT @ x.flatten(0, -2),
            d_up_bias,
            d_y.flatten(0, -2).mT @ activated.flatten(0, -2),
            d_y.flatten(0, -2).sum(0, dtype=torch.float32),
        )
        found = zip(gradients, ctx.dtypes, strict=True)
        return d_hidden @ up, *(gradient.to(dtype) for gradient, dtype in found)
