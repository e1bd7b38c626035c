"""`python -m scripts.trace attention=ring...`: what it prints, what it refuses, and its page."""

import json
import re

import pytest

from attention import BACKENDS
from attention.played_ring import PlayedRing
from scripts import trace_ring
from tests.scripts.test_trace import embedded, write_run

RINGS = [name for name, backend in BACKENDS.items() if isinstance(backend.fn, PlayedRing)]


def test_worked_example_by_hand(run_trace):
    """Rank 0 has the scores 0.8, 0.3, 0.6 and 0.1, rank 1 has -0.1, 0.5, 1.2 and -0.4. The first
    sums to 2.922, which exp(0.8 - 1.2) makes 1.959; the second adds 1.971.
    """
    out, page = run_trace("attention=ring_no_rescale")
    assert "8 of 8 rows come out wrong: finite but wrong. Nothing leaves the finite range." in out
    assert "rank 0  of 0: 0-1, 6-7 (16 pairs)  of 1: 2-5 (16 pairs)" in out
    assert "Every rank computes 32 pairs" in out and "32 numbers, 128 bytes" in out
    assert out.count("<- breaks") == 1
    data = embedded(page)
    exact, found = data["steps"][1]["exact"], data["steps"][1]["found"]
    assert (exact["alpha"][0], exact["beta"][0], exact["row_sum"][0]) == (0.6703, 1, 3.93)
    assert (found["alpha"][0], found["beta"][0], found["row_sum"][0]) == (1, 1, 4.893)
    assert [data["steps"][hop]["exact"]["weight"][0] for hop in (0, 1)] == [0.4984, 0.5016]
    assert [data["steps"][hop]["found"]["weight"][0] for hop in (0, 1)] == [0.5972, 0.4028]
    assert data["command"] == "python -m scripts.trace attention=ring_no_rescale"


def test_sums_of_weights(run_trace):
    data = embedded(run_trace("attention=ring_local_softmax", "ranks=4")[1])
    assert data["sums"] == {"exact": [1.0] * 8, "found": [4.0] * 8}


def test_names_the_merge_that_breaks(run_trace):
    out, page = run_trace("attention=ring_no_max", "inputs=up", "seq_len=40")
    assert re.search(
        r"The first merge to leave the finite range is that of query 0, on rank 0 in hop 1, with "
        r"the keys of rank 3. The largest score so far is \d+\.\d\d: what multiplies the past "
        r"passes the largest number of its dtype\.",
        out,
    )
    assert not re.search(r"https?:|src=|@import|url\(", page)
    assert page.count("<script>") == page.count("</script>") == 1
    assert {"inf", "nan"} <= set(re.findall(r"inf|nan", json.dumps(embedded(page)["steps"])))


@pytest.mark.parametrize("ranks", [1, 3, 8, 20])
def test_any_number_of_ranks(run_trace, ranks):
    """Also more than there are keys."""
    out, page = run_trace("attention=ring", f"ranks={ranks}", "causal=true")
    assert "Every row is as close to exact attention as rounding allows." in out
    assert len(embedded(page)["cells"]) == ranks


def test_many_queries_are_cut_around_the_row(run_trace, monkeypatch):
    monkeypatch.setattr(trace_ring, "MAX_NUMBERS", 2000)
    data = embedded(run_trace("attention=ring", "inputs=normal", "row=100")[1])
    assert data["rows"] == list(range(95, 106)) and data["row"] == 5
    assert all(len(step["found"]["row_max"]) == 11 for step in data["steps"])


def test_a_run(tmp_path, run_trace):
    """Its q, k and v on a ring."""
    write_run(tmp_path / "run")
    out, _ = run_trace(f"run={tmp_path}/run", "attention=ring_no_rescale", "ranks=3", "layer=1")
    assert "layer 1, head 0 of " in out and "on a ring of 3" in out and "finite but wrong" in out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["attention=ring", "ranks=0"], "ranks=0 must be at least 1"),
        (["attention=ring", "ranks=x"], "ranks=x must be a whole number"),
        (["attention=ring", "ranks=33"], "ranks=33: a page shows at most 32"),
        (["ranks=2"], "ranks=2: attention=no_rescale is no ring; attention=ring is one"),
        (["attention=ring", "softmax_dtype=input"], "softmax_dtype=input: attention=ring has its"),
        (["attention=ring", "row=8"], "row=8 is not one of the 8 queries"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_refuses_in_one_line(run_trace, arguments, reason):
    with pytest.raises(SystemExit) as error:
        run_trace(*arguments)
    assert error.value.code.startswith(f"trace: {reason}") and "\n" not in error.value.code


def test_replay_of_the_worked_example(open_page):
    page = open_page("attention=ring_no_rescale")
    assert page.title() == "ring_no_rescale in float32, hop by hop"
    assert "sends them to rank 1: 32 numbers, 128 bytes" in page.inner_text("#say")
    page.keyboard.press("ArrowRight")
    say = page.inner_text("#say")
    assert "multiplies the past by exp(0.8 − 1.2) = 0.67 and the block by" in say
    assert "this block weighs 0.403 where 0.502 is right" in say
    assert "3.930" in page.inner_text("#exact") and "4.893" in page.inner_text("#found")
    assert "broken" in page.get_attribute("#found", "class")
    # a cell of another rank: its first query is followed
    page.locator("#ring [data-step='0']").nth(1).click()
    assert "Rank 1 holds the keys of rank 1" in page.inner_text("#say")
    assert (page.input_value("#slider"), page.input_value("#row")) == ("0", "2")


@pytest.mark.parametrize(
    "arguments",
    [
        *[[f"attention={name}", "ranks=3", "causal=true"] for name in RINGS],
        ["attention=ring_no_max", "inputs=up", "seq_len=30"],
        ["attention=ring_no_max", "inputs=negative", "seq_len=9", "dtype=bf16"],
        ["attention=ring_local_softmax", "ranks=12"],
        ["attention=ring", "ranks=1"],
    ],
    ids=" ".join,
)
def test_every_hop_of_every_query_draws(open_page, arguments):
    """On a phone: nothing is cut off, and no number reaches the page unexplained."""
    page = open_page(*arguments, viewport={"width": 390, "height": 844}, color_scheme="dark")
    words = page.evaluate(
        """() => DATA.rows.flatMap((_, r) => steps.map((_, i) => {
             go(i, r);
             return document.body.innerText;
           }))"""
    )
    assert all(
        "undefined" not in text and "null" not in text and "[object" not in text for text in words
    )
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
