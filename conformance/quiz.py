"""Find the wrong line: the exercises of `attn-conform quiz`, their symptoms, and the judge.

Dimensions: B batch, H heads, N queries, M keys, D head dim.
"""

import importlib.util
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from attention import AttentionOutput, Backend
from conformance.backend_under_test import TILES, Subject
from conformance.cases import run
from conformance.files import write_file
from conformance.properties import PROPERTIES, SLOW, Cell, examine
from conformance.quiz_exercises import EXERCISES, Exercise

FEATURES = frozenset({"gqa", "non_causal", "cross_length", "window", "softcap", "lse"})
ROWS = ("out", "lse", "dq", "dk", "dv")
MAP = (
    "Each sign is a row of the tensor: a query of out, lse and dq, a key of dk and dv.\n"
    ". within its budget   + up to 100 times that   # more   ! not a finite number\n"
)
TASK = """Exercise {number} of attn-conform quiz, {level}: one edit made this attention wrong.
Find it, mend it, and ask

    attn-conform quiz {number} fix={file}

The symptoms are in {symptoms}. It walks in tiles of {block_q} queries by {block_kv} keys.
"""


def numbered(text: str) -> tuple[int, Exercise]:
    """The exercise whose number the user typed."""
    if not text.isdecimal() or not 1 <= int(text) <= len(EXERCISES):
        raise ValueError(f"there is no exercise {text}; they go from 1 to {len(EXERCISES)}")
    return int(text), EXERCISES[int(text) - 1]


def listed() -> str:
    """The command, and a line for every level."""
    lines = ["attn-conform quiz NUMBER out=. writes an exercise and its symptoms"]
    for level in dict.fromkeys(each.level for each in EXERCISES):
        found = [i for i, each in enumerate(EXERCISES, 1) if each.level == level]
        lines.append(f"{found[0]:>2} to {found[-1]:>2}  {level}")
    return "\n".join(lines)


def backend_of(file: Path) -> Backend:
    """The attend() of a file as a Backend. Raises ValueError if there is none."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise ValueError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        attend = module.attend
    except Exception as error:  # a learner's file may raise anything
        raise ValueError(f"{file}: {type(error).__name__}: {error}") from error

    def fn(*tensors: Tensor, **arguments: object) -> AttentionOutput:
        return AttentionOutput(*attend(*tensors, **arguments))

    return Backend(
        file.stem, fn, devices=("cpu",), features=FEATURES, options=dict(TILES), traceable=False
    )


def subject_of(file: Path) -> Subject:
    return Subject(backend_of(file), "cpu", torch.float32, random_cases=4, seed=0)


def red_cells(file: Path, names: tuple[str, ...] = ()) -> list[Cell]:
    """The red properties of an attention with the quiz's signature, among `names` or all."""
    subject = subject_of(file)
    cells = (examine(subject, name) for name in names or PROPERTIES if name not in SLOW)
    return [cell for cell in cells if cell.status == "red"]


def error_map(subject: Subject) -> str:
    """Which rows are wrong, head by head, in the first call with wrong rows."""
    n = subject.length
    plain, window = subject.case(), subject.case(window=20)
    cases = [plain, replace(plain, inputs="huge"), window, subject.case(n // 2, n)]
    cases += [subject.case(n, n // 2), subject.case(num_heads=4), replace(plain, inputs="down")]
    cases += [subject.case(softcap=2.0, inputs="large")]
    for case in cases:
        expected = subject.expected(case)
        try:
            found = run(subject.backend, *expected.inputs)
        except Exception as error:  # a broken attention may raise anything
            return f"{case}: {type(error).__name__}: {error}"
        lines = []
        for name in ROWS:
            errors = (found[name] - expected.reference[name]).abs()
            errors = torch.where(found[name] == expected.reference[name], 0.0, errors)
            shares = errors / max(expected.budget(name), 1e-300)
            rows = shares[0] if name == "lse" else shares[0].amax(-1)
            if not (rows <= 1).all():
                lines += [f"{name:>4} head {h}  {signs(row)}" for h, row in enumerate(rows)]
        if lines:
            ruler = "".join(f"|{i:<15}" for i in range(0, max(case.num_queries, case.num_keys), 16))
            return "\n".join([f"{case}", f"{'':13}{ruler}", *lines])
    return "The calls that a map is drawn of are right."


def signs(row: Tensor) -> str:
    """A sign for each row, from its error in units of the budget."""
    return "".join(
        "!" if not share < torch.inf else "." if share <= 1 else "+" if share <= 100 else "#"
        for share in row.tolist()
    )


def write(number: int, exercise: Exercise, folder: Path) -> tuple[Path, Path]:
    """Write the exercise and its symptoms, which are measured now."""
    if not folder.is_dir():
        raise ValueError(f"out={folder} is not a folder")
    file, text = (folder / f"exercise_{number:02}.{end}" for end in ("py", "txt"))
    if file.exists():
        raise ValueError(f"{file} is there already; judge it with fix={file}, or move it away")
    task = TASK.format(number=number, level=exercise.level, file=file, symptoms=text.name, **TILES)
    write_file(file, exercise.source.replace('"""', f'"""{task}\n', 1))
    write_file(text, f"{reds(red_cells(file))}\n\n{MAP}\n{error_map(subject_of(file))}\n")
    return file, text


def judge(exercise: Exercise, file: Path) -> str | None:
    """Print the red properties, or the answer if there are none. Returns what is still wrong."""
    cells = red_cells(file)
    print(reds(cells) or f"Green: every property holds. The mistake was: {exercise.says}")
    return f"properties still red: {len(cells)}" if cells else None


def reds(cells: list[Cell]) -> str:
    return "\n".join(f"red  {cell.property:<20}  {cell.note}" for cell in cells)


def hint(exercise: Exercise) -> str:
    return (
        f"Look at {exercise.function}(). A property that shows it is {exercise.shows!r}: "
        f"{' '.join((PROPERTIES[exercise.shows].__doc__ or '').split())}"
    )
