"""Which stabiliser keeps attention scores down, and how long no_max in float16 survives with it.

    python train.py experiment=stabilisers hydra.sweep.dir=multirun/stabilisers/none/exact
    python -m lab.findings.stabilisers multirun/stabilisers out=stabilisers.json

The second command takes runs of that recipe, or folders of them: without a stabiliser and with
optim.qk_clip=5,8,10, optim.z_loss=1e-4,1e-2, optim.weight_decay=0.1,1, model.qk_norm=true,
attention.softcap=10, optim=muon or optim.lr=2e-3; and all of these also with attention=no_max
dtype=fp16. The page has the loop.

    out     the JSON file to write; the figure is written beside it

no_max works as a fuse: it is exact until a score passes ln(65504) = 11.09, where exp(score)
overflows float16. Then its output is infinite, and the run ends.
"""

import re
from itertools import chain
from pathlib import Path
from statistics import mode

import torch

from attention import LIMITS
from config import RunConfig
from lab.findings.finding import check_recipe, finding, finish
from scripts.drawing import new_figure
from scripts.runs import runs_below
from scripts.tables import Row, by, listed, spread, table
from training.files import read_metrics
from training.names import as_typed
from training.trained import read_run_config

LIMIT = LIMITS[torch.float16]
BY_HEAD = "attention/max_score_by_head"
# tables of the JSON file, and the runs in them
TABLES = {"exact": "run with exact attention", "fuse": "run with attention=no_max"}


@finding
def main(paths: list[Path], device: torch.device) -> Row:
    ended = {
        run: (read_run_config(run), summary)
        for run, summary in runs_below(paths).items()
        if summary["status"] in ("completed", "diverged")
    }
    # the recipe sets a learning rate, which names some of its runs
    rated = {run: {"optim": {"lr": config.optim.lr}} for run, (config, _) in ended.items()}
    check_recipe(rated, "stabilisers", "optim.lr")
    rates = [config.optim.lr for config, _ in ended.values()]
    usual = mode(rates) if rates else None
    runs = [described(run, config, summary, usual) for run, (config, summary) in ended.items()]
    found = {name: [row for row in runs if row["fuse"] == (name == "fuse")] for name in TABLES}
    for name, rows in found.items():
        if not rows:
            raise ValueError(f"no {TABLES[name]} among {len(runs)} runs: train some too")
    return {"limit": LIMIT} | found


def described(run: Path, config: RunConfig, summary: Row, usual_lr: float | None) -> Row:
    """The run's stabiliser and how the run ended; for exact attention also the largest scores."""
    fuse = summary["attention"] == "no_max"
    row = {"stabiliser": stabiliser(config, usual_lr), "seed": config.seed, "fuse": fuse}
    row |= {"dtype": config.dtype, "steps": config.steps, "died_at": summary.get("first_bad_step")}
    if fuse:
        return row
    rows = [row for row in read_metrics(run / "metrics.jsonl") if BY_HEAD in row]
    figures = {run: summary | {BY_HEAD: rows or None}}
    check_recipe(figures, "stabilisers", "max_score", "val/loss", BY_HEAD)
    by_head = torch.tensor([row[BY_HEAD] for row in rows], dtype=torch.float64)  # (rows, layers, H)
    return row | {
        "largest_score": round(summary["max_score"], 2),
        "passes_at": summary["float16_overflow_step"],  # among steps with a row of metrics
        "largest_by_head": by_head.amax(0).tolist(),  # of each layer
        "own": summary["val/loss"],
        "curves": {
            "step": [row["step"] for row in rows],
            "by_layer": [[round(x, 2) for x in layers] for layers in by_head.amax(2).tolist()],
        },
    }


def stabiliser(config: RunConfig, usual_lr: float | None) -> str:
    """The name of the stabiliser that this run uses. usual_lr: the learning rate of most runs."""
    optim, cap = config.optim, config.attention.softcap
    words = {
        "QK-norm": config.model.qk_norm,
        f"softcap {as_typed(cap)}": cap,
        f"QK-clip {as_typed(optim.qk_clip)}": optim.qk_clip,
        f"z-loss {optim.z_loss:g}": optim.z_loss,
        f"weight decay {as_typed(optim.weight_decay)}": optim.weight_decay,
        "Muon": optim.name == "muon",
        f"lr {optim.lr:g}": optim.lr != usual_lr,
    }
    return " and ".join(name for name, is_set in words.items() if is_set) or "none"


def in_text(found: Row) -> str:
    def past_the_limit(rows: list[Row]) -> str:
        heads = [score for row in rows for score in chain(*row["largest_by_head"])]
        return f"{sum(score > LIMIT for score in heads)} of {len(heads)}"

    fuse = [row | {"died_at": row["died_at"] or "lives"} for row in found["fuse"]]
    exact = {
        "largest score": spread("largest_score", "{:.1f}"),
        "heads past the limit": past_the_limit,
        "passes it at": listed("passes_at"),
        "held-out loss": spread("own", "{:.3f}"),
    }
    lives = {"dies at step": listed("died_at"), "of": lambda rows: str(rows[0]["steps"])}
    return "\n\n".join(
        (
            table("exact", by(found["exact"], "stabiliser"), exact),
            table("no_max in float16", by(fuse, "stabiliser"), lives),
        )
    )


def draw(found: Row, path: Path) -> None:
    """The largest score over training, the largest of each head, and how long no_max survives."""
    figure, (over, heads, fuse) = new_figure(1, 3, size=(13, 4))
    by_name = by(found["exact"], "stabiliser")
    names = sorted(by_name, key=lambda name: max(row["largest_score"] for row in by_name[name]))
    colors: dict[str, str] = {}
    for place, name in enumerate(names):
        kind = re.sub(r" [\d.]+$", "", name)  # one colour for all strengths
        label = None if kind in colors else kind
        color = colors.setdefault(kind, f"C{len(colors)}")
        for row in by_name[name]:
            curve = row["curves"]
            over.plot(curve["step"], [*map(max, curve["by_layer"])], color=color, linewidth=0.8)
            each = list(chain(*row["largest_by_head"]))
            heads.plot(each, [place] * len(each), ".", color=color)
        over.plot([], [], color=color, label=label)
        for row in found["fuse"]:
            if row["stabiliser"] == name:
                marker = "x" if row["died_at"] else ">"
                fuse.plot(row["died_at"] or row["steps"], place, marker, color=color)
    over.axhline(LIMIT, color="C7", linestyle=":")
    heads.axvline(LIMIT, color="C7", linestyle=":")
    over.set(xlabel="step", ylabel="largest score", yscale="log", ylim=(1, None))
    heads.set(xlabel="largest score of each head", xscale="log")
    fuse.set(xlabel="no_max in float16 dies (x) or lives on (>) at step")
    heads.set_yticks(range(len(names)), names, fontsize=8)
    fuse.set_yticks(range(len(names)), [""] * len(names))
    fuse.set_xlim(0, None)
    over.legend(fontsize=7, ncols=2)
    finish(figure, path)


if __name__ == "__main__":
    main()
