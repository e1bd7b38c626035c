"""Report on the runs of a sweep: one HTML file that opens offline.

It reads the files of training and measures nothing itself. The page says which variant is best and
how clear the difference is, what is suspicious, memory and speed, how runs broke, and where the
numbers come from. It is written to DIR/report.html.

    python -m scripts.report multirun/2026-01-31/12-00-00

The arguments are sweeps, runs, or folders of either, and

    out       FILE.html, to write the page elsewhere
    baseline  the variant to compare the others with (naive, sdpa or tiled, whichever ran)
"""

from dataclasses import dataclass
from pathlib import Path

from scripts.arguments import check_out, command
from scripts.report.page import render
from scripts.report.ranking import best_first, rank
from scripts.report.runs import load_runs
from training.record.files import write_file
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
    check_out(out, ".html")
    rankings = rank(runs, options.baseline)
    runs = best_first(runs, rankings)
    left_out = sum(len(not_started(folder)) for folder in options.paths)
    page = render(runs, rankings, left_out=left_out, folder=options.paths[0].resolve().name)
    # a name may hold half a character, which no file can
    write_file(out, page.encode(errors="replace"))
    print(f"runs: {len(runs)}, written: {out}")


if __name__ == "__main__":
    main()
