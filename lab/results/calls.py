"""The sections of results/README.md about one attention call: is it right, what does it keep, how
fast is it.
"""

from collections.abc import Iterable
from itertools import product
from statistics import geometric_mean
from typing import Any

from lab.results.tables import FOLDER, groups, load, load_all, plain, rounded, section, table
from lab.results.verify_figure import EFFORT_HEAD, draw_kills, draw_matrix, effort, kills, verdict
from scripts.plots import draw_longest, draw_memory, draw_roofline, draw_time

MEMORY = (("forward", "forward_bytes", 2**20), ("forward and backward", "training_bytes", 2**20))
TIME = (("ms forward", "forward_seconds", 1e-3), ("ms backward", "backward_seconds", 1e-3))


def verification() -> str:
    """The property x backend matrix, wherever scripts.verify was run."""
    panels = {
        where: load(name)
        for name, where in (("verify_cpu", "CPU, Triton interpreted"), ("verify_h200", "H200"))
        if (FOLDER / f"{name}.json").is_file()
    }
    draw_matrix(panels, FOLDER / "verify.png")
    parts = [
        section(data, f"{where}: {verdict(data)}", table(EFFORT_HEAD, effort(data)))
        for where, data in panels.items()
    ]
    return "\n\n".join([*parts, "![property x backend](verify.png)"])


def mutants() -> str:
    """Which property catches which mistake."""
    data = load("mutants")
    draw_kills(data, FOLDER / "mutants.png")
    dead = [row for row in data["mutants"] if row["killed_by"]]
    alive = [
        f"`{row['name']}`: {row['says']} No mistake: {row['survives']}."
        for row in data["mutants"]
        if not row["killed_by"]
    ]
    cover = ", ".join(data["cover"])
    what = (
        f"{len(data['mutants'])} single edits of the tile loop, {len(dead)} of them caught: by "
        f"{cover} between them, which the tests run "
        f"every time. {len(alive)} change no result and are caught by nothing, as they should be. "
        + " ".join(alive)
    )
    parts = [
        section(
            data,
            what,
            table(["property", "catches", "which no other catches"], kills(data)),
            "![kill matrix](mutants.png)",
        )
    ]
    if (FOLDER / "mutants_h200.json").is_file():
        again = load("mutants_h200")
        here = {row["name"]: bool(row["killed_by"]) for row in data["mutants"]}
        there = {row["name"]: bool(row["killed_by"]) for row in again["mutants"]}
        apart = [f"`{name}`" for name, killed in there.items() if killed != here.get(name)]
        end = (
            f"which differs from the CPU's for {', '.join(apart)}."
            if apart
            else "the same ones as on the CPU."
        )
        what = (
            "The same edits on the GPU, in its longer cases and larger tiles: "
            f"{sum(there.values())} of {len(there)} caught, {end}"
        )
        parts.append(
            section(
                again, what, table(["property", "catches", "which no other catches"], kills(again))
            )
        )
    return "\n\n".join(parts)


def conformance() -> str:
    head = ["attention", "cases", "worst error / naive's own error", "worst error / budget"]
    runs = {
        "conformance_interpreter": "Without a GPU, Triton interpreted:",
        "conformance_h200": "On the GPU:",
        "conformance_hopper_h200": "The Hopper kernels alone once more, since their backward "
        "was rewritten:",
    }
    parts = []
    for name, what in runs.items():
        data = load(name)
        rows = [
            [
                backend,
                found["cases"],
                f"{found['worst_multiple_of_naive']:.2f}",
                f"{found['worst_share_of_budget']:.2f}",
            ]
            for backend, found in data["summary"].items()
        ]
        parts.append(section(data, what, table(head, rows)))
    return "\n\n".join(parts)


def call_tables(data: dict[str, Any], *figures: tuple[str, str, float]) -> Iterable[str]:
    """For each shape that was measured, a table of each figure (title, column, divisor): variants
    down, lengths across.
    """
    shapes = groups(
        data["rows"],
        lambda row: tuple(row[key] for key in ("batch", "heads", "head_dim", "dtype", "causal")),
    )
    for (batch, heads, head_dim, dtype, causal), rows in shapes.items():
        lengths = sorted({row["seq_len"] for row in rows})
        lines = []
        for name, own in groups(rows, lambda row: row["attention"]).items():
            for title, column, divisor in figures:
                cells = {}
                for row in own:
                    value = row.get(column)
                    cells[row["seq_len"]] = (
                        "out of memory"
                        if "oom" in row
                        else "-"
                        if value is None
                        else rounded(value / divisor)
                    )
                lines.append(
                    [name.replace(":", " "), title, *(cells.get(length, "-") for length in lengths)]
                )
        what = (
            f"One call, batch {batch}, {heads} heads of {head_dim}, {dtype}, "
            f"{'causal' if causal else 'no mask'}; MiB above q, k and v."
        )
        yield f"{what}\n\n{table(['attention', '', *map(str, lengths)], lines)}"


def memory() -> str:
    """Peak memory of one attention call against length, with its time and where it stands under the
    roofline.
    """
    data = load("memory_h200")
    drawn = [
        draw(data, FOLDER / f"{name}_h200.png")
        for name, draw in (
            ("memory", draw_memory),
            ("time", draw_time),
            ("roofline", draw_roofline),
        )
    ]
    return section(
        data,
        *call_tables(data, *MEMORY),
        *(f"![{path.stem}]({path.name})" for path in drawn if path),
    )


def regenerated() -> str:
    """The tables of memory and time that the documents print, measured."""
    return "\n\n".join(
        section(data, *call_tables(data, *MEMORY, *TIME))
        for data in load_all("tables_h200", "tables_cpu")
    )


def longest() -> str:
    """The longest sequence that ran, by memory."""
    data = load("longest_h200")
    rows = []
    for row in data["rows"]:
        shape = f"{row['batch']} x {row['heads']} x {row['head_dim']} {row['dtype']}"
        gib = "all" if row["memory_gib"] is None else f"{row['memory_gib']:g}"
        sign = "at least " if row.get("limited_by") == "time" else ""
        length = row["refused"] if "refused" in row else f"{sign}{row['max_seq_len']:,}"
        rows.append([row["attention"].replace(":", " "), shape, row["pass"], gib, length])
    drawn = draw_longest(data, FOLDER / "longest_h200.png")
    what = (
        'Found by doubling, then halving the gap to 12%; "at least": the next trial would have '
        "passed the time limit, not the memory."
    )
    head = ["attention", "batch x heads x head_dim", "pass", "GiB", "longest sequence"]
    return section(data, what, table(head, rows), *([f"![longest]({drawn.name})"] if drawn else []))


def kernels() -> str:
    """Speed of our Triton kernels beside PyTorch's and others', those of a table in one run."""
    found = load_all("kernels_h200", "kernels_flex_h200", "kernels_rested_h200")
    return "\n\n".join(section(data, *speed_tables(data)) for data in found)


def speed_tables(data: dict[str, Any]) -> list[str]:
    names = list(dict.fromkeys(row["attention"] for row in data["rows"]))
    ours = [name for name in names if name.partition(":")[0] == "triton"]
    points = groups(data["rows"], lambda row: (row["causal"], row["head_dim"], row["seq_len"]))
    first = data["rows"][0]
    pause = (
        f" The card rested for {first['pause_s']:g} s before every call."
        if "pause_s" in first
        else ""
    )
    counts = sorted(
        {
            row[f"{name}_repeats"]
            for row in data["rows"]
            for name in ("forward", "backward")
            if f"{name}_repeats" in row
        }
    )
    calls = (
        f" of {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} calls"
        if counts
        else ""
    )
    parts = [
        f"{first['dtype']}, 16,384 tokens, heads x head_dim = 2,048; TFLOP/s of medians{calls}, "
        f"the best in bold.{pause}"
    ]
    for direction in ("forward", "backward"):
        rows, ratios = [], {}
        for (causal, head_dim, seq_len), found in points.items():
            speed = {
                row["attention"]: row[f"{direction}_tflops"]
                for row in found
                if f"{direction}_tflops" in row
            }
            cells = [
                f"**{speed[name]:.0f}**"
                if speed[name] == max(speed.values())
                else f"{speed[name]:.0f}"
                for name in names
            ]
            rows.append(["causal" if causal else "full", head_dim, f"{seq_len:,}", *cells])
            for own, peer in product(ours, (name for name in names if name not in ours)):
                ratios.setdefault((own, peer), {}).setdefault(causal, []).append(
                    speed[own] / speed[peer]
                )
        means = [
            [
                plain(own),
                plain(peer),
                *(
                    f"{geometric_mean(found[causal]):.2f} ({min(found[causal]):.2f})"
                    for causal in found
                ),
            ]
            for (own, peer), found in ratios.items()
        ]
        masks = ["causal" if causal else "full" for causal in next(iter(ratios.values()))]
        parts += [
            f"{direction.capitalize()}:",
            table(["mask", "head_dim", "seq_len", *map(plain, names)], rows),
            "Speed over a peer's, geometric mean (lowest):",
            table(["attention", "over", *masks], means),
        ]
    return parts


def masks() -> str:
    """What a window, packed documents and grouped heads save."""
    data = load("masks_h200")
    rows = []
    for row in data["rows"]:
        what = [f"window {row['window']:,}"] if "window" in row else []
        what += [f"documents of {row['documents']:,}"] if "documents" in row else []
        what += [f"{row['groups']} query heads a key head"] if "groups" in row else []
        times = [f"{row[f'{name}_seconds'] * 1e3:.2f}" for name in ("forward", "backward")]
        speed = [f"{row[f'{name}_tflops']:.0f}" for name in ("forward", "backward")]
        memory = f"{row['training_bytes'] / 2**20:,.0f}"
        rows.append(
            [
                plain(row["attention"]),
                row["head_dim"],
                f"{row['seq_len']:,}",
                ", ".join(what) or "causal",
                *times,
                *speed,
                memory,
            ]
        )
    head = [
        "attention",
        "head_dim",
        "seq_len",
        "mask",
        "ms forward",
        "ms backward",
        "TFLOP/s forward",
        "backward",
        "MiB above q, k, v",
    ]
    first = data["rows"][0]
    what = (
        f"{first['dtype']}, batch {first['batch']}, {first['heads']} heads; TFLOP/s count the "
        "scores that the mask leaves."
    )
    return section(data, what, table(head, rows))
