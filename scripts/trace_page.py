"""The HTML page of scripts/trace.py: trace.html with the numbers of a trace and trace.js, which
draws it. The page needs only a browser.
"""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from attention.look.trace import Step, Trace

MAX_NUMBERS = 200_000  # about 1.5 MB of page

TEMPLATE = Path(__file__).with_name("trace.html")
SCRIPT = TEMPLATE.with_name("trace.js")


def render_page(found: Trace, about: dict[str, Any]) -> str:
    """The page. `about` holds what stands around the trace, see scripts.trace.

    A tile of queries with too many numbers is cut to the rows around the followed one.
    """
    rows = rows_that_fit(found)
    kept = slice(rows.start - found.rows.start, rows.stop - found.rows.start)
    steps = [
        {
            "keys": keys,
            "reference": numbers(found.reference[n][kept].tolist()),
            "exact": lane(found.exact[n], found.exact_error[n], kept),
            "found": lane(found.found[n], found.error[n], kept),
        }
        for n, keys in enumerate(found.tiles)
    ]
    data = about | {
        "rows": list(rows),
        "tile": [found.rows.start, found.rows.stop],
        "row": found.row - rows.start,
        "fates": [found.fates[i] for i in rows],
        "breaks": found.breaks[kept],
        "steps": steps,
    }
    # a browser ends the script at the first </script, even inside a string
    embedded = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    page = TEMPLATE.read_text("utf-8").replace("/*SCRIPT*/", SCRIPT.read_text("utf-8"), 1)
    return page.replace("/*DATA*/null", embedded, 1)


def rows_that_fit(found: Trace) -> range:
    """As many rows of the tile as a page shows, with the followed one in the middle if possible."""
    step, rows = found.found[0], found.rows
    of_a_row = len(found.tiles) * (4 * step.scores.shape[1] + 3 * step.out.shape[1] + 12)
    count = min(len(rows), max(1, MAX_NUMBERS // of_a_row))
    start = min(max(found.row - count // 2, rows.start), rows.stop - count)
    return range(start, start + count)


def lane(step: Step | None, error: Tensor, kept: slice) -> dict[str, Any] | None:
    """One backend's numbers for one tile; None if it skips the tile."""
    if step is None:
        return None
    figures = vars(step) | {"acc": step.acc.abs().amax(-1), "error": error}
    shown = {name: numbers(x[kept].tolist()) for name, x in figures.items() if name != "keys"}
    # the mask's -inf becomes null
    shown["scores"] = [[None if x == "-inf" else x for x in row] for row in shown["scores"]]
    # the rows in which each quantity breaks
    broken = {name: where[kept].int().tolist() for name, where in step.causes().items()}
    shown["causes"] = {name: where for name, where in broken.items() if any(where)}
    return shown


def numbers(x: Any) -> Any:
    """Nested lists of four digits; NaN and infinity, which JSON lacks, as strings."""
    if isinstance(x, list):
        return list(map(numbers, x))
    text = f"{x:.4g}"
    return text if text in ("nan", "inf", "-inf") else float(text)
