"""Draw the committed measurements: results/*.json to results/*.png and the tables of results/README.md.

    python -m scripts.results

Only reads results/*.json; measures nothing. Every table says where and on what its figures were measured. Rewrites tracked files:
results/README.md and the pictures in it, docs/claims.md and docs/questions.md.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scripts.cross_eval_matrix import draw as draw_cross_eval
from scripts.headline_figure import crossing, draw_headline, points
from scripts.plan import predict_run
from scripts.plots import COLORS, draw_longest, draw_memory, draw_roofline, draw_time
from scripts.verify_figure import EFFORT_HEAD, draw_kills, draw_matrix, effort, kills, verdict

FOLDER = Path(__file__).resolve().parent.parent / "results"


def load(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


def provenance(data: dict[str, Any]) -> str:
    environment = data["environment"]
    hardware, versions = environment["hardware"], environment["versions"]
    chip = hardware["gpu"] or f"{hardware['cpu']}, {hardware['cpu_cores']} cores"
    packages = ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton", "python") if versions.get(name))
    # runs of one table may come from several commits; then each says its own
    commits = {run.get("commit") or environment.get("commit") or "unknown" for run in data.get("runs", [{}])}
    return f"Measured on {chip}; {packages}; commit {', '.join(sorted(commit[:7] for commit in commits))}."


def table(head: list[str], rows: Iterable[list[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def section(data: dict[str, Any], *parts: str) -> str:
    return "\n\n".join((provenance(data), *parts))


def spread(values: list[float], form: str = "{:.3f}") -> str:
    """Mean and, of several, the standard deviation and their number."""
    if len(values) == 1:
        return form.format(values[0])
    return f"{form.format(fmean(values))} ± {form.format(stdev(values))} (n={len(values)})"


def rounded(value: float) -> str:
    """Three digits of a small figure, one decimal of a large one: 0.523, 1.5, 52.3, 1,024, 2,048.1."""
    return f"{value:.3g}" if abs(value) < 10 else f"{value:,.1f}".removesuffix(".0")


def groups(runs: list[dict[str, Any]], key: Callable[[dict[str, Any]], Any]) -> dict[Any, list[dict[str, Any]]]:
    found: dict[Any, list[dict[str, Any]]] = {}
    for run in runs:
        found.setdefault(key(run), []).append(run)
    return found


def finite(runs: list[dict[str, Any]], name: str) -> list[float]:
    return [run[name] for run in runs if run.get(name) is not None]


def evaluated(run: dict[str, Any]) -> dict[int, tuple[float, float]]:
    """Step to (val/loss, val/loss_exact), where both are finite."""
    curves = run["curves"]
    rows = zip(curves["step"], curves["val/loss"], curves["val/loss_exact"], strict=True)
    return {step: (own, exact) for step, own, exact in rows if own is not None and exact is not None}


def planned_steps(run: dict[str, Any]) -> str:
    return next(override.removeprefix("steps=") for override in run["overrides"] if override.startswith("steps="))


def diagnosis(run: dict[str, Any]) -> str:
    """The sentence; older runs recorded nothing else."""
    return run["diagnosis"]["message"] if isinstance(run["diagnosis"], dict) else run["diagnosis"]


def headline() -> str:
    """The two defects beside exact attention at GPT-2's size, with what their weights are worth under every attention."""
    data, judged = load("headline_h200"), load("headline_cross_eval_h200")
    draw_headline(data["runs"], load("defects_retrieval")["runs"], FOLDER / "headline.png")
    draw_cross_eval(judged["rows"], FOLDER / "headline_cross_eval.png")
    by_variant = groups(data["runs"], lambda run: (run["attention"], run["dtype"]))
    rows = []
    for (name, dtype), runs in by_variant.items():
        bad = finite(runs, "first_bad_step")
        own = "not finite" if bad else spread(finite(runs, "val/loss"))
        scores = "/".join(f"{run['max_score']:.1f}" for run in runs)
        ended = f"died at step {'/'.join(map(str, bad))}" if bad else f"{runs[0]['steps_done']:,} steps"
        rows.append([name, dtype, ended, own, spread(finite(runs, "val/loss_exact")), scores])
    run = data["runs"][0]
    step = crossing(by_variant["triton", "bfloat16"], by_variant["no_rescale", "bfloat16"])
    what = (
        f"{run['parameters']:,} parameters (GPT-2's 12 layers of 12 heads of 64, byte vocabulary), {run['seq_len']:,} tokens, "
        f"{run['tokens'] // run['steps_done']:,} tokens a step, PyTorch's own source as text, tiles of 64 keys, all in the Triton kernels. "
        f"The curves of no_rescale and exact attention cross: from step {step} on no_rescale is behind for good."
    )
    head = ["attention", "dtype", "ended", "held-out loss, own attention", "same weights, exact attention", "largest score"]
    pictures = "![headline](headline.png)\n\n![trained under x evaluated under](headline_cross_eval.png)"
    return section(data, what, table(head, rows), pictures)


def text() -> str:
    """The two defects beside exact attention on text: loss under their own attention and under exact attention."""
    from matplotlib import pyplot

    data = load("defects_text")
    rows = []
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
    # runs of one dtype are compared at the last step at which all that did not diverge were evaluated
    compared = {
        dtype: max(set.intersection(*({*evaluated(run)} for run in runs if run["status"] != "diverged")))
        for dtype, runs in groups(data["runs"], lambda run: run["dtype"]).items()
    }
    for (name, dtype), runs in groups(data["runs"], lambda run: (run["attention"], run["dtype"])).items():
        bad = finite(runs, "first_bad_step")
        own = [] if bad else [evaluated(run)[compared[dtype]][0] for run in runs]
        exact = finite(runs, "val/loss_exact") if bad else [evaluated(run)[compared[dtype]][1] for run in runs]
        rows.append(
            [
                name,
                dtype,
                "/".join(map(str, bad)) if bad else compared[dtype],
                spread(own) if own else "not finite",
                spread(exact),
                "/".join(f"{run['max_score']:.1f}" for run in runs),
                diagnosis(runs[0]) if bad else "trains",
            ]
        )
        for run in runs if dtype == "bfloat16" or name == "no_max" else []:
            for axis, column in zip(axes, ("val/loss", "val/loss_exact"), strict=True):
                label = f"{name}, {dtype}, schedule of {planned_steps(run)}" if run is runs[0] else None
                style = {"linestyle": ":" if dtype == "float32" else "-", "marker": "x" if run["status"] == "diverged" else None}
                steps, losses = points(run, column)
                if steps:
                    axis.plot(steps, losses, color=COLORS[name], label=label, **style)
    axes[0].set(title="held-out loss under the run's own attention", xlabel="optimizer step", ylabel="nats per byte")
    axes[1].set(title="the same weights under exact attention", xlabel="optimizer step")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(FOLDER / "defects_text.png", dpi=150)
    head = ["attention", "dtype", "step", "held-out loss, own attention", "same weights, exact attention", "largest score", "what happened"]
    return section(data, table(head, rows), "![losses](defects_text.png)")


def retrieval() -> str:
    """Accuracy on last_write by tile size, and where no_max overflows."""
    from matplotlib import pyplot

    data = load("defects_retrieval")
    rows = []
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    by_variant = groups(data["runs"], lambda run: (run["attention"], run["options"]["block_kv"]))
    for (name, block_kv), runs in sorted(by_variant.items()):
        own, exact, bad = finite(runs, "val/accuracy"), finite(runs, "val/accuracy_exact"), finite(runs, "first_bad_step")
        ended = f"diverged at step {'/'.join(map(str, bad))}" if bad else "completed"
        accuracies = [spread(x, "{:.1%}") if x and not bad else "-" for x in (own, exact)]
        rows.append([name, block_kv, *accuracies, "/".join(f"{run['max_score']:.0f}" for run in runs), ended])
    by_tile = {block_kv: finite(runs, "val/accuracy") for (name, block_kv), runs in sorted(by_variant.items()) if name == "no_rescale"}
    for block_kv, values in by_tile.items():
        axes.plot([block_kv] * len(values), values, "o", color=COLORS["no_rescale"], alpha=0.6)
    axes.plot(list(by_tile), [fmean(values) for values in by_tile.values()], color=COLORS["no_rescale"], label="no_rescale")
    axes.axhline(fmean(finite(by_variant["tiled", 8], "val/accuracy")), color=COLORS["tiled"], label="exact (tiled)")
    axes.set(xscale="log", xlabel="keys of a tile (sequence of 128)", ylabel="held-out accuracy", ylim=(0, 1.03), title="last_write")
    axes.set_xticks(list(by_tile), [str(x) for x in by_tile])
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(FOLDER / "defects_retrieval.png", dpi=150)
    head = ["attention", "block_kv", "accuracy, own attention", "same weights, exact attention", "largest score", "ended"]
    return section(data, table(head, rows), "![accuracy](defects_retrieval.png)")


def paired() -> str:
    """Do exact attentions train the same? Differences of the training loss, step by step, between runs that share seed and data."""
    data = load("paired_curves")
    names = {id(run): run["attention"] + (f" {run['options']['backend']}" if run["attention"] == "sdpa" else "") for run in data["runs"]}
    rows = []
    for seed, runs in groups(data["runs"], lambda run: run["seed"]).items():
        for a, b in combinations(runs, 2):
            differences = [
                x - y for x, y in zip(a["curves"]["train/loss"], b["curves"]["train/loss"], strict=True) if x is not None and y is not None
            ]
            noise = a["attention"] == b["attention"] == "sdpa"
            rms = fmean(x * x for x in differences) ** 0.5
            rows.append(
                (noise, seed, f"{names[id(a)]} - {names[id(b)]}", fmean(differences), rms, max(map(abs, differences)), len(differences))
            )
    floor = [row[4] for row in rows if row[0]]
    head = ["seed", "pair", "mean difference", "rms difference", "largest", "steps"]
    body = [
        [seed, pair, f"{mean:+.5f}", f"{rms:.5f}", f"{top:.4f}", n]
        for _, seed, pair, mean, rms, top, n in sorted(rows, key=lambda row: row[:2])
    ]
    floor = f"Float noise alone, PyTorch's own kernels against each other: rms {min(floor):.5f} to {max(floor):.5f}."
    others = [row[4] for row in rows if not row[0]]
    ours = f"Pairs with naive, tiled or triton in them: rms {min(others):.5f} to {max(others):.5f}."
    return section(data, f"{floor} {ours}", table(head, body))


def call_tables(data: dict[str, Any], *figures: tuple[str, str, float]) -> Iterable[str]:
    """For each shape that was measured, a table of each figure (title, column, divisor): variants down, lengths across."""
    shapes = groups(data["rows"], lambda row: tuple(row[key] for key in ("batch", "heads", "head_dim", "dtype", "causal")))
    for (batch, heads, head_dim, dtype, causal), rows in shapes.items():
        lengths = sorted({row["seq_len"] for row in rows})
        lines = []
        for name, own in groups(rows, lambda row: row["attention"]).items():
            for title, column, divisor in figures:
                cells = {}
                for row in own:
                    value = row.get(column)
                    cells[row["seq_len"]] = "out of memory" if "oom" in row else "-" if value is None else rounded(value / divisor)
                lines.append([name.replace(":", " "), title, *(cells.get(length, "-") for length in lengths)])
        what = f"One call, batch {batch}, {heads} heads of {head_dim}, {dtype}, {'causal' if causal else 'no mask'}; MiB above q, k and v."
        yield f"{what}\n\n{table(['attention', '', *map(str, lengths)], lines)}"


MEMORY = (("forward", "forward_bytes", 2**20), ("forward and backward", "training_bytes", 2**20))
TIME = (("ms forward", "forward_seconds", 1e-3), ("ms backward", "backward_seconds", 1e-3))


def memory() -> str:
    """Peak memory of one attention call against length, with its time and where it stands under the roofline."""
    data = load("memory_h200")
    drawn = [
        draw(data, FOLDER / f"{name}_h200.png")
        for name, draw in (("memory", draw_memory), ("time", draw_time), ("roofline", draw_roofline))
    ]
    return section(data, *call_tables(data, *MEMORY), *(f"![{path.stem}]({path.name})" for path in drawn if path))


def regenerated() -> str | None:
    """The tables of memory and time that the documents print, measured."""
    found = [load(name) for name in ("tables_h200", "tables_cpu") if (FOLDER / f"{name}.json").is_file()]
    return "\n\n".join(section(data, *call_tables(data, *MEMORY, *TIME)) for data in found) or None


def longest() -> str | None:
    """The longest sequence that ran, by memory."""
    if not (FOLDER / "longest_h200.json").is_file():
        return None
    data = load("longest_h200")
    rows = []
    for row in data["rows"]:
        shape = f"{row['batch']} x {row['heads']} x {row['head_dim']} {row['dtype']}"
        gib = "all" if row["memory_gib"] is None else f"{row['memory_gib']:g}"
        sign = "at least " if row.get("limited_by") == "time" else ""
        length = row["refused"] if "refused" in row else f"{sign}{row['max_seq_len']:,}"
        rows.append([row["attention"].replace(":", " "), shape, row["pass"], gib, length])
    drawn = draw_longest(data, FOLDER / "longest_h200.png")
    what = 'Found by doubling, then halving the gap to 12%; "at least": the next trial would have passed the time limit, not the memory.'
    head = ["attention", "batch x heads x head_dim", "pass", "GiB", "longest sequence"]
    return section(data, what, table(head, rows), *([f"![longest]({drawn.name})"] if drawn else []))


def predicted() -> str:
    """The memory calculator beside the peaks that training runs measured."""
    names = [name for name in ("training_h200", "paired_curves", "defects_text") if load(name)["environment"]["hardware"]["gpu"]]
    rows = []
    for run in (run for name in names for run in load(name)["runs"] if run["seed"] == 0 and run["status"] == "completed"):
        found, peak = predict_run(run), run["memory/peak_gib"]
        settings = " ".join(x for x in run["overrides"] if x.startswith(("attention", "model", "seq_len", "batch_size")))
        rows.append(
            [settings, run["dtype"], "compiled" if run["compiled"] else "eager", f"{found:.2f}", f"{peak:.2f}", f"{found / peak - 1:+.1%}"]
        )
    head = ["run", "dtype", "", "predicted GiB", "measured GiB", "error"]
    return section(
        load(names[0]),
        "Predicted by `model/plan.py`: counted from the code, but for the libraries' 64 MiB of workspaces, read off these runs.",
        table(head, rows),
    )


def kernels() -> str:
    """Speed of our Triton kernels beside PyTorch's, in one run."""
    data = load("kernels_h200")
    rows = [
        [
            row["attention"].replace(":backend=", " "),
            row["head_dim"],
            row["seq_len"],
            row["batch"],
            f"{row['forward_tflops']:.0f}",
            f"{row['backward_tflops']:.0f}",
        ]
        for row in data["rows"]
    ]
    head = ["attention", "head_dim", "seq_len", "batch", "forward TFLOP/s", "backward TFLOP/s"]
    return section(data, "bfloat16, causal, medians.", table(head, rows))


def verification() -> str:
    """The property x backend matrix, wherever scripts.verify was run."""
    panels = {
        where: load(name)
        for name, where in (("verify_cpu", "CPU, Triton interpreted"), ("verify_h200", "H200"))
        if (FOLDER / f"{name}.json").is_file()
    }
    draw_matrix(panels, FOLDER / "verify.png")
    parts = [section(data, f"{where}: {verdict(data)}", table(EFFORT_HEAD, effort(data))) for where, data in panels.items()]
    return "\n\n".join([*parts, "![property x backend](verify.png)"])


def mutants() -> str:
    """Which property catches which mistake."""
    data = load("mutants")
    draw_kills(data, FOLDER / "mutants.png")
    dead = [row for row in data["mutants"] if row["killed_by"]]
    alive = [f"`{row['name']}`: {row['says']} No mistake: {row['survives']}." for row in data["mutants"] if not row["killed_by"]]
    cover = ", ".join(data["cover"])
    what = (
        f"{len(data['mutants'])} single edits of the tile loop, {len(dead)} of them caught: by {cover} between them, which the tests run "
        f"every time. {len(alive)} change no result and are caught by nothing, as they should be. " + " ".join(alive)
    )
    return section(data, what, table(["property", "catches", "which no other catches"], kills(data)), "![kill matrix](mutants.png)")


def conformance() -> str:
    rows = []
    for name, where in (("conformance_interpreter", "CPU, Triton interpreted"), ("conformance_h200", "H200")):
        data = load(name)
        for backend, found in data["summary"].items():
            rows.append(
                [where, backend, found["cases"], f"{found['worst_multiple_of_naive']:.2f}", f"{found['worst_share_of_budget']:.2f}"]
            )
    head = ["where", "attention", "cases", "worst error / naive's own error", "worst error / budget"]
    return section(load("conformance_h200"), table(head, rows))


def training() -> str:
    data = load("training_h200")
    rows = [
        [
            " ".join(run["overrides"][:4]),
            run["status"],
            f"{run['parameters']:,}",
            f"{run['tokens_per_sec']:,.0f}",
            f"{run['memory/peak_gib']:.2f}",
            f"{run['val/loss']:.3f}",
        ]
        for run in data["runs"]
    ]
    return section(data, table(["run", "status", "parameters", "tokens/s", "peak GiB", "val/loss"], rows))


def survival() -> str | None:
    """Runs that were killed or harmed and resumed, against one that nothing disturbed."""
    if not (FOLDER / "kills.json").is_file():
        return None
    data = load("kills")
    cases = {
        "killed (SIGKILL) while it trains": [each for each in data["kills"] if not each["in_a_save"]],
        "killed (SIGKILL) while it saves": [each for each in data["kills"] if each["in_a_save"]],
        "disk full (a limit on file sizes: a write fails half way)": [each for each in data["harms"] if each["harm"] == "disk full"],
        "latest checkpoint damaged": [each for each in data["harms"] if each["harm"] == "latest damaged"],
        "all checkpoints damaged": [each for each in data["harms"] if each["harm"] == "all damaged"],
    }
    rows = []
    for case, found in cases.items():
        outcomes = [each["outcome"] for each in found]
        same, refused = outcomes.count("identical"), outcomes.count("refused")
        rows.append([case, len(found), same, refused, len(found) - same - refused])
    what = (
        "Each is a training of its own on one CPU core, disturbed at a random moment and resumed. Identical: weights, optimizer, random "
        "state and every computed row of metrics.jsonl are, to the bit, those of the run that nothing disturbed. Refused: one line says "
        "why, and no file of the run has changed."
    )
    return section(data, what, table(["what happened", "n", "identical", "refused", "anything else"], rows))


def laptop() -> str:
    data = load("laptop")
    rows = [[name, value] for name, value in data["figures"].items()]
    return section(data, table(["what", "figure"], rows))


SECTIONS = {
    "The two commands on two CPU cores": laptop,
    "Broken on purpose: at GPT-2's size": headline,
    "Properties": verification,
    "Mutants": mutants,
    "Conformance": conformance,
    "Exact attentions train alike": paired,
    "Peak memory of attention": memory,
    "The documents' tables, measured": regenerated,
    "Longest sequences": longest,
    "Predicted and measured memory of training": predicted,
    "Training a GPT-2-sized model at 8,192 tokens": training,
    "Killed and resumed": survival,
    "Broken on purpose: text": text,
    "Broken on purpose: retrieval": retrieval,
    "Speed of the kernels": kernels,
}


def main() -> None:
    # it takes no arguments: --help must not write, nor must a mistyped one
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    import matplotlib

    matplotlib.use("Agg")
    # a section whose measurements are not there yet is left out
    parts = [f"## {title}\n\n{text}" for title, section in SECTIONS.items() if (text := section())]
    intro = "# Results\n\nGenerated by `python -m scripts.results` from the JSON files beside it."
    (FOLDER / "README.md").write_text(intro + "\n\n" + "\n\n".join(parts) + "\n")
    print(f"{FOLDER / 'README.md'}: {len(parts)} sections")
    from scripts.claims.render import write_pages  # which draws on the tables above

    write_pages()


if __name__ == "__main__":
    main()
