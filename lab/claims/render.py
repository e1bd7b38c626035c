"""docs/claims.md and docs/questions.md, from results/claims.json and the other files of results/.
Measures nothing.
"""

from collections import Counter
from pathlib import Path

from lab.claims import CLAIMS
from lab.claims.asked import ASKED
from lab.claims.claim import (
    DOCUMENTS,
    FAILS,
    HOLDS,
    NOT_TESTABLE,
    RESULTS,
    Claim,
    Figures,
    cells,
    recorded,
    sentence,
)
from lab.claims.questions import CHECKLIST, QUESTIONS
from lab.results.tables import provenance, table

DOCS = RESULTS.parent / "docs"
NOT_YET = "not measured yet"
# how the files of results/ that claims read were made
MADE_BY = {
    "memory_h200": "python -m scripts.benchmark attention=naive,triton,triton:kernel=portable,"
    "sdpa:backend=flash,sdpa:backend=cudnn,sdpa:backend=efficient,"
    "tiled:block_q=2048,block_kv=2048 seq_len=1024,2048,4096,8192,16384,32768,65536,131072 "
    "dtype=bf16 out=results/memory_h200.json",
    "longest_h200": "python -m scripts.benchmark max_length=true attention=naive,triton batch=2 "
    "heads=8 causal=false dtype=fp16 memory_gib=8 out=results/longest_h200.json && "
    "python -m scripts.benchmark max_length=true attention=naive,triton heads=32 causal=false "
    "dtype=fp16 memory_gib=24,40 append=true out=results/longest_h200.json",
    "tile_speed_h200": "python -m scripts.benchmark attention=naive,triton,"
    "tiled:block_q=64,block_kv=64,tiled:block_q=256,block_kv=256,"
    "tiled:block_q=1024,block_kv=1024,tiled:block_q=2048,block_kv=2048 "
    "seq_len=1024,2048,4096,8192 batch=2 heads=8 causal=false dtype=fp16 "
    "out=results/tile_speed_h200.json",
}


def figures_of(claim: Claim) -> Figures | None:
    """Its figures: from results/claims.json, or from the file it reads. None where that has not
    been measured.
    """
    try:
        return claim.measure() if claim.reads else recorded("claims")["claims"].get(claim.name)
    except FileNotFoundError:
        return None


def found(claim: Claim, figures: Figures | None) -> tuple[str, str]:
    """What was measured, in a sentence, and the verdict."""
    if figures is None:
        return f"{NOT_YET}: `{MADE_BY.get(claim.reads, command(claim.name))}`", NOT_YET
    measured = sentence(claim.measured, figures)
    because = sentence(claim.because, figures)
    return measured + (f". {because}" if because else ""), claim.verdict(figures)


def command(*names: str) -> str:
    return f"python -m lab.claims run={','.join(names)}"


def claims_page() -> str:
    all_figures = {name: figures_of(claim) for name, claim in CLAIMS.items()}
    rows: dict[str, list[list[str]]] = {document: [] for document in DOCUMENTS}
    counts: Counter[str] = Counter()
    for claim in CLAIMS.values():
        measured, verdict = found(claim, all_figures[claim.name])
        counts["holds only if" if verdict.startswith("holds only if") else verdict] += 1
        first, *others = claim.documents.split(", ")
        says = (
            claim.says
            + (f" (Also: the {', the '.join(others)}.)" if others else "")
            + f" *Holds if* {claim.criterion}."
        )
        where = f"`results/{claim.reads}.json`: " if claim.reads else ""
        commands = f"`{command(claim.name)}`" + (f" `{claim.also}`" if claim.also else "")
        rows[first].append([cell(says), cell(where + measured), f"**{verdict}**", commands])
    parts = [INTRO, provenance(recorded("claims")), tally(counts)]
    for document, own in rows.items():
        parts += [f"## The {document}", table(["claim", "measured", "verdict", "test it"], own)]
    parts += [
        "## Where the recorded figures come from",
        table(["file of results/", "measured", "by"], sources()),
    ]
    parts += [
        "## What they ask to be built",
        table(["asked by", "what", "where"], [[*row[:2], f"`{row[2]}`"] for row in ASKED]),
    ]
    return "\n\n".join(parts) + "\n"


def sources() -> list[list[str]]:
    """Each file that claims read: where it was measured, and by which command."""
    rows = []
    for name in dict.fromkeys(claim.reads for claim in CLAIMS.values() if claim.reads):
        try:
            data = recorded(name)
        except FileNotFoundError:
            rows.append([f"`{name}.json`", NOT_YET, f"`{MADE_BY[name]}`"])
            continue
        runs = data.get("runs")
        how = (
            f"`python train.py {' '.join(runs[0]['overrides'])}` and {len(runs) - 1} more runs"
            if runs
            else f"`{MADE_BY[name]}`"
        )
        rows.append([f"`{name}.json`", provenance(data).removeprefix("Measured on "), how])
    return rows


def tally(counts: Counter[str]) -> str:
    words = {
        HOLDS: "hold",
        FAILS: "do not",
        "holds only if": "hold only under a condition",
        NOT_TESTABLE: "cannot be tested here",
    }
    parts = [f"{counts[verdict]} {word}" for verdict, word in words.items()]
    waiting = f" Still to be measured: {counts[NOT_YET]}." if counts[NOT_YET] else ""
    return f"Of {counts.total()} claims {', '.join(parts)}.{waiting}"


def cell(text: str) -> str:
    return text.replace("|", "\\|")


INTRO = """# What five documents claim about attention, and what was measured

Generated by `python -m lab.claims`. Five documents that teach flash attention served as the
starting point of this project:

- **the chapter**, a book chapter that builds tiled attention in PyTorch and breaks it on purpose
- **the notebook**, from naive attention to a streaming softmax in PyTorch
- **the exercise**, attention of one head in NumPy with hidden tests
- **the guide**, a project guide with phases, benchmarks, pitfalls and interview questions
- **the deep dive**, a derivation in NumPy with complexity, CUDA and quick checks

Their claims stand here in our words, each with what decides it, what was measured, and the verdict
computed from that. A range reads median (smallest to largest, n). Errors are largest absolute
differences to float64 attention of the same rounded inputs unless they say relative. Inputs are
random, q, k and v of standard deviation 1, unless a claim says otherwise. Sizes and rates of chips
are from NVIDIA's documents (training/traffic.py, training/metrics.py, lab/claims/chips.py)."""

QUESTIONS_INTRO = """# The documents' questions, answered from runs

Generated by `python -m lab.claims` from the figures of [claims.md](claims.md), which also says
what the five documents are. Every number here was measured; the command below an answer measures it
again."""


def questions_page() -> str:
    all_figures = {name: figures_of(claim) for name, claim in CLAIMS.items()}
    parts = [QUESTIONS_INTRO]
    for document in DOCUMENTS:
        own = [question for question in QUESTIONS if question.document == document]
        parts += [f"## The {document}"] if own else []
        for question in own:
            missing = [name for name in question.uses if all_figures[name] is None]
            if missing:
                answer = "; ".join(found(CLAIMS[name], None)[0] for name in missing) + "."
            else:
                figures = {name: all_figures[name] for name in question.uses}
                answer = sentence(question.answer, figures)
            rows = (
                {}
                if missing
                else {label: cells(template, figures) for label, template in question.rows}
            )
            keys = list(dict.fromkeys(key for row in rows.values() for key in row))
            parts += [f"### {question.asks}", answer]
            parts += (
                [
                    table(
                        [question.keys, *keys],
                        [
                            [label, *(row.get(key, "-") for key in keys)]
                            for label, row in rows.items()
                        ],
                    )
                ]
                if rows
                else []
            )
            parts += [f"`{command(*question.uses)}`"]
        if document == "guide":
            rows = [[what, f"`{where}`"] for what, where in CHECKLIST]
            parts += ["### Its checklist: can you ...", table(["...", "shown by"], rows)]
    return "\n\n".join(parts) + "\n"


PAGES = {"claims.md": claims_page, "questions.md": questions_page}


def write_pages(folder: Path = DOCS) -> None:
    folder.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (folder / name).write_text(page())
