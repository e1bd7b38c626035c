"""Scorecards of other people's attention, on a CPU: each held to the properties by attn-conform.

    python -m lab.scorecards out=results/scorecards_cpu.json jax=.jax/bin/python

jax names a Python where jax is installed (`pip install jax`); without it JAX is left out. dtype is
fp32,bf16,fp16 unless given. EXPLAINED says of every red cell why it is red; one that it does not
know ends the command with an error, after the file is written.
"""

import importlib.metadata
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from conformance import exchange
from conformance.command import DTYPES, properties_of, set_up
from conformance.dialects import target
from conformance.minimise import Minimiser, Watched
from conformance.properties import Cell, examine
from scripts.arguments import command, default
from scripts.tables import Row
from training.environment import measured_on
from training.files import check_writable, write_json


def sdpa_math(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """PyTorch's attention by plain products."""
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(
            q, k, v, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )


class Card(NamedTuple):
    """An attention, the package that it comes from, and how attn-conform is to call it."""

    name: str
    package: str
    target: str
    dialect: str
    changes: dict[str, Any] = {}


TORCH, HERE, MODELS = "torch.nn.functional", "lab.scorecards", "transformers.models"
CARDS = (
    Card("SDPA (flash)", "torch", f"{TORCH}:scaled_dot_product_attention", "sdpa"),
    Card("SDPA (math)", "torch", f"{HERE}:sdpa_math", "sdpa"),
    Card(
        "FlexAttention, not compiled", "torch",
        "torch.nn.attention.flex_attention:flex_attention", "flex", {"backward": False},
    ),
    Card(
        "Llama, eager", "transformers", f"{MODELS}.llama.modeling_llama:eager_attention_forward",
        "hf",
    ),
    Card(
        "AttentionInterface, sdpa", "transformers",
        "transformers.integrations.sdpa_attention:sdpa_attention_forward", "hf",
    ),
)  # fmt: skip

MATRIX = "it holds the N x M matrix"
SCORES = "its scores are rounded to the inputs' dtype before the softmax in float32"
# by card and property, or by property alone
EXPLAINED = {
    ("SDPA (math)", "saved bytes"): MATRIX,
    ("SDPA (math)", "largest tensor"): MATRIX,
    ("Llama, eager", "saved bytes"): MATRIX,
    ("Llama, eager", "largest tensor"): MATRIX,
    ("AttentionInterface, sdpa", "saved bytes"): "its mask is an N x M matrix",
    ("AttentionInterface, sdpa", "largest tensor"): "its mask is an N x M matrix",
    **{
        ("Llama, eager", name): SCORES
        for name in (
            "large logits", "logits + 100", "logits - 120", "float32 statistics", "every length",
        )
    },
    ("JAX", "wider calls"): "a row without a key gives the mean of the values, and not 0",
}  # fmt: skip


@dataclass
class Options:
    out: Path = Path("scorecards.json")
    jax: str | None = None
    dtype: list[Literal["fp32", "bf16", "fp16"]] = default("fp32", "bf16", "fp16")


def red_cells(name: str, dtype: str, cells: list[Cell], scripts: dict[str, str]) -> list[Row]:
    return [
        {
            "dtype": dtype,
            "property": cell.property,
            "note": cell.note,
            "why": EXPLAINED.get((name, cell.property)),
            "lines_of_script": len(scripts[cell.property].splitlines())
            if cell.property in scripts
            else None,
        }
        for cell in cells
        if cell.status == "red"
    ]


def measure(card: Card, dtypes: list[str]) -> Row:
    """The card's figures; each red cell with the shortest call that shows it."""
    found = target(card.target, card.dialect, card.changes)
    start, red, counts = time.perf_counter(), [], Counter()
    for dtype in dtypes:
        subject = Watched(found.backend, "cpu", DTYPES[dtype], random_cases=20, seed=0)
        minimiser = Minimiser(found, subject)
        cells, scripts = [], {}
        for name, check in properties_of(subject).items():
            subject.tried.clear()
            cells.append(examine(subject, name, check))
            if cells[-1].status == "red" and (script := minimiser.script(cells[-1])):
                scripts[name] = script
        counts.update(cell.status for cell in cells)
        red += red_cells(card.name, dtype, cells, scripts)
    return {
        "name": card.name,
        "package": f"{card.package} {importlib.metadata.version(card.package)}",
        "dialect": card.dialect,
        "seconds": round(time.perf_counter() - start, 1),
        **{status: counts[status] for status in ("green", "red", "n/a")},
        "red_cells": red,
    }


def measure_jax(python: str) -> Row:
    """JAX's attention, by files."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        files = inputs, outputs = Path(folder, "inputs.npz"), Path(folder, "outputs.npz")
        exchange.export(inputs, 20, 0)
        script = Path(__file__).with_name("jax_outputs.py")
        run = partial(subprocess.run, check=True, capture_output=True, text=True)
        said = run([python, str(script), *map(str, files)]).stdout
        cells = list(exchange.judge(*files))
    counts = Counter(cell.status for cell in cells)
    return {
        "name": "JAX",
        "package": said.partition(":")[0],
        "dialect": "files",
        "seconds": round(time.perf_counter() - start, 1),
        **{status: counts[status] for status in ("green", "red", "n/a")},
        "red_cells": red_cells("JAX", "fp32", cells, {}),
    }


@command("scorecards", Options)
def main(options: Options) -> None:
    check_writable(options.out)
    device = torch.device("cpu")
    set_up(device)
    where = measured_on(device)
    rows = []
    for card in CARDS:
        rows.append(measure(card, options.dtype))
        print(f"{card.name}: {rows[-1]['red']} red, {rows[-1]['seconds']} s", file=sys.stderr)
    if options.jax is not None:
        rows.append(measure_jax(options.jax))
    write_json(options.out, {"environment": where, "dtypes": options.dtype, "cards": rows})
    unknown = [
        f"{row['name']}, {cell['property']}, {cell['dtype']}: {cell['note']}"
        for row in rows
        for cell in row["red_cells"]
        if cell["why"] is None
    ]
    if unknown:
        raise ValueError("; ".join(unknown))


if __name__ == "__main__":
    main()
