"""Do the properties catch mistakes? Every mistake in the gallery turns at least one property red,
and a harmless edit turns none red.

    pytest tests/conformance/test_mutants.py -k loop --kill-matrix results/mutants.json

tries every property on every mutant of the tile loop, on the GPU if there is one; so do -k ring
and -k decoding, for their own files. -k kernel, for results/mutants_kernels.json, stops at the
first red property, because the kernels are interpreted on a CPU. Without the option, each mutant is
tried on the CPU with one property that catches it in the committed matrix.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from attention import get_backend
from conformance.backend_under_test import Check, Subject
from conformance.cases import SHORT
from conformance.properties import PROPERTIES, SLOW, Property, examine
from tests.conformance.mutants import GALLERY, MATRIX_DEVICE, MUTANTS, RING_MUTANTS
from tests.conformance.mutants_decoding import DECODING_MUTANTS
from tests.conformance.mutants_kernels import FIRST, KERNEL_MUTANTS, QUICK
from tests.conformance.mutation import Mutant, smallest_cover

RESULTS = Path(__file__).resolve().parents[2] / "results"
MATRICES = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in GALLERY}
MATRIX = MATRICES["mutants"]
MISTAKES = [mutant for mutant in MUTANTS if mutant.survives is None]
HARMLESS = [mutant for mutant in MUTANTS if mutant.survives is not None]
# of an edit that was never tried, where a property would be red whatever it asks
NO_RESULT = ("NameError", "SyntaxError", "IndentationError", "CompilationError")


def until_red(property: Property) -> Property:
    """The property, stopped after its first red check."""

    def check(subject: Subject) -> Iterator[Check]:
        for each in property(subject):
            yield each
            if each.share > 1:
                return

    return check


def caught(mutant: Mutant, names, *, first: bool = False, device: str = "cpu") -> list[str]:
    """The properties that are red; with first, only the first of them."""
    found = []
    with mutant.installed() as backend:
        subject = Subject(backend, device, mutant.dtype, random_cases=4, seed=0)
        for name in names:
            cell = examine(subject, name, until_red(PROPERTIES[name]))
            assert not any(error in cell.note for error in NO_RESULT), cell.note
            if cell.status == "red":
                found.append(name)
                if first:
                    break
    return found


def cheapest(mutant: Mutant, matrix: dict) -> list[str]:
    """One property that catches the mutant, from the matrix's cover; all properties if the matrix
    does not have the mutant.
    """
    # a value that nobody wrote may be right by chance, but not there
    order = ["poisoned memory", *matrix["cover"]]
    for row in matrix["mutants"]:
        if row["name"] == mutant.name:
            return [name for name in order if name in row["killed_by"]][:1]
    return everything()


def everything() -> list[str]:
    return [name for name in PROPERTIES if name not in SLOW]


def row(mutant: Mutant, killed_by: list[str]) -> dict:
    return {
        "name": mutant.name,
        "says": mutant.says,
        "dtype": SHORT[mutant.dtype],
        "survives": mutant.survives,
        "killed_by": killed_by,
    }


def by_name(mutants: list[Mutant]):
    return pytest.mark.parametrize(
        "mutant", [pytest.param(mutant, id=mutant.name) for mutant in mutants]
    )


@by_name(MISTAKES)
def test_a_loop_is_caught(mutant, kill_record):
    found = (
        caught(mutant, everything(), device=MATRIX_DEVICE)
        if kill_record
        else caught(mutant, cheapest(mutant, MATRIX), first=True)
    )
    if kill_record:
        kill_record(row(mutant, found))
    assert found, mutant.says


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, id=mutant.name, marks=[pytest.mark.slow] if i else [])
        for i, mutant in enumerate(HARMLESS)
    ],
)
def test_no_mistake_in_a_loop_is_caught(mutant, kill_record):
    """A property that is red here demands more than attention must do."""
    found = caught(mutant, everything(), device=MATRIX_DEVICE if kill_record else "cpu")
    if kill_record:
        kill_record(row(mutant, found))
    assert not found, mutant.survives


def test_without_a_mistake_passes():
    """An unedited copy, loaded as mutants are, equals the real backend."""
    copy = Mutant("copy", "No edit.", ())
    assert caught(copy, everything()) == []
    q, k, v = (
        torch.randn(1, 2, 40, 16, generator=torch.Generator().manual_seed(seed))
        for seed in range(3)
    )
    with copy.installed() as backend:
        outs = [
            each.fn(q, k, v, causal=True, scale=0.25, block_q=16, block_kv=8).out
            for each in (backend, get_backend("tiled"))
        ]
    assert torch.equal(*outs)


def test_the_edits_are_looked_for():
    says = "astray: attention/tiled.py holds 0 times: what stands nowhere"
    astray = Mutant("astray", "", (("tiled", "what stands nowhere", ""),))
    with pytest.raises(AssertionError, match=says), astray.installed():
        pass


def test_mutants_are_told_apart():
    mutants = [mutant for mutants in GALLERY.values() for mutant in mutants]
    assert (
        len({mutant.name for mutant in mutants})
        == len({(mutant.backend, mutant.edits) for mutant in mutants})
        == len(mutants)
    )


@pytest.mark.parametrize("name", GALLERY)
def test_the_committed_matrix_is_of_these_mutants_and_properties(name, kill_record):
    if kill_record:
        pytest.skip("it is being written")
    data = MATRICES[name]
    assert [row["name"] for row in data["mutants"]] == [mutant.name for mutant in GALLERY[name]]
    assert data["properties"] == everything()
    assert data["cover"] == smallest_cover(data["mutants"])
    assert all(bool(row["killed_by"]) == (row["survives"] is None) for row in data["mutants"])


def test_some_properties_stand_alone():
    data = MATRIX
    # calls that stand alone are nothing that the other properties ask for
    alone = [row["killed_by"][0] for row in data["mutants"] if len(row["killed_by"]) == 1]
    assert {"every length", "call history", "poisoned memory", "row independence"} <= set(alone)


PAGE = (RESULTS.parent / "docs/what-tests-miss.md").read_text()
SHIPPED = re.findall(r"^\| .+ \| .*\| `(\w+)` \| (.+) \|$", PAGE, re.MULTILINE)


def test_the_page_of_shipped_bugs_says_what_was_measured():
    rows = [row for matrix in MATRICES.values() for row in matrix["mutants"]]
    killed_by = {row["name"]: row["killed_by"] for row in rows}
    assert len(SHIPPED) >= 8
    for name, property in SHIPPED:
        assert property in killed_by[name], name


@by_name(RING_MUTANTS)
def test_a_ring_is_held_to_the_same_properties(mutant, kill_record):
    """Four ranks, simulated in one process."""
    few = ("forward", "gradients", "large logits")
    judge(mutant, MATRICES["mutants_ring"], kill_record, few)


@by_name(DECODING_MUTANTS)
def test_decoding_is_held_to_its_own(mutant, kill_record):
    judge(mutant, MATRICES["mutants_decoding"], kill_record, ("cache and pages",))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, about NaN
@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, id=mutant.name, marks=[] if mutant.name in QUICK else pytest.mark.slow)
        for mutant in KERNEL_MUTANTS
    ],
)
def test_a_kernel_is_held_to_them_too(mutant, kill_record):
    judge(mutant, MATRICES["mutants_kernels"], kill_record, ("forward", "gradients"), first=FIRST)


def judge(
    mutant: Mutant,
    matrix: dict,
    kill_record,
    few: tuple[str, ...],
    *,
    first: tuple[str, ...] | None = None,
) -> None:
    """Assert that a mistake is caught and a harmless edit is not. few: properties for a harmless
    edit, unless the matrix is written. first: the matrix gets one property per mistake, and these
    are tried before the others.
    """
    mistake = mutant.survives is None
    if kill_record:
        names = [*(first or ()), *(name for name in everything() if name not in (first or ()))]
    else:
        names = cheapest(mutant, matrix) if mistake else few
    found = caught(mutant, names, first=not kill_record or (mistake and first is not None))
    if kill_record:
        kill_record(row(mutant, found))
    assert bool(found) == mistake, mutant.says
