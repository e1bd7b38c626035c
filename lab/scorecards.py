"""Scorecards of attention from other packages and of ours: attn-conform checks the properties of
each.

    python -m lab.scorecards out=results/scorecards_cpu.json jax=.jax/bin/python
    python -m lab.scorecards device=cuda processes=3 tutorial=06-fused-attention.py

Each card and dtype runs in a separate process, or in several if there are more processes than
these. A process writes into the folder OUT.parts after each cell, so one that hangs or dies loses
neither other cards nor its own cells. A card whose
package is missing is left out, and the file says so. EXPLAINED has the reason for every red cell.
If one has none, the command writes its file and ends with an error. The arguments:

    out        the JSON file (scorecards.json)
    device     cpu or cuda; each has different cards (cpu)
    card       several names, separated by commas, or all (all)
    dtype      several, separated by commas (bf16,fp16,fp32)
    cases      random shapes in each dtype (20)
    processes  number of processes at the same time (1), spread over the GPUs that PyTorch sees
    seconds    after which a process is stopped (1800)
    total      seconds after which all are stopped and no other is started (36000)
    jax        a Python where jax is installed (`pip install jax`); without it JAX is left out
    tutorial   Triton's python/tutorials/06-fused-attention.py; without it its card is left out
"""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fcntl import LOCK_EX, flock
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attention import get_backend
from attention.interface import Refusal
from conformance import exchange
from conformance.backend_under_test import Subject
from conformance.command import DTYPES, properties_of, set_up
from conformance.dialects import target
from conformance.minimise import Minimiser
from conformance.properties import PROPERTIES, SLOW, Cell, Property, examine, why_unusable
from lab.side_by_side import measured, take_gpu
from scripts.arguments import Count, Natural, command, default
from scripts.tables import Row
from training.device import pick_device
from training.environment import measured_on
from training.files import check_writable, write_json


def by_kernel(
    q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False, *, kernel: SDPBackend
):
    """PyTorch's attention with this kernel. Raises Refusal if it does not take the inputs."""
    with sdpa_kernel(kernel):
        try:
            return scaled_dot_product_attention(
                q, k, v, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
            )
        except RuntimeError as error:
            if not re.match("No (available kernel|viable backend)", str(error)):
                raise
            raise Refusal(f"{kernel.name} does not take these inputs") from error


sdpa_math = partial(by_kernel, kernel=SDPBackend.MATH)
sdpa_flash = partial(by_kernel, kernel=SDPBackend.FLASH_ATTENTION)
sdpa_cudnn = partial(by_kernel, kernel=SDPBackend.CUDNN_ATTENTION)
sdpa_efficient = partial(by_kernel, kernel=SDPBackend.EFFICIENT_ATTENTION)


@cache
def compiled_flex():
    from torch.nn.attention.flex_attention import flex_attention

    # every new mask or head dim compiles again; past the limit it would run uncompiled
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.accumulated_recompile_limit = 1024
    # else a second softcap becomes an argument of the graph, which its kernel cannot read
    torch._dynamo.config.specialize_float = True
    return torch.compile(flex_attention)


def flex_compiled(
    q, k, v, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False
):
    return compiled_flex()(q, k, v, score_mod, block_mask, scale, enable_gqa, return_lse=return_lse)


PORTABLE = get_backend("triton", kernel="portable")
HOPPER = get_backend("triton", kernel="hopper")


class Card(NamedTuple):
    """An attention, its package, and how attn-conform calls it."""

    name: str
    package: str
    target: str
    dialect: str | None = None  # None for a Backend
    changes: dict[str, Any] = {}


OURS = "tilegpt"  # need not be installed
TORCH, HERE, MODELS = "torch.nn.functional", "lab.scorecards", "transformers.models"
FLEX = "torch.nn.attention.flex_attention:flex_attention"
LLAMA = Card(
    "Llama (eager)", "transformers", f"{MODELS}.llama.modeling_llama:eager_attention_forward", "hf"
)
HF_SDPA = Card(
    "AttentionInterface (sdpa)", "transformers",
    "transformers.integrations.sdpa_attention:sdpa_attention_forward", "hf",
)  # fmt: skip
MATH = Card("SDPA (math)", "torch", f"{HERE}:sdpa_math", "sdpa")
NARROW = {"dtypes": "bf16,fp16"}
EIGHTS = ",".join(map(str, range(8, 257, 8)))
TUTORIAL = "fused_attention_tutorial"  # name of the module that we load from its file
CARDS = {
    "cpu": (
        Card("SDPA (flash)", "torch", f"{TORCH}:scaled_dot_product_attention", "sdpa"),
        MATH,
        Card("FlexAttention (not compiled)", "torch", FLEX, "flex", {"backward": False}),
        LLAMA,
        HF_SDPA,
    ),
    # the slowest first
    "cuda": (
        Card(
            "FlashAttention-4", "flash-attn-4", "flash_attn.cute:flash_attn_func", "fa",
            NARROW | {"window_form": "pair_or_none", "head_dims": EIGHTS},
        ),
        Card("FlexAttention (compiled)", "torch", f"{HERE}:flex_compiled", "flex"),
        Card("FlashAttention-2", "flash-attn", "flash_attn:flash_attn_func", "fa", NARROW),
        Card(
            "Triton's tutorial", "triton", f"{TUTORIAL}:_attention", "triton-tutorial",
            # on Hopper its test does not use warp specialisation either
            {"dtypes": "fp16", "head_dims": "64,128", "constants": "False"},
        ),
        Card("SDPA (cuDNN)", "torch", f"{HERE}:sdpa_cudnn", "sdpa", NARROW | {"value_dim": False}),
        Card(
            "SDPA (flash)", "torch", f"{HERE}:sdpa_flash", "sdpa",
            NARROW | {"mask": "", "value_dim": False},
        ),
        Card(
            "SDPA (memory-efficient)", "torch", f"{HERE}:sdpa_efficient", "sdpa", {"gqa": "no"}
        ),
        MATH,
        LLAMA,
        HF_SDPA,
        Card("ours (Hopper)", OURS, f"{HERE}:HOPPER"),
        Card("ours (portable)", OURS, f"{HERE}:PORTABLE"),
        Card("ours (tiled)", OURS, "tiled"),
        Card("ours (naive)", OURS, "naive"),
    ),
}  # fmt: skip


class Reason(NamedTuple):
    """Why a cell is red, and where that was reported."""

    why: str
    # an issue, "by design", "new" (no issue of the project was found) or "open" (not looked up)
    known: str


MATRIX = Reason("it holds the N x M matrix", "by design")
MASK = Reason("its mask is an N x M matrix", "by design")
SCORES = Reason(
    "its scores are rounded to the inputs' dtype before the softmax in float32",
    "https://github.com/huggingface/transformers/pull/33317",
)
HALF_TILE = Reason(
    "cuDNN's backward scores what fills half a tile up as 0, without its own causal mask: NaN",
    "https://github.com/pytorch/pytorch/issues/196678",
)
# by card and property
EXPLAINED = {
    ("SDPA (math)", "saved bytes"): MATRIX,
    ("SDPA (math)", "largest tensor"): MATRIX,
    ("ours (naive)", "saved bytes"): MATRIX,
    ("ours (naive)", "largest tensor"): MATRIX,
    ("Llama (eager)", "saved bytes"): MATRIX,
    ("Llama (eager)", "largest tensor"): MATRIX,
    ("AttentionInterface (sdpa)", "saved bytes"): MASK,
    ("AttentionInterface (sdpa)", "largest tensor"): MASK,
    **{
        ("Llama (eager)", name): SCORES
        for name in (
            "forward", "large logits", "logits + 100", "logits - 120", "float32 statistics",
            "every length",
        )
    },
    ("AttentionInterface (sdpa)", "every length"): HALF_TILE,
    **{
        (card, "strides and views"): Reason(
            "it reads 16 bytes at a time, and does not look whether a view begins there",
            "https://github.com/pytorch/pytorch/issues/183484",
        )
        for card in (
            "SDPA (flash)", "SDPA (cuDNN)", "SDPA (memory-efficient)", "AttentionInterface (sdpa)",
        )
    },
    **{
        ("Triton's tutorial", name): Reason(
            "its backward rounds k * scale to 16 bits, the forward does not",
            "https://github.com/triton-lang/triton/issues/5971",
        )
        for name in (
            "large logits", "logits + 100", "logits - 120", "float32 statistics", "every length",
        )
    },
    ("SDPA (cuDNN)", "every length"): HALF_TILE,
    **{
        (card, "call history"): Reason(
            "what cuDNN compiled for a backward pass is kept without the strides of d_out",
            "https://github.com/pytorch/pytorch/pull/191576",  # the same in its varlen function
        )
        for card in ("SDPA (cuDNN)", "AttentionInterface (sdpa)")
    },
    **{
        ("SDPA (cuDNN)", name): Reason("a row without a key gives the mean of the values", "new")
        for name in ("rows without a key", "mask positions", "wider calls")
    },
    **{
        ("Triton's tutorial", name): Reason(
            "its backward takes q, k, v, out and d_out in one layout alone", "by design"
        )
        for name in ("strides and views", "call history")
    },
    ("FlashAttention-4", "gradients"): Reason(
        "dv of grouped heads is wrong at head_dim 40; the open pull request is about dq at 72 and "
        "104",
        "https://github.com/Dao-AILab/flash-attention/pull/2896",
    ),
    ("FlashAttention-4", "optional arguments"): Reason(
        "its softcap takes the GPU's approximate tanh, which shows in a float32 lse", "by design"
    ),
    ("FlexAttention (compiled)", "streams and graphs"): Reason(
        "the mask is built inside the captured call, from numbers of the CPU", "by design"
    ),
    ("FlexAttention (compiled)", "strides and views"): Reason(
        "it counts rows in 32 bits, so it reads outside where they are 2^31 elements apart "
        "(its script was run in bf16)",
        "https://github.com/pytorch/pytorch/issues/190857",
    ),
    ("FlexAttention (compiled)", "largest tensor"): Reason(
        "create_block_mask evaluates the mask of all N x M pairs, unless it is compiled too",
        "by design",
    ),
    ("JAX", "wider calls"): Reason("a row without a key gives the mean of the values", "new"),
}  # fmt: skip

# by property
JAX_SCRIPTS = {
    "wider calls": '''\
"""out of a query that sees no key: written by hand, as attn-conform's scripts call torch."""

import jax.numpy as np
from jax.nn import dot_product_attention

q = k = v = np.arange(1.0, 5.0).reshape(1, 2, 1, 2)
seen = np.array([[False, False], [True, True]])[None, None]
found = dot_product_attention(q, k, v, mask=seen)
error = abs(found[0, 0]).max()
print(f"out: error {error:.3g}, allowed 0")
assert error == 0
'''
}


@dataclass
class Options:
    out: Path = Path("scorecards.json")
    device: Literal["cpu", "cuda"] = "cpu"
    card: list[str] = default("all")
    dtype: list[Literal["fp32", "bf16", "fp16"]] = default("bf16", "fp16", "fp32")
    cases: Natural = 20
    processes: Count = 1
    seconds: Count = 1800
    total: Count = 36000
    jax: str | None = None
    tutorial: Path | None = None

    def __post_init__(self) -> None:
        names = [card.name for card in CARDS[self.device]]
        if unknown := [name for name in self.card if name not in ("all", *names)]:
            raise ValueError(f"card={unknown[0]} is not one of: {', '.join(names)}")
        if self.tutorial is not None and not self.tutorial.is_file():
            raise ValueError(f"tutorial={self.tutorial} is not a file")

    @property
    def cards(self) -> list[Card]:
        every = self.card == ["all"]
        return [card for card in CARDS[self.device] if every or card.name in self.card]


def why_left_out(card: Card, tutorial: Path | None) -> str:
    """Why the card cannot be measured here; "" if it can."""
    if card.target.startswith(TUTORIAL) and tutorial is None:
        return "its file is not given, by tutorial="
    if card.package == OURS:
        return ""
    try:
        importlib.metadata.version(card.package)
    except importlib.metadata.PackageNotFoundError:
        return f"{card.package} is not installed"
    return ""


def version_of(package: str) -> str:
    return package if package == OURS else f"{package} {importlib.metadata.version(package)}"


def load_tutorial(file: Path) -> None:
    """Import the file as module TUTORIAL."""
    # under pytest it uses one tile size, and does not time dozens for every length
    os.environ["PYTEST_VERSION"] = "none"
    spec = importlib.util.spec_from_file_location(TUTORIAL, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[TUTORIAL] = module
    spec.loader.exec_module(module)


class Examined(NamedTuple):
    """A cell, with the data from which its script is made."""

    dtype: str
    cell: Cell
    subject: Subject
    tried: list


def examined(subjects: dict[str, Subject], properties: dict[str, Property]) -> Iterator[Examined]:
    """The cells of each dtype, until the device becomes unusable."""
    for name, check in properties.items():
        for dtype, subject in subjects.items():
            if why_unusable(subject.device):
                return
            cell = examine(subject, name, check)
            yield Examined(dtype, cell, subject, list(subject.tried))


def measure(card: Card, options: Options, names: list[str], number: int, part: Path) -> None:
    """Write the card's results for these properties to `part` again after each cell, with the
    smallest failing call of each red cell.
    """
    set_up(torch.device(options.device))
    take_gpu(options.device, number)
    if options.tutorial is not None and card.target.startswith(TUTORIAL):
        load_tutorial(options.tutorial)
    start, done, scripts = time.perf_counter(), [], {}
    found = target(card.target, card.dialect, card.changes)
    subjects = {
        dtype: Subject(found.backend, options.device, DTYPES[dtype], options.cases, seed=0)
        for dtype in options.dtype
    }

    def write() -> None:
        row = nothing(card) | {
            "package": version_of(card.package),
            "seconds": round(time.perf_counter() - start, 1),
            **Counter(each.cell.status for each in done),
            "red_cells": [
                red_cell(card.name, each.dtype, each.cell, scripts.get(i))
                for i, each in enumerate(done)
                if each.cell.status == "red"
            ],
        }
        write_json(part, row)

    every = properties_of(next(iter(subjects.values())))
    for properties in stages({name: every[name] for name in names}):
        first = len(done)
        with one_at_a_time(part.with_name("memory"), properties):
            for each in examined(subjects, properties):
                done.append(each)
                write()
        for i, each in enumerate(done[first:], first):
            if each.cell.status == "red":
                each.subject.tried[:] = each.tried
                scripts[i] = Minimiser(found, each.subject).script(each.cell)
                write()


def stages(properties: dict[str, Property]) -> list[dict[str, Property]]:
    """The properties in two stages. "strides and views" comes last: a misaligned address may crash
    a kernel and make the GPU unusable. In the first stage, the SLOW properties come last.
    """
    last = {name: check for name, check in properties.items() if name == "strides and views"}
    others = sorted((name for name in properties if name not in last), key=SLOW.__contains__)
    return [{name: properties[name] for name in others}, last]


@contextmanager
def one_at_a_time(file: Path, properties: dict[str, Property]) -> Iterator[None]:
    """Lock `file` for "strides and views", whose distant views take dozens of GiB of a GPU."""
    with file.open("w") as lock:
        if "strides and views" in properties:
            flock(lock, LOCK_EX)
        yield


def red_cell(name: str, dtype: str, cell: Cell, script: str | None) -> Row:
    reason = EXPLAINED.get((name, cell.property))
    return {
        "dtype": dtype,
        "property": cell.property,
        "note": cell.note,
        "why": reason and reason.why,
        "known": reason and reason.known,
        "script": script,
    }


def row_of(card: Card, options: Options, names: list[str], number: int, end: float) -> Row:
    """The row that measure() wrote before it finished, was stopped or died."""
    seconds = min(options.seconds, end - time.monotonic())
    name = f"{card.name} {' '.join(options.dtype)} {number}"
    named = {"name": name, "out": options.out, "empty": nothing(card)}
    row = measured(measure, card, options, names, number, **named, seconds=seconds)
    count = sum(row[status] for status in ("green", "red", "n/a"))
    row |= {"unexamined": len(names) * len(options.dtype) - count}
    print(f"{name}: {row['red']} red, {row['seconds']} s, {row['ended']}", flush=True)
    return row


def joined(rows: Sequence[Row]) -> Row:
    """The row of a card, joined from the rows of its processes."""
    counts = ("seconds", "green", "red", "n/a", "unexamined")
    ends = dict.fromkeys(row["ended"] for row in rows if row["ended"] != "whole")
    return rows[0] | {
        **{name: round(sum(row[name] for row in rows), 1) for name in counts},
        "red_cells": [cell for row in rows for cell in row["red_cells"]],
        "ended": "; ".join(ends) or "whole",
    }


def nothing(card: Card) -> Row:
    head = {"name": card.name, "package": card.package, "dialect": card.dialect}
    return head | {"seconds": 0.0, "green": 0, "red": 0, "n/a": 0, "red_cells": []}


def measure_jax(python: str) -> Row:
    """The row of JAX's attention, which exchanges files."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        files = inputs, outputs = Path(folder, "inputs.npz"), Path(folder, "outputs.npz")
        exchange.export(inputs, 20, 0)
        script = Path(__file__).with_name("jax_outputs.py")
        run = partial(subprocess.run, check=True, capture_output=True, text=True)
        said = run([python, str(script), *map(str, files)]).stdout
        cells = list(exchange.judge(*files))
    return nothing(Card("JAX", said.partition(":")[0], "", "files")) | {
        "seconds": round(time.perf_counter() - start, 1),
        **Counter(cell.status for cell in cells),
        "red_cells": [
            red_cell("JAX", "fp32", cell, JAX_SCRIPTS.get(cell.property))
            for cell in cells
            if cell.status == "red"
        ],
        "unexamined": 0,
        "ended": "whole",
    }


@command
def main(options: Options) -> None:
    check_writable(options.out)
    where = measured_on(pick_device(options.device))
    reasons = {card.name: why_left_out(card, options.tutorial) for card in options.cards}
    left_out = {name: why for name, why in reasons.items() if why}
    for name, why in left_out.items():
        print(f"{name} is left out: {why}", flush=True)
    end = time.monotonic() + options.total
    cards = [card for card in options.cards if not reasons[card.name]]
    # neighbours in this list share kernels, and those of one process are spread over it
    count = max(1, options.processes // max(1, len(cards) * len(options.dtype)))
    shares = [list(PROPERTIES)[part::count] for part in range(count)]
    with ThreadPoolExecutor(options.processes) as pool:
        jobs = [
            pool.submit(row_of, card, replace(options, dtype=[dtype]), names, number, end)
            for number, (card, dtype, names) in enumerate(product(cards, options.dtype, shares))
        ]
    parts, each = [job.result() for job in jobs], len(options.dtype) * count
    rows = [joined(parts[i : i + each]) for i in range(0, len(parts), each)]
    if options.jax is not None:
        rows.append(measure_jax(options.jax))
    head = {"environment": where, "dtypes": options.dtype, "cases": options.cases}
    head |= {"left_out": left_out}
    write_json(options.out, head | {"cards": rows})
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
