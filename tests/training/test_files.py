"""metrics.jsonl, and JSON that is strict and whole."""

import json
import math

import pytest

from training.record.files import MetricsFile, layout, read_metrics, write_json


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


def test_json_has_a_line_for_each_row():
    row = {"attention": "naive", "settings": ["seed=0"]}
    curve = {"step": list(range(200)), "loss": [0.5] * 200}
    value = {"environment": {"gpu": None}, "rows": [row] * 20, "runs": [row | {"curve": curve}]}
    text = layout(value)
    assert json.loads(text) == value
    # a row fits; the run does not, and has a line for each part of its curve
    assert text.count("\n") == 34 and ' "step": [0, 1, 2,' in text
    assert layout({}) == "{}" and json.loads(layout({1: value, None: []})) == {
        "1": value,
        "null": [],
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
    kept = [strict_loads(line)["step"] for line in file.path.read_text().splitlines()]
    assert kept == [10, 20, 25]


@pytest.mark.parametrize("victim", ["write_json", "go_back_to"])
def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch, victim):
    file = MetricsFile(tmp_path / "file")
    file.write({"step": 1})
    before = file.path.read_text()

    def no_space(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(OSError):
        if victim == "write_json":
            write_json(file.path, {"a": 1})
        else:
            file.go_back_to(0, tmp_path / "none")
    assert file.path.read_text() == before
