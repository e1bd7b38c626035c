"""The page of a report as one HTML file: verdict, table, charts, endings and sources.

A policy in the page forbids network and eval, and only its own two scripts run, by their checksums:
the files of somebody else's run can do no harm. All text is escaped.
"""

import json
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from html import escape
from pathlib import Path
from string import Template

import vl_convert

from scripts.report.charts import Look, Looks, cost_charts, looks_of, loss_charts, score_chart
from scripts.report.doubts import doubts
from scripts.report.ranking import Ranking, verdict
from scripts.report.runs import Run, measured
from scripts.tables import grouped, mean_and_deviation
from training.record.palette import HUES
from training.record.runs import remark

# what stands above a column, and the format of its means
COLUMNS = {
    "val/loss": ("val/loss", "{:.3f}"),
    "val/loss_exact": ("val/loss_exact", "{:.3f}"),
    "val/bpb": ("val/bpb", "{:.3f}"),
    "val/bpb_exact": ("val/bpb_exact", "{:.3f}"),
    "val/accuracy": ("accuracy", "{:.1%}"),
    "val/accuracy_exact": ("accuracy, exact", "{:.1%}"),
    "memory/peak_gib": ("peak GiB", "{:.3g}"),
    "tokens_per_sec": ("tokens/s", "{:,.0f}"),
    "step_tokens_per_sec": ("steps alone", "{:,.0f}"),
}


def render(runs: list[Run], rankings: list[Ranking], *, left_out: int, folder: str) -> str:
    """The page about `runs`, which are in the order of its rows. left_out: the number of jobs that
    never started. folder: the name of that of the runs.
    """
    looks = looks_of(runs)
    several = len({ranking.seq_len for ranking in rankings}) > 1
    verdicts = [verdict(ranking, at_length=several) for ranking in rankings] or [
        ("No result", "No completed run was evaluated.")
    ]
    names = ("page.html", "page.css", "page.js")
    template, css, script = (Path(__file__).with_name(name).read_text("utf-8") for name in names)
    vega = _vega()
    return Template(template).substitute(
        policy=" ".join(map(_checksum, (script, vega))),
        title=escape(f"{verdicts[0][0]}: {folder}"),
        css=css,
        summary=escape(_summary(runs, folder)),
        verdicts="".join(
            f"<h1>{escape(head)}</h1><p class=lead>{escape(text)}</p>" for head, text in verdicts
        ),
        doubts="".join(f"<li>{escape(text)}</li>" for text in doubts(runs, left_out)),
        variants=_variants(runs, rankings, looks),
        legend="".join(_button(*item) for item in looks.items()) if len(looks) > 1 else "",
        charts=_charts(runs, looks),
        endings=_endings(runs),
        sources=_sources(runs),
        script=script,
        vega=vega,
    )


@cache
def _vega() -> str:
    """The script that draws: a megabyte, which takes a second to make."""
    return vl_convert.javascript_bundle()


def _checksum(script: str) -> str:
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"


def _summary(runs: list[Run], folder: str) -> str:
    named = [run for run in runs if run.status != "damaged"]
    variants, seeds = {run.variant for run in named}, {run.seed for run in named}
    counts = f"variants {len(variants)} · seeds {len(seeds)}"
    return f"{_statuses(runs)} · {counts} · {folder}"


def _statuses(runs: list[Run]) -> str:
    statuses = Counter(run.status for run in runs)
    return ", ".join(f"{count} {status}" for status, count in statuses.items())


def _button(variant: str, look: Look) -> str:
    """A variant's name, with its line and its marker as the charts draw them."""
    light, dark = HUES[look.hue]
    dash = " ".join(map(str, look.dash))
    name = escape(variant)
    return (
        f'<button class="variant" data-variant="{name}" aria-pressed="true" title="{name}">'
        f'<svg style="--light:{light};--dark:{dark}" viewBox="0 0 34 12" aria-hidden="true">'
        f'<path d="M1 6H33" stroke-dasharray="{dash if look.dash[1] else "none"}"/>'
        f'<path class="mark" d="{look.shape}" transform="translate(17 6) scale(4.2)"/></svg>'
        f"<span>{name}</span></button>"
    )


def _variants(runs: list[Run], rankings: list[Ranking], looks: Looks) -> str:
    """A row for each variant and length, best first: means over its completed runs with the
    standard deviation over seeds, and the difference to the baseline.
    """
    columns = {name: each for name, each in COLUMNS.items() if measured(runs, name)}
    if len({run.data for run in runs}) == 1:  # bits per byte are the loss times a constant
        columns = {name: each for name, each in columns.items() if "bpb" not in name}
    several = len({run.seq_len for run in runs}) > 1
    body = ""
    for (seq_len, variant), own in grouped(runs, lambda run: (run.seq_len, run.variant)).items():
        cells = {"seq_len": f"{seq_len:,}"} if several else {}
        cells["status"] = _statuses(own)
        if len(looks) > 1:
            cells["beside baseline"] = _beside(rankings, own[0])
        for name, (head, form) in columns.items():
            cells[head] = mean_and_deviation(measured(own, name), form)
        note = "<small>broken on purpose</small>" if looks[variant].is_defect else ""
        row = f"<th>{_button(variant, looks[variant])}{note}</th>"
        for head, cell in cells.items():
            row += f'<td data-label="{head}">{_small_spread(cell)}</td>'
        body += f'<tr data-variant="{escape(variant)}">{row}</tr>'
    head = "".join(f"<th><button>{head}</button></th>" for head in ("variant", *cells))
    return f"<table class=sortable><thead><tr>{head}</tr></thead>{body}</table>"


def _small_spread(text: str) -> str:
    mean, sign, spread = escape(text).partition(" ± ")
    return f"{mean} <small>±&nbsp;{spread}</small>" if sign else mean


def _beside(rankings: list[Ranking], run: Run) -> str:
    """How much higher a variant's loss is than the baseline's, with half of its 95% interval."""
    for ranking in rankings:
        baseline, ranked = ranking.baseline, ranking.losses
        if ranking.seq_len == run.seq_len and run.variant in ranked and baseline in ranked:
            if run.variant == baseline:
                return "baseline"
            found = ranking.difference(run.variant, baseline)
            half = "" if found.half is None else f" ± {found.half:.3f}"
            return f"{found.mean:+z.3f}{half}"
    return "-"


def _charts(runs: list[Run], looks: Looks) -> str:
    parts, scores = [], []
    lengths = grouped(runs, lambda run: run.seq_len)
    for seq_len, own in lengths.items():
        where = f" at seq_len={seq_len:,}" if len(lengths) > 1 else ""
        charts, note = loss_charts(own, looks)
        parts.append(_grid(f"Loss{where}", charts, note))
        scores += score_chart(own, looks, f"Largest score{where}")
    parts.append(_grid("Memory and speed", cost_charts(runs, looks)))
    return "".join([*parts, _grid("Largest scores", scores)])


def _grid(title: str, charts: list[dict], note: str = "") -> str:
    if not charts:
        return ""
    figures = ""
    for chart in charts:
        spec = json.dumps(chart, allow_nan=False).replace("<", "\\u003c")
        figures += (
            f"<figure><figcaption>{escape(chart['description'])}</figcaption><div data-chart>"
            f'<script type="application/json">{spec}</script></div></figure>'
        )
    note = f"<p class=hint>{escape(note)}</p>" if note else ""
    return f"<h2>{escape(title)}</h2>{note}<div class=charts>{figures}</div>"


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    lines = ["".join(f"<td>{escape(text)}</td>" for text in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table class=plain><thead><tr>{head}</tr></thead>{body}</table>"


def _endings(runs: list[Run]) -> str:
    """How each run ended that was not completed, with what was found out."""
    rows = []
    for run in runs:
        found = run.summary.get("diagnosis") or run.summary.get("oom") or {}
        facts = [
            f"{key.replace('_', ' ')} {f'{value:.4g}' if isinstance(value, float) else value}"
            for key, value in found.items()
            if key not in ("message", "history") and value is not None
        ]
        if run.status != "completed":
            rows.append([run.name, run.ending, remark(run.summary), ", ".join(facts)])
    heads = ["run", "ended", "why", "details"]
    return f"<h2>How runs ended</h2>{_table(heads, rows)}" if rows else ""


def _sources(runs: list[Run]) -> str:
    """Every run, and where it ran."""
    rows = [[run.place, run.name, run.ending] for run in runs]
    parts = [_table(["folder", "run", "ended"], rows)]
    for facts, own in grouped(runs, _where).items():
        names = ", ".join(run.name for run in own) if len(own) < len(runs) else "All runs"
        parts.append(f"<p>{escape(names)}</p><pre>{escape(facts)}</pre>")
    return "".join(parts)


def _where(run: Run) -> str:
    facts = {key: run.summary.get(key) for key in ("device", "dtype", "compiled")} | run.env
    # the command line may hold paths of a machine, and reports are passed on
    return "\n".join(f"{key}: {value}" for key, value in facts.items() if key != "command")
