"""How scripts end that cannot go on: in one line, before the work where that can be known, and what
was there before stays.
"""

import errno
import os
import sys
from importlib import import_module
from pathlib import Path

import pytest

from scripts.arguments import NoOptions, command
from training.record.files import check_writable, write_file

MODULES = {
    "condense_runs": "lab.condense_runs",
    "report": "scripts.report.__main__",
    "results": "lab.results",
}


def start(monkeypatch, name: str, *arguments: str) -> object:
    """The exit code, or the line, with which a command of scripts/ or lab/ ends."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    module = import_module(MODULES.get(name, f"scripts.{name}"))
    with pytest.raises(SystemExit) as ended:
        sys.exit(module.main())
    return ended.value.code


def never(*_: object, **__: object) -> None:
    raise AssertionError("the work began")


@pytest.mark.parametrize(
    ("name", "arguments", "work"),
    [
        (
            "benchmark",
            ["attention=naive", "check=false", "out={out}"],
            "scripts.benchmark.measured",
        ),
        ("verify", ["attention=naive", "out={folder}.json"], "scripts.verify.verify"),
        ("condense_runs", ["{folder}", "out={out}"], "lab.condense_runs.runs_below"),
        ("trace", ["out={folder}.html"], "scripts.trace.look"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." not in value else "",
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    monkeypatch, tmp_path, name, arguments, work
):
    (tmp_path / "file").write_text("")
    out, folder = tmp_path / "file" / "out.json", tmp_path / "folder"
    for each in (folder, tmp_path / "folder.json", tmp_path / "folder.html"):
        each.mkdir()
    monkeypatch.setattr(work, never)
    told = start(
        monkeypatch, name, *(argument.format(out=out, folder=folder) for argument in arguments)
    )
    assert isinstance(told, str) and "\n" not in told
    assert told.startswith(f"{name}: {tmp_path}")
    assert os.listdir(folder) == []
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "folder.html", "folder.json"]


@pytest.mark.parametrize(
    ("name", "work", "ending"),
    [("verify", "scripts.verify.verify", ".json"), ("trace", "scripts.trace.look", ".html")],
)
def test_a_file_of_another_kind_is_not_replaced(monkeypatch, tmp_path, name, work, ending):
    (tmp_path / "README.md").write_text("mine")
    monkeypatch.setattr(work, never)
    told = start(monkeypatch, name, f"out={tmp_path}/README.md")
    assert "README.md" in told and told.endswith(ending)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_a_file_is_tried_without_being_touched(tmp_path):
    (tmp_path / "old.json").write_text("old")
    check_writable(tmp_path / "old.json")
    check_writable(tmp_path / "new/x.json")
    assert (tmp_path / "old.json").read_text() == "old" and os.listdir(tmp_path / "new") == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_with_the_path(tmp_path, monkeypatch):
    (tmp_path / "page.html").write_text("old")
    monkeypatch.setattr(Path, "with_name", lambda path, name: Path("/dev/full"))
    monkeypatch.setattr(Path, "unlink", lambda path: None)
    with pytest.raises(OSError, match=f"{tmp_path}/page.html .*{os.strerror(errno.ENOSPC)}"):
        write_file(tmp_path / "page.html", "new")
    assert (tmp_path / "page.html").read_text() == "old"


def test_an_os_error_is_one_line():
    @command
    def main(options: NoOptions) -> None:
        write_file(Path("/nowhere/to/be/found"), "")

    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code.startswith("test_endings: /nowhere/to/be/found ")
    assert "\n" not in ended.value.code


@pytest.mark.parametrize(
    ("name", "arguments", "work"),
    [
        (
            "benchmark",
            ["attention=naive", "seq_len=16", "check=false"],
            "scripts.benchmark.measured",
        ),
        ("verify", ["attention=naive"], "scripts.verify.verify"),
        ("cross_eval", ["."], "scripts.cross_eval.measure"),
        ("report", ["."], "scripts.report.__main__.load_runs"),
        ("sample", ["run=."], "scripts.sample.sample"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." not in value else "",
)
def test_ctrl_c_is_one_line_and_exit_code_130(monkeypatch, capsys, name, arguments, work):
    def pressed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(work, pressed)
    assert start(monkeypatch, name, *arguments) == 130
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"{name}: ")


@pytest.mark.parametrize("argument", ["--help", "render=true"])
def test_results_writes_nothing_where_it_is_given_an_argument(monkeypatch, capsys, argument):
    """A regression test: it took no notice of its arguments and rewrote the tracked tables."""
    monkeypatch.setattr("lab.results.written", never)
    said = start(monkeypatch, "results", argument)
    if argument == "--help":
        assert said is None and "results/README.md" in capsys.readouterr().out
    else:
        assert said.startswith("results: render=true: ")


def test_condense_runs_of_a_folder_that_is_not_there(monkeypatch, tmp_path):
    told = start(monkeypatch, "condense_runs", str(tmp_path / "nope"), f"out={tmp_path / 'x.json'}")
    assert told.startswith(f"condense_runs: {tmp_path / 'nope'} ")
    assert os.listdir(tmp_path) == []
