"""The output of scripts/trace.py for a ring of ranks: who holds which keys in each hop, and what
each merge does to a query.
"""

from typing import Any

import torch
from torch import Tensor

from attention.ring_trace import Hop, RingTrace
from scripts.tables import text_table
from scripts.trace_page import MAX_NUMBERS, around, causes, fill, numbers

SHOWN = 4  # entries of acc and of the output
MAX_RANKS = 32  # the page has a cell for each rank and hop
# the broken quantity, in words
WHY = {
    "block": "the sums of the block itself are not finite",
    "alpha": "what multiplies the past passes the largest number of its dtype",
    "beta": "what multiplies the block passes the largest number of its dtype",
    "row_sum": "row_sum passes the largest number of its dtype",
    "acc": "acc passes the largest number of its dtype",
    "row_sum = 0": "every weight rounds to 0, and 0/0 is left to divide",
}


def first_merge(found: RingTrace) -> str:
    """A sentence on where the finite range was left."""
    assert found.first is not None
    query, hop, cause, score = found.first
    rank = found.ranks[query]
    return (
        f"The first merge to leave the finite range is that of query {query}, on rank {rank} in "
        f"hop {hop}, with the keys of rank {found.cells[rank][hop].source}. The largest score so "
        f"far is {score:.2f}: {WHY[cause]}."
    )


def ring_sentence(found: RingTrace) -> str:
    """A sentence on what all ranks compute, and what they send."""
    pairs = sorted({sum(cell.pairs for cell in hops) for hops in found.cells})
    text = f"Every rank computes {pairs[0]} pairs of query and key."
    if len(pairs) > 1:
        text = f"A rank computes {pairs[0]} to {pairs[-1]} pairs of query and key."
    sent = {(cell.elements, cell.bytes) for hops in found.cells for cell in hops[:-1]}
    if sent:
        elements, size = max(sent)
        text += (
            " In each hop but the last it sends the keys and values that it holds to the next "
            f"rank: {'at most ' if len(sent) > 1 else ''}{elements:,} numbers, {size:,} bytes."
        )
    return text


def ring_table(found: RingTrace) -> str:
    """A table of who holds which keys, and of the followed row, hop by hop."""
    i, ranks = found.row, range(len(found.cells))
    held = [["keys", *(f"hop {hop}" for hop in ranks)]]
    held += [
        [
            f"rank {rank}",
            *(f"of {each.source}: {spans(each.keys) or '-'} ({each.pairs} pairs)" for each in row),
        ]
        for rank, row in enumerate(found.cells)
    ]
    heads = ("block max", "block sum", "alpha", "beta", "row_max", "row_sum", "|acc|", "weight")
    merges = [["hop", "keys of", *heads, "of ring", "error", "of ring", ""]]
    for hop, (step, exact) in enumerate(zip(found.found, found.exact, strict=True)):
        figures = (step.block.row_max, step.block.row_sum, step.alpha, step.beta)
        figures += (step.state.row_max, step.state.row_sum, step.state.acc.abs().amax(-1))
        figures += (step.weight, exact.weight, found.error[hop], found.exact_error[hop])
        texts = ("-" if x is None else f"{x[i].item():.4g}" for x in figures)
        source = f"rank {found.cells[found.ranks[i]][hop].source}"
        merges.append([str(hop), source, *texts, "<- breaks" if hop == found.breaks[i] else ""])
    return (
        f"{text_table(held, words=len(held[0]))}\n\nquery {i}, on rank {found.ranks[i]}\n"
        f"{text_table(merges, words=2)}"
    )


def spans(positions: list[int]) -> str:
    """Join consecutive positions: 0, 1, 6, 7 becomes "0-1, 6-7"."""
    parts: list[list[int]] = []
    for x in positions:
        if parts and x == parts[-1][1] + 1:
            parts[-1][1] = x
        else:
            parts.append([x, x])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def render_ring(found: RingTrace, about: dict[str, Any]) -> str:
    """The page. `about` holds what every page has, see scripts.trace. If there are many queries, it
    shows those around the followed one.
    """
    world, num_queries = len(found.cells), len(found.fates)
    count = min(num_queries, MAX_NUMBERS // (2 * world * (3 * SHOWN + 9)))
    rows = around(found.row, range(num_queries), count)
    kept = slice(rows.start, rows.stop)
    lanes = {"exact": (found.exact, found.exact_error), "found": (found.found, found.error)}
    data = about | {
        "rows": list(rows),
        "row": found.row - rows.start,
        "ranks": found.ranks[kept],
        "fates": found.fates[kept],
        "breaks": found.breaks[kept],
        "cells": [
            [cell._asdict() | {"keys": spans(cell.keys)} for cell in hops] for hops in found.cells
        ],
        "ring": ring_sentence(found),
        "why": WHY,
        "sums": {
            name: numbers(torch.stack([hop.weight for hop in hops]).sum(0)[kept])
            for name, (hops, _) in lanes.items()
        },
        "steps": [
            {name: lane(hops[hop], error[hop], kept) for name, (hops, error) in lanes.items()}
            for hop in range(world)
        ],
    }
    return fill("trace_ring.js", data)


def lane(hop: Hop, error: Tensor, kept: slice) -> dict[str, Any]:
    """One backend's numbers for one hop."""
    block, state = hop.block, hop.state
    figures = {
        "block_max": block.row_max[:, 0],
        "block_sum": block.row_sum[:, 0],
        "block_acc": block.acc[:, :SHOWN],
        "row_max": state.row_max[:, 0],
        "row_sum": state.row_sum[:, 0],
        "acc": state.acc[:, :SHOWN],
        "out": hop.out[:, :SHOWN],
        "weight": hop.weight,
        "error": error,
        "alpha": hop.alpha,
        "beta": hop.beta,
    }
    shown = {name: None if x is None else numbers(x[kept]) for name, x in figures.items()}
    return shown | {"causes": causes(hop, kept)}
