"""no_rescale by tile size: the loss of its weights under exact attention, how two tile sizes detect
it without a reference, and how soon exact attention repairs it.

    python train.py experiment=tile_size hydra.sweep.dir=multirun/tiles/size
    python -m lab.findings.tile_size multirun/tiles out=tile_size.json

The second command takes runs of that recipe, or folders of them, and out= the JSON file to write;
the figure is written beside it.

More sweeps go into folders beside the first: model.num_layers=1,4 or seq_len=64,256 with
attention.block_kv=16,256 (one tile of all keys is exact). The repair needs attention.block_kv=16
attention.switch_at=100,300,500 attention.switch_to=naive eval_every=5, and attention.block_kv=128
eval_every=5, which is never broken.

The detector computes the same output with two tile sizes. With exact attention the two differ only
by roundings, so no reference is needed.
"""

from collections import Counter
from itertools import product
from pathlib import Path
from statistics import fmean

import torch

from attention import Backend, attention, get_backend
from lab.findings.captured import Captured, capture, weights_of
from lab.findings.finding import (
    EXACT,
    OWN,
    apart,
    completed_runs,
    curves,
    finding,
    finish,
    losses,
    plot_groups,
)
from scripts.drawing import new_figure
from scripts.tables import Row, by, least, listed, most, spread, table
from training.trained import read_run_config

SEQUENCES = 8  # held-out sequences for the detector
LEAST_TILE = 16  # keys, of the smaller of the two tiles that the detector compares


@finding
def main(paths: list[Path], device: torch.device) -> Row:
    needed = ("options.block_kv", "max_score", OWN, EXACT)
    folders = completed_runs(paths, "tile_size", *needed)
    runs = [described(run, summary) for run, summary in folders.items()]
    size = by_size(runs)
    tile = min((row["block_kv"] for row in size), key=lambda tile: (tile < LEAST_TILE, tile))
    tiles = tile, 2 * tile
    detected = [
        {"seed": row["seed"]} | each
        for run, row in zip(folders, runs, strict=True)
        if row in size and row["block_kv"] == tile
        for each in detect(run, tiles, device)
    ]
    return {"tiles": tiles, "runs": runs, "detector": detected, "repair": repairs(runs)}


def described(run: Path, summary: Row) -> Row:
    """The settings in which runs differ, how the run ended, and its curves."""
    config = read_run_config(run)
    row = {
        "layers": config.model.num_layers,
        "seq_len": config.seq_len,
        # larger tiles also hold all keys in one tile
        "block_kv": min(summary["options"]["block_kv"], config.seq_len),
        "seed": config.seed,
        "switch_at": config.attention.switch_at,
        "largest_score": round(summary["max_score"], 2),
    }
    return row | {"own": summary[OWN], "exact": summary[EXACT], "curves": curves(run, OWN, EXACT)}


def by_size(runs: list[Row]) -> list[Row]:
    """The runs that differ only in tile size: those of the most common shape that did not switch
    attention.
    """
    plain = [row for row in runs if row["switch_at"] is None]
    (shape, _), *_ = Counter((row["layers"], row["seq_len"]) for row in plain).most_common(1)
    return [row for row in plain if (row["layers"], row["seq_len"]) == shape]


def detect(run: Path, tiles: tuple[int, int], device: torch.device) -> list[Row]:
    """The largest difference of out between two tile sizes, by inputs, attention and dtype."""
    inputs = {
        name: capture(weights_of(run, SEQUENCES, device, initial=initial), get_backend("tiled"))
        for name, initial in (("initial weights", True), ("trained weights", False))
    }
    draw, like = torch.Generator().manual_seed(0), inputs["trained weights"][0]
    normal = [torch.randn(x.shape, generator=draw).to(device) for x in like]
    inputs["normal"] = [Captured(*normal)]
    rows = []
    cases = product(inputs, ("tiled", "no_rescale"), ("float32", "bfloat16"))
    for name, each, dtype in cases:
        backend = get_backend(each)
        found = [difference(backend, layer, tiles, dtype) for layer in inputs[name]]
        case = {"inputs": name, "attention": each, "dtype": dtype}
        rows.append(case | {"difference": max(found)})
    return rows


def difference(backend: Backend, layer: Captured, tiles: tuple[int, int], dtype: str) -> float:
    """The largest difference between the outputs with two tile sizes."""
    q, k, v = (x.to(getattr(torch, dtype)) for x in layer[:3])
    few, many = (
        attention(q, k, v, backend=backend.configured(block_kv=tile)).out.float() for tile in tiles
    )
    return float((few - many).abs().max())


def repairs(runs: list[Row]) -> list[Row]:
    """Compare each run that switched with the run of the same seed that was never broken.

    A row has the excess of its exact loss at the switch and at the end. It also has the steps of
    exact attention until the excess has halved, and the step at which the other run had the same
    loss.
    """
    found = []
    for row in (row for row in runs if row["switch_at"] is not None):
        never = never_broken(runs, row)
        at = row["switch_at"]
        behind = apart(losses(row, EXACT), never, since=at)
        half = (step for step, more in behind.items() if step and more <= behind[0] / 2)
        as_good = (step for step, loss in never.items() if loss <= row["own"])
        found.append(
            {"seed": row["seed"], "switch_at": at, "shown": losses(row)[at]}
            | {"behind": behind[0], "steps_to_half": next(half, None)}
            | {"behind_at_end": behind[max(behind)], "end": at + max(behind)}
            | {"like_never_broken_at": next(as_good, None)}
        )
    return found


def never_broken(runs: list[Row], like: Row) -> dict[int, float]:
    """The losses by step of the runs with one tile and otherwise the settings of `like`."""
    same = ("layers", "seq_len", "seed")
    found: dict[int, float] = {}
    for row in runs:
        whole = row["block_kv"] == row["seq_len"] and row["switch_at"] is None
        if whole and all(row[name] == like[name] for name in same):
            found |= losses(row, EXACT)
    if not found:
        raise ValueError(
            f"no run with one tile of {like['seq_len']} keys and seed={like['seed']} to compare "
            "the repair with: train it too"
        )
    return dict(sorted(found.items()))


def in_text(found: Row) -> str:
    plain = [row for row in found["runs"] if row["switch_at"] is None]
    cases = {
        case: list({row["seed"]: row for row in rows}.values())
        for case, rows in sorted(by(plain, "layers", "seq_len", "block_kv").items())
    }
    own = {"own loss": spread("own", "{:.3f}"), "exact loss": spread("exact", "{:.3f}")}
    own["largest score"] = spread("largest_score", "{:.1f}")
    detector = by(found["detector"], "attention", "dtype", "inputs")
    ends = {"least": least("difference"), "most": most("difference")}
    repair = {
        "shown": spread("shown", "{:.3f}"),
        "behind": spread("behind", "{:.3f}"),
        "steps to half": listed("steps_to_half"),
        "behind at the end": spread("behind_at_end", "{:.3f}"),
        "like never at": listed("like_never_broken_at"),
    }
    return "\n\n".join(
        (
            table("layers, tokens, tile", cases, own),
            table("two tile sizes differ by", detector, ends),
            table("switch at", by(found["repair"], "switch_at"), repair),
        )
    )


def draw(found: Row, path: Path) -> None:
    """Losses by tile size, exact minus own loss over training, and the repair."""
    figure, (tiles, gap, repair) = new_figure(1, 3, size=(12, 3.8))
    runs = found["runs"]
    size = by_size(runs)
    longest = size[0]["seq_len"]
    by_tile = dict(sorted(by(size, "block_kv").items()))
    for name, label, color in (("own", "own", "C1"), ("exact", "same weights, exact", "C0")):
        means = [fmean(row[name] for row in rows) for rows in by_tile.values()]
        tiles.plot(list(by_tile), means, color=color, label=f"{label} attention")
        tiles.plot([row["block_kv"] for row in size], [row[name] for row in size], ".", color=color)
    tiles.set(
        xscale="log", xlabel=f"keys of a tile, of {longest}", ylabel="held-out loss, nats a byte"
    )
    tiles.set_xticks(list(by_tile), list(map(str, by_tile)))
    tiles.minorticks_off()
    hidden = {
        f"tiles of {tile}": [apart(losses(row, EXACT), losses(row)) for row in rows]
        for tile, rows in by_tile.items()
        if tile < longest
    }
    plot_groups(gap, hidden)
    gap.set(xlabel="step", ylabel="exact loss less own")
    behind = {
        f"broken for {at} steps": [
            apart(losses(row, EXACT), never_broken(runs, row), since=at) for row in rows
        ]
        for at, rows in by(runs, "switch_at").items()
        if at
    }
    plot_groups(repair, behind)
    repair.set(xlabel="steps of exact attention", ylabel="loss less that of the run never broken")
    finish(figure, path)


if __name__ == "__main__":
    main()
