"""The section of results/README.md about lab.peers: our kernels beside other people's."""

from lab.peers import DIRECTIONS, UNTIMED, summary
from lab.results.tables import best_in_bold, formatted, load, plain, section, table
from scripts.tables import Row, by

TITLES = {"lab.peers:FLASH_ATTENTION_4": "FlashAttention-4"}


def both_times() -> str:
    """The device's time and the time of eager calls."""
    return tables(load("peers_h200"))


def tables(data: Row) -> str:
    rows = [
        row | {"attention": TITLES.get(row["attention"], plain(row["attention"]))}
        for row in data["rows"]
    ]
    counts = [row["forward_repeats"] for row in rows if "forward_repeats" in row]
    what = (
        f"{rows[0]['dtype']}, device time with an empty cache, calls in turns; TFLOP/s of medians "
        f"of {max(counts)} calls, fewer where one takes long; the best in bold. TFLOP/s count the "
        "scores that the mask leaves."
    )
    head, *lines = summary(rows)
    parts = [part for name in DIRECTIONS for part in (f"{name.capitalize()}:", speeds(rows, name))]
    parts += ["Speed over a peer's, geometric mean (lowest):", table(head, lines)]
    eager = [row for row in rows if "eager_forward_seconds" in row]
    return section(data, what, *parts, *(eager_table(eager) if eager else ()))


def speeds(rows: list[Row], direction: str) -> str:
    """TFLOP/s of every shape; a word where an attention was not timed."""
    names = list(dict.fromkeys(row["attention"] for row in rows))
    lines = []
    for own in by(rows, "shape").values():
        column = f"{direction}_tflops"
        speed = {row["attention"]: row[column] for row in own if column in row}
        why = {row["attention"]: next(filter(row.__contains__, UNTIMED), "-") for row in own}
        cells = zip(names, best_in_bold(speed, names), strict=True)
        shape = own[0]
        heads = f"{shape['heads']}:{shape['kv_heads']}"
        sizes = [shape["shape"], shape["batch"], heads, f"{shape['seq_len']:,}", shape["head_dim"]]
        lines.append([*sizes, *(cell if cell != "-" else why[name] for name, cell in cells)])
    return table(["shape", "batch", "heads", "seq_len", "head_dim", *names], lines)


def eager_table(rows: list[Row]) -> list[str]:
    """Microseconds of an eager call, with the least and the most of its windows."""
    what = (
        "Microseconds of an eager call, among calls that follow each other without waiting: median "
        "(least to most) of windows of 20 calls, in turns."
    )
    columns = """
        shape      {shape}
        attention  {attention}
        forward    {forward[0]:.0f} ({forward[1]:.0f} to {forward[2]:.0f})
        backward   {backward[0]:.0f} ({backward[1]:.0f} to {backward[2]:.0f})
    """
    shown = [
        row
        | {
            name: [1e6 * row[f"eager_{name}_{key}"] for key in ("seconds", "least", "most")]
            for name in DIRECTIONS
            if f"eager_{name}_seconds" in row
        }
        for row in rows
    ]
    return [what, formatted(columns, shown)]
