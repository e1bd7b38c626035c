"""The section of results/README.md about lab.peers: our kernels beside other people's."""

from lab.peers import DIRECTIONS, UNTIMED, summary
from lab.results.tables import best_in_bold, formatted, load, plain, section, table
from scripts.tables import Row, by

TITLES = {"lab.peers:FLASH_ATTENTION_4": "FlashAttention-4"}


def both_times() -> str:
    """The device's time and the time of eager calls."""
    shapes = (tables(load(name)) for name in ("peers_h200", "peers_h100"))
    return "\n\n".join([*shapes, counters(load("backward_counters_h100"))])


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


def counters(data: Row) -> str:
    """What ncu counted of the backward kernels."""
    rows = []
    for row in data["rows"]:
        found = row["metrics"]
        # of the four schedulers, in a cycle
        issues = 4 * found["smsp__issue_active.avg.pct_of_peak_sustained_active"] / 100
        names = ("barrier", "long_scoreboard", "short_scoreboard", "gmma")
        ratios = (f"smsp__average_warps_issue_stalled_{x}_per_issue_active.ratio" for x in names)
        stalls = [issues * found[ratio] for ratio in ratios]
        millions = {
            "ms": found["gpu__time_duration.sum"],
            "passes": found["l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"],
            "instructions": found["sm__inst_executed.sum"],
        }
        rows.append(
            row
            | {name: value / 1e6 for name, value in millions.items()}
            | {
                "tensor": found["sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"],
                "warps": 0.64 * found["sm__warps_active.avg.pct_of_peak_sustained_active"],
                "stalls": stalls,
                "barriers": stalls[0] + stalls[1],
            }
        )
    what = (
        "The backward kernel alone, counted by ncu at the base clock: one causal call of 16,384 "
        "tokens after two others. Stalled warps are of a multiprocessor, on average."
    )
    columns = """
        attention                     {who}
        head_dim                      {head_dim}
        ms                            {ms:.2f}
        tensor cores busy, %          {tensor:.0f}
        passes of shared memory, 1e6  {passes:.0f}
        instructions, 1e6             {instructions:,.0f}
        warps                         {warps:.0f}
        stalled at barriers           {barriers:.1f}
        for shared memory             {stalls[2]:.1f}
        for products                  {stalls[3]:.1f}
    """
    return section(data, what, formatted(columns, rows))
