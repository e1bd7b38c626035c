"""metrics.jsonl, and JSON that is strict and whole."""

import math

import pytest

from tests.command import strict_json
from training.record.files import append_row, read_data, read_mapping, read_metrics, write_json


def test_nonfinite_values_become_null_and_are_named(tmp_path):
    rows, path = tmp_path / "metrics.jsonl", tmp_path / "summary.json"
    rows.touch()
    append_row(rows, {"step": 1, "train/loss": math.nan, "grad_norm": math.inf, "lr": 0.1})
    row = strict_json(rows.read_text())
    null = {"train/loss": None, "grad_norm": None, "nonfinite": ["train/loss", "grad_norm"]}
    assert row == {"step": 1, "lr": 0.1} | null
    write_json(path, {"oom": {"free": -math.inf}, "list": [1.0, math.nan]})
    null = {"oom": {"free": None}, "list": [1.0, None], "nonfinite": ["oom", "list"]}
    assert strict_json(path.read_text()) == null


def test_a_deleted_file_is_not_begun_again(tmp_path):
    """A regression test: the run went on with the later rows alone."""
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(OSError, match=f"{path} .* lost"):
        append_row(path, {"step": 2})
    assert not path.exists()


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})

    def no_space(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(OSError, match=f"{path} .*No space left"):
        write_json(path, {"a": 2})
    assert read_mapping(path) == {"a": 1} and list(tmp_path.iterdir()) == [path]


DAMAGED = {
    "torn": ("env.json", b"{torn"),
    "no-utf-8": ("env.json", b"a: \xff\xfe"),
    "no-mapping": ("env.json", b"[1]"),
    "nested": ("env.json", b'{"a":' + b"[" * 20_000),
    "empty": ("config.yaml", b""),
    "no-date": ("config.yaml", b"a: 2020-99-99"),
}


@pytest.mark.parametrize("name, content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_named_once_and_read_as_nothing(tmp_path, caplog, name, content):
    path = tmp_path / name
    assert read_mapping(path) == {} and not caplog.messages  # there is no such file
    path.write_bytes(content)
    assert read_mapping(path) == read_mapping(path) == {}
    (said,) = caplog.messages
    assert said.startswith(f"{path} ") and "\n" not in said
    with pytest.raises(ValueError, match=f"^{path} .*[^\n]$"):
        read_data(path)


def test_the_damaged_lines_of_the_metrics_are_named(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    lines = [b'{"step": 1}', b'{"step": \xff}', b"[" * 100_000, b"[]", b'{"step": 2}', b'{"st']
    path.write_bytes(b"\n".join(lines))
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]
    (said,) = caplog.messages
    assert said.startswith(f"{path}: 4 of 6 ") and "\n" not in said
