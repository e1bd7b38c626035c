"""metrics.jsonl, and JSON that is strict and whole."""

import json
import math

import pytest

from training.record.files import (
    MetricsFile,
    read_mapping,
    read_metrics,
    try_folder,
    write_json,
)


def strict_loads(text: str):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_nonfinite_values_become_null_and_are_named(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write({"step": 1, "train/loss": math.nan, "grad_norm": math.inf, "lr": 0.1})
    row = strict_loads(file.path.read_text())
    null = {"train/loss": None, "grad_norm": None, "nonfinite": ["train/loss", "grad_norm"]}
    assert row == {"step": 1, "lr": 0.1} | null
    path = tmp_path / "summary.json"
    write_json(path, {"oom": {"free": -math.inf}, "list": [1.0, math.nan]})
    null = {"oom": {"free": None}, "list": [1.0, None], "nonfinite": ["oom.free", "list[1]"]}
    assert strict_loads(path.read_text()) == null


def test_torn_lines_are_left_out(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in (10, 20):
        file.write({"step": step, "train/loss": 1 / step})
    with file.path.open("a") as handle:
        handle.write('{"step": 40, "train/lo')
    assert [row["step"] for row in read_metrics(file.path)] == [10, 20]


def test_a_deleted_file_is_not_begun_again(tmp_path):
    """A regression test: the run went on with the later rows alone."""
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write({"step": 1})
    file.path.unlink()
    with pytest.raises(OSError, match=rf"{file.path} was deleted.* lost"):
        file.write({"step": 2})
    assert not file.path.exists()


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})

    def no_space(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(OSError, match=f"{path} .*No space left"):
        write_json(path, {"a": 2})
    assert read_mapping(path) == {"a": 1} and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["env.json", "config.yaml"])
@pytest.mark.parametrize("content", [None, b"", b"{torn", b"[1]", b"\xff\xfe", b"null"])
def test_what_is_no_mapping_is_read_as_nothing(tmp_path, name, content):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert read_mapping(tmp_path / name) == {}


def test_a_folder_with_room_for_a_part_is_refused(tmp_path):
    """A regression test: the system wrote the part, and called that no error."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try_folder(tmp_path / "run", 8192)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            try_folder(tmp_path / "run", 8192)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not any((tmp_path / "run").iterdir())
