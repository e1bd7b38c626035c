"""Every backend inside the models of transformers (Hugging Face).

    import attention.hf
    AutoModelForCausalLM.from_config(config, attn_implementation="tilegpt_tiled")

`expose(get_backend("tiled", block_kv=16), "small_tiles")` adds a backend with options, or your own.

transformers describes a mask by a function of positions. This module turns it into one interval of
keys per query, which attention() can express:

    left padding of 2     window of 2           two documents         right padding of 1
       . . . .   0:0         1 . . .   0:1         1 . . .   0:1         1 . . .   0:1
       . . . .   0:0         1 1 . .   0:2         1 1 . .   0:2         1 1 . .   0:2
       . . 1 .   2:3         . 1 1 .   1:3         . . 1 .   2:3         1 1 1 .   0:3
       . . 1 1   2:4         . . 1 1   2:4         . . 1 1   2:4         1 1 1 .   0:3

Consecutive rows whose ends move alike become one call of attention() on only their keys. So a
backend needs only causal attention for these masks, and padding costs no time.

Dimensions: B batch, H heads, N queries, M keys, D head dim.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from attention import BACKENDS, Backend, attention

# how both ends of a row's interval may move to the next row within a piece
MOVES = ((0, 0), (0, 1), (1, 1))


def expose(backend: Backend, name: str | None = None) -> None:
    """Let models use `backend` as attn_implementation=name, by default tilegpt_NAME."""
    name = name or f"tilegpt_{backend.name}"
    AttentionInterface.register(name, attention_function(backend))
    AttentionMaskInterface.register(name, interval_mask)


def attention_function(backend: Backend) -> Callable[..., tuple[Tensor, None]]:
    """`backend` as a function for AttentionInterface.

    The function raises ValueError for dropout of attention weights, a bias for each pair of
    positions, a paged cache, a mask with gaps, and inputs that the backend does not take.
    """

    def forward(
        module: torch.nn.Module,
        query: Tensor,  # (B, H, N, D)
        key: Tensor,  # (B, H_kv, M, D)
        value: Tensor,
        attention_mask: Tensor | None,  # of interval_mask(), or a user's own (B, 1, N, M) bool
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,  # the sinks of gpt-oss, (H,)
        position_bias: Tensor | None = None,  # a bias for each pair of positions
        cache: object = None,  # of pages
        **_: Any,
    ) -> tuple[Tensor, None]:
        """The output (B, N, H, D), and no weights."""
        if dropout or not (position_bias is None and cache is None):
            raise ValueError(
                f"attention={backend.name} takes no position_bias, no paged cache and no dropout "
                f"of attention weights; {dropout=} here (the model's config can set it to 0)"
            )

        def attend(sequences: slice | Tensor, piece: Piece) -> Tensor:
            k, v = (x[sequences][:, :, piece.keys] for x in (key, value))
            return attention(
                query[sequences][:, :, piece.queries],
                k,
                v,
                backend=backend,
                causal=piece.causal,
                window=piece.window,
                scale=scaling,
                softcap=softcap,
                sinks=s_aux,
            ).out

        if attention_mask is None:  # all keys, or those of a causal mask
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            n = query.shape[2]
            # in its first pass, a static cache has unused room behind the keys; later a single
            # query sees all keys
            keys = slice(n if causal and n > 1 else None)
            out = attend(slice(None), Piece(slice(None), keys, causal))
        else:
            out = torch.zeros_like(query)
            patterns, which = own_intervals(attention_mask).unique(dim=0, return_inverse=True)
            for number, pattern in enumerate(patterns):
                same = which == number
                for piece in pieces(pattern):
                    out[same, :, piece.queries] = attend(same, piece)
        return out.transpose(1, 2).contiguous(), None

    return forward


class Piece(NamedTuple):
    """The queries of one call of attention(), and the keys that they see."""

    queries: slice
    keys: slice
    causal: bool = True
    window: int | None = None


def pieces(pattern: Tensor) -> Iterator[Piece]:
    """The rows of one sequence, intervals (N, 2), cut where the ends stop moving alike.

    In a piece, each row gains a key (causal), or gains one and loses one (causal with a window), or
    all rows see the same keys. Rows without a key belong to no piece.
    """
    rows, moves = pattern.tolist(), pattern.diff(dim=0).tolist()
    start, move = 0, None
    for stop, next_move in enumerate([*map(tuple, moves), None], 1):
        if next_move in (MOVES if move is None else (move,)):
            move = next_move
            continue
        (first, _), (lo, last) = rows[start], rows[stop - 1]
        if first < last:
            window = last - lo if move == (1, 1) else None
            yield Piece(slice(start, stop), slice(first, last), move != (0, 0), window)
        start, move = stop, None


def interval_mask(**mask: Any) -> Tensor | None:
    """A mask for AttentionMaskInterface: intervals (B, 1, N, 2), or None for a plain mask, as in
    PyTorch's own attention.

    Raises ValueError for a mask with gaps, such as padding between tokens.
    """
    boolean = sdpa_mask(**mask)
    return None if boolean is None else intervals(boolean)


def own_intervals(mask: Tensor) -> Tensor:
    """Intervals (B, N, 2) on the CPU, from a mask of interval_mask() or of the user."""
    if mask.is_floating_point():
        raise ValueError(
            f"a mask of {tuple(mask.shape)} in {mask.dtype} is added to the scores, which "
            "attention() cannot do; give a boolean one, or attention_mask (B, M) with 0 for padding"
        )
    return (intervals(mask) if mask.dtype == torch.bool else mask)[:, 0].cpu()


def intervals(mask: Tensor) -> Tensor:
    """The interval of keys that each row of a boolean mask (B, 1, N, M) sees, (B, 1, N, 2) int64.

    A row without a key has 0:0. Raises ValueError for a row with several runs of keys.
    """
    before = torch.nn.functional.pad(mask[..., :-1], (1, 0))
    if ((mask & ~before).sum(-1) > 1).any():
        raise ValueError(
            "a query sees one run of keys in attention(), and this mask has gaps: pad on the left "
            "(tokenizer.padding_side='left'), or use attn_implementation='sdpa'"
        )
    first = mask.byte().argmax(-1)
    return torch.stack((first, first + mask.sum(-1)), dim=-1)


for each in BACKENDS.values():
    expose(each)
