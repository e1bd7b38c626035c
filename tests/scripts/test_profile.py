"""`python -m scripts.profile`: a table with the ranges of a step, a trace, and one line for each
thing that can be wrong.
"""

import gzip
import json
import re
import sys

import pytest
import torch

from scripts import profile
from tests import processes
from tests.command import environment

SMALL = (
    "device=cpu",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.hidden_size=32",
    "seq_len=32",
    "batch_size=4",
    "steps=2",
    "warmup=1",
)
RANGES = {"step", "data", "forward", "backward", "optimizer"}


@pytest.fixture
def run_profile(monkeypatch, capsys, tmp_path):
    """run_profile("key=value", ...): what it printed; SystemExit carries its complaint."""
    monkeypatch.setenv("TILEGPT_CACHE", environment()["TILEGPT_CACHE"])

    def run(*arguments: str) -> str:
        values = {
            argument.partition("=")[0]: argument
            for argument in (*SMALL, f"out={tmp_path / 'out'}", *arguments)
        }
        monkeypatch.setattr(sys, "argv", ["profile", *values.values()])
        profile.main()
        return capsys.readouterr().out

    return run


def rows_of(output: str) -> list[list[str]]:
    """The cells of the table's rows, in order."""
    _, _, rows, *_ = re.split(r"^-[- ]+\n", output, flags=re.MULTILINE)
    return [re.split(r" {2,}", line.strip()) for line in rows.splitlines()]


def test_the_table_and_the_trace_have_the_ranges_of_a_step(run_profile, tmp_path):
    output = run_profile("attention=naive", "tokens_per_step=256")
    names = [row[0] for row in rows_of(output)]
    assert names[0] == "step" and len(names) == profile.ROWS
    assert names.index("forward") < names.index("attention")
    shares = [float(row[3].rstrip("%")) for row in rows_of(output)]
    assert shares[0] == 100 and shares == sorted(shares, reverse=True)
    assert f"written: {tmp_path / 'out/trace.json.gz'}" in output
    trace = json.loads(gzip.decompress((tmp_path / "out/trace.json.gz").read_bytes()))
    calls = [event["name"] for event in trace["traceEvents"] if event.get("ph") == "X"]
    assert set(calls) >= RANGES and calls.count("step") == 2
    # two steps of two passes in two layers
    assert calls.count("forward") == 4 and calls.count("attention") == 8


@pytest.mark.slow
def test_the_line_of_the_help_runs_as_typed(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["profile", "--help"])
    profile.main()
    line = re.search(r"python -m (scripts\.profile .*)", capsys.readouterr().out)[1]
    done = processes.run("-m", *line.split(), f"out={tmp_path}", env=environment())
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert rows_of(done.stdout)[0][0] == "step"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["model=gpt3"], "gpt2"),
        (["modl=gpt2"], "modl"),
        (["steps=none"], "steps=none"),
        (["warmup=0"], "warmup=0"),
        (["out="], "out="),
        (["resume=outputs/x"], "resume=outputs/x"),
        (["attention=naive", "attention.block_q=16"], "block_q"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_refused_in_one_line(run_profile, arguments, words):
    with pytest.raises(SystemExit) as error:
        run_profile(*arguments)
    message = str(error.value)
    assert message.startswith("profile: ") and words in message and "\n" not in message


def test_a_run_that_diverges_is_not_measured(run_profile):
    with pytest.raises(SystemExit, match="nothing to measure"):
        run_profile("model.init_std=1e18")


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["true", "false"])
def test_a_gpu_s_rows_are_sorted_by_its_own_time(run_profile, compiled):
    torch._dynamo.reset()
    size = ("model.num_heads=6", "model.hidden_size=384", "seq_len=1024", "batch_size=8")
    output = run_profile("device=cuda", "attention=triton", f"compile={compiled}", *size)
    names = [row[0] for row in rows_of(output)]
    assert "Self CUDA time total" in output and len(names) == profile.ROWS
    assert {"step", "forward"} <= {*names}
    assert compiled == "true" or "attention" in names
