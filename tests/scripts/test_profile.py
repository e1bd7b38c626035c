"""`python -m scripts.profile`: a table with the ranges of a step, a trace, and one line for each
thing that can be wrong.
"""

import gzip
import json
import re

import pytest

from scripts import profile
from tests.command import environment

MODEL = ("model.num_layers=2", "model.num_heads=2", "model.hidden_size=32")
SMALL = (*MODEL, "device=cpu", "seq_len=32", "batch_size=4", "steps=2", "warmup=1")
RANGES = {"step", "data", "forward", "backward", "optimizer"}


@pytest.fixture
def run_profile(monkeypatch, capsys, tmp_path):
    """run_profile("key=value", ...): what it printed; SystemExit carries its complaint."""
    monkeypatch.setenv("TILEGPT_CACHE", environment()["TILEGPT_CACHE"])

    def run(*arguments: str) -> str:
        given = (*SMALL, f"out={tmp_path / 'out'}", *arguments)
        values = {argument.partition("=")[0]: argument for argument in given}
        profile.main(list(values.values()))
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
    assert {"forward", "backward"} <= {*names}
    shares = [float(row[3].rstrip("%")) for row in rows_of(output)]
    assert shares[0] == 100 and shares == sorted(shares, reverse=True)
    assert str(tmp_path / "out/trace.json.gz") in output
    trace = json.loads(gzip.decompress((tmp_path / "out/trace.json.gz").read_bytes()))
    calls = [event["name"] for event in trace["traceEvents"] if event.get("ph") == "X"]
    assert set(calls) >= RANGES and calls.count("step") == 2
    # two steps of two passes
    assert calls.count("forward") == 4


@pytest.mark.parametrize("argument", ["modl=gpt2", "warmup=0", "out=", "resume=outputs/x"])
def test_refused_in_one_line(run_profile, argument):
    with pytest.raises(SystemExit, match="^profile: ") as error:
        run_profile(argument)
    assert argument.partition("=")[0] in error.value.code and "\n" not in error.value.code


@pytest.mark.gpu
def test_a_gpu_s_rows_are_sorted_by_its_own_time(run_profile):
    size = ("model.num_heads=6", "model.hidden_size=384", "seq_len=1024", "batch_size=8")
    output = run_profile("device=cuda", "attention=triton", *size)
    names = [row[0] for row in rows_of(output)]
    assert "Self CUDA" in output and len(names) == profile.ROWS
    assert {"step", "forward"} <= {*names}
