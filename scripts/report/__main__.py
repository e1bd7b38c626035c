"""Report on the runs of a sweep: one self-contained HTML page.

It reads the files of training and measures nothing itself. The page says which variant is best and
how clear the difference is, what is suspicious, memory and speed, how runs broke, and where the
numbers come from. It is written to DIR/report.html.

    python -m scripts.report multirun/2026-01-31_12-00-00

The arguments are sweeps, runs, or folders of either, and

    out       FILE.html, to write the page elsewhere
    baseline  the variant to compare the others with (naive, sdpa or tiled, whichever ran)
"""

from dataclasses import dataclass
from pathlib import Path

from scripts.arguments import command
from scripts.report import sections as parts
from scripts.report.drawing import variant_styles
from scripts.report.page import Section, Table, Text, render_html
from scripts.report.ranking import best_first, rank
from scripts.report.runs import Run, ended, load_runs
from training.record.files import check_writable, write_file
from training.record.runs import not_started


@dataclass
class Options:
    paths: list[Path]
    baseline: str | None = None
    out: Path | None = None


@command
def main(options: Options) -> None:
    out = options.out or options.paths[0] / "report.html"
    runs = load_runs(options.paths)
    check_writable(out, ".html")
    left_out = sum(len(not_started(folder)) for folder in options.paths)
    sections = build_report(runs, baseline=options.baseline, left_out=left_out)
    write_file(out, render_html(parts.title(runs), sections))
    print(f"{parts.count_of(len(runs), 'run')}: {out}")


def build_report(
    runs: list[Run], *, baseline: str | None = None, left_out: int = 0
) -> list[Section]:
    """Every section that has content. left_out: number of jobs that never started."""
    if baseline not in {None, *(run.variant for run in runs)}:
        names = ", ".join(dict.fromkeys(run.variant for run in runs))
        raise ValueError(f"baseline={baseline} is no variant of these runs; they are: {names}")
    styles, rankings = variant_styles(runs), rank(runs, baseline)
    runs = best_first(runs, rankings, list(styles))
    # "Not completed" lists failed jobs; their losses are drawn if they logged some
    ran = [run for run in runs if run.status != "failed"]
    drawn = [run for run in runs if run.status != "failed" or run.logged]
    styles = {name: styles[name] for name in styles if name in {run.variant for run in drawn}}
    diverged = ended(runs, "diverged")
    doubts = parts.suspicions(ran) + parts.warnings(runs, left_out=left_out)
    sections = [
        Section("", [Text(text) for text in parts.at_a_glance(runs, rankings)]),
        Section("", [Text(text, warning=True) for text in doubts]),
        Section("Variants", [parts.variant_table(ran, rankings)]),
        Section("Loss", parts.curve_figures(drawn, styles)),
        Section(
            "Diverged",
            [
                parts.diverged_card(run, place, styles[run.variant])
                for place, run in enumerate(diverged)
            ],
        ),
        Section("Out of memory", [parts.oom_table(ended(runs, "oom"))]),
        Section(
            "Not completed",
            [parts.broken_table(ended(runs, "failed", "interrupted", "unfinished"))],
        ),
        Section("Memory and speed", parts.cost_figures(ran, styles)),
        Section("What else was logged", parts.other_figures(drawn, styles)),
        Section("Every run", [parts.run_table(ran)]),
        Section("Where the numbers come from", [parts.provenance(runs)]),
    ]
    for section in sections:
        section.blocks = [
            block for block in section.blocks if not (isinstance(block, Table) and not block.rows)
        ]
    return [section for section in sections if section.blocks]


if __name__ == "__main__":
    main()
