"""The sections of a report: one function per section turns runs into blocks of text, tables and
figures.
"""

from collections import Counter
from functools import partial
from typing import Any

from attention import LIMITS, dtype_name
from scripts.report.drawing import Style, legend, render
from scripts.report.figures import (
    COSTS,
    cost_lengths,
    curve_lengths,
    draw_cost,
    draw_curves,
    draw_history,
    draw_others,
    end_marks,
    other_metrics,
)
from scripts.report.page import Card, Figure, Table, Text
from scripts.report.ranking import Ranking, answer
from scripts.report.runs import Run, ended, measured
from scripts.tables import grouped, mean_and_deviation
from training.launch.sweep import COLUMNS, in_order, remark
from training.record.recorder import belies_exact
from training.record.starts import changes_in_words

SPEEDS = (
    "The speed drawn is that of the steps alone, without warm-up, metrics, evaluation and "
    "checkpoints. "
    "In the tables it stands beside tokens/s, which is by the wall clock with all of these."
)
FAR_APART = 0.05  # nats
SCORE_LIMITS = {dtype_name(dtype): limit for dtype, limit in LIMITS.items()}
NEAR = 0.8  # share of a limit
HELD_OUT = ("val/loss", "val/loss_exact", "val/accuracy")


def title(runs: list[Run]) -> str:
    variants = sorted({run.variant for run in runs}, key=in_order)
    words = ", ".join(variants) if len(variants) < 6 else count_of(len(variants), "variant")
    return f"{words}: {count_of(len(runs), 'run')}" if len(runs) > 1 else words


def at_a_glance(runs: list[Run], rankings: list[Ranking]) -> list[str]:
    """Which variant is best, and how the runs ended."""
    several = len({run.seq_len for run in runs}) > 1
    texts = []
    for ranking in rankings:
        where = f" at seq_len={ranking.seq_len:,}" if several else ""
        text = answer(ranking, where=where)
        texts.append(text if ranking.metric != "val/loss" else f"Not softmax: {text}")
    variants = {run.variant for run in runs}
    seeds = {str(run.summary.get("seed")) for run in runs}
    shape = f"{count_of(len(runs), 'run')} of {count_of(len(variants), 'variant')}"
    if len(seeds) > 1:
        shape += f" and {count_of(len(seeds), 'seed')}"
    return [*texts, f"{shape}: {_outcomes(runs)}."]


def suspicions(runs: list[Run]) -> list[str]:
    """Doubts about a variant: it is not what it claims, or is close to an overflow."""
    texts, apart = [], []
    near: dict[str, list[str]] = {}  # by dtype: variants with their largest scores
    for variant, group in grouped(runs, lambda run: run.variant).items():
        for dtype, limit in SCORE_LIMITS.items():
            own = [run for run in group if run.summary.get("dtype") == dtype]
            score = max(measured(own, "max_score"), default=0)
            if score > NEAR * limit:
                near.setdefault(dtype, []).append(f"{variant} {score:.1f}")
        judged = [run for run in group if run.is_softmax and _gap(run) is not None]
        if not judged:
            continue
        worst = max(judged, key=lambda run: abs(_gap(run)))
        losses = f"{worst.figure('val/loss'):.3f} against {worst.figure('val/loss_exact'):.3f}"
        if belies_exact(worst.summary):
            texts.append(
                f"{variant} is labelled exact and is not: its own val/loss against that of the "
                f"same weights under exact attention is {losses}."
            )
        elif abs(_gap(worst)) > FAR_APART:
            apart.append(f"{variant} {losses}")
    if apart:
        texts.append(f"Own loss far from val/loss_exact of the same weights: {'; '.join(apart)}.")
    for dtype, scores in near.items():
        texts.append(
            f"Largest scores near or past {SCORE_LIMITS[dtype]:.2f}, where exp overflows {dtype} "
            f"unless the maximum is subtracted: {', '.join(scores)}."
        )
    return texts


def warnings(runs: list[Run], *, left_out: int = 0) -> list[str]:
    texts = []
    if left_out:
        jobs = count_of(left_out, "job")
        texts.append(
            f"{jobs} of the sweep never started: python train.py resume=DIR goes on with them."
        )
    if len({str(run.env.get("data_fingerprint")) for run in runs} - {"None", ""}) > 1:
        # the fingerprint includes the tokenizer
        texts.append(
            "These runs read different data or tokenizers: curves compare only where the data "
            "fingerprint is the same. Of one corpus under several tokenizers, val/bpb compares."
        )
    timed = [run.env.get("hardware") for run in runs if run.figure("tokens_per_sec")]
    machines = {(hardware.get("cpu"), hardware.get("gpu")) for hardware in timed if hardware}
    if len(machines) > 1:
        texts.append(f"The speeds were measured on {len(machines)} different machines.")
    texts += [f"Damaged: {run.name}: {run.damage}." for run in runs if run.damage]
    for run in runs:
        if changes := changes_in_words(run.summary):
            texts.append(f"{run.name} was {changes}.")
    return texts


def variant_table(runs: list[Run], rankings: list[Ranking]) -> Table:
    """A row per variant and sequence length, best first: means over its completed runs with the
    standard deviation over seeds, and the difference to the baseline, paired by seed.
    """
    figures = {
        "val/loss_exact": ("val/loss_exact", "{:.3f}"),
        "own val/loss": ("val/loss", "{:.3f}"),
        "val/bpb_exact": ("val/bpb_exact", "{:.3f}"),
        "own val/bpb": ("val/bpb", "{:.3f}"),
        "accuracy, exact": ("val/accuracy_exact", "{:.1%}"),
        "own accuracy": ("val/accuracy", "{:.1%}"),
        "peak GiB": ("memory/peak_gib", "{:.3g}"),
        "steps alone": ("step_tokens_per_sec", "{:,.0f}"),
        "tokens/s": ("tokens_per_sec", "{:,.0f}"),
    }
    several = len({run.seq_len for run in runs}) > 1
    rows = []
    for (seq_len, variant), group in grouped(runs, lambda run: (run.seq_len, run.variant)).items():
        completed = ended(group, "completed")
        beside = [
            _beside(ranking, variant)
            for ranking in rankings
            if ranking.seq_len == seq_len and variant in ranking.losses
        ]
        cells = [
            mean_and_deviation(measured(completed, name), form) for name, form in figures.values()
        ]
        steps = sorted({f"{done:,.0f}" for done in measured(completed, "steps_done")})
        rows.append(
            [
                variant,
                f"{seq_len:,}" if seq_len and several else "-",
                *next(filter(None, beside), ("-", "-")),
                *cells,
                ", ".join(steps) or "-",
                _outcomes(group),
            ]
        )
    head = ["variant", "seq_len", "beside baseline", "95%", *figures, "steps", "runs"]
    return _without_empty(Table(head, rows))


def _beside(ranking: Ranking, variant: str) -> tuple[str, str] | None:
    """How much higher a loss is than the baseline's, as "+0.310" and "+0.280 to +0.340"."""
    if ranking.baseline is None or len(ranking.losses) == 1:
        return None
    if variant == ranking.baseline:
        return "baseline", "-"
    found = ranking.difference(variant, ranking.baseline)
    return f"{found.mean:+.3f}", found.interval() if found.half is not None else "-"


def curve_figures(runs: list[Run], styles: dict[str, Style]) -> list[Figure | Text]:
    """The figures, or a sentence if there is nothing to draw."""
    several = len({(run.variant, run.seq_len) for run in runs}) < len(runs)
    seeds = (
        " Lines are means over seeds, bands reach from the lowest to the highest; where a seed "
        "ends early, the others go on thin."
    )
    captions = {
        "loss": "Marked lines: held-out loss. Faint lines: training loss. Dashed: an attention "
        "that is wrong on purpose. A wrong attention can look healthy under itself; under exact "
        "attention its weights are judged.",
        "accuracy": "Share of queries answered with the most recent value.",
    }
    metrics = {"loss": ("val/loss", "train/loss"), "accuracy": ("val/accuracy",)}
    figures: list[Figure | Text] = []
    rows = [row for run in runs for row in run.metrics if row["step"]]
    if all(row.get(name) is None for row in rows for name in HELD_OUT):
        figures.append(Text("No evaluation after step 0: there is no held-out loss to show."))
    elif not curve_lengths(runs, *metrics["loss"], *metrics["accuracy"]):
        figures.append(Text("No curve: no run has logged a loss twice."))
    for name, own in metrics.items():
        if curve_lengths(runs, *own):
            panels = render(name, partial(draw_curves, runs, styles, *own))
            key = legend(name, styles, end_marks(runs))
            title = f"{name} against training tokens"
            figures.append(Figure(title, captions[name] + seeds * several, panels, key))
    return figures


def cost_figures(runs: list[Run], styles: dict[str, Style]) -> list[Figure | Text]:
    lengths = cost_lengths(runs)
    here = [run for run in runs if run.seq_len in lengths]
    if not any(run.figure(name) for run in here for name in COSTS.values()):
        return [Text("No run has measured its memory or its speed.")]
    several = len(lengths) > 1
    if several:
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
    ran_out = several and any(run.status == "oom" for run in here)
    panels = render("cost", partial(draw_cost, runs, styles))
    # bars have their names next to them
    key = legend("cost", styles if several else {}, {"out of memory": "X"} if ran_out else {})
    return [Figure("peak memory and training speed", caption, panels, key)]


def other_figures(runs: list[Run], styles: dict[str, Style]) -> list[Figure]:
    if not other_metrics(runs):
        return []
    caption = (
        "Against training tokens. A logarithmic scale where values span more than a factor of 30."
    )
    panels = render("others", partial(draw_others, runs, styles))
    key = legend("others", styles, {})
    return [Figure("other metrics against training tokens", caption, panels, key)]


def diverged_card(run: Run, place: int, style: Style) -> Card:
    """How a run left the finite range, as AttentionMonitor.diagnose() recorded it, with its largest
    scores until then.
    """
    found = run.summary.get("diagnosis") or {}
    diagnosis = {"history": [], "dtype": run.summary.get("dtype")} | found
    history = {step: score for step, score in diagnosis.pop("history") if score is not None}
    facts = {}
    for key, value in diagnosis.items():
        if key in ("queries", "keys"):
            facts[key] = ":".join(map(str, value))
        elif key != "message" and value is not None:
            facts[key.replace("_", " ")] = _fact(value)
    figure = None
    if len(history) > 1:
        draw = partial(draw_history, history, run.figure("first_bad_step"), style)
        panels = render(f"scores{place}_", draw)
        figure = Figure(f"largest score of {run.name} by step", "", panels)
    return Card(run.name, remark(run.summary), facts, figure)


def oom_table(runs: list[Run]) -> Table:
    rows = []
    for run in runs:
        oom = run.summary.get("oom", {})
        gib = [oom.get(f"{key}_gib") for key in ("asked", "free", "total")]
        rows.append([run.name, *(_cell(value, "{:.2f} GiB") for value in gib), remark(run.summary)])
    head = ["run", "asked", "free", "total", "message"]
    return _without_empty(Table(head, rows, notes=True))


def broken_table(runs: list[Run]) -> Table:
    rows = []
    for run in runs:
        steps = _cell(run.figure("steps_done"), "{:,.0f}")
        rows.append([run.name, run.status, steps, run.place, remark(run.summary)])
    head = ["run", "status", "steps", "folder", "message"]
    return _without_empty(Table(head, rows, words=2, notes=True))


def run_table(runs: list[Run]) -> Table:
    """Every run, with the columns of a sweep's table."""
    columns = {"steps": ("steps_done", "{:,.0f}")} | COLUMNS
    columns |= {"max score": ("max_score", "{:.1f}"), "bad step": ("first_bad_step", "{:.0f}")}
    del columns["status"]
    rows = []
    for run in runs:
        figures = [_cell(run.figure(key), form) for key, form in columns.values()]
        rows.append([run.name, run.status, run.place, *figures])
    return _without_empty(Table(["run", "status", "folder", *columns], rows, words=3))


def provenance(runs: list[Run]) -> Table:
    """The facts that all runs share, one line per group. Below, every fact in which they differ,
    with the runs that have each value.
    """
    # a job that failed before its run started has no environment
    runs = [run for run in runs if run.env]
    facts = [_environment(run) for run in runs]
    shared: dict[str, list[str]] = {}
    differing = []
    for group, key in dict.fromkeys(key for fact in facts for key in fact):
        pairs = zip(runs, facts, strict=True)
        values = grouped(pairs, lambda pair, key=(group, key): pair[1].get(key, "unknown"))
        if len(values) == 1:
            shared.setdefault(group, []).append(f"{key} {next(iter(values))}".strip())
            continue
        # no list of runs for the most common value
        most = max(values.values(), key=len)
        words = [
            f"{value}: "
            + (count_of(len(own), "run") if own is most else ", ".join(run.name for run, _ in own))
            for value, own in values.items()
        ]
        differing.append([f"{group}: {key}" if key else group, "; ".join(words)])
    rows = [[group, ", ".join(words)] for group, words in shared.items()]
    return Table(["fact", "value"], rows + differing, notes=True)


def _environment(run: Run) -> dict[tuple[str, str], str]:
    """The facts of a run's environment: (group, name) to value."""
    changed = " with uncommitted changes" if run.env.get("dirty") else ""
    facts = {
        ("commit", ""): f"{run.env.get('commit') or 'unknown'}{changed}",
        ("data fingerprint", ""): run.env.get("data_fingerprint"),
    }
    facts |= {("settings", key): run.summary.get(key) for key in ("device", "dtype", "compiled")}
    for group in ("hardware", "versions"):
        for key, value in run.env.get(group, {}).items():
            facts[group, key.replace("_", " ")] = value
    facts["platform", ""] = run.env.get("platform")
    return {key: _fact(value) for key, value in facts.items() if value is not None}


def _outcomes(runs: list[Run]) -> str:
    """For example: 2 completed, 1 diverged"""
    statuses = Counter(run.status for run in runs)
    return ", ".join(f"{count} {status}" for status, count in statuses.items())


def _gap(run: Run) -> float | None:
    own, exact = run.figure("val/loss"), run.figure("val/loss_exact")
    return None if own is None or exact is None else exact - own


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _fact(value: Any) -> str:
    """Any value of a JSON file as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')} {_fact(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_fact, value))
    return str(value)


def count_of(number_of: int, noun: str) -> str:
    return f"{number_of} {noun}{'s' * (number_of != 1)}"


def _without_empty(table: Table) -> Table:
    """The table without the columns that are empty in every row."""
    columns = zip(*table.rows, strict=True) if table.rows else ()
    kept = [i for i, column in enumerate(columns) if i == 0 or set(column) - {"", "-"}]
    return Table(
        [table.head[i] for i in kept],
        [[row[i] for i in kept] for row in table.rows],
        words=sum(i < table.words for i in kept),
        notes=table.notes and len(table.head) - 1 in kept,
    )
