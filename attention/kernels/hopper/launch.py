"""Launch the Hopper kernels: tile shapes, descriptors, order of work.

Dimensions: B batch, H query heads, H_kv key/value heads, N queries, M keys, D head dim.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from attention.kernels.hopper.backward import backward_kernel
from attention.kernels.hopper.documents import ALIGNED, block_starts
from attention.kernels.hopper.forward import forward_kernel
from attention.kernels.hopper.pre_post import convert_dq_kernel, join_shares_kernel, prepare_kernel
from attention.kernels.intervals import query_ranges
from attention.kernels.launch import Settings
from attention.kernels.score_mods import find_score_mod
from attention.kernels.tiles import (
    batch_stride,
    bytes_of_a_head,
    multiprocessors,
    properties,
    section_of,
    tiles_of,
)

BLOCK_Q = 64  # queries of a forward consumer
BLOCK_KV = 128  # keys of a block of the backward
GROUP = 16  # queries of a group of the sum of dq
GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


class Division(NamedTuple):
    """How a forward program is divided, as far as the registers allow."""

    consumers: int
    block_kv: int
    stages: int  # tiles of keys, and of values, in flight
    turns: bool  # whether consumers issue their products in turn
    round_early: bool  # round p during the previous product (takes 32 registers) or after it


FORWARD = {
    64: Division(consumers=3, block_kv=128, stages=3, turns=True, round_early=False),
    128: Division(consumers=2, block_kv=128, stages=2, turns=False, round_early=True),
}
# for intervals, and for causal masks up to SHORT keys: there a large part of all tiles lies at the
# edges and is half wasted
SHORT, SHORT_FORWARD = 1024, {64: FORWARD[64]._replace(block_kv=64, stages=6)}

# at head_dim 128 and with more keys than this, a backward program computes only one block. Tiles
# that change place from block to block slow its loops by 1 to 5%, and long blocks gain less from
# staying
LONG = 2048


@cache
def shared_layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), GLUON_DTYPES[dtype])


def descriptor(x: Tensor, rows: int, columns: int = 128) -> TensorDescriptor:
    """A descriptor of x (B, H, N, D) for boxes of `rows` rows of one head and at most `columns`
    columns. Past the end of x, loads give zero and stores write nothing.
    """
    block = (1, 1, rows, min(columns, x.shape[3]))
    return TensorDescriptor(
        x, list(x.shape), list(x.stride()), list(block), shared_layout(block, x.dtype)
    )


def gradient_columns(dtype: torch.dtype, head_dim: int, block_q: int) -> int:
    """The most columns of dk and dv that fit into a consumer's tile, which it also adds to the sum
    of dq.
    """
    return math.prod(sum_block(head_dim, block_q)) * 4 // (BLOCK_KV // 2 * dtype.itemsize)


def sum_block(head_dim: int, block_q: int) -> tuple[int, int, int]:
    """The box that a consumer adds to the sum of dq: 64 queries. They are half of a step of 128, or
    a whole step of which it has half of the columns.
    """
    return 64 // GROUP, block_q * head_dim // 256, 32


def sum_descriptor(x: Tensor, block: tuple[int, int, int]) -> TensorDescriptor:
    """A descriptor of the sum x (groups, D / 2, 32) float32."""
    return TensorDescriptor(
        x, list(x.shape), list(x.stride()), list(block), shared_layout(block, x.dtype)
    )


def cache_bytes(device: torch.device) -> int:
    return properties(device).L2_cache_size


_counters: dict[tuple[torch.device, int], Tensor] = {}


def counters(device: torch.device) -> Tensor:
    """Two counters, which are 0 before and after every launch. Each stream has a pair, because
    launches of one stream run one after the other.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)  # memory owned by the graph
    key = device, driver.active.get_current_stream(device.index)  # the stream of Triton's launch
    if key not in _counters:
        # the calling thread may allocate from a pool whose memory is reused, as under
        # torch.compile(mode="reduce-overhead")
        with ThreadPoolExecutor(1) as another:
            _counters[key] = another.submit(_zeros, device).result()
    return _counters[key]


def _zeros(device: torch.device) -> Tensor:
    zeros = torch.zeros(2, dtype=torch.int32, device=device)
    torch.cuda.current_stream(device).synchronize()  # of this thread, not of the caller
    return zeros


def forward_constants(
    q_shape: torch.Size, num_keys: int, causal: bool, intervals: bool, score_mod: str = ""
) -> dict[str, Any]:
    num_queries, head_dim = q_shape[2:]
    short = intervals or (causal and num_keys <= SHORT)
    consumers, block_kv, stages, turns, round_early = (
        SHORT_FORWARD if short and head_dim in SHORT_FORWARD else FORWARD
    )[head_dim]
    # the diagonal of a consumer's rows lies in one tile of keys if rows and keys start at multiples
    # of BLOCK_Q
    edges = intervals or (causal and (num_keys - num_queries) % BLOCK_Q != 0)
    return {
        "CAUSAL": causal,
        "INTERVALS": intervals,
        "FIRST_MASKED": causal or intervals or num_keys % block_kv != 0,
        "EDGES": edges,
        "SCORE_MOD": find_score_mod(score_mod),
        "D": head_dim,
        "BLOCK_Q": BLOCK_Q,
        "BLOCK_KV": block_kv,
        "CONSUMERS": consumers,
        "STAGES": stages,
        "TURNS": turns,
        "ROUND_EARLY": round_early and not edges,  # masks also take registers
    }


def backward_constants(
    q_shape: torch.Size, k_shape: torch.Size, causal: bool, intervals: bool, shares: int = 1,
    score_mod: str = "",
) -> dict[str, Any]:  # fmt: skip
    head_dim, num_keys = q_shape[3], k_shape[2]
    heads = q_shape[1] // k_shape[1] // shares  # query heads of a share
    grouped = heads > 1
    long = head_dim == 128 and num_keys * heads > LONG and not intervals
    return {
        "CAUSAL": causal,
        "INTERVALS": intervals,
        "MASKED": causal or intervals or num_keys % BLOCK_KV != 0,
        "SCORE_MOD": find_score_mod(score_mod),
        "GROUPED": grouped,
        "SHARED": shares > 1,
        "STAY": not long,
        "D": head_dim,
        "BLOCK_Q": 128 if head_dim == 64 and not score_mod else 64,  # the registers limit it
        "STAGES": 2,
    }


def in_base_2(scale: float, score_mod: str) -> float:
    """The kernels' scale_log2: a score modifier gets scaled scores."""
    return (1 if score_mod else scale) * math.log2(math.e)


def starts_of(q: Tensor, k: Tensor, lo: Tensor | None, settings: Settings) -> Tensor | None:
    """Where blocks of rows start, for packed documents; None if they start at multiples."""
    if lo is None or not settings.documents:
        return None
    fits = len(lo) == len(q) and q.shape[2] == k.shape[2]
    return block_starts(lo) if fits else None


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    top: Tensor | None,
    lo: Tensor | None,
    hi: Tensor | None,
    params: Tensor | None,
    sinks: Tensor | None,
    settings: Settings,
) -> None:
    """Fill out (B, H, N, D) and lse (B, H, N); fill top (B, H, N), if given, with each row's
    largest score. q, k and v must suit a descriptor; lo, hi (B or 1, N) int32; sinks (H,) float32.
    """
    (batch, num_heads, num_queries, _), (_, num_kv_heads, num_keys, _) = q.shape, k.shape
    groups, batch_heads = num_heads // num_kv_heads, batch * num_heads
    causal, scale, score_mod = settings[:3]
    meta = forward_constants(q.shape, num_keys, causal, lo is not None, score_mod)
    block, keys = BLOCK_Q * meta["CONSUMERS"], meta["BLOCK_KV"]
    starts = starts_of(q, k, lo, settings) if block == ALIGNED else None
    by_start = starts is not None
    work = batch_heads * tiles_of(num_queries, block)
    forward_kernel[(min(work, multiprocessors(q.device)),)](
        descriptor(q, BLOCK_Q), descriptor(k, keys), descriptor(v, keys), descriptor(out, BLOCK_Q),
        out if by_start else None,  # incomplete blocks are written without a descriptor
        lse, top, lo, hi, starts, params, sinks, counters(q.device),
        *(out.stride()[:3] if by_start else (None,) * 3),
        batch_stride(lo), num_heads, groups, batch_heads,
        section_of(k.device, 2 * bytes_of_a_head(k), heads=groups, equal=not causal),
        num_queries, num_keys, in_base_2(scale, score_mod), scale if score_mod else None,
        **meta, TOP=top is not None, num_warps=4,
    )  # fmt: skip


def backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    lo: Tensor | None,
    hi: Tensor | None,
    params: Tensor | None,
    settings: Settings,
) -> Tensor:
    """Fill dq, dk and dv. Returns delta (B, H, N)."""
    (batch, num_heads, num_queries, head_dim), (_, num_kv_heads, num_keys, _) = q.shape, k.shape
    groups, batch_heads = num_heads // num_kv_heads, batch * num_heads
    causal, scale, score_mod = settings[:3]
    starts = starts_of(q, k, lo, settings)
    padded = tiles_of(num_queries, 128) * 128
    if starts is not None:  # a step may start at any group and end past the sequence
        padded += 128
    head_groups, rows = padded // GROUP, 4096 // head_dim
    delta, lse_log2 = torch.empty_like(lse), torch.empty_like(lse)
    dq_sum = lse.new_empty(batch_heads * head_groups, head_dim // 2, 32)
    prepare_kernel[(padded // rows, batch_heads)](
        out, d_out, lse, d_lse, delta, lse_log2, dq_sum,
        *out.stride()[:3], *d_out.stride()[:3], num_heads, num_queries,
        D=head_dim, BLOCK_Q=rows, num_warps=4,
    )  # fmt: skip

    blocks, programs = tiles_of(num_keys, BLOCK_KV), multiprocessors(q.device)
    # bytes of q and d_out, and of dq in float32
    streamed = 2 * bytes_of_a_head(q) + 4 * num_queries * head_dim
    shares = shares_of(
        groups, batch * num_kv_heads * blocks, programs, equal=not causal or lo is not None,
        streamed=streamed, cache=cache_bytes(q.device),
    )  # fmt: skip
    groups //= shares  # query heads of a share
    meta = backward_constants(q.shape, k.shape, causal, lo is not None, shares, score_mod)
    block_q = meta["BLOCK_Q"]
    batch_shares = batch * num_kv_heads * shares
    work = blocks * batch_shares
    # dv and dk of each share, in float32
    parts = lse.new_empty(work, 2, BLOCK_KV, head_dim) if shares > 1 else None
    starts = None if shares > 1 else starts
    by_start = starts is not None
    ranges = None if lo is None else query_ranges(lo, hi, num_keys, BLOCK_KV, starts)
    queries, keys = [block_q, 128], [BLOCK_KV // 2, 128]
    gradient = [BLOCK_KV // 2, gradient_columns(dk.dtype, head_dim, block_q)]
    backward_kernel[(min(work, programs) if meta["STAY"] else work,)](
        descriptor(q, *queries), descriptor(k, *keys), descriptor(v, *keys),
        descriptor(d_out, *queries), sum_descriptor(dq_sum, sum_block(head_dim, block_q)),
        descriptor(dk, *gradient), descriptor(dv, *gradient),
        *((dk, dv) if by_start else (None, None)), lse_log2, delta, lo, hi, ranges, starts,
        parts, params, counters(q.device),
        *((*dk.stride()[:3], *dv.stride()[:3]) if by_start else (None,) * 6),
        batch_stride(lo), batch_stride(ranges), num_kv_heads, shares, groups, batch_shares,
        section_of(
            q.device, groups * streamed, equal=not causal,
            # with fewer, the longest blocks of the last section would end alone
            at_least=round(2 * programs / blocks),
        ),
        num_queries, num_keys, head_groups, scale, in_base_2(scale, score_mod),
        *((num_keys - num_queries, num_heads) if score_mod else (None, None)),
        **meta, num_warps=4,
    )  # fmt: skip
    if parts is not None:
        join_shares_kernel[(tiles_of(num_keys, 32), batch * num_kv_heads)](
            parts, dk, dv, *dk.stride()[:3], *dv.stride()[:3], num_kv_heads, num_keys, shares,
            D=head_dim, BLOCK_KV=BLOCK_KV, ROWS=32, num_warps=4,
        )  # fmt: skip
    convert_dq_kernel[(tiles_of(num_queries, 64), batch_heads)](
        dq_sum, dq, *dq.stride()[:3], num_heads, head_groups, num_queries, scale,
        D=head_dim, num_warps=8,
    )  # fmt: skip
    return delta


def shares_of(
    groups: int, blocks: int, programs: int, *, equal: bool, streamed: int, cache: int
) -> int:
    """How many shares the query heads of each key/value head are divided into in the backward pass,
    a divisor of `groups`. Every program should have work, and find in the L2 cache what another has
    read.

    blocks: blocks of keys in all key/value heads. programs: how many run at a time. equal: whether
    all blocks take the same amount of work.

    Unequal blocks run longest first, and end evenly if there are at least twice as many as
    programs. Their programs are at different heads of their shares. So a share has at most as many
    heads as fit into half of the `cache`, at `streamed` bytes a head; two are always allowed.
    """
    divisors = [n for n in range(1, groups + 1) if groups % n == 0]
    if not equal:
        heads = max(2, cache // 2 // streamed)
        enough = (n for n in divisors if n * blocks >= 2 * programs and groups // n <= heads)
        return next(enough, groups)
    used = {n: n * blocks / tiles_of(n * blocks, programs) for n in divisors}  # slots in use
    return next(n for n in divisors if used[n] >= 0.95 * max(used.values()))
