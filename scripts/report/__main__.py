"""Report on the runs of a sweep: one self-contained HTML page, and the same as Markdown.

Reads what training left on disk and measures nothing itself. Loss under each run's own attention
beside the loss of the same weights under exact attention, memory and speed, how runs broke,
DIR/cross_eval.json where scripts.cross_eval wrote one, and where the numbers come from. Writes
DIR/report.html, DIR/report.md and the Markdown's figures, DIR/report_figures/.

    python -m scripts.report multirun/2026-01-31_12-00-00

The arguments are sweeps, runs, or folders of either. out=FILE.html writes the page elsewhere.
"""

from dataclasses import dataclass
from pathlib import Path

from scripts.arguments import command
from scripts.report import sections as parts
from scripts.report.drawing import variant_styles
from scripts.report.matrix import cross_blocks
from scripts.report.page import Card, Figure, Section, Table, Text, render_html, render_markdown
from scripts.report.runs import Run, ended, load_runs
from training.files import check_writable, write_file
from training.sweep import not_started


@dataclass
class Options:
    paths: list[Path]
    out: Path | None = None


@command("report", Options)
def main(options: Options) -> None:
    out = options.out or options.paths[0] / "report.html"
    if out.suffix != ".html" or out.is_dir():
        raise ValueError(f"out={out} is not a name for an HTML file; give one that ends in .html")
    runs = load_runs(options.paths)
    check_writable(out)
    left_out = sum(len(not_started(folder)) for folder in options.paths)
    write_report(runs, cross_blocks(options.paths), out, left_out=left_out)
    count = f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}"
    print(f"{count}: {out} and {out.with_suffix('.md').name}")


def write_report(
    runs: list[Run], cross_eval: list[Table | Text], out: Path, *, left_out: int = 0
) -> None:
    """The page, the Markdown beside it, and the Markdown's figures in a folder of their own.
    left_out: jobs that were never started.
    """
    title, sections = parts.title(runs), build_report(runs, cross_eval, left_out=left_out)
    folder = out.with_name(f"{out.stem}_figures")
    folder.mkdir(parents=True, exist_ok=True)
    # a figure of an earlier report must not pass for one of this
    for earlier in folder.glob("*.png"):
        earlier.unlink()
    blocks = [block for section in sections for block in section.blocks]
    for figure in [block.figure if isinstance(block, Card) else block for block in blocks]:
        if isinstance(figure, Figure):
            write_file(folder / f"{figure.name}.png", figure.drawing.png)
    write_file(out, render_html(title, sections))
    write_file(out.with_suffix(".md"), render_markdown(title, sections, folder.name))


def build_report(
    runs: list[Run], cross_eval: list[Table | Text], *, left_out: int = 0
) -> list[Section]:
    """Every section that has something to say."""
    styles = variant_styles(runs)
    order = list(styles)
    runs = sorted(runs, key=lambda run: (order.index(run.variant), run.seq_len))
    diverged = ended(runs, "diverged")
    sections = [
        Section("", [Text(text) for text in parts.at_a_glance(runs)]),
        Section("", [Text(text, warning=True) for text in parts.warnings(runs, left_out=left_out)]),
        Section("Variants", [parts.variant_table(runs, styles)]),
        Section("Loss", parts.curve_figures(runs, styles)),
        Section("Trained under, evaluated under", cross_eval),
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
        Section("Memory and speed", parts.cost_figures(runs, styles)),
        Section("What else was logged", parts.other_figures(runs, styles)),
        Section("Every run", [parts.run_table(runs)]),
        Section("Where the numbers come from", [parts.provenance(runs)]),
    ]
    for section in sections:
        section.blocks = [
            block for block in section.blocks if not (isinstance(block, Table) and not block.rows)
        ]
    return [section for section in sections if section.blocks]


if __name__ == "__main__":
    main()
