"""The sections of results/README.md about one attention call: correctness, memory and speed."""

from collections.abc import Iterable
from itertools import product
from statistics import geometric_mean, median

from lab.results.tables import (
    FOLDER,
    best_in_bold,
    finite,
    formatted,
    load,
    plain,
    rounded,
    section,
    table,
)
from lab.results.verify_figure import EFFORT_HEAD, draw_kills, draw_matrix, effort, kills, verdict
from scripts.plots import draw_longest, draw_memory, draw_roofline, draw_time
from scripts.tables import Row, by

MEMORY = (("forward", "forward_bytes", 2**20), ("forward and backward", "training_bytes", 2**20))
TIME = (("ms forward", "forward_seconds", 1e-3), ("ms backward", "backward_seconds", 1e-3))
KILLS_HEAD = ["property", "catches", "which no other catches"]
OTHER_CODE = {
    "mutants_ring": "a ring of four ranks",
    "mutants_decoding": "decoding over a cache and its pages",
}
WITHOUT_REFERENCE = "it needs no reference, and holds for other functions than softmax too"
NAMES = "it names the fault, which others only show"
# why we keep a property that catches nothing alone
STAYS = {
    "forward": "the first question; its error is what others are compared with",
    "gradients": "the first question about the backward pass",
    "lse": "it tells a wrong lse from a wrong output",
    "block sizes": "it needs no reference, which long inputs cannot afford",
    "key permutation": "it needs no reference, which long inputs cannot afford",
    "rows sum to one": f"{NAMES}: the normalisation",
    "logits + 100": f"{NAMES}: exponentials of scores that are not shifted",
    "ragged tails": f"{NAMES}: a last tile, of lengths that are short enough to debug",
    "first tile masked": f"{NAMES}: -inf - -inf",
    "N != M": "of the Triton kernels' mistakes it caught one that passed all others, "
    "`kernel_last_key_skipped`",
    "grouped heads": f"{NAMES}: which key/value head a query head reads",
    "no leak (outputs)": WITHOUT_REFERENCE,
    "no leak (gradients)": WITHOUT_REFERENCE,
    "streams and graphs": "it asks a GPU, and these matrices are a CPU's",
}


def verification() -> str:
    """The property x backend matrix, wherever scripts.verify was run."""
    panels = {"CPU, Triton interpreted": load("verify_cpu"), "H200": load("verify_h200")}
    draw_matrix(panels, FOLDER / "verify.png")
    parts = [
        section(data, f"{where}: {verdict(data)}{gaps(data)}", table(EFFORT_HEAD, effort(data)))
        for where, data in (panels | {"H100": load("verify_h100")}).items()
    ]
    return "\n\n".join([*parts, "![property x backend](verify.png)"])


def gaps(data: Row) -> str:
    """The columns that a time limit left out, with their dtypes if only some are missing."""
    named = "; ".join(
        column if dtypes == data["dtypes"] else f"{column} in {', '.join(dtypes)}"
        for column, dtypes in data.get("missing", {}).items()
    )
    return f" Not measured in the time: {named}." if named else ""


def false_alarms() -> str:
    """Random calls of exact attentions that conformance wrongly rejects."""
    files = map(load, ("false_alarms_cpu", "false_alarms_h100"))
    return "\n\n".join(map(random_calls, files))


def random_calls(data: Row) -> str:
    rows = [
        row | {"failed": len(row["failures"]), "first": (row["failures"] or ["-"])[0]}
        for row in data["rows"]
    ]
    calls, distinct, checks, failed = (
        sum(row[name] for row in rows) for name in ("calls", "distinct", "checks", "failed")
    )
    kind = "compiled kernels" if data["environment"]["hardware"].get("gpu") else "exact attentions"
    what = (
        f"{calls:,} random calls of {kind} ({distinct:,} distinct in shape, layout, mask, features "
        f"and logits), {checks:,} checks, {failed} beyond their budget."
    )
    if failed:
        what += (
            " Both are of PyTorch's kernel. It rounds each query head's part of dv to the inputs' "
            "dtype, and then adds the heads of a group. With shifted scores its backward pass "
            "rounds p otherwise than its forward pass. The budget counts one rounding of each."
        )
    columns = """
        attention                  {attention}
        dtype                      {dtype}
        seed                       {seed}
        calls                      {calls:,}
        refused                    {refused:,}
        checks                     {checks:,}
        beyond                     {failed}
        largest share of a budget  {worst_share_of_budget:.2f}
    """
    return section(data, what, formatted(columns, rows))


def scorecards() -> str:
    """The properties of attention from other packages."""
    where = {
        "scorecards_cpu": "on a CPU, by `attn-conform` in {} (JAX by files, in fp32)",
        "scorecards_h100": "on an H100, in {}",
    }
    return "\n\n".join(cards(load(name), what) for name, what in where.items())


def cards(data: Row, where: str) -> str:
    rows = []
    for card in data["cards"]:
        reasons: dict[str, dict[str, None]] = {}
        for cell in card["red_cells"]:
            known = cell["known"]
            link = f"[known]({known})" if known.startswith("https") else known
            reasons.setdefault(f"{cell['why']} ({link})", {})[cell["property"]] = None
        why = "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items())
        shown = {"why": why or "-", "na": card["n/a"], "dialect": card["dialect"] or "-"}
        rows.append(card | shown)
    what = (
        f"Other people's attention {where.format(', '.join(data['dtypes']))}: a cell for each "
        "property and dtype. n/a is what an attention does not support, or what a file of outputs "
        "cannot show. New means that we found no issue of the project about it, open that we have "
        "not looked for the cause."
    )
    if data["left_out"]:
        left_out = "; ".join(f"{name}: {why}" for name, why in data["left_out"].items())
        what += f" Left out: {left_out}."
    columns = """
        attention  {name}
        package    {package}
        dialect    {dialect}
        green      {green}
        red        {red}
        n/a        {na}
        not tried  {unexamined}
        seconds    {seconds:.0f}
        why red    {why}
    """
    return section(data, what, formatted(columns, rows))


def mutants() -> str:
    """Which property catches which mistake."""
    data, again = load("mutants"), load("mutants_h200")
    draw_kills(data, FOLDER / "mutants.png")
    what = (
        f"{caught(data, 'single edits of the tile loop and of what it uses')} "
        f"{len(data['cover'])} properties catch them all: {', '.join(data['cover'])}. The tests "
        "always check them."
    )
    here, there = (
        {row["name"]: bool(row["killed_by"]) for row in each["mutants"]} for each in (data, again)
    )
    apart = [f"`{name}`" for name, killed in there.items() if killed != here.get(name)]
    end = f"which differs from the CPU's for {', '.join(apart)}" if apart else ""
    what_again = (
        f"{len(there)} of these edits on the GPU, in its longer cases and larger tiles: "
        f"{sum(there.values())} caught, {end or 'the same ones as on the CPU'}."
    )
    parts = [
        section(data, what, harmless(data), table(KILLS_HEAD, kills(data))),
        "![kill matrix](mutants.png)",
        section(again, what_again, table(KILLS_HEAD, kills(again))),
        *(of_other_code(name, subject, KILLS_HEAD) for name, subject in OTHER_CODE.items()),
        of_other_code("mutants_kernels", "the Triton kernels", ["property", "catches first"]),
        because_they_stay(),
    ]
    return "\n\n".join(parts)


def of_other_code(name: str, subject: str, head: list[str]) -> str:
    """The mistakes that are not in the tile loop."""
    data = load(name)
    rows = [row[: len(head)] for row in kills(data) if row[1]]
    return section(data, caught(data, f"edits of {subject}"), harmless(data), table(head, rows))


def caught(data: Row, edits: str) -> str:
    killed = sum(bool(row["killed_by"]) for row in data["mutants"])
    return f"{len(data['mutants'])} {edits}, {killed} of them caught."


def harmless(data: Row) -> str:
    """The edits that no property catches, and why that is right."""
    return "No property catches the others, because they change no result:\n\n" + "\n".join(
        f"- `{row['name']}`: {row['says']} No mistake: {row['survives']}."
        for row in data["mutants"]
        if not row["killed_by"]
    )


def because_they_stay() -> str:
    """Properties that catch nothing alone in any matrix, and why we still check them."""
    rows = [row for name in ("mutants", *OTHER_CODE) for row in load(name)["mutants"]]
    alone = {row["killed_by"][0] for row in rows if len(row["killed_by"]) == 1}
    names = [name for name in load("mutants")["properties"] if name not in alone]
    what = "These properties are never the only one to catch a mistake. Why they stay:"
    return "\n\n".join(
        [what, table(["property", "why it stays"], [[name, STAYS[name]] for name in names])]
    )


def conformance() -> str:
    runs = {
        "conformance_interpreter": "Without a GPU, Triton interpreted:",
        "conformance_h200": "On the GPU:",
        "conformance_hopper_h200": "Only the Hopper kernels, measured again because their "
        "backward was rewritten:",
    }
    columns = """
        attention                        {attention}
        cases                            {cases}
        worst error / naive's own error  {worst_multiple_of_naive:.2f}
        worst error / budget             {worst_share_of_budget:.2f}
    """
    parts = []
    for name, what in runs.items():
        data = load(name)
        rows = [{"attention": backend} | row for backend, row in data["summary"].items()]
        parts.append(section(data, what, formatted(columns, rows)))
    return "\n\n".join(parts)


def call_tables(data: Row, *figures: tuple[str, str, float]) -> Iterable[str]:
    """For each shape that was measured, a table of each figure (title, column, divisor): variants
    down, lengths across.
    """

    def cell(row: Row | None, column: str, divisor: float) -> str:
        if row and "oom" in row:
            return "out of memory"
        return rounded(row[column] / divisor) if row and row.get(column) is not None else "-"

    shape = ("batch", "heads", "head_dim", "dtype", "causal")
    for rows in by(data["rows"], *shape).values():
        lengths = sorted({row["seq_len"] for row in rows})
        lines = []
        for name, own in by(rows, "attention").items():
            at = {row["seq_len"]: row for row in own}
            for title, column, divisor in figures:
                cells = [cell(at.get(length), column, divisor) for length in lengths]
                lines.append([name.replace(":", " "), title, *cells])
        first = rows[0]
        what = (
            f"One call, batch {first['batch']}, {first['heads']} heads of {first['head_dim']}, "
            f"{first['dtype']}, {'causal' if first['causal'] else 'no mask'}; MiB above q, k and v."
        )
        yield f"{what}\n\n{table(['attention', '', *lengths], lines)}"


def memory() -> str:
    """Peak memory of one attention call against length, with its time and its place under the
    roofline.
    """
    data = load("memory_h200")
    draws = {"memory": draw_memory, "time": draw_time, "roofline": draw_roofline}
    drawn = [draw(data, FOLDER / f"{name}_h200.png") for name, draw in draws.items()]
    pictures = [f"![{path.stem}]({path.name})" for path in drawn]
    return section(data, *call_tables(data, *MEMORY), *pictures)


def regenerated() -> str:
    """The tables of memory and time that the documents print, measured."""
    files = map(load, ("tables_h200", "tables_cpu"))
    return "\n\n".join(section(data, *call_tables(data, *MEMORY, *TIME)) for data in files)


def longest() -> str:
    """The longest sequence that ran, by memory."""
    data = load("longest_h200")
    draw_longest(data, FOLDER / "longest_h200.png")
    signs = {"time": "at least ", "memory": ""}
    rows = [row | {"sign": signs[row["limited_by"]]} for row in data["rows"]]
    what = (
        'Found by doubling, then halving the gap to 12%. "At least" means that the next trial '
        "would have exceeded the time limit, not the memory."
    )
    columns = """
        attention                 {attention}
        batch x heads x head_dim  {batch} x {heads} x {head_dim} {dtype}
        pass                      {pass}
        GiB                       {memory_gib:g}
        longest sequence          {sign}{max_seq_len:,}
    """
    return section(data, what, formatted(columns, rows), "![longest](longest_h200.png)")


def kernels() -> str:
    """Speed of our Triton kernels, PyTorch's and others; each table comes from one run."""
    files = map(load, ("kernels_h200", "kernels_flex_h200", "kernels_rested_h200"))
    return "\n\n".join(section(data, *speed_tables(data)) for data in files)


def speed_tables(data: Row) -> list[str]:
    first = data["rows"][0]
    rested = " The card rested for {pause_s:g} s before every call."
    pause = rested.format_map(first) if "pause_s" in first else ""
    directions = ("forward", "backward")
    counts = {count for name in directions for count in finite(data["rows"], f"{name}_repeats")}
    ends = " to ".join(map(str, sorted({min(counts), max(counts)})))
    what = (
        f"{first['dtype']}, 16,384 tokens, heads x head_dim = 2,048; TFLOP/s of medians of {ends} "
        f"calls, the best in bold.{pause}"
    )
    return [what, *(part for name in directions for part in direction_tables(data["rows"], name))]


def direction_tables(all_rows: list[Row], direction: str) -> list[str]:
    """TFLOP/s of every shape, and how our kernels compare with their peers."""
    names = list(dict.fromkeys(row["attention"] for row in all_rows))
    ours = [name for name in names if name.partition(":")[0] == "triton"]
    peers = [name for name in names if name not in ours]
    masks = {True: "causal", False: "full"}
    rows, ratios = [], {}
    points = by(all_rows, "causal", "head_dim", "seq_len")
    for (causal, head_dim, seq_len), shape in points.items():
        column = f"{direction}_tflops"
        speed = {row["attention"]: row[column] for row in shape if column in row}
        rows.append([masks[causal], head_dim, f"{seq_len:,}", *best_in_bold(speed, names)])
        for own, peer in product(ours, peers):
            by_mask = ratios.setdefault((own, peer), {})
            by_mask.setdefault(masks[causal], []).append(speed[own] / speed[peer])
    means = [
        [
            plain(own),
            plain(peer),
            *(f"{geometric_mean(x):.2f} ({min(x):.2f})" for x in by_mask.values()),
        ]
        for (own, peer), by_mask in ratios.items()
    ]
    return [
        f"{direction.capitalize()}:",
        table(["mask", "head_dim", "seq_len", *map(plain, names)], rows),
        "Speed over a peer's, geometric mean (lowest):",
        table(["attention", "over", *next(iter(ratios.values()))], means),
    ]


def decoding() -> str:
    """One query per sequence against a long cache, by the bytes that it reads; and GPT-2's tokens
    per second.
    """
    data = load("decoding_h200")
    what = (
        "One query per sequence, bfloat16, device time with a cold cache. The figures are TB/s of "
        "keys and values, each read once; the memory's peak is 4.8. The last five shapes are "
        "smaller than the L2 cache or one wave of programs: there the time of a launch decides."
    )
    rows = []
    for row in data["attention"]:
        if not rows or rows[-1]["shape"] != row["shape"]:
            rows.append({name: row[name] for name in ("shape", "batch", "heads", "kv_heads")})
            rows[-1] |= {"keys": row["keys"], "head_dim": row["head_dim"]}
            rows[-1]["gib"] = row["kv_bytes"] / 2**30
        rows[-1][row["variant"]] = row.get("terabytes_per_second")
    columns = """
        {shape}
        B         {batch}
        H / H_kv  {heads} / {kv_heads}
        keys      {keys:,}
        head dim  {head_dim}
        GiB       {gib:.2f}
    """
    names = dict.fromkeys(row["variant"] for row in data["attention"])
    columns += "\n".join(f"{name}  {{{name}:.2f}}" for name in names)
    written = """
        {variant}
        B         {batch}
        tokens/s  {tokens_per_second:,.0f}
        least     {least:,.0f}
        most      {most:,.0f}
        n         {rounds}
        agreement  {same:.2f}
    """
    gpt2 = load("generation_h200")
    greedy = (
        "GPT-2 124M with random weights, greedy, between the 64th and the last of "
        f"{gpt2['generation'][0]['new_tokens']} new tokens. The plain model has a static cache and "
        "a CUDA graph. Agreement is the share of our tokens that a model finds likeliest after the "
        "same tokens; with random weights a rounding often decides."
    )
    parts = [
        section(data, what, formatted(columns, rows)),
        section(gpt2, greedy, formatted(written, gpt2["generation"])),
    ]
    return "\n\n".join(parts)


def masks() -> str:
    """What a window, packed documents and grouped heads save."""
    data = load("masks_h200")
    words = {
        "window": "window {:,}",
        "documents": "documents of {:,}",
        "groups": "{} query heads a key head",
    }
    rows = []
    for row in data["rows"]:
        mask = [form.format(row[key]) for key, form in words.items() if key in row]
        row = row | {"name": plain(row["attention"]), "mask": ", ".join(mask) or "causal"}
        row |= {"mib": row["training_bytes"] / 2**20}
        row |= {f"{name}_ms": row[f"{name}_seconds"] * 1e3 for name in ("forward", "backward")}
        rows.append(row)
    columns = """
        attention          {name}
        head_dim           {head_dim}
        seq_len            {seq_len:,}
        mask               {mask}
        ms forward         {forward_ms:.2f}
        ms backward        {backward_ms:.2f}
        TFLOP/s forward    {forward_tflops:.0f}
        backward           {backward_tflops:.0f}
        MiB above q, k, v  {mib:,.0f}
    """
    first = data["rows"][0]
    what = (
        f"{first['dtype']}, batch {first['batch']}, {first['heads']} heads; TFLOP/s count the "
        "scores that the mask leaves."
    )
    return section(data, what, formatted(columns, rows))


def features() -> str:
    """What softcap, ALiBi and sinks cost: each pair of kernels with them, beside without."""
    data, directions = load("kernel_features_h200"), ("forward", "backward")
    named = [{"feature": "none"} | row for row in data["rows"]]
    shapes = by(named, "attention", "head_dim", "seq_len")
    plain = {shape: first for shape, (first, *_) in shapes.items()}

    def cells(row: Row) -> dict[str, str]:
        without = plain[row["attention"], row["head_dim"], row["seq_len"]]
        ratios = {name: without[f"{name}_seconds"] / row[f"{name}_seconds"] for name in directions}
        return {name: f"{row[f'{name}_tflops']:.0f} ({ratios[name]:.2f})" for name in directions}

    # attention=triton takes the Hopper pair, and comes first
    rows = [
        hopper | {"hopper": cells(hopper), "portable": cells(portable)}
        for hopper, portable in by(named, "head_dim", "seq_len", "feature").values()
    ]
    before, first = data["without_features"], data["rows"][0]
    ratios = [row["ratio"] for row in before["rows"]]
    what = (
        f"{first['dtype']}, causal, {first['batch'] * first['seq_len']:,} tokens: TFLOP/s, in "
        "brackets the speed beside that without a feature. Device time with an empty cache, median "
        f"of {first['forward_repeats']} calls in turns. After these measurements attention=triton "
        "took the portable kernels for a softcap. Calls without features took as long as at commit "
        f"{before['before']}, before this: the median ratio of {len(ratios)} shapes and directions "
        f"is {median(ratios):.3f}. Both ran in turns, {before['rounds']} rounds. Other programs "
        f"kept the host busy, so single ratios are {min(ratios):.2f} to {max(ratios):.2f}."
    )
    columns = """
        head_dim              {head_dim}
        seq_len               {seq_len:,}
        feature               {feature}
        Hopper, forward       {hopper[forward]}
        Hopper, backward      {hopper[backward]}
        portable, forward     {portable[forward]}
        portable, backward    {portable[backward]}
    """
    return section(data, what, formatted(columns, rows))
