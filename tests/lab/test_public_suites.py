"""The published tests, restated: what is right passes them, and what they miss is found."""

import json
from collections import Counter

import pytest
import torch

from attention import get_backend
from conformance import course
from lab.public_suites import page
from lab.public_suites.reach import ADDITIONS, additions, smallest_cover
from lab.public_suites.suites import MEAN, SUITES
from tests.conformance.mutants import MUTANTS

QUICK = ("kernelbench_97_fp32", "cs336", "opinfo")
ALL = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in SUITES]
MISTAKES = {mutant.name: mutant for mutant in MUTANTS if mutant.survives is None}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("backend", ["naive", "tiled"])
def test_exact_attention_passes_and_nothing_is_added_for_it(name, backend):
    assert SUITES[name].passes(get_backend(backend))
    assert additions(get_backend(backend), SUITES[name]) == []


@pytest.mark.parametrize(
    ("suite", "caught", "passed", "property"),
    [
        ("cs336", "no_rescale", "tail_dropped", "ragged tails"),
        ("kernelbench_97_fp32", "scale_twice", "no_max", "large logits"),
        ("opinfo", "mask_sees_next", "no_rescale", "forward"),
    ],
)
def test_a_suite_passes_what_its_inputs_cannot_show(suite, caught, passed, property):
    with MISTAKES[caught].installed() as backend:
        assert not SUITES[suite].passes(backend)
    with MISTAKES[passed].installed() as backend:
        assert SUITES[suite].passes(backend)
        assert property in {name for name, _ in additions(backend, SUITES[suite])}


def test_what_a_suite_cannot_express_is_out_of_its_reach():
    for suite, name in (("kernelbench_97_fp32", "mask_sees_next"), ("cs336", "heads_in_turn")):
        with MISTAKES[name].installed() as backend:
            assert additions(backend, SUITES[suite]) == []


def test_uniform_inputs_hardly_tell_attention_from_the_mean_of_v():
    assert SUITES["kernelbench_97_bf16"].passes(MEAN)
    assert not SUITES["cs336"].passes(MEAN)


def test_a_cover_begins_with_what_catches_most():
    one, other, third = (("large logits", "a"), ("large logits", "b"), ("forward", "c"))
    caught_by = {"x": [one], "y": [one, other], "z": [third], "never": []}
    cover = smallest_cover(caught_by)
    assert [each["catches"] for each in cover] == [["x", "y"], ["z"]]
    assert [(each["property"], each["case"]) for each in cover] == [one, third]


def test_the_record_and_the_page_are_of_these_suites_and_mistakes():
    data = json.loads(page.RECORD.read_text())
    assert list(data["suites"]) == list(SUITES)
    for name, row in data["suites"].items():
        assert row["commit"] == SUITES[name].source.commit and row["mistakes"] == len(MISTAKES)
        assert set(row["passes_in_reach"]) <= set(row["passes"]) <= MISTAKES.keys()
        caught = [mistake for each in row["add"] for mistake in each["catches"]]
        assert sorted(caught) == sorted(row["passes_in_reach"])
        assert {each["property"] for each in row["add"]} <= ADDITIONS.keys()
    text = page.page(data)
    assert page.PAGE.read_text() == text


def test_students_are_told_what_the_record_says():
    row = json.loads(page.RECORD.read_text())["suites"]["cs336"]
    counts = Counter()
    for each in row["add"]:
        counts[each["property"]] += len(each["catches"])
    assert (row["reach"], dict(counts.most_common())) == (course.IN_REACH, course.CAUGHT_BY)


def test_rounded_references_are_kept_in_the_inputs_dtype():
    for name in ("opinfo", "kernelbench_97_bf16"):
        _, reference, _ = SUITES[name].expected[0]
        assert reference["out"].dtype == torch.bfloat16
