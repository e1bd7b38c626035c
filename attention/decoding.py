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

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from attention.interface import (
    INTEGERS,
    AttentionOutput,
    dtype_name,
    statistics_dtype,
    values_can_be_read,
)
from attention.mask import VisibleKeys, Window, visible_keys
from attention.online_softmax import OnlineSoftmax

FIXED_SPLITS, MOST_SPLITS = 16, 128
# costs, in the time that a program takes for one tile of keys: START of a program, MERGE of a row
# and MERGE_SPLIT of each split. TAIL: the share of a program's time in which only the last ones
# run. Fitted to times of an H200, measured at 6587e35 by python -m lab.decoding
START, MERGE, MERGE_SPLIT, TAIL = 0.25, 4.0, 0.05, 0.25


def split_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: VisibleKeys,
    *,
    scale: float,
    splits: int,
    softcap: float | None = None,
    block_kv: int = 64,
) -> AttentionOutput:
    """Attention of q (B, H, N, D) to k, v (B, H_kv, M, D), in `splits` splits of whole tiles of
    keys.
    """
    q, dtype = q.unflatten(1, (k.shape[1], -1)), statistics_dtype(q)  # (B, H_kv, G, N, D)
    seen = visible.mask()  # (B or 1, 1, N, M)
    # a cache has memory that is not written yet, and 0 * NaN would be NaN
    v = v.masked_fill(~seen.any(2).unsqueeze(-1), 0.0).unsqueeze(2)
    scores = q.to(dtype) @ k.to(dtype).unsqueeze(2).mT * scale  # (B, H_kv, G, N, M)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen.unsqueeze(2), -torch.inf)
    state = empty = OnlineSoftmax.empty(q, dtype=dtype, value_dim=v.shape[-1])
    for own in keys_of_splits(visible, splits, block_kv):
        part = empty.update(scores.masked_fill(~own[:, None, None, None], -torch.inf), v)
        state = state.merge(part)
    out, lse = state.finalize()
    return AttentionOutput(out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2))


def keys_of_splits(visible: VisibleKeys, splits: int, block_kv: int) -> Iterator[Tensor]:
    """A mask of each split's own keys, (B or 1, M). Splits differ by at most one tile. The masks
    depend only on what the sequence sees, not on the rest of the batch.
    """
    first, last = visible.lo.amin(1, keepdim=True), visible.hi.amax(1, keepdim=True)
    tiles = (last - first + block_kv - 1) // block_kv
    j = torch.arange(visible.num_keys, device=first.device)
    for split in range(splits):
        start, end = (first + x * tiles // splits * block_kv for x in (split, split + 1))
        yield (j >= start) & (j < end)


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
    (num_pages, _, room, _), broken = k.shape, cache_lengths < 0
    if block_table is not None:
        used = torch.arange(block_table.shape[1], device=k.device) * room < cache_lengths[:, None]
        outside = (block_table < 0) | (block_table >= num_pages)
        broken, room = broken | (used & outside).any(1), room * block_table.shape[1]
        k, v = gathered(k, block_table), gathered(v, block_table)
    broken = (broken | (cache_lengths > room)).view(-1, 1, 1)
    visible = visible_keys(q, k, causal=causal, window=window, cache_lengths=cache_lengths)
    count = num_splits(splits)
    out, lse = split_attention(q, k, v, visible, scale=scale, softcap=softcap, splits=count)
    assert lse is not None
    nan = float("nan")
    return AttentionOutput(out.masked_fill(broken.unsqueeze(-1), nan), lse.masked_fill(broken, nan))


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
    count = int(splits) if isinstance(splits, str) and splits.isdecimal() else splits
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_SPLITS:
        raise ValueError(f"splits={splits} must be auto, fixed or a number of 1 to {MOST_SPLITS}")
    return count


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
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(
            "q must be (B, H, N, D) and k, v (B, H_kv, M, D), or with a block_table (P, page_size, "
            f"H_kv, D); got {shapes}"
        )
    if block_table is not None and (not k.numel() or k.shape[:3] != v.shape[:3]):
        raise ValueError(
            "k and v must have as many pages of one size, at least one; got k "
            f"{tuple(k.shape)}, v {tuple(v.shape)}"
        )
    _check_integers("cache_lengths", cache_lengths, q, dims=1)
    room = k.shape[2]
    if block_table is not None:
        _check_integers("block_table", block_table, q, dims=2)
        room = block_table.shape[1] * k.shape[1]
    if q.device.type != "cpu" or not values_can_be_read():
        return
    lengths = cache_lengths.tolist()
    if not 0 <= min(lengths) <= max(lengths) <= room:
        raise ValueError(f"cache_lengths must lie in 0 to {room}, the room; got {lengths}")
    if block_table is not None:
        num_pages, page_size = k.shape[:2]
        for row, length in zip(block_table.tolist(), lengths, strict=True):
            used = row[: -(-length // page_size)]
            if used and not 0 <= min(used) <= max(used) < num_pages:
                raise ValueError(
                    f"a block_table's pages must lie in 0 to {num_pages - 1} as far as its "
                    f"sequence's {length} keys reach; got {used}"
                )


def _check_integers(name: str, x: Any, q: Tensor, *, dims: int) -> None:
    shape = ("(B,)", "(B, max_pages)")[dims - 1]
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor, its type is {type(x).__name__}")
    if x.ndim != dims or x.shape[0] != q.shape[0] or not x.numel() or x.dtype not in INTEGERS:
        raise ValueError(
            f"{name} must be integers of shape {shape} with B = {q.shape[0]}; got "
            f"{tuple(x.shape)} of {dtype_name(x.dtype)}"
        )
    if x.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}; got {x.device}")
