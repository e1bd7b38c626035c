"""Judge trained weights under every attention: the matrix trained-under x evaluated-under.

    python -m scripts.cross_eval multirun/2026-01-31_12-00-00

A broken attention can have a loss curve as good as exact attention's, and weights that are of no
use under any other. This shows it: each run's checkpoint is evaluated under exact attention (sdpa),
under every attention that some run was trained with, and, where no_rescale is among them, at half
and at double each of its tile sizes. Other judges: --under tiled naive no_rescale:block_kv=16.

Prints the matrix, writes every single figure to cross_eval.json, and draws the means over seeds to
cross_eval.png beside it. Runs that failed, ran out of memory or never ended are left out, with a
line each. Given a cross_eval.json it only prints and draws.
"""

import argparse
import math
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attention import BACKENDS, Backend, get_backend
from config import RunConfig
from data import Batch, build_data
from model import GPT
from scripts.arguments import parse_backend
from scripts.cross_eval_matrix import draw, in_text, read_rows
from scripts.sample import read_config
from training.checkpoint import load_model_state, read_meta
from training.device import pick_device, pick_dtype
from training.evaluate import evaluate_under, exact_attention
from training.interrupt import one_line
from training.memory import is_out_of_memory, release_memory
from training.metrics import check_writable, environment, write_json
from training.schedule import chosen_attention
from training.sweep import differing_settings, read_sweep

TILES = ("block_q", "block_kv")
# the weights of a diverged run are those before its bad step
JUDGED = ("completed", "diverged", "interrupted")


class Checkpoint(NamedTuple):
    """A run whose weights can be loaded."""

    folder: Path
    config: RunConfig
    summary: dict[str, Any]
    setting: dict[
        str, str
    ]  # what else sets it apart from the other runs, besides attention and seed
    backends: dict[int, Backend]  # by the step after which it was used


@one_line("cross_eval")
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.cross_eval",
        description="Evaluate every checkpoint of a sweep under every attention: a matrix, "
        "as text, JSON "
        "and heat map.",
        epilog="example: python -m scripts.cross_eval multirun/*/* --under sdpa "
        "no_rescale:block_kv=16",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUNS",
        help="runs, sweeps or folders of either; or one cross_eval.json",
    )
    parser.add_argument(
        "--under",
        nargs="+",
        metavar="NAME",
        help="the judges: NAME, NAME:option=value,... or pkg.module:BACKEND",
    )
    parser.add_argument(
        "--sequences", type=int, default=64, metavar="N", help="held-out sequences to judge by (64)"
    )
    parser.add_argument(
        "--device", default="auto", choices=("auto", "cpu", "cuda"), help="where to evaluate (auto)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the JSON file (default: cross_eval.json in the folder of the runs)",
    )
    arguments = parser.parse_args(argv)
    try:
        written_before = len(arguments.runs) == 1 and arguments.runs[0].is_file()
        out = arguments.runs[0] if written_before else measure(arguments)
        rows = read_rows(out)
        print(in_text(rows))
        draw(rows, out.with_suffix(".png"))
    except (OSError, ValueError) as error:
        print(f"cross_eval: {error}", file=sys.stderr)
        return 2
    print(f"{out} and {out.with_suffix('.png').name}")
    return 0


def measure(arguments: argparse.Namespace) -> Path:
    """Evaluate and write the JSON file; returns its path."""
    if arguments.sequences < 1:
        raise ValueError(f"--sequences {arguments.sequences} must be at least 1")
    device = pick_device(arguments.device)
    checkpoints = load_checkpoints(arguments.runs)
    base = Path(os.path.commonpath([folder.resolve() for folder in arguments.runs]))
    out = arguments.out or base / "cross_eval.json"
    judges = (
        [parse_judge(text) for text in arguments.under]
        if arguments.under
        else default_judges(checkpoints, device)
    )
    check_writable(out)
    rows, fingerprints = [], []
    for number, checkpoint in enumerate(checkpoints, 1):
        print(f"{number} of {len(checkpoints)}: {checkpoint.folder}", flush=True)
        try:
            found, fingerprint = judge(
                checkpoint, judges, base=base, sequences=arguments.sequences, device=device
            )
        except (ValueError, OSError) as error:  # damaged weights, or a corpus that is not here
            leave_out(checkpoint.folder, error)
            continue
        rows += found
        fingerprints += [fingerprint] if fingerprint not in fingerprints else []
        release_memory(device)
    if not rows:
        raise ValueError("no checkpoint could be evaluated")
    # a matrix without a figure must not take the place of one that has some
    if all(row["status"].startswith("refused") for row in rows):
        name, status = rows[0]["evaluated_under"]["name"], rows[0]["status"]
        raise ValueError(f"nothing could be evaluated, nothing is written: {name} {status}")
    write_json(
        out,
        {
            "environment": environment(" ".join(fingerprints), device),
            "sequences": arguments.sequences,
            "rows": rows,
        },
    )
    return out


def load_checkpoints(folders: Sequence[Path]) -> list[Checkpoint]:
    """Every run below the folders whose weights can be loaded; the others are left out with a line
    each. ValueError where none is.
    """
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is neither a folder of runs nor a cross_eval.json")
    # a run below two of the folders counts once
    summaries = list(
        {
            Path(row["dir"]).resolve(): row for folder in folders for row in read_sweep(folder)
        }.values()
    )
    found = []
    for summary, setting in zip(summaries, differing_settings(summaries), strict=True):
        folder = Path(summary["dir"])
        try:
            if not any(
                (folder / name).exists() for name in ("summary.json", "metrics.jsonl", "checkpoint")
            ):
                raise ValueError(
                    summary.get("error")
                    or "no run directory: without summary.json, metrics.jsonl and checkpoint"
                )
            if summary["status"] not in JUDGED:
                raise ValueError(summary["status"])
            config = read_config(folder)
            backends = chosen_attention(config.attention)
            read_meta(folder)
        except (ValueError, OSError) as error:
            leave_out(folder, error)
            continue
        others = {
            key: value
            for key, value in setting.items()
            if key != "seed" and key.partition(".")[0] != "attention"
        }
        found.append(Checkpoint(folder, config, summary, others, backends))
    if not found:
        raise ValueError(f"no run with a checkpoint below {', '.join(map(str, folders))}")
    return found


def leave_out(folder: Path, error: Exception) -> None:
    print(f"left out: {folder}: {str(error).splitlines()[0]}", file=sys.stderr)


def parse_judge(text: str) -> Backend:
    try:
        return parse_backend(text)
    except ValueError as error:
        raise ValueError(f"--under {text}: {error}") from error


def default_judges(checkpoints: Sequence[Checkpoint], device: torch.device) -> list[Backend]:
    """Exact attention, whatever a run was trained under, and no_rescale at half and double its
    tiles; each once.

    Tiles of another size are another judge for a broken attention alone.
    """
    used = [backend for checkpoint in checkpoints for backend in checkpoint.backends.values()]
    sizes = {
        (size, tuple(b.options.items())): b
        for b in used
        if b.name == "no_rescale"
        for size in neighbours(b.options["block_kv"])
    }
    used += [backend.configured(block_kv=size) for (size, _), backend in sizes.items()]
    shapes = {(each.config.model.head_dim, each.config.data.documents) for each in checkpoints}
    exact = [
        exact_attention(head_dim, device, documents=documents)
        for head_dim, documents in sorted(shapes)
    ]
    unique = {}
    for backend in (*exact, *used):
        options = {
            name: value
            for name, value in described(backend)["options"].items()
            if not (backend.exact and name in TILES)
        }
        unique.setdefault((backend.name, str(options)), backend)
    # as they stand in the table of backends, no_rescale from small tiles to large
    order = {name: place for place, name in enumerate(dict.fromkeys(["sdpa", *BACKENDS]))}
    return sorted(
        unique.values(),
        key=lambda backend: (
            order.get(backend.name, len(order)),
            backend.options.get("block_kv", 0),
        ),
    )


def neighbours(block_kv: int) -> tuple[int, ...]:
    return tuple(size for size in (block_kv // 2, 2 * block_kv) if size)


def described(backend: Backend) -> dict[str, Any]:
    """Name and options, without those that only a backward pass reads."""
    return {
        "name": backend.name,
        "options": {key: value for key, value in backend.options.items() if key != "detach_max"},
    }


def judge(
    checkpoint: Checkpoint,
    judges: Iterable[Backend],
    *,
    base: Path,
    sequences: int,
    device: torch.device,
) -> tuple[list[dict[str, Any]], str]:
    """One row a judge, and the fingerprint of the data."""
    config = checkpoint.config
    data = build_data(config.data, config.tokenizer, seq_len=config.seq_len, seed=config.seed)
    dtype = pick_dtype(config.dtype, device)
    model = GPT(config.model, vocab_size=data.vocab_size, backend=get_backend("sdpa")).to(device)
    meta = load_model_state(checkpoint.folder, model)
    (_, first), *later = checkpoint.backends.items()
    common = {
        "run": str(checkpoint.folder.resolve().relative_to(base))
        if checkpoint.folder.resolve() != base
        else checkpoint.folder.name,
        "trained_under": described(first)
        | ({"switch_at": later[0][0], "switch_to": described(later[0][1])} if later else {}),
        "setting": checkpoint.setting,
        "seed": config.seed,
        "step": meta["step"],
        "trained": checkpoint.summary["status"],
        "dtype": str(dtype).removeprefix("torch."),
    }
    batch = data.val_batch(sequences)
    rows = []
    for backend in judges:
        found = outcome(
            model,
            backend,
            batch,
            batch_size=config.batch_size,
            dtype=dtype,
            accuracy=data.metric == "accuracy",
        )
        rows.append(common | {"evaluated_under": described(backend)} | found)
    return rows, data.fingerprint


def outcome(
    model: GPT,
    backend: Backend,
    batch: Batch,
    *,
    batch_size: int,
    dtype: torch.dtype,
    accuracy: bool,
) -> dict[str, Any]:
    """loss, accuracy and status of one cell; a judge that cannot take this model is refused, and
    says why.
    """
    device = next(model.parameters()).device
    autocast = torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)
    nothing = {"loss": None, "accuracy": None}
    try:
        loss, right = evaluate_under(
            model, backend, *batch, batch_size=batch_size, autocast=autocast, accuracy=accuracy
        )
    except (ValueError, RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            return nothing | {"status": "refused: out of memory"}
        if isinstance(error, ValueError):
            return nothing | {"status": f"refused: {error}"}
        raise
    if not math.isfinite(loss):
        return nothing | {"status": "non-finite"}
    return {"loss": loss, "accuracy": right, "status": "ok"}


if __name__ == "__main__":
    sys.exit(main())
