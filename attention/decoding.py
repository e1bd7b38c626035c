"""Attention of few queries to a cache of many keys: split the keys, then merge the parts.

A decoding step has one query a sequence. One program a head would leave most of a GPU idle, so
several programs share the keys of one head. Each program's result for a row is a state of the
streaming softmax, so parts merge like two tiles:

    tiles of keys   0 1 2 3 4 5 6 7 8 9      10 tiles, 4 splits
    split           0 0 1 1 1 2 2 3 3 3
    state           s0   s1    s2   s3       merge(merge(merge(s0, s1), s2), s3)

Dao et al., "Flash-Decoding for long-context inference" (2023). The cache of a sequence may also lie
in pages, as in Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (2023, arXiv:2309.06180). This is the specification, in plain PyTorch;
attention/kernels/decoding.py is the kernel.

Dimensions: B batch, H query heads, H_kv key/value heads, G query heads of a group, N queries, M
keys that the cache has room for, D head dim; P pages.
"""

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from attention.checks import check_tensor, shapes_of
from attention.interface import (
    INTEGERS,
    AttentionOutput,
    statistics_dtype,
    values_can_be_read,
)
from attention.mask import Window, visible_keys
from attention.online_softmax import OnlineSoftmax

BLOCK_KV = 64  # keys of a tile; the kernel has its own
FIXED_SPLITS, MOST_SPLITS = 16, 128
# costs, in the time that a program takes for one tile of keys: START of a program, MERGE of a row
# and MERGE_SPLIT of each split. TAIL: the share of a program's time in which only the last ones
# run. Fitted to times of an H200, measured at 6587e35 by python -m lab.decoding
START, MERGE, MERGE_SPLIT, TAIL = 0.25, 4.0, 0.05, 0.25


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache_lengths: Tensor,
    block_table: Tensor | None,
    *,
    causal: bool,
    scale: float,
    window: Window,
    softcap: float | None,
    splits: str | int,
) -> AttentionOutput:
    """The `decode` of a Backend, for attention_with_cache(). k, v are (B, H_kv, M, D), or with a
    block_table (P, H_kv, page_size, D).
    """
    outside = outside_cache(k, cache_lengths, block_table).view(-1, 1, 1)
    if block_table is not None:
        k, v = gathered(k, block_table), gathered(v, block_table)
    visible = visible_keys(q, k, causal=causal, window=window, cache_lengths=cache_lengths)
    # a cache has memory that is not written yet, and 0 * NaN would be NaN
    v = v.masked_fill(~visible.mask().any(2).unsqueeze(-1), 0.0).unsqueeze(2)
    rows, dtype = q.unflatten(1, (k.shape[1], -1)), statistics_dtype(q)  # (B, H_kv, G, N, D)
    scores = rows.to(dtype) @ k.to(dtype).unsqueeze(2).mT * scale  # (B, H_kv, G, N, M)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    state = empty = OnlineSoftmax.empty(rows, dtype=dtype, value_dim=v.shape[-1])
    first, last = visible.lo.amin(1, keepdim=True), visible.hi.amax(1, keepdim=True)
    # splits differ by at most one tile, and depend only on what the sequence sees
    tiles, count = (last - first + BLOCK_KV - 1) // BLOCK_KV, num_splits(splits)
    for split in range(count):
        start, end = (first + x * tiles // count * BLOCK_KV for x in (split, split + 1))
        lo, hi = (x.clamp(start, end) for x in (visible.lo, visible.hi))
        hidden = ~replace(visible, lo=lo, hi=hi).mask().unsqueeze(2)  # (B or 1, 1, 1, N, M)
        state = state.merge(empty.update(scores.masked_fill(hidden, -torch.inf), v))
    out, lse = (x.flatten(1, 2) for x in state.finalize())
    out = out.to(q.dtype).masked_fill(outside.unsqueeze(-1), torch.nan)
    return AttentionOutput(out, lse.masked_fill(outside, torch.nan))


def outside_cache(k: Tensor, cache_lengths: Tensor, block_table: Tensor | None) -> Tensor:
    """Whether the length of a sequence, or the number of a page that it uses, points outside the
    cache, (B,). k as in decode().
    """
    lengths, room = cache_lengths.long(), k.shape[2]
    outside = lengths < 0
    if block_table is not None:
        used = torch.arange(block_table.shape[1], device=k.device) * room < lengths[:, None]
        outside = outside | (used & ((block_table < 0) | (block_table >= len(k)))).any(1)
        room *= block_table.shape[1]
    return outside | (lengths > room)


def gathered(pages: Tensor, block_table: Tensor) -> Tensor:
    """(B, H_kv, max_pages * page_size, D) from the pages (P, H_kv, page_size, D) of each sequence.

    Table entries beyond a sequence's last page may hold any number: no query sees their keys.
    """
    own = pages[block_table.long().clamp(0, len(pages) - 1)]  # (B, max_pages, H_kv, page_size, D)
    return own.transpose(1, 2).flatten(2, 3)


def num_splits(splits: str | int, *, programs: int = 1, tiles: int = 1, slots: int = 1) -> int:
    """How many programs share the keys of a head: the number `splits`, FIXED_SPLITS for "fixed", or
    for "auto" as many as keep the device busy.

    programs: their number without splits. tiles: of keys, for each program. slots: how many
    programs the device runs at a time. Raises ValueError for any other `splits`.
    """
    if splits == "auto":
        return busy_splits(programs, tiles, slots)
    if splits == "fixed":
        return FIXED_SPLITS
    # settings of a run are text
    if not str(splits).isdecimal() or not 1 <= int(splits) <= MOST_SPLITS:
        raise ValueError(f"splits={splits} must be auto, fixed or a number of 1 to {MOST_SPLITS}")
    return int(splits)


@lru_cache(maxsize=4096)
def busy_splits(programs: int, tiles: int, slots: int) -> int:
    """The number of splits that takes the least time. A slot starts its next program as soon as one
    ends, so more programs end more evenly.
    """

    def time(splits: int) -> float:
        own, rounds = -(-tiles // splits) + START, programs * splits / slots
        merged = MERGE + MERGE_SPLIT * splits if splits > 1 else 0.0
        return (own if rounds <= 1 else (rounds + TAIL) * own) + merged

    return min(range(1, min(tiles, MOST_SPLITS) + 1), key=time)


def check_cache(
    q: Tensor, k: Tensor, v: Tensor, cache_lengths: Tensor, block_table: Tensor | None
) -> None:
    """Raise ValueError for inputs that attention_with_cache() cannot take, before the checks of all
    calls. Values are checked only on a CPU: a decoding step should not wait for its GPU.
    """
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(
            "q must be (B, H, N, D) and k, v (B, H_kv, M, D), or with a block_table (P, page_size, "
            f"H_kv, D); got {shapes_of(q, k, v)}"
        )
    if block_table is not None and (not k.numel() or k.shape[:3] != v.shape[:3]):
        raise ValueError(
            "k and v must have as many pages of one size, at least one; got k "
            f"{tuple(k.shape)}, v {tuple(v.shape)}"
        )
    batch = q.shape[0]
    check_tensor("cache_lengths", cache_lengths, q, INTEGERS)
    if cache_lengths.shape != (batch,):
        raise ValueError(
            f"cache_lengths must have shape (B,) with B = {batch}; got {tuple(cache_lengths.shape)}"
        )
    if block_table is not None:
        check_tensor("block_table", block_table, q, INTEGERS)
        if block_table.ndim != 2 or len(block_table) != batch or not block_table.numel():
            raise ValueError(
                f"block_table must have shape (B, max_pages) with B = {batch}; got "
                f"{tuple(block_table.shape)}"
            )
        k = k.transpose(1, 2)
    if q.device.type != "cpu" or not values_can_be_read():
        return
    if outside_cache(k, cache_lengths, block_table).any():
        table = "" if block_table is None else f", block_table {block_table.tolist()}"
        raise ValueError(
            f"a sequence points outside its cache, k {tuple(k.shape)}: cache_lengths "
            f"{cache_lengths.tolist()}{table}"
        )
