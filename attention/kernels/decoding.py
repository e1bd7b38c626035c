"""The split kernel: attention of few queries to many keys, and the merge of its parts.

The specification is attention/decoding.py; the softmax steps are those of softmax.py. A program
owns the queries of one key/value head, with a row for each query head of the group. It reads each
key of its part once, so memory bandwidth limits it. A second kernel merges the parts of a row.

The keys of a cache are contiguous or in pages. A query at position p sees the sequence's keys
p - left <= j <= p + right.

Dimensions: B batch, H = H_kv * GROUPS query heads, N queries, M keys, D head dim (padded to
BLOCK_D); S splits; a tile is BLOCK_Q rows by BLOCK_KV keys.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.decoding import num_splits
from attention.interface import empty_heads, operator
from attention.kernels.forward import scores_of
from attention.kernels.launch import readable
from attention.kernels.score_mods import find_score_mod
from attention.kernels.softmax import move_max
from attention.kernels.tiles import (
    Tile,
    batch_stride,
    multiprocessors,
    padded_head_dim,
    pick_tile,
    properties,
    tiles_of,
)

CHECKED = tl.constexpr(128)  # pages that a program checks at a time


# do not recompile for each length
@triton.jit(do_not_specialize=["M", "num_pages", "left", "right"])
def split_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, lengths_ptr, table_ptr, params_ptr,
    stride_qb, stride_qh, stride_qn, stride_page, stride_h, stride_n, stride_table,
    num_kv_heads, N, M, num_pages, left, right, score_scale,
    SCORE_MOD: tl.constexpr, GROUPS: tl.constexpr, SPLITS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """lengths_ptr: how many keys each sequence has; table_ptr: its pages. out (B, N, H, S, D) and
    lse (B, N, H, S) are contiguous.
    """
    row_tiles = tl.cdiv(N * GROUPS, BLOCK_Q)
    tile, head_of_batch = tl.program_id(0) % row_tiles, tl.program_id(0) // row_tiles
    split = tl.program_id(1)
    batch = tl.cast(head_of_batch // num_kv_heads, tl.int64)
    kv_head = tl.cast(head_of_batch % num_kv_heads, tl.int64)
    # a query's heads are neighbouring rows, so both ends of the intervals are non-decreasing
    rows = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    n, head = rows // GROUPS, kv_head * GROUPS + rows % GROUPS
    first_n, last_n = tile * BLOCK_Q // GROUPS, (tile * BLOCK_Q + BLOCK_Q - 1) // GROUPS
    given = tl.load(lengths_ptr + batch)
    length = tl.minimum(given.to(tl.int32), M)
    broken = (given > M) | (given < 0)
    past = length - N  # the position of query 0
    lo = tl.maximum(past + n - left, 0)
    hi = tl.minimum(past + n + right + 1, length)
    # both ends are non-decreasing
    first = tl.maximum(past + first_n - left, 0)
    last = tl.maximum(first, tl.minimum(past + last_n + right + 1, length))
    # tiles lie on a fixed grid, so that a page holds whole tiles, or a tile whole pages
    grid = first // BLOCK_KV * BLOCK_KV
    tiles = tl.cdiv(last - grid, BLOCK_KV)
    begin = grid + split * tiles // SPLITS * BLOCK_KV
    end = tl.minimum(grid + (split + 1) * tiles // SPLITS * BLOCK_KV, last)

    column = tl.arange(0, BLOCK_D)
    in_row = (column < D)[None, :]
    q = tl.load(
        q_ptr + batch * stride_qb + (head * stride_qh + n * stride_qn)[:, None] + column[None, :],
        mask=(n < N)[:, None] & in_row,
        other=0.0,
    )
    if PAGE_SIZE != 0:
        table_ptr += batch * stride_table
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for start in tl.range(begin, end, BLOCK_KV):
        keys = start + tl.arange(0, BLOCK_KV)
        inside = (keys >= first) & (keys < end)
        page, row = batch, keys  # a contiguous cache has one page a sequence
        if PAGE_SIZE != 0:
            if PAGE_SIZE % BLOCK_KV == 0:
                page = tl.load(table_ptr + start // PAGE_SIZE)
            else:
                page = tl.load(table_ptr + keys // PAGE_SIZE, mask=inside, other=0)
            page, row = tl.minimum(tl.maximum(page, 0), num_pages - 1), keys % PAGE_SIZE
        at = tl.cast(page, tl.int64) * stride_page + tl.cast(row, tl.int64) * stride_n
        at = (at + kv_head * stride_h)[:, None] + column[None, :]
        k = tl.load(k_ptr + at, mask=inside[:, None] & in_row, other=0.0)
        scores, _ = scores_of(
            tl.dot(q, tl.trans(k), input_precision="ieee"), (past + n)[:, None],
            keys[None, :], lo[:, None], hi[:, None], batch, head[:, None], M, score_scale,
            params_ptr, False, True, True, SCORE_MOD, False,
        )  # fmt: skip
        row_max, shift, alpha = move_max(row_max, tl.max(scores, 1), True)
        p = tl.exp2(scores - shift[:, None])
        row_sum = alpha * row_sum + tl.sum(p, 1)
        v = tl.load(v_ptr + at, mask=inside[:, None] & in_row, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")

    if PAGE_SIZE != 0:
        # check the table after the loop: in the loop, the check would wait for pages that are
        # loaded early
        for start in tl.range(begin // PAGE_SIZE, tl.cdiv(end, PAGE_SIZE), CHECKED, num_stages=1):
            entry = start + tl.arange(0, CHECKED)
            used = (entry >= first // PAGE_SIZE) & (entry * PAGE_SIZE < end)
            page = tl.load(table_ptr + entry, mask=used, other=0)
            broken |= tl.max(((page < 0) | (page >= num_pages)).to(tl.int32), 0) > 0
    no_key = row_max == float("-inf")
    row_sum = tl.where(broken, float("nan"), tl.where(no_key, 1.0, row_sum))
    lse = (row_max + tl.log2(row_sum)) * 0.6931471805599453  # back to the natural logarithm
    part = ((batch * N + n) * num_kv_heads * GROUPS + head) * SPLITS + split
    tl.store(
        out_ptr + part[:, None] * D + column[None, :],
        (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty),
        mask=(n < N)[:, None] & in_row,
    )
    tl.store(lse_ptr + part, lse, mask=n < N)


@triton.jit
def merge_kernel(
    parts_ptr, part_lse_ptr, out_ptr, lse_ptr,
    SPLITS: tl.constexpr, D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """OnlineSoftmax.merge of all parts of a row, each of which is the state (lse, 1, out)."""
    row = tl.cast(tl.program_id(0), tl.int64)
    column = tl.arange(0, BLOCK_D)
    split = tl.arange(0, BLOCK_S)
    part = row * SPLITS + split
    part_lse = tl.load(part_lse_ptr + part, mask=split < SPLITS, other=float("-inf"))
    out = tl.load(
        parts_ptr + part[:, None] * D + column[None, :],
        mask=(split < SPLITS)[:, None] & (column < D)[None, :],
        other=0.0,
    )
    row_max = tl.max(part_lse, 0)
    p = tl.exp(part_lse - tl.where(row_max == float("-inf"), 0.0, row_max))
    row_sum = tl.sum(p, 0)
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # no key
    acc = tl.sum(p[:, None] * out, 0)
    out = (acc / row_sum).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * D + column, out, mask=column < D)
    tl.store(lse_ptr + row, row_max + tl.log(row_sum))


def slots_of(device: torch.device, bytes_of_a_program: int) -> int:
    """How many programs the device runs at a time if each takes this much shared memory."""
    if device.type == "cpu":
        return 8  # the interpreter runs programs one by one; several make tests merge parts
    each = properties(device).shared_memory_per_block_optin // bytes_of_a_program
    return multiprocessors(device) * max(1, each)


def stages_of(tile: Tile, *, paged: bool) -> int:
    """num_stages for a launch. With pages, a page's number arrives before its keys, so the keys are
    under way for only half of the stages.
    """
    return 2 * tile.num_stages - 1 if paged else tile.num_stages


def split_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache_lengths: Tensor,
    block_table: Tensor | None,
    params: Tensor | None,
    left: int,
    right: int,
    scale: float,
    score_mod: str,
    splits: str,
) -> tuple[Tensor, Tensor]:
    """out (B, H, N, D) and lse (B, H, N) float32, for q (B, H, N, D); k, v (B, H_kv, M, D), or (P,
    H_kv, page_size, D) with a block_table (B, max_pages).

    cache_lengths: (B,). left, right: how many keys a query sees before and after its position.
    score_mod, params: as in launch.py. splits: auto, fixed or a number.
    """
    dtype, device = q.dtype, q.device
    q, k, v = map(readable, (q, k, v))
    if k.stride() != v.stride():  # the kernel has one offset for both
        k, v = k.contiguous(), v.contiguous()
    block_table = None if block_table is None else block_table.contiguous()
    (batch, num_heads, num_queries, head_dim), (_, num_kv_heads, num_keys, _) = q.shape, k.shape
    page_size = 0
    if block_table is not None:
        page_size, num_keys = num_keys, num_keys * block_table.shape[1]
    groups, block_d = num_heads // num_kv_heads, padded_head_dim(head_dim)
    rows = num_queries * groups
    tile = pick_tile("decoding", head_dim, q.dtype, device)
    block_q = min(tile.block_q, padded_head_dim(rows))  # a power of two that holds the rows
    programs = batch * num_kv_heads * tiles_of(rows, block_q)
    memory = 2 * tile.num_stages * tile.block_kv * block_d * q.element_size()
    tiles = tiles_of(min(num_keys, left + num_queries + right), tile.block_kv)
    count = num_splits(splits, programs=programs, tiles=tiles, slots=slots_of(device, memory))

    out, lse = outputs(q)
    parts, part_lse = out, lse
    if count > 1:
        parts = lse.new_empty(batch, num_queries, num_heads, count, head_dim)
        part_lse = lse.new_empty(parts.shape[:-1])
    split_kernel[(programs, count)](
        q, k, v, parts, part_lse, cache_lengths.contiguous(), block_table, params,
        *q.stride()[:3], *k.stride()[:3], batch_stride(block_table),
        num_kv_heads, num_queries, num_keys, len(k), left, right,
        scale * (1 if score_mod else math.log2(math.e)),  # a score modifier takes natural scores
        find_score_mod(score_mod), groups, count, page_size, head_dim, block_q, tile.block_kv,
        block_d, num_warps=tile.num_warps, num_stages=stages_of(tile, paged=page_size > 0),
    )  # fmt: skip
    if count > 1:
        merge_kernel[(batch * num_queries * num_heads,)](
            parts, part_lse, out, lse, count, head_dim, triton.next_power_of_2(count), block_d
        )
    return out.to(dtype), lse


split_attention_op = operator("split_attention")(split_attention)


@torch.library.register_fake("tilegpt::split_attention")
def outputs(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """Memory for out (B, H, N, D) and lse (B, H, N), where a token's heads are side by side."""
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
    return empty_heads(q.shape, q), lse.transpose(1, 2)
