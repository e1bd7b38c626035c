"""metrics.jsonl, JSON that is strict, the clock, and the description of the machine."""

import json
import math
import subprocess
import sys
import time

import pytest
import torch

from training import metrics
from training.metrics import (
    MetricsFile,
    Progress,
    Throughput,
    WallClock,
    environment,
    peak_flops,
    read_metrics,
    write_json,
)


def strict_loads(text: str):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_rows_are_readable_as_soon_as_they_are_written(tmp_path):
    file = MetricsFile(tmp_path / "run/metrics.jsonl")
    assert read_metrics(file.path) == []
    file.write({"step": 1, "tokens": 10, "train/loss": 2.5})
    assert read_metrics(file.path) == [{"step": 1, "tokens": 10, "train/loss": 2.5}]


def test_nonfinite_values_become_null_and_are_named(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write({"step": 1, "train/loss": math.nan, "grad_norm": math.inf, "lr": 0.1})
    row = strict_loads(file.path.read_text())
    assert row == {
        "step": 1,
        "train/loss": None,
        "grad_norm": None,
        "lr": 0.1,
        "nonfinite": ["train/loss", "grad_norm"],
    }
    write_json(
        tmp_path / "summary.json",
        {"status": "diverged", "oom": {"free": -math.inf}, "list": [1.0, math.nan]},
    )
    summary = strict_loads((tmp_path / "summary.json").read_text())
    assert summary == {
        "status": "diverged",
        "oom": {"free": None},
        "list": [1.0, None],
        "nonfinite": ["oom.free", "list[1]"],
    }


def test_truncation_drops_later_rows_and_a_torn_line(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in (10, 20, 30):
        file.write({"step": step, "train/loss": 1 / step})
    with file.path.open("a") as handle:
        handle.write('{"step": 40, "train/lo')
    assert [row["step"] for row in read_metrics(file.path)] == [10, 20, 30]
    MetricsFile(file.path).go_back_to(20, tmp_path / "none")
    file.write({"step": 25})
    assert [strict_loads(line)["step"] for line in file.path.read_text().splitlines()] == [
        10,
        20,
        25,
    ]


def test_missing_file_has_no_rows(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("victim", ["write_json", "go_back_to"])
def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch, victim):
    file = MetricsFile(tmp_path / "file")
    file.write({"step": 1})
    before = file.path.read_text()

    def no_space(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(metrics.os, "fsync", no_space)
    with pytest.raises(OSError):
        write_json(file.path, {"a": 1}) if victim == "write_json" else file.go_back_to(
            0, tmp_path / "none"
        )
    assert file.path.read_text() == before


class Clock:
    """A clock that a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_wall_clock_has_everything_in_it():
    """A run of four steps that goes on after 1,000 s of an earlier start: rows after steps 3 and 4,
    the last with a checkpoint after it.
    """
    clock = Clock()
    wall = WallClock(seconds=1000.0, clock=clock)
    clock.now += 30  # the validation of step 0
    assert wall.row(200) == {"seconds": 1030.0}
    assert wall.tokens_per_sec(200) is None
    clock.now += 5
    wall.begin(200)
    assert wall.tokens_per_sec(200) is None
    clock.now += 60 + 1 + 1 + 8  # the first step compiles; the row's evaluation
    assert wall.row(500) == {"seconds": 1105.0, "tokens_per_sec": 300 / 70}
    clock.now += 3 + 1 + 1  # a checkpoint, a step and what the row looks at
    assert wall.row(600) == {"seconds": 1110.0, "tokens_per_sec": 100 / 5}
    clock.now += 25
    assert wall.tokens_per_sec(600) == 400 / 100


def test_throughput_leaves_out_warm_up_and_pauses():
    clock = Clock()
    throughput = Throughput(warmup_steps=2, clock=clock)

    def steps(count: int, seconds: float) -> None:
        for _ in range(count):
            clock.now += seconds
            throughput.step(50)

    clock.now += 60  # compilation
    steps(2, 9.0)
    assert throughput.step_tokens_per_sec is None and throughput.window() is None
    steps(4, 1.0)
    assert throughput.step_tokens_per_sec == 50.0
    assert throughput.window() == 50.0
    with throughput.paused():
        clock.now += 1000  # an evaluation
        assert throughput.step_tokens_per_sec == 50.0
    steps(2, 5.0)
    assert throughput.window() == 10.0
    assert throughput.step_tokens_per_sec == pytest.approx(6 * 50 / 14)
    assert throughput.window() is None  # no step since the last row


def test_throughput_paused_during_warm_up_does_not_start_the_clock():
    clock = Clock()
    throughput = Throughput(warmup_steps=2, clock=clock)
    throughput.step(50)
    with throughput.paused():
        clock.now += 100
    clock.now += 7
    throughput.step(50)
    clock.now += 2
    throughput.step(50)
    assert throughput.step_tokens_per_sec == 25.0


def test_a_row_has_every_share_of_the_peak_by_its_name():
    """Three rows of a run with log_every=2, an evaluation after each and passes that differ in
    length: none leaks into another.
    """
    clock = Clock()
    throughput = Throughput(
        flops_per_token={"mfu": 40.0, "mfu_causal": 30.0}, peak=8000.0, warmup_steps=1, clock=clock
    )
    rows = []
    for step, seconds in enumerate((90.0, 1.0, 1.0, 1.0, 2.0, 2.0, 4.0), start=1):
        clock.now += seconds
        throughput.step(100)
        with throughput.paused():
            if step % 2 == 1:
                rows.append(throughput.row())
                clock.now += 1000
    assert rows[0] == {"step_tokens_per_sec": None, "mfu": None, "mfu_causal": None}  # it compiled
    assert rows[1] == {"step_tokens_per_sec": 100.0, "mfu": 0.5, "mfu_causal": 0.375}
    assert [row["step_tokens_per_sec"] for row in rows[2:]] == [
        pytest.approx(200 / 3),
        pytest.approx(200 / 6),
    ]
    unknown = Throughput(flops_per_token={"mfu": 40.0}, warmup_steps=1, clock=clock)
    for _ in range(2):
        clock.now += 1
        unknown.step(10)
    assert unknown.row() == {"step_tokens_per_sec": 10.0, "mfu": None}


def test_slow_steps_on_the_way_do_not_count_either():
    """A run that changes its attention compiles a second time."""
    clock = Clock()
    throughput = Throughput(warmup_steps=2, clock=clock)
    for step, seconds in enumerate((60.0, 1.0, 1.0, 1.0, 60.0, 1.0, 2.0), start=1):
        clock.now += seconds
        throughput.step(100)
        if step == 4:
            with throughput.paused():
                throughput.warm_up()
    assert throughput.step_tokens_per_sec == 300 / 4.0


@pytest.mark.gpu
def test_the_clock_of_a_gpu_runs_with_it_and_waits_for_nothing():
    """Four steps of a known time on the GPU, none waited for, with work of the GPU and of the host
    in between that does not count.
    """
    throughput = Throughput("cuda", warmup_steps=1)
    cycles = 50_000_000
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles)
    start.record()
    torch.cuda._sleep(cycles)
    stop.record()
    torch.cuda.synchronize()
    seconds = start.elapsed_time(stop) / 1000
    torch.cuda.set_sync_debug_mode("error")
    try:
        began = time.perf_counter()
        for _ in range(5):
            torch.cuda._sleep(cycles)
            throughput.step(1000)
            with throughput.paused():
                torch.cuda._sleep(3 * cycles)
        assert time.perf_counter() - began < seconds, "the host has waited"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert throughput.window() == pytest.approx(1000 / seconds, rel=0.1)
    with throughput.paused():
        torch.cuda.synchronize()
        time.sleep(20 * seconds)
    assert throughput.step_tokens_per_sec == pytest.approx(1000 / seconds, rel=0.1)


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA L40", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_peak_of_known_gpus_by_name(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops("cuda", torch.bfloat16) == peak
    assert peak_flops("cuda", torch.float32) is None
    assert peak_flops("cpu", torch.bfloat16) is None


def test_progress_says_the_time_left_and_is_never_silent_for_long():
    now = 0.0
    progress = Progress(100, tokens_per_step=200, every=15.0, clock=lambda: now)
    assert progress.line(0, {"step": 0, "val/loss": 5.5}) == "step     0/100  val/loss 5.5000"
    now = 60.0
    assert progress.step(1), "the first step took a minute"
    assert progress.line(1, {"train/loss": 5.0}) == "step     1/100  train/loss 5.0000  3 tokens/s"
    now = 74.0
    assert not progress.step(8)
    now = 80.0
    assert progress.step(11)
    # two seconds a step: what came before the first does not count
    row = {"train/loss": math.nan, "lr": 1e-3, "val/loss": 4.0}
    assert (
        progress.line(11, row)
        == "step    11/100  train/loss nan  val/loss 4.0000  100 tokens/s  02:58 left"
    )
    assert not progress.step(12)
    now = 258.0
    assert progress.line(100, row).endswith("100 tokens/s")


def test_progress_of_a_resumed_run_counts_its_own_steps():
    now = 0.0
    progress = Progress(100, tokens_per_step=200, first_step=90, clock=lambda: now)
    now = 4.0
    progress.step(92)
    assert progress.line(92, {}) == "step    92/100  100 tokens/s"


def test_environment_says_where_the_run_ran():
    env = environment("abc123", "cpu")
    assert env["data_fingerprint"] == "abc123"
    # the wheel's metadata may lack the build tag
    assert env["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert env["hardware"]["cpu_cores"] >= 1 and env["hardware"]["gpu"] is None
    assert env["command"][1:] == sys.argv
    assert strict_loads(json.dumps(env)) == env


def test_environment_imports_no_package_to_ask_its_version():
    code = (
        "import sys; from training.metrics import environment; environment('', 'cpu'); "
        "print({'wandb', 'datasets'} & set(sys.modules))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "set()"
    )


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def test_commit_and_uncommitted_changes(tmp_path, monkeypatch):
    monkeypatch.delenv("TILEGPT_COMMIT", raising=False)
    git(tmp_path, "init", "-q")
    (tmp_path / "copy").mkdir()
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "one")
    monkeypatch.setattr(metrics, "ROOT", tmp_path.resolve())
    head = git(tmp_path, "rev-parse", "HEAD")
    assert {key: environment("", "cpu")[key] for key in ("commit", "dirty")} == {
        "commit": head,
        "dirty": False,
    }
    (tmp_path / "file").write_text("two")
    assert {key: environment("", "cpu")[key] for key in ("commit", "dirty")} == {
        "commit": head,
        "dirty": True,
    }
    # a copy of the program without .git inside another repository
    monkeypatch.setattr(metrics, "ROOT", (tmp_path / "copy").resolve())
    assert {key: environment("", "cpu")[key] for key in ("commit", "dirty")} == {
        "commit": None,
        "dirty": None,
    }


def test_without_git(monkeypatch):
    monkeypatch.delenv("TILEGPT_COMMIT", raising=False)
    monkeypatch.setenv("PATH", "")
    assert environment("", "cpu")["commit"] is None
