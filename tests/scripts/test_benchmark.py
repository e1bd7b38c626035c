"""`python -m scripts.benchmark`: what its rows say, whom it refuses, and the search for the longest
sequence.
"""

import json
import re
import sys
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest
import torch

from attention import Backend, get_backend
from attention.naive import naive_attention
from conformance.memory_growth import LiveTensors
from scripts import attention_call, benchmark
from scripts.attention_call import (
    ROUNDS,
    Call,
    Measurement,
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


@pytest.fixture
def run_benchmark(monkeypatch, capsys, tmp_path):
    """run_benchmark("key=value", ...): its rows and what it printed, on a machine without a GPU;
    SystemExit carries its complaint.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(*arguments: str) -> tuple[list[dict], str]:
        monkeypatch.setattr(
            sys, "argv", ["benchmark", *arguments, f"out={tmp_path / 'bench.json'}"]
        )
        benchmark.main()
        data = json.loads((tmp_path / "bench.json").read_text())
        assert {"hardware", "versions", "commit"} <= data["environment"].keys() and str(
            tmp_path
        ) not in json.dumps(data)
        return data["rows"], capsys.readouterr().out

    return run


@pytest.fixture
def no_verification(monkeypatch):
    """Verification takes seconds and has tests of its own."""
    monkeypatch.setattr(benchmark, "wrong_results", lambda backend, **where: [])


SMALL = ("heads=2", "seq_len=64,128", "repeats=3")


@pytest.mark.parametrize(
    "special, pairs_of_8",
    [
        ({}, 32),
        ({"causal": False}, 64),
        ({"window": 2}, 14),
        ({"window": 100}, 32),
        ({"documents": 4}, 16),
        ({"documents": 4, "window": 1}, 7),
    ],
)
def test_speed_counts_the_scores_that_the_mask_leaves(special, pairs_of_8):
    """By the field's count, in which a causal mask leaves half of the square; a window of 1 leaves
    the diagonal and that half of it.
    """
    assert pairs({"seq_len": 8, "causal": True, **special}) == pairs_of_8
    call = Call(get_backend("naive"), SHAPE | special, device=CPU, dtype=torch.float32)
    assert call.flops == 4 * 2 * 32 * pairs(SHAPE | special)


def test_grouped_heads_a_window_and_documents_are_what_is_timed(run_benchmark, no_verification):
    rows, _ = run_benchmark(
        "attention=naive,sdpa",
        "heads=4",
        "groups=2",
        "seq_len=64",
        "repeats=3",
    )
    assert all(row["groups"] == 2 and row["forward_seconds"] > 0 for row in rows)
    rows, said = run_benchmark(
        "attention=naive,sdpa",
        "heads=2",
        "seq_len=64",
        "window=8",
        "documents=32",
        "repeats=3",
    )
    assert rows[0]["window"] == 8 and rows[0]["documents"] == 32 and rows[0]["backward_seconds"] > 0
    assert "refused" in rows[1] and "document_ids" in rows[1]["refused"]
    call = Call(
        get_backend("naive"),
        SHAPE | {"documents": 32, "window": 8, "groups": 2},
        device=CPU,
        dtype=torch.float32,
    )
    assert [x.shape[1] for x in call.inputs] == [2, 1, 1] and call.mask["window"] == 8
    assert call.mask["document_ids"][0].tolist() == [0] * 32 + [1] * 32 + [2] * 32 + [3] * 32


def test_features_are_timed_beside_none(run_benchmark, no_verification):
    rows, said = run_benchmark(
        "attention=naive,sdpa", "features=none,softcap,alibi,sinks", "heads=2", "seq_len=64",
        "repeats=3",
    )  # fmt: skip
    assert [row.get("feature", "none") for row in rows] == 2 * ["none", "softcap", "alibi", "sinks"]
    assert all(row["backward_seconds"] > 0 for row in rows[:5])
    assert all("refused" in row for row in rows[5:])
    call = {
        feature: Call(
            get_backend("naive"), SHAPE | {"feature": feature}, device=CPU, dtype=torch.float32
        )
        for feature in ("none", "softcap", "alibi", "sinks")
    }
    for each in call.values():  # the same inputs
        each.inputs[:] = call["none"].inputs
    outs = [each.forward() for each in call.values()]
    assert all(not torch.allclose(x, outs[0]) for x in outs[1:])
    d_out = torch.ones_like(outs[3])
    assert len(call["sinks"].backward(outs[3], d_out)) == 4


def test_features_are_not_for_the_longest_sequence(run_benchmark):
    with pytest.raises(SystemExit, match="features= are timed; leave max_length=true out"):
        run_benchmark("max_length=true", "features=softcap")


def test_rows_over_everything_asked_for(run_benchmark, no_verification):
    rows, _ = run_benchmark(
        "attention=naive,tiled:block_q=64",
        "dtype=fp32,bf16",
        "head_dim=16,32",
        *SMALL,
        "seq_len=64",
    )
    assert (
        len({(r["attention"], r["dtype"], r["head_dim"], r["seq_len"]) for r in rows})
        == len(rows)
        == 8
    )
    for row in rows:
        for name in ("forward", "backward"):
            assert 0 < row[f"{name}_p20"] <= row[f"{name}_seconds"] <= row[f"{name}_p80"]
            assert row[f"{name}_repeats"] >= 3 and row[f"{name}_tflops"] > 0
        assert row["training_seconds"] == row["forward_seconds"] + row["backward_seconds"]
        assert 0 < row["saved_bytes"] <= row["backward_bytes"] <= row["training_bytes"]
        assert row["forward_reserved_bytes"] is None  # a CPU reserves nothing
        assert "broken" not in row


def test_memory_is_counted_to_the_byte_above_the_inputs():
    """sdpa keeps out and a float32 a row; its backward adds dq, dk and dv. Twice the length, twice
    the bytes; naive: four times.
    """
    size, rows = 2 * 128 * 32 * 4, 2 * 128 * 4
    call = Call(get_backend("sdpa"), SHAPE, device=CPU, dtype=torch.float32)
    found = measure_memory(call, torch.ones_like(call.inputs[0]))
    assert found["forward_bytes"] == found["saved_bytes"] == size + rows
    assert found["backward_bytes"] == found["training_bytes"] == 4 * size + rows

    def peaks(name: str) -> list[int]:
        calls = [
            Call(get_backend(name), SHAPE | {"seq_len": n}, device=CPU, dtype=torch.float32)
            for n in (512, 1024)
        ]
        return [
            measure_memory(call, torch.ones_like(call.inputs[0]))["training_bytes"]
            for call in calls
        ]

    assert peaks("naive")[1] == pytest.approx(4 * peaks("naive")[0], rel=0.1)
    assert peaks("tiled")[1] < 2.1 * peaks("tiled")[0]


def test_live_tensors_sees_what_is_made_and_freed():
    inside = torch.ones(1000)
    with LiveTensors() as live:
        a = inside + 1
        b = (a * 2).view(10, 100)
        assert live.bytes == 8000
        del a
        assert live.bytes == 4000
        inside.mul_(2)  # made outside
        assert live.bytes == 4000
        del b
        assert (live.bytes, live.peak) == (0, 8000)


def test_backward_is_timed_without_its_forward(no_verification):
    def slow_forward(q, k, v, *, causal, scale):
        torch.manual_seed(sum(i for i in range(300_000)))  # ten milliseconds, and no gradient
        return naive_attention(q, k, v, causal=causal, scale=scale)

    backend = Backend("slow_forward", slow_forward, features=frozenset({"non_causal"}))
    measurement = Measurement(
        lambda: Call(backend, SHAPE, device=CPU, dtype=torch.float32), repeats=3
    )
    for _ in range(ROUNDS):
        measurement.turn()
    assert measurement.row["backward_p20"] < 0.5 * measurement.row["forward_p20"]
    assert (
        measurement.row["forward_repeats"] == 3 and "forward_host_seconds" not in measurement.row
    )  # a CPU's are the same


class FakeGPU:
    """A host's clock and a GPU's, which works off its queue: what attention_call.seconds sees of
    torch and of time.
    """

    def __init__(self):
        self.host = self.free_at = 0.0
        self.flushed = 0  # bytes, before a call
        self.uint8 = torch.uint8
        self.cuda = SimpleNamespace(
            Event=lambda enable_timing: FakeEvent(self),
            synchronize=self.synchronize,
            _sleep=lambda cycles: self.launch(cycles / 2e9),
        )

    def perf_counter(self) -> float:
        return self.host

    def sleep(self, duration: float) -> None:
        self.host += duration

    def launch(self, duration: float, *, host: float = 5e-6) -> None:
        """A kernel that runs so long and takes the host so long to launch."""
        self.host += host
        self.free_at = max(self.free_at, self.host) + duration

    def synchronize(self, device: torch.device | None = None) -> None:
        self.host = max(self.host, self.free_at)

    def empty(self, size: int, **_) -> SimpleNamespace:
        def zero_() -> None:
            self.flushed = size
            self.launch(size / 4e12)

        return SimpleNamespace(zero_=zero_)


class FakeEvent:
    def __init__(self, gpu: FakeGPU):
        self.gpu = gpu

    def record(self) -> None:
        self.at = max(self.gpu.free_at, self.gpu.host)

    def query(self) -> bool:
        return self.at <= self.gpu.host

    def elapsed_time(self, end: "FakeEvent") -> float:
        return 1000 * (end.at - self.at)


@pytest.fixture
def fake_gpu(monkeypatch):
    gpu = FakeGPU()
    monkeypatch.setattr(attention_call, "torch", gpu)
    monkeypatch.setattr(attention_call, "time", gpu)
    return gpu


@pytest.mark.parametrize("host", [10e-6, 140e-6, 600e-6, 7e-3])
def test_a_gpu_is_timed_without_its_host(fake_gpu, host):
    """Also where the host takes longer than the wait that is tried first; and each call finds an
    empty L2 cache.
    """

    def call() -> None:
        assert fake_gpu.flushed == 256 * 2**20
        fake_gpu.flushed = 0
        fake_gpu.launch(40e-6, host=host)

    times, hosts = seconds(call, repeats=5, device=torch.device("cuda"))
    assert times == pytest.approx([40e-6] * 5) and hosts == pytest.approx([host] * 5)


def test_a_call_that_waits_for_the_gpu_is_timed_with_its_host(fake_gpu):
    """No wait is long enough for it, and none is tried for ever."""

    def call() -> None:
        fake_gpu.launch(40e-6)
        fake_gpu.synchronize()
        fake_gpu.launch(40e-6, host=1e-3)

    times, _ = seconds(call, repeats=5, device=torch.device("cuda"))
    assert times == pytest.approx([1.08e-3] * 5)


def test_the_card_rests_before_each_call(fake_gpu):
    idle_since, rests = [0.0], []

    def call() -> None:
        rests.append(fake_gpu.host - idle_since[-1])
        fake_gpu.launch(4e-3)
        idle_since.append(fake_gpu.free_at)

    times, _ = seconds(call, repeats=5, device=torch.device("cuda"), pause_s=0.05)
    assert times == pytest.approx([4e-3] * 5) and all(0.05 <= rest < 0.051 for rest in rests)


@pytest.mark.gpu
def test_a_short_kernel_under_a_slow_host():
    """200,000 cycles are 0.1 ms, and the call two."""

    def call() -> None:
        time.sleep(2e-3)
        torch.cuda._sleep(200_000)

    times, hosts = seconds(call, repeats=10, device=torch.device("cuda"))
    assert len(times) == len(hosts) == 10 and min(hosts) > 2e-3
    assert 50e-6 < median(times) < 500e-6


def test_backends_take_turns(run_benchmark, no_verification, monkeypatch):
    """Each has all of its repeats, a quarter at a time, and one that fails leaves the others
    theirs.
    """
    turns, turn = [], Measurement.turn

    def watched(self):
        call = self.make()
        turns.append((call.backend.name, call.inputs[0].shape[2]))
        if call.backend.name == "tiled" and len(turns) > 4:
            raise MemoryError("can't allocate memory")
        turn(self)

    monkeypatch.setattr(Measurement, "turn", watched)
    rows, output = run_benchmark(
        "attention=naive,tiled,sdpa",
        "heads=2",
        "seq_len=64,128",
        "head_dim=8",
        "repeats=10",
    )
    all_three, others = ["naive", "tiled", "sdpa"], ["naive", "sdpa"]
    assert [name for name, length in turns if length == 64] == all_three * 2 + others * 2
    assert [name for name, length in turns if length == 128] == all_three + others * 3
    assert [(row["attention"], row["seq_len"]) for row in rows] == [
        (name, length) for length in (64, 128) for name in all_three
    ]
    assert [row.get("forward_repeats") for row in rows] == [10, None, 10] * 2
    assert all(
        "memory" in row["oom"]["message"] and "forward_bytes" not in row
        for row in (rows[1], rows[4])
    )
    assert output.count("out of memory") == 2


def test_the_hosts_time_is_said_beside_the_devices():
    row = {"attention": "triton", "dtype": "bfloat16", "seq_len": 1024, "head_dim": 128}
    row |= {"forward_seconds": 40e-6, "forward_tflops": 445.0, "forward_host_seconds": 140e-6}
    row |= {"backward_seconds": 400e-6, "backward_tflops": 300.0, "backward_host_seconds": 200e-6}
    said = benchmark.describe(row)
    assert "0.040 ms (host 0.140 ms)" in said and "0.400 ms (host 0.200 ms)" in said


def test_a_backend_with_wrong_results_is_refused(run_benchmark):
    with pytest.raises(SystemExit) as error:
        run_benchmark("attention=tests.scripts.test_benchmark:WRONG", *SMALL)
    assert re.match(
        r"benchmark: .*is wrong in float32.*red in forward.*allow_broken=true", error.value.code
    )
    assert "\n" not in error.value.code


def test_the_others_are_timed_beside_a_backend_with_wrong_results(
    run_benchmark, monkeypatch, tmp_path
):
    monkeypatch.setattr(
        benchmark,
        "wrong_results",
        lambda backend, **where: {"naive": [], "no_rescale": ["forward"]}[backend.name],
    )
    with pytest.raises(SystemExit) as error:
        run_benchmark("attention=no_rescale,naive", *SMALL)
    assert re.match(r"benchmark: no_rescale is wrong in float32.*red in forward", error.value.code)
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [(row["attention"], row["seq_len"]) for row in rows] == [("naive", 64), ("naive", 128)]
    assert all(row["forward_seconds"] > 0 and "broken" not in row for row in rows)


def test_a_backend_with_wrong_results_can_be_timed_and_is_marked(run_benchmark, monkeypatch):
    red = {"naive": [], "no_rescale": ["forward", "block sizes"]}
    monkeypatch.setattr(benchmark, "wrong_results", lambda backend, **where: red[backend.name])
    rows, output = run_benchmark(
        "attention=naive,no_rescale:block_kv=16", "allow_broken=true", *SMALL
    )
    assert [row.get("broken") for row in rows] == [None, ["forward", "block sizes"]] * 2
    assert output.count("BROKEN") == 2


def test_a_backend_whose_results_are_not_checked_is_marked(run_benchmark, monkeypatch):
    """allow_broken=true refuses nothing, but still checks for minutes on a GPU."""
    monkeypatch.setattr(benchmark, "wrong_results", None)
    own = "attention=tests.scripts.test_benchmark:WRONG"
    rows, output = run_benchmark(own, "check=false", *SMALL)
    assert [(row["unchecked"], "broken" in row) for row in rows] == [(True, False)] * 2
    assert output.count("unchecked") == 2


def test_a_verdict_is_kept_for_the_same_code_alone(monkeypatch, tmp_path):
    checked, where = [], {"commit": "a", "dirty": False, "versions": {}, "hardware": {}}
    monkeypatch.setenv("TILEGPT_CACHE", str(tmp_path))
    monkeypatch.setattr(
        "conformance.properties.red_properties",
        lambda backend, **_: checked.append(dict(backend.options)) or ["forward"],
    )

    def verdict(name: str, dtype: torch.dtype = torch.float32, **options) -> list[str]:
        return benchmark.wrong_results(
            get_backend(name, **options), device=CPU, dtype=dtype, where=where
        )

    assert verdict("tiled") == verdict("tiled") == ["forward"] and len(checked) == 1
    verdict("tiled", block_q=32), verdict("tiled", dtype=torch.bfloat16), verdict("naive")
    assert len(checked) == 4
    where["commit"] = "b"
    verdict("tiled")
    where["dirty"] = True  # whatever the code is now
    verdict("tiled"), verdict("tiled")
    where.update(commit=None, dirty=False)
    verdict("tiled")
    assert len(checked) == 8


def test_out_of_memory_is_a_row(run_benchmark, no_verification, monkeypatch):
    def runs_out(measurement):
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you "
            "tried to allocate 64 bytes."
        )

    monkeypatch.setattr(Measurement, "turn", runs_out)
    rows, output = run_benchmark("attention=naive", *SMALL)
    assert len(rows) == 2 and all("can't allocate memory" in row["oom"]["message"] for row in rows)
    assert output.count("out of memory") == 2


def test_a_shape_that_is_refused_is_a_row_and_only_that_is_an_error(run_benchmark, no_verification):
    rows, _ = run_benchmark("attention=flex,naive", "head_dim=8", *SMALL)
    assert ["refused" in row for row in rows] == [True, False] * 2
    with pytest.raises(SystemExit, match="nothing was measured: attention=flex cannot take"):
        run_benchmark("attention=flex", "head_dim=8", *SMALL)


@pytest.mark.parametrize("limit", [1, 64, 100, 127, 1000, 5000, 123_456])
def test_the_search_finds_the_limit_within_its_precision(limit):
    tried = []

    def fits(length: int) -> float | dict:
        tried.append(length)
        return 0.001 if length <= limit else {"asked_gib": 1.0}

    found = longest(fits, start=256, limit_s=1e9)
    best, first_bad = found["max_seq_len"], found["oom_seq_len"]
    assert best <= limit < first_bad and found["limited_by"] == "memory"
    assert first_bad - best <= max(64, 0.12 * best)
    assert len(tried) == len(set(tried)) <= 18


def test_the_search_stops_where_a_trial_would_take_too_long():
    found = longest(lambda length: length**2 * 1e-6, start=256, limit_s=10)
    assert found["max_seq_len"] == 2048 and found["limited_by"] == "time" and found["oom"] is None


def test_longest_sequence_in_little_memory(run_benchmark, no_verification):
    """Real allocations under a real limit: naive's N x N ends it within two doublings, of forward
    alone first or at the same length.
    """
    rows, output = run_benchmark(
        "attention=naive",
        "max_length=true",
        "memory_gib=0.12",
        "heads=8",
        "seq_len=256",
        "limit_s=20",
        "head_dim=16",
        "device=cpu",
    )
    forward, training = rows
    assert (forward["pass"], training["pass"]) == ("forward", "training")
    assert all(
        row["limited_by"] == "memory" and row["memory_gib"] == 0.12 and row["oom"]["message"]
        for row in rows
    )
    # 8 heads, 12 to 16 bytes a score; what the process had freed before, it can take beside the
    # limit
    assert (
        512
        <= training["max_seq_len"]
        <= 1.5 * forward["max_seq_len"]
        <= 1.5 * (0.22 * 2**30 / (8 * 4)) ** 0.5
    )
    assert output.count("ran out of memory") == 2


def test_rows_are_added_to_a_file_of_the_same_code_and_machine(
    run_benchmark, no_verification, tmp_path, monkeypatch
):
    short = ("attention=sdpa", "heads=2", "repeats=3", "append=true")
    run_benchmark(*short, "seq_len=64")
    rows, _ = run_benchmark(*short, "seq_len=128")
    assert [row["seq_len"] for row in rows] == [64, 128]
    monkeypatch.setenv("TILEGPT_COMMIT", "another")
    monkeypatch.setattr("training.environment._output", lambda *command: None)
    with pytest.raises(SystemExit, match="bench.json commit was .* and is "):
        run_benchmark(*short, "seq_len=64")
    (tmp_path / "bench.json").write_text("[]")
    with pytest.raises(SystemExit, match="is not a file of scripts.benchmark"):
        run_benchmark(*short, "seq_len=64")


def test_backends_and_their_options_from_text():
    assert (
        benchmark.parse_backend("tiled:block_q=64,softmax_dtype=input").options["softmax_dtype"]
        == "input"
    )
    assert benchmark.parse_backend("no_max:detach_max=true").options["detach_max"] is True
    assert benchmark.parse_backend("sdpa").name == "sdpa"
    assert benchmark.parse_backend(f"{__name__}:WRONG").fn is wrong
    with pytest.raises(ValueError, match="no option 'block'"):
        benchmark.parse_backend("tiled:block=64")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["attention=flashy"], "attention=flashy is not known"),
        (["seq_len=0"], "seq_len=0 must be at least 1"),
        (["pause=-1"], "pause=-1 must be between 0 and 60 seconds"),
        (["memory_gib=8"], "memory_gib= belongs to max_length=true"),
        (["device=cuda"], "PyTorch sees no GPU"),
    ],
)
def test_refused_in_one_line(run_benchmark, arguments, words):
    with pytest.raises(SystemExit) as error:
        run_benchmark(*arguments)
    assert (
        error.value.code.startswith("benchmark: ")
        and words in error.value.code
        and "\n" not in error.value.code
    )


@pytest.mark.slow
def test_the_line_of_the_help_runs_as_typed(run_benchmark, no_verification):
    line = re.search(r"python -m scripts\.benchmark (.*) out=", benchmark.__doc__)[1]
    rows, _ = run_benchmark(*line.split(), "repeats=3")
    assert {row["attention"] for row in rows} == {"naive", "tiled", "sdpa"}
    assert Path(benchmark.__file__).stem == "benchmark"
