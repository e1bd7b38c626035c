"""What a report says: one function a section, from the runs to blocks of text, tables and
figures.
"""

import math
from collections.abc import Iterable
from itertools import product
from statistics import fmean
from typing import Any

from scripts.report.drawing import Style, render
from scripts.report.figures import (
    FLOAT16_LIMIT,
    cost_lengths,
    curve_lengths,
    draw_cost,
    draw_curves,
    draw_history,
    draw_others,
    other_metrics,
)
from scripts.report.page import Card, Figure, Table, Text
from scripts.report.runs import MIN_POINTS, Run, ended, in_order, number
from scripts.tables import mean_and_deviation
from training.resume import changes_in_words
from training.sweep import remark

SPEEDS = (
    "The speed drawn is that of the steps alone, without warm-up, metrics, evaluation and "
    "checkpoints. "
    "In the tables it stands beside tokens/s, which is by the wall clock with all of these."
)
HELD_OUT = ("val/loss", "val/loss_exact", "val/accuracy")


def title(runs: list[Run]) -> str:
    variants = sorted({run.variant for run in runs}, key=in_order)
    words = ", ".join(variants) if len(variants) < 6 else _count(len(variants), "variant")
    return f"{words}: {_count(len(runs), 'run')}" if len(runs) > 1 else words


def at_a_glance(runs: list[Run]) -> list[str]:
    variants = {run.variant for run in runs}
    seeds = {str(run.summary.get("seed")) for run in runs}
    shape = f"{_count(len(runs), 'run')} of {_count(len(variants), 'variant')}"
    if len(seeds) > 1:
        shape += f" and {_count(len(seeds), 'seed')}"
    texts = [f"{shape}: {_outcomes(runs)}."]
    judged = [run for run in ended(runs, "completed") if _gap(run) is not None]
    if judged and all(abs(_gap(run)) < 0.0005 for run in judged):
        texts.append(
            "In every completed run the held-out loss is the same under exact attention as under "
            "the run's own, to three decimals."
        )
    elif judged:
        groups: dict[str, list[Run]] = {}
        for run in judged:
            groups.setdefault(run.variant, []).append(run)
        widest = max(groups, key=lambda variant: abs(fmean(map(_gap, groups[variant]))))
        own, exact = (
            fmean(run.figure(name) for run in groups[widest])
            for name in ("val/loss", "val/loss_exact")
        )
        texts.append(
            "The widest gap between a variant's own held-out loss and that of the same weights "
            f"under exact attention is {widest}'s: {own:.3f} against {exact:.3f} nats per token."
        )
    return texts


def warnings(runs: list[Run], *, left_out: int = 0) -> list[str]:
    texts = []
    if left_out:
        jobs = _count(left_out, "job")
        texts.append(f"{jobs} of the sweep never started: index.jsonl has the commands.")
    if len({str(run.env.get("data_fingerprint")) for run in runs} - {"None", ""}) > 1:
        # the fingerprint is of the tokenizer too
        texts.append(
            "These runs read different data or tokenizers: curves compare only where the data "
            "fingerprint is the same."
        )
    machines = set()
    for run in runs:
        hardware = run.env.get("hardware")
        if isinstance(hardware, dict) and run.figure("tokens_per_sec"):
            machines.add(str([hardware.get(name) for name in ("cpu", "gpu")]))
    if len(machines) > 1:
        texts.append(f"The speeds were measured on {len(machines)} different machines.")
    texts += [f"Damaged: {run.name}: {run.damage}." for run in runs if run.damage]
    for run in runs:
        if changes := changes_in_words(run.summary):
            texts.append(f"{run.name} was {changes}.")
    meanings = {
        "failed": "failed",
        "unfinished": "ended without a summary",
        "interrupted": "were interrupted",
    }
    for status, meaning in meanings.items():
        if count := len(ended(runs, status)):
            of_all = f"{count} of {_count(len(runs), 'run')}"
            texts.append(f"{of_all} {meaning}: means of variants leave them out.")
    return texts


def variant_table(runs: list[Run], styles: dict[str, Style]) -> Table:
    """A row a variant and sequence length: means over its completed runs, with the standard
    deviation over seeds.
    """
    lengths = sorted({run.seq_len for run in runs})
    columns = [
        ("own val/loss", "{:.3f}", lambda run: run.figure("val/loss")),
        ("val/loss_exact", "{:.3f}", lambda run: run.figure("val/loss_exact")),
        ("exact - own", "{:+.3f}", _gap),
        ("accuracy", "{:.1%}", lambda run: run.figure("val/accuracy")),
        ("accuracy, exact", "{:.1%}", lambda run: run.figure("val/accuracy_exact")),
        ("tokens/s", "{:,.0f}", lambda run: run.figure("tokens_per_sec")),
        ("steps alone", "{:,.0f}", lambda run: run.figure("step_tokens_per_sec")),
        ("peak GiB", "{:.3g}", lambda run: run.peak_gib),
    ]
    several = len(lengths) > 1
    head = ["variant", *(["seq_len"] if several else []), "runs", "steps"]
    rows = []
    for variant, seq_len in product(styles, lengths):
        group = [run for run in runs if (run.variant, run.seq_len) == (variant, seq_len)]
        if not group:
            continue
        completed = ended(group, "completed")
        steps = {_cell(run.figure("steps_done"), "{:,.0f}") for run in completed} - {"-"}
        length = [f"{seq_len:,}" if seq_len else "-"] if several else []
        cells = [_mean(map(figure, completed), form) for _, form, figure in columns]
        words = [variant, *length, _outcomes(group), ", ".join(sorted(steps)) or "-"]
        rows.append([*words, *cells])
    head += [name for name, _, _ in columns]
    return _without_empty(Table(head, rows, words=head.index("runs") + 1))


def curve_figures(runs: list[Run], styles: dict[str, Style]) -> list[Figure | Text]:
    """The figures, and a line where there is nothing to draw."""
    several = len({(run.variant, run.seq_len) for run in runs}) < len(runs)
    seeds = (
        " Lines are means over seeds, bands reach from the lowest to the highest; where a seed "
        "ends early, the others go on thin."
    )
    caption = (
        "Marked lines: held-out loss. Faint lines: training loss. Dashed: an attention that is "
        "wrong on purpose. A wrong attention can "
        "look healthy under itself; under exact attention its weights are judged." + seeds * several
    )
    figures: list[Figure | Text] = []
    rows = [row for run in runs for row in run.metrics if row.get("step")]
    if not any(number(row.get(name)) is not None for row in rows for name in HELD_OUT):
        figures.append(Text("No evaluation after step 0: there is no held-out loss to show."))
    elif not curve_lengths(runs, "val/loss", "train/loss", "val/accuracy"):
        figures.append(Text(f"No curve: no run has logged a loss {MIN_POINTS} times."))
    if curve_lengths(runs, "val/loss", "train/loss"):
        drawing = render("loss", lambda: draw_curves(runs, styles, "val/loss", "train/loss"))
        figures.append(Figure("loss", "loss against training tokens", caption, drawing))
    if curve_lengths(runs, "val/accuracy"):
        caption = "Share of queries answered with the most recent value." + seeds * several
        drawing = render("accuracy", lambda: draw_curves(runs, styles, "val/accuracy", None))
        figures.append(Figure("accuracy", "accuracy against training tokens", caption, drawing))
    return figures


def cost_figures(runs: list[Run], styles: dict[str, Style]) -> list[Figure | Text]:
    lengths = cost_lengths(runs)
    here = [run for run in runs if run.seq_len in lengths]
    if not any(run.peak_gib or run.figure("step_tokens_per_sec") for run in here):
        return [Text("No run has measured its memory or its speed.")]
    if len(lengths) > 1:
        caption = (
            "Both axes are logarithmic: a line of slope 2 grows with the square of the length, one "
            "of slope 1 with the length. A cross above the frame: out of memory. "
        )
    else:
        caption = (
            f"At seq_len={lengths[0]:,}. Means over seeds, each seed as a dot. Hatched: wrong on "
            "purpose. "
        )
    if any(run.figure("step_tokens_per_sec") for run in runs):
        caption += f"{SPEEDS} "
    if any(run.summary.get("device") == "cpu" for run in runs):
        caption += "Peak memory is that of tensors, on a CPU too: of one step, measured apart."
    drawing = render("cost", lambda: draw_cost(runs, styles))
    return [Figure("cost", "peak memory and training speed", caption, drawing)]


def other_figures(runs: list[Run], styles: dict[str, Style]) -> list[Figure]:
    if not other_metrics(runs):
        return []
    caption = (
        "Against training tokens. A logarithmic scale where values span more than a factor of 30."
    )
    drawing = render("others", lambda: draw_others(runs, styles))
    return [Figure("others", "other metrics against training tokens", caption, drawing)]


def diverged_card(run: Run, place: int, style: Style) -> Card:
    """How a run left the finite range, with its largest scores on the way."""
    diagnosis = run.summary.get("diagnosis")
    diagnosis = diagnosis if isinstance(diagnosis, dict) else {}
    history = score_history(diagnosis, run)
    facts = {}
    for key, value in diagnosis.items():
        if key in ("queries", "keys") and isinstance(value, list):
            facts[key] = ":".join(map(str, value))
        elif key not in ("message", "history"):
            facts[key.replace("_", " ")] = _fact(value)
    facts.setdefault("step", _fact(run.summary.get("first_bad_step")))
    facts.setdefault("dtype", _fact(run.summary.get("dtype")))
    if not any("max score" in key for key in facts):
        facts["largest score"] = _fact(run.figure("max_score"))
    past = next((step for step, score in history.items() if score > FLOAT16_LIMIT), None)
    if past is not None and not any("16" in key for key in facts):
        facts[f"past {FLOAT16_LIMIT:.2f}, where exp overflows float16"] = f"step {past:g}"
    facts = {key: value for key, value in facts.items() if value != "-"}
    figure = None
    if len(history) > 1:
        name, step = f"scores_{place}", number(run.summary.get("first_bad_step"))
        drawing = render(name, lambda: draw_history(history, step, style))
        figure = Figure(name, f"largest score of {run.name} by step", "", drawing)
    return Card(run.name, _sentence(run), facts, figure)


def score_history(diagnosis: dict[str, Any], run: Run) -> dict[float, float]:
    """Largest score by step: the diagnosis' own history as pairs, or rows with a step and a score;
    else what the run logged.
    """
    points = []
    for entry in diagnosis.get("history") or ():
        if isinstance(entry, dict):
            entry = (entry.get("step"), entry.get("max_score", entry.get("attention/max_score")))
        if isinstance(entry, (list, tuple)) and len(entry) == 2:
            points.append(entry)
    points = points or [(row.get("step"), row.get("attention/max_score")) for row in run.metrics]
    return {
        step: score
        for step, score in points
        if number(step) is not None and number(score) is not None
    }


def oom_table(runs: list[Run]) -> Table:
    rows = []
    for run in runs:
        oom = run.summary.get("oom", {})
        gib = [number(oom.get(f"{key}_gib")) for key in ("asked", "free", "total", "predicted")]
        gib[-1] = gib[-1] or run.figure("memory/predicted_gib")
        rows.append([run.name, *(_cell(value, "{:.2f} GiB") for value in gib), _sentence(run)])
    head = ["run", "asked", "free", "total", "predicted", "message"]
    return _without_empty(Table(head, rows, notes=True))


def broken_table(runs: list[Run]) -> Table:
    rows = []
    for run in runs:
        steps = _cell(run.figure("steps_done"), "{:,.0f}")
        rows.append([run.name, run.status, steps, run.place, _sentence(run)])
    head = ["run", "status", "steps", "folder", "message"]
    return _without_empty(Table(head, rows, words=2, notes=True))


def run_table(runs: list[Run]) -> Table:
    columns = {
        "steps": ("steps_done", "{:,.0f}"),
        "val/loss": ("val/loss", "{:.4f}"),
        "val/loss_exact": ("val/loss_exact", "{:.4f}"),
        "accuracy": ("val/accuracy", "{:.1%}"),
        "accuracy, exact": ("val/accuracy_exact", "{:.1%}"),
        "max score": ("max_score", "{:.1f}"),
        "tokens/s": ("tokens_per_sec", "{:,.0f}"),
        "steps alone": ("step_tokens_per_sec", "{:,.0f}"),
        "peak GiB": ("memory/peak_gib", "{:.3g}"),
        "bad step": ("first_bad_step", "{:.0f}"),
    }
    rows = []
    for run in runs:
        figures = [_cell(run.figure(key), form) for key, form in columns.values()]
        rows.append([run.name, run.status, run.place, *figures])
    return _without_empty(Table(["run", "status", "folder", *columns], rows, words=3))


def provenance(runs: list[Run]) -> Table:
    """What all runs share, a line a group; below it every fact in which they differ, each value
    with the runs that have it.
    """
    facts = [_environment(run) for run in runs]
    shared: dict[str, list[str]] = {}
    differing = []
    for group, key in dict.fromkeys(key for fact in facts for key in fact):
        values: dict[str, list[str]] = {}
        for run, fact in zip(runs, facts, strict=True):
            values.setdefault(fact.get((group, key), "unknown"), []).append(run.name)
        if len(values) == 1:
            shared.setdefault(group, []).append(f"{key} {next(iter(values))}".strip())
            continue
        # the value that most runs have needs no list of them
        most = max(values.values(), key=len)
        words = [
            f"{value}: {_count(len(names), 'run') if names is most else ', '.join(names)}"
            for value, names in values.items()
        ]
        differing.append([f"{group}: {key}" if key else group, "; ".join(words)])
    rows = [[group, ", ".join(words)] for group, words in shared.items()]
    return Table(["fact", "value"], rows + differing, notes=True)


def _environment(run: Run) -> dict[tuple[str, str], str]:
    """Group and name of a fact, with its value."""
    changed = " with uncommitted changes" if run.env.get("dirty") else ""
    facts = {
        ("commit", ""): f"{run.env.get('commit') or 'unknown'}{changed}",
        ("data fingerprint", ""): run.env.get("data_fingerprint"),
    }
    facts |= {("settings", key): run.summary.get(key) for key in ("device", "dtype", "compiled")}
    for group in ("hardware", "versions"):
        recorded = run.env.get(group)
        for key, value in recorded.items() if isinstance(recorded, dict) else ():
            facts[group, key.replace("_", " ")] = value
    facts["platform", ""] = run.env.get("platform")
    return {key: _fact(value) for key, value in facts.items() if value is not None}


def _outcomes(runs: list[Run]) -> str:
    """2 completed, 1 diverged"""
    statuses = [run.status for run in runs]
    return ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))


def _gap(run: Run) -> float | None:
    own, exact = run.figure("val/loss"), run.figure("val/loss_exact")
    return None if own is None or exact is None else exact - own


def _sentence(run: Run) -> str:
    diagnosis = run.summary.get("diagnosis")
    if isinstance(diagnosis, dict):
        return str(diagnosis.get("message") or "")
    return remark(run.summary)


def _mean(values: Iterable[float | None], form: str) -> str:
    """Mean and, of several, the standard deviation."""
    return _signless(mean_and_deviation([x for x in values if x is not None], form))


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else _signless(form.format(value))


def _signless(text: str) -> str:
    """A figure that is rounded to nothing has no sign."""
    mean = text.partition(" ")[0]
    return text if text == "-" or mean.strip("+-0.,%") else text.lstrip("+-")


def _fact(value: Any) -> str:
    """Any value of a JSON file as words."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')} {_fact(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_fact, value))
    return str(value)


def _count(number_of: int, noun: str) -> str:
    return f"{number_of} {noun}{'s' * (number_of != 1)}"


def _without_empty(table: Table) -> Table:
    """The table less the columns in which no row has anything."""
    columns = zip(*table.rows, strict=True) if table.rows else ()
    kept = [i for i, column in enumerate(columns) if i == 0 or set(column) - {"", "-"}]
    return Table(
        [table.head[i] for i in kept],
        [[row[i] for i in kept] for row in table.rows],
        words=sum(i < table.words for i in kept),
        notes=table.notes and len(table.head) - 1 in kept,
    )
