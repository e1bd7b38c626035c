"""The HTML page of scripts/compare.py: one file with everything in it, for a phone as for a screen, light or dark."""

from html import escape
from typing import Any

from training.sweep import remark

CAPTIONS = {
    "loss": "Light lines: training loss. Marked lines: held-out loss, thin for each seed. Dashed: an attention that is wrong on purpose. "
    "A wrong attention can look healthy on the left; on the right its weights are judged under exact attention.",
    "accuracy": "Share of queries answered with the most recent value, under the run's own attention and under exact attention.",
    "memory": "Both axes are logarithmic: a line of slope 2 grows with the square of the length, one of slope 1 with the length.",
    "throughput": "Mean over seeds, each seed as a dot, without warm-up, evaluation and checkpoints. Hatched: wrong on purpose.",
}
COLUMNS = {
    "variant": ("variant", "{}"),
    "seq_len": ("seq_len", "{:,}"),
    "seed": ("seed", "{}"),
    "status": ("status", "{}"),
    "val/loss": ("val/loss", "{:.4f}"),
    "val/loss_exact": ("val/loss_exact", "{:.4f}"),
    "val/accuracy": ("accuracy", "{:.1%}"),
    "val/accuracy_exact": ("accuracy, exact", "{:.1%}"),
    "tokens_per_sec": ("tokens/s", "{:,.0f}"),
    "memory/peak_gib": ("peak GiB", "{:.2f}"),
    "first_bad_step": ("first bad step", "{}"),
}
STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1e; --paper: #fff; --line: #d8d8dd; --soft: #6a6a70; --warn: #fff4d6; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececf0; --paper: #1c1c1e; --line: #3a3a3e; --soft: #a0a0a8; --warn: #4a3c10; } }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: .5rem 0; }  h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
figure { margin: 0 0 2rem; }  figcaption, .soft { color: var(--soft); font-size: .9rem; }
.wide { overflow-x: auto; }  img { display: block; width: 100%; min-width: 38rem; max-width: 64rem; height: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child, td.note { text-align: left; }  td.note { white-space: normal; min-width: 18rem; }
.warn { background: var(--warn); padding: .6rem .9rem; border-radius: .4rem; }
"""


def render_page(summaries: list[dict[str, Any]], envs: list[dict[str, Any]], images: dict[str, tuple[str, str]]) -> str:
    """The page. `images` holds each figure twice as base64 PNG: on light and on dark paper."""
    figures = "".join(
        f"<figure><div class=wide><picture>"
        f'<source media="(prefers-color-scheme: dark)" srcset="data:image/png;base64,{dark}">'
        f'<img alt="{name}" src="data:image/png;base64,{light}"></picture></div>'
        f"<figcaption>{escape(CAPTIONS[name])}</figcaption></figure>"
        for name, (light, dark) in images.items()
    )
    warnings = "".join(f"<p class=warn>{escape(text)}</p>" for text in _warnings(summaries, envs))
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>Comparison of {len(summaries)} runs</title><style>{STYLE}</style></head><body>"
        f"<h1>Comparison of {len(summaries)} runs</h1>{warnings}{figures}"
        f"<h2>Runs</h2><div class=wide>{_table(summaries)}</div>"
        f"<h2>Where the numbers come from</h2>{_provenance(envs)}</body></html>\n"
    )


def _warnings(summaries: list[dict[str, Any]], envs: list[dict[str, Any]]) -> list[str]:
    warnings = []
    fingerprints = {env["data_fingerprint"] for env in envs if env.get("data_fingerprint")}
    if len(fingerprints) > 1:
        warnings.append(
            f"These runs read {len(fingerprints)} different corpora: curves compare only where the data fingerprint is the same."
        )
    for status in ("failed", "unfinished", "interrupted"):
        count = sum(summary["status"] == status for summary in summaries)
        if count:
            warnings.append(f"{status}: {count} of {len(summaries)} runs. The figures show what they wrote.")
    return warnings


def _table(summaries: list[dict[str, Any]]) -> str:
    columns = {key: column for key, column in COLUMNS.items() if any(summary.get(key) is not None for summary in summaries)}
    head = "".join(f"<th>{escape(title)}</th>" for title, _ in columns.values())
    body = ""
    for summary in summaries:
        cells = ["-" if summary.get(key) is None else escape(form.format(summary[key])) for key, (_, form) in columns.items()]
        body += f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}<td class=note>{escape(remark(summary))}</td></tr>"
    return f"<table><thead><tr>{head}<th></th></tr></thead><tbody>{body}</tbody></table>"


def _provenance(envs: list[dict[str, Any]]) -> str:
    """Each fact once where all runs share it, else with every value and the number of runs that have it."""
    facts: dict[str, list[str]] = {}
    for env in envs:
        commit = f"{env.get('commit') or 'unknown'}{' (with uncommitted changes)' if env.get('dirty') else ''}"
        hardware = {key: value for key, value in (env.get("hardware") or {}).items() if value is not None}
        versions = {key: value for key, value in (env.get("versions") or {}).items() if value is not None}
        row = {
            "commit": commit,
            "hardware": ", ".join(f"{key} {value}" for key, value in hardware.items()),
            "versions": ", ".join(f"{key} {value}" for key, value in versions.items()),
            "platform": env.get("platform"),
            "data fingerprint": env.get("data_fingerprint"),
        }
        for key, value in row.items():
            facts.setdefault(key, []).append(str(value or "unknown"))
    rows = ""
    for key, values in facts.items():
        counts = {value: values.count(value) for value in values}
        text = "; ".join(value if len(counts) == 1 else f"{value} ({count} runs)" for value, count in counts.items())
        rows += f"<tr><td>{escape(key)}</td><td class=note>{escape(text)}</td></tr>"
    return f"<div class=wide><table><tbody>{rows}</tbody></table></div>"
