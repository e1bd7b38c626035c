"""The gallery: the wrong lines of the files in gallery/, one file a room.

    # the rescaling
    quick alpha_on_acc_only [wider calls]: row_sum is not rescaled.
        OnlineSoftmax.update: alpha * self.row_sum -> self.row_sum

A mistake has a name, the properties that must be red for it, a sentence, and its edits. `quick` is
one of the few that `make test` judges; a line with # begins a section. An edit has one of these
forms, see tests.conformance.edits:

    PLACE: OLD -> NEW
    PLACE: drop OLD
    PLACE: PARAMETER of FUNCTION: OLD -> NEW
    PLACE:
        - OLD, of one or more lines
        + NEW

An edit with `survives:` changes no result, and the sentence says why. `dtype:` is the one in which
a mistake shows. New code can keep values as remember_(key, value).
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.conformance.edits import Edit
from tests.conformance.mutation import Mutant

FOLDER = Path(__file__).with_name("gallery")
# the rooms that are measured together, in results/mutants*.json
ROOMS = {
    "loop": ("loop", "mask", "sinks", "naive"),
    "states": ("merge",),
    "decoding": ("decoding",),
    "kernels": ("kernels", "split"),
}
BACKENDS = {
    "naive": "naive",
    "merge": "alpha_beta",
    "kernels": "triton",
    "split": "triton",
}

HEAD = re.compile(r"(?P<quick>quick )?(?P<name>\w+) \[(?P<red>.+?)\]: (?P<says>.+)")
EDIT = re.compile(
    r"    (?P<place>[\w.]+(:[\w.]+)?):"
    r"( (?P<parameter>\w+) of (?P<function>[\w.]+):)?"
    r"( drop (?P<dropped>.+)| (?P<old>.+) -> (?P<new>.+))?"
)


@cache
def mutants_of(room: str) -> tuple[Mutant, ...]:
    return tuple(read((FOLDER / f"{room}.txt").read_text(), room))


def gallery(group: str) -> list[Mutant]:
    return [mutant for room in ROOMS[group] for mutant in mutants_of(room)]


def read(text: str, room: str) -> Iterator[Mutant]:
    section = room
    for block in re.split(r"\n(?! )", text.strip()):
        if block.startswith("#"):
            section = f"{room}: {block.removeprefix('# ')}"
        elif block:
            yield mutant_of(block.splitlines(), room, section)


def mutant_of(lines: list[str], room: str, section: str) -> Mutant:
    head = HEAD.fullmatch(lines[0])
    assert head, f"{room}.txt: no NAME [PROPERTIES]: SENTENCE in {lines[0]!r}"
    fields: dict[str, Any] = {}
    edits: list[dict[str, Any]] = []
    for line in lines[1:]:
        sign, code = line[8:10], line[10:]
        if line.startswith("    survives: "):
            fields["survives"] = line.partition(": ")[2]
        elif line.startswith("    dtype: "):
            fields["dtype"] = getattr(torch, line.partition(": ")[2])
        elif line.startswith(" " * 8) and sign in ("- ", "+ "):
            edits[-1]["old" if sign == "- " else "new"].append(code)
        else:
            found = EDIT.fullmatch(line)
            assert found, f"{room}.txt: no edit of {head['name']} in {line!r}"
            edits.append(parts_of(found))
    return Mutant(
        head["name"],
        head["says"],
        tuple(
            Edit(x["place"], "\n".join(x["old"]), "\n".join(x["new"]), x["argument"]) for x in edits
        ),
        red=() if "survives" in fields else tuple(head["red"].split(", ")),
        backend=BACKENDS.get(room, "tiled"),
        section=section,
        quick=bool(head["quick"]),
        **fields,
    )


def parts_of(found: re.Match[str]) -> dict[str, Any]:
    """An edit whose lines may still follow."""
    old, new = found["old"], found["new"]
    if found["dropped"]:
        old, new = found["dropped"], "pass"
    return {
        "place": found["place"],
        "old": [old] if old else [],
        "new": [new] if new else [],
        "argument": (found["function"], found["parameter"]) if found["function"] else None,
    }
