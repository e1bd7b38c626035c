"""`python -m scripts.benchmark`: what its rows say, whom it refuses, and the search for the longest
sequence.
"""

import itertools
import json
import time
from statistics import median

import pytest
import torch

from attention import Backend, get_backend
from attention.naive import naive_attention
from scripts.attention_call import (
    Call,
    longest,
    measure_memory,
    pairs,
    seconds,
)

SHAPE = {"seq_len": 128, "head_dim": 32, "batch": 1, "heads": 2, "causal": True}
CPU = torch.device("cpu")


def wrong(q, k, v, *, causal, scale):
    return naive_attention(q, k, v, causal=causal, scale=2 * scale)


WRONG = Backend("wrong", wrong, features=frozenset({"non_causal"}))
OWN = __name__
calls = []  # name and length of each call of the two backends below


def noted(q, k, v, *, causal, scale):
    calls.append(("noted", q.shape[2]))
    return naive_attention(q, k, v, causal=causal, scale=scale)


def runs_out(q, k, v, *, causal, scale):
    """It runs out of memory in its second turn, after all others had their first."""
    calls.append(("runs_out", q.shape[2]))
    if ("noted", q.shape[2]) in calls:
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you "
            "tried to allocate 64 bytes."
        )
    return naive_attention(q, k, v, causal=causal, scale=scale)


NOTED = Backend("noted", noted, features=frozenset({"non_causal"}))
RUNS_OUT = Backend("runs_out", runs_out, features=frozenset({"non_causal"}))


@pytest.fixture
def run_benchmark(typed, tmp_path):
    """run_benchmark("key=value", ...): its rows and what it printed. Results are only checked where
    check=true is asked for.
    """

    def run(*arguments: str) -> tuple[list[dict], str]:
        check = [] if "check=true" in arguments else ["check=false"]
        output = typed("benchmark", *arguments, *check, f"out={tmp_path / 'bench.json'}").out
        data = json.loads((tmp_path / "bench.json").read_text())
        assert {"hardware", "versions", "commit"} <= data["environment"].keys()
        assert str(tmp_path) not in json.dumps(data)
        return data["rows"], output

    return run


def call_of(name: str, **special) -> Call:
    return Call(get_backend(name), SHAPE | special, device=CPU, dtype=torch.float32)


SMALL = ("heads=2", "seq_len=64,128", "repeats=3")


def test_speed_counts_the_scores_that_the_mask_leaves():
    """By the field's count, in which a causal mask leaves half of the square; a window of 1 leaves
    the diagonal and that half of it.
    """
    for special, pairs_of_8 in (
        ({}, 32),
        ({"causal": False}, 64),
        ({"window": 2}, 14),
        ({"window": 100}, 32),
        ({"documents": 4}, 16),
        ({"documents": 4, "window": 1}, 7),
    ):
        assert pairs({"seq_len": 8, "causal": True, **special}) == pairs_of_8
        assert call_of("naive", **special).flops == 4 * 2 * 32 * pairs(SHAPE | special)


def test_grouped_heads_a_window_and_documents_are_what_is_timed(run_benchmark):
    shape = ("attention=naive,sdpa", "seq_len=64", "repeats=3")
    rows, _ = run_benchmark(*shape, "heads=4", "groups=2")
    assert all(row["groups"] == 2 and row["forward_seconds"] > 0 for row in rows)
    rows, _ = run_benchmark(*shape, "heads=2", "window=8", "documents=32")
    assert rows[0]["window"] == 8 and rows[0]["documents"] == 32 and rows[0]["backward_seconds"] > 0
    assert "document_ids" in rows[1]["refused"]
    call = call_of("naive", documents=32, window=8, groups=2)
    assert [x.shape[1] for x in call.inputs] == [2, 1, 1] and call.mask["window"] == 8
    assert call.mask["document_ids"][0].tolist() == [0] * 32 + [1] * 32 + [2] * 32 + [3] * 32


def test_rows_over_everything_asked_for(run_benchmark, tmp_path):
    asked = ("attention=naive,tiled:block_q=64", "dtype=bf16", "head_dim=16", "seq_len=64,128")
    rows, _ = run_benchmark(*asked, "heads=2", "repeats=3")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert len({(row["attention"], row["seq_len"]) for row in rows}) == len(rows) == 4
    assert {(row["dtype"], row["head_dim"]) for row in rows} == {("bfloat16", 16)}
    for row in rows:
        for name in ("forward", "backward"):
            assert 0 < row[f"{name}_p20"] <= row[f"{name}_seconds"] <= row[f"{name}_p80"]
            assert row[f"{name}_repeats"] >= 3 and row[f"{name}_tflops"] > 0
        assert row["training_seconds"] == row["forward_seconds"] + row["backward_seconds"]
        assert 0 < row["saved_bytes"] <= row["training_bytes"]


def test_memory_is_counted_to_the_byte_above_the_inputs():
    """sdpa keeps out and a float32 a row; its backward adds dq, dk and dv. Twice the length, twice
    the bytes; naive: four times.
    """
    size, rows = 2 * 128 * 32 * 4, 2 * 128 * 4
    found = measure_memory(call_of("sdpa"))
    assert found["forward_bytes"] == found["saved_bytes"] == size + rows
    assert found["training_bytes"] == 4 * size + rows
    naive, tiled = (
        [measure_memory(call_of(name, seq_len=n))["training_bytes"] for n in (512, 1024)]
        for name in ("naive", "tiled")
    )
    assert naive[1] == pytest.approx(4 * naive[0], rel=0.1)
    assert tiled[1] < 2.1 * tiled[0]


def test_backward_is_timed_without_its_forward():
    functions = Call(NOTED, SHAPE, device=CPU, dtype=torch.float32).passes()
    calls.clear()
    for _ in range(2):
        functions["backward"]()
    assert not calls
    functions["forward"]()
    assert len(calls) == 1


@pytest.mark.gpu
def test_a_short_kernel_under_a_slow_host():
    """A GPU is timed without its host. 200,000 cycles are 0.1 ms, and the call two."""

    def call() -> None:
        time.sleep(2e-3)
        torch.cuda._sleep(200_000)

    times = seconds(call, repeats=10, device=torch.device("cuda"))
    assert len(times) == 10 and 50e-6 < median(times) < 500e-6


def test_backends_take_turns(run_benchmark):
    """Each has all of its repeats, a part at a time. One that runs out of memory has a row that
    says so, and leaves the others theirs.
    """
    calls.clear()
    names = [f"{OWN}:RUNS_OUT", f"{OWN}:NOTED", "sdpa"]
    shape = ("heads=2", "seq_len=64,128", "head_dim=8", "repeats=4")
    rows, output = run_benchmark(f"attention={','.join(names)}", *shape)
    turns = [call for call, _ in itertools.groupby(calls)]
    for length in (64, 128):
        expected = ["runs_out", "noted", "runs_out", "noted"]
        assert [name for name, n in turns if n == length] == expected
    assert [(row["attention"], row["seq_len"]) for row in rows] == [
        (name, length) for length in (64, 128) for name in names
    ]
    assert [row.get("forward_repeats") for row in rows] == [None, 4, 4] * 2
    for row in (rows[0], rows[3]):
        assert "can't allocate memory" in row["oom"]["message"] and "forward_bytes" not in row
    assert output.count("out of memory") == 2


def test_a_backend_with_wrong_results_has_no_speed(run_benchmark, tmp_path):
    """The others are timed beside it."""
    with pytest.raises(SystemExit, match=f"^benchmark: {OWN}:WRONG .*float32") as error:
        run_benchmark(f"attention={OWN}:WRONG,{OWN}:NOTED", "check=true", *SMALL)
    assert "forward" in error.value.code and "check=false" in error.value.code
    assert "\n" not in error.value.code
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [row["seq_len"] for row in rows] == [64, 128]
    assert all(row["attention"] == f"{OWN}:NOTED" and row["forward_seconds"] > 0 for row in rows)


def test_the_search_finds_the_limit_within_its_precision():
    tried = []

    def trial(length: int) -> dict:
        tried.append(length)
        if length > limit:
            raise MemoryError
        return {"seconds": 0.001}

    for limit, start in itertools.product((1, 64, 100, 1000, 5000, 123_456), (65, 256)):
        tried.clear()
        found = longest(trial, start=start, device=CPU)
        best, first_bad = found["max_seq_len"], found["oom_seq_len"]
        assert best <= limit < first_bad and found["limited_by"] == "memory"
        assert first_bad - best <= max(65, 0.12 * best)
        assert len(tried) == len(set(tried)) <= 18
    found = longest(lambda n: {"seconds": n**2 * 1e-6}, start=256, device=CPU)
    assert found["max_seq_len"] == 4096 and found["limited_by"] == "time" and found["oom"] is None


def test_longest_sequence_in_little_memory(run_benchmark):
    """Real allocations under a real limit, which ends naive's N x N. A regression test: training
    fitted longer sequences than the forward pass, for which memory of an error had counted.
    """
    asked = ("attention=naive", "max_length=true", "memory_gib=0.25", "device=cpu")
    rows, output = run_benchmark(*asked, "heads=8", "seq_len=256", "head_dim=16")
    forward, training = rows
    assert (forward["pass"], training["pass"]) == ("forward", "training")
    for row in rows:
        assert row["limited_by"] == "memory" and row["memory_gib"] == 0.25 and row["oom"]["message"]
    largest = (0.25 * 2**30 / (8 * 3 * 4)) ** 0.5  # three matrices of scores in 8 heads
    assert 1024 <= training["max_seq_len"] <= forward["max_seq_len"] <= largest
    for row in rows:
        assert f"{row['oom_seq_len']:,} ran out" in output
