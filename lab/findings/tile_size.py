"""no_rescale by the size of its tiles: what its weights are worth under exact attention, how two
tile sizes tell it without a reference, and how soon exact attention repairs it.

    python train.py experiment=tile_size hydra.sweep.dir=multirun/tiles/size
    python -m lab.findings.tile_size multirun/tiles out=results/tile_size.json

The arguments of the second are runs of that recipe, or folders of them, and

    tiles   two numbers of keys that the detector compares (16,32); the first is that of runs too
    device  auto, cpu or cuda (auto)
    out     the JSON file to write; the figure stands beside it

More runs, each sweep in a folder beside the first: model.num_layers=1,4 or seq_len=64,256 with
attention.block_kv=16,256 (one tile of all keys is exact); for the repair attention.block_kv=16
attention.switch_at=100,300,500 attention.switch_to=naive eval_every=5, and attention.block_kv=128
eval_every=5, which was never broken.

The detector computes the same output with two tile sizes. Those of exact attention differ by
roundings alone, so no reference is needed.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from attention import Backend, attention, get_backend
from lab.findings.captured import (
    Captured,
    capture,
    completed_runs,
    curves,
    largest_score,
    weights_of,
)
from scripts.arguments import Device, command, default
from scripts.drawing import for_both_papers, new_figure, save_figure
from scripts.tables import Row, grouped, mean_and_deviation, text_table
from training.device import pick_device
from training.environment import measured_on
from training.files import check_writable, write_json
from training.trained import read_run_config

OWN, EXACT = "val/loss", "val/loss_exact"
SEQUENCES = 8  # that the detector looks at


@dataclass
class Options:
    paths: list[Path]
    tiles: list[int] = default(16, 32)
    device: Device = "auto"
    out: Path = Path("tile_size.json")

    def __post_init__(self) -> None:
        if len(set(self.tiles)) != 2 or min(self.tiles) < 1:
            raise ValueError(f"tiles={','.join(map(str, self.tiles))} must be two different sizes")


@command("tile_size", Options)
def main(options: Options) -> None:
    check_writable(options.out)
    torch.set_num_threads(1)  # the tiles are small: threads would only wait for one another
    device = pick_device(options.device)
    folders = completed_runs(options.paths)
    runs = [described(run, summary) for run, summary in folders.items()]
    detected, size = [], by_size(runs)
    for run, row in zip(folders, runs, strict=True):
        if row in size and row["block_kv"] == options.tiles[0]:
            found = detect(run, options.tiles, device)
            detected += [{"seed": row["seed"]} | each for each in found]
    found = {"runs": runs, "detector": detected, "repair": repairs(runs)}
    print(in_text(found))
    about = {"environment": measured_on(device), "tiles": options.tiles}
    write_json(options.out, about | found)
    draw(found, options.out.with_suffix(".png"))


def described(run: Path, summary: Row) -> Row:
    """What sets the run apart, how it ended, and its curves."""
    config = read_run_config(run)
    row = {
        "layers": config.model.num_layers,
        "seq_len": config.seq_len,
        # larger tiles are one tile too
        "block_kv": min(summary["options"]["block_kv"], config.seq_len),
        "seed": config.seed,
        "switch_at": config.attention.switch_at,
        "largest_score": round(largest_score(run), 2),
    }
    return row | {"own": summary[OWN], "exact": summary[EXACT], "curves": curves(run, OWN, EXACT)}


def by_size(runs: list[Row]) -> list[Row]:
    """The runs that differ in the size of their tiles alone: those of the most common shape that
    did not switch.
    """
    plain = [row for row in runs if row["switch_at"] is None]
    (shape, _), *_ = Counter((row["layers"], row["seq_len"]) for row in plain).most_common(1)
    return [row for row in plain if (row["layers"], row["seq_len"]) == shape]


def detect(run: Path, tiles: list[int], device: torch.device) -> list[Row]:
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
        found = [difference(get_backend(each), layer, dtype, tiles) for layer in inputs[name]]
        case = {"inputs": name, "attention": each, "dtype": dtype}
        rows.append(case | {"difference": max(found)})
    return rows


def difference(backend: Backend, layer: Captured, dtype: str, tiles: list[int]) -> float:
    """The largest, between the outputs with two tile sizes."""
    q, k, v = (x.to(getattr(torch, dtype)) for x in layer[:3])
    few, many = (
        attention(q, k, v, backend=backend.configured(block_kv=tile)).out.float() for tile in tiles
    )
    return float((few - many).abs().max())


def repairs(runs: list[Row]) -> list[Row]:
    """Each run that switched, beside the run of its seed that was never broken.

    A row says how much higher its exact loss is at the switch and at the end. It also has the steps
    of exact attention until half of that is gone, and the step at which the other run had come to
    the same loss.
    """
    found = []
    for row in (row for row in runs if row["switch_at"] is not None):
        never = never_broken(runs, row)
        at = row["switch_at"]
        behind = apart(losses(row, EXACT), never, since=at)
        half = (step for step, more in behind.items() if step and more <= behind[0] / 2)
        as_good = (step for step, loss in never.items() if loss <= row["own"])
        found.append(
            {"seed": row["seed"], "switch_at": at, "shown": losses(row, OWN)[at]}
            | {"behind": behind[0], "steps_to_half": next(half, None)}
            | {"behind_at_end": behind[max(behind)], "end": at + max(behind)}
            | {"like_never_broken_at": next(as_good, None)}
        )
    return found


def never_broken(runs: list[Row], like: Row) -> dict[int, float]:
    """The losses by step of the runs with one tile, else as `like`."""
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


def apart(a: dict[int, float], b: dict[int, float], since: int = 0) -> dict[int, float]:
    """a - b at the steps that both have, counted from `since`."""
    return {step - since: a[step] - b[step] for step in a if step in b and step >= since}


def losses(row: Row, name: str) -> dict[int, float]:
    """By step."""
    return dict(zip(row["curves"]["step"], row["curves"][name], strict=True))


def in_text(found: Row) -> str:
    plain = [row for row in found["runs"] if row["switch_at"] is None]
    table = [["layers, tokens, tile", "own loss", "exact loss", "largest score"]]
    by_case = grouped(plain, lambda row: (row["layers"], row["seq_len"], row["block_kv"]))
    for case, rows in sorted(by_case.items()):
        rows = list({row["seed"]: row for row in rows}.values())
        cells = [
            mean_and_deviation([row[name] for row in rows], form)
            for name, form in (("own", "{:.3f}"), ("exact", "{:.3f}"), ("largest_score", "{:.1f}"))
        ]
        table.append([", ".join(map(str, case)), *cells])
    detector = [["two tile sizes differ by", "least", "most"]]
    by_case = grouped(
        found["detector"], lambda row: (row["attention"], row["dtype"], row["inputs"])
    )
    for case, rows in by_case.items():
        values = [row["difference"] for row in rows]
        detector.append([", ".join(case), f"{min(values):.1e}", f"{max(values):.1e}"])
    head = ["switch at", "shown", "behind", "steps to half", "behind at the end", "like never at"]
    repair = [head]
    for at, rows in grouped(found["repair"], lambda row: row["switch_at"]).items():
        cells = [
            mean_and_deviation([row[name] for row in rows], "{:.3f}")
            for name in ("shown", "behind")
        ]
        cells.append("/".join(str(row["steps_to_half"]) for row in rows))
        cells.append(mean_and_deviation([row["behind_at_end"] for row in rows], "{:.3f}"))
        cells.append("/".join(str(row["like_never_broken_at"]) for row in rows))
        repair.append([str(at), *cells])
    return "\n\n".join(map(text_table, (table, detector, repair)))


def draw(found: Row, path: Path) -> None:
    """Losses by the size of the tile, what the own loss hides over training, and the repair."""
    figure, (tiles, gap, repair) = new_figure(1, 3, size=(12, 3.8))
    runs = found["runs"]
    size = by_size(runs)
    longest = size[0]["seq_len"]
    by_tile = grouped(sorted(size, key=lambda row: row["block_kv"]), lambda row: row["block_kv"])
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
        f"tiles of {tile}": [apart(losses(row, EXACT), losses(row, OWN)) for row in rows]
        for tile, rows in by_tile.items()
        if tile < longest
    }
    plot_groups(gap, hidden)
    gap.set(xlabel="step", ylabel="exact loss less own")
    switched = grouped((row for row in runs if row["switch_at"]), lambda row: row["switch_at"])
    behind = {
        f"broken for {at} steps": [
            apart(losses(row, EXACT), never_broken(runs, row), since=at) for row in rows
        ]
        for at, rows in switched.items()
    }
    plot_groups(repair, behind)
    repair.set(xlabel="steps of exact attention", ylabel="loss less that of the run never broken")
    for axes in (tiles, gap, repair):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    for_both_papers(save_figure(figure, path, dpi=110))


def plot_groups(axes: Any, groups: dict[str, list[dict[int, float]]]) -> None:
    """A colour for each group, a line for each of its runs."""
    for number, (name, lines) in enumerate(groups.items()):
        for each in lines:
            label = name if each is lines[0] else None
            axes.plot(list(each), list(each.values()), color=f"C{number}", label=label, linewidth=1)


if __name__ == "__main__":
    main()
