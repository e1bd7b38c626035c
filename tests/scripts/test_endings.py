"""How commands end that cannot go on: in one line, before the work where that can be known, and
what was there before stays.
"""

import errno
import os
from importlib import import_module
from pathlib import Path

import pytest

from scripts.arguments import NoOptions, check_out, command
from training.record.files import write_file


def ending(module: str, *arguments: str) -> object:
    """The exit code, or the line, with which a command of scripts/ or lab/ ends."""
    with pytest.raises(SystemExit) as ended:
        import_module(module).main(arguments)
    return ended.value.code


def never(*_: object, **__: object) -> None:
    raise AssertionError("the work began")


# a command, its arguments but for out=, the ending of its file, and its work
WRITERS = (
    ("scripts.benchmark", ["attention=naive", "check=false"], ".json", "measured"),
    ("scripts.verify", ["attention=naive"], ".json", "column_of"),
    ("scripts.trace", [], ".html", "look"),
    ("lab.condense_runs", ["."], ".json", "runs_below"),
)


@pytest.mark.parametrize(("module", "arguments", "suffix", "work"), WRITERS, ids=str)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    monkeypatch, tmp_path, module, arguments, suffix, work
):
    monkeypatch.setattr(f"{module}.{work}", never)
    (tmp_path / f"folder{suffix}").mkdir()
    (tmp_path / "README.md").write_text("mine")
    # a folder, a file of another kind, and a file in place of the folder
    for name in (f"folder{suffix}", "README.md", f"README.md/out{suffix}"):
        told = ending(module, *arguments, f"out={tmp_path / name}")
        assert told.startswith(f"{module.rpartition('.')[2]}: ") and "\n" not in told
        assert str(tmp_path) in told
    assert sorted(os.listdir(tmp_path)) == ["README.md", f"folder{suffix}"]
    assert (tmp_path / "README.md").read_text() == "mine"


def test_a_file_is_tried_without_being_touched_and_named_if_it_is_replaced(tmp_path, capsys):
    (tmp_path / "old.json").write_text("old")
    for name in ("old.json", "new/x.json"):
        check_out(tmp_path / name)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(str(tmp_path / "old.json"))
    assert (tmp_path / "old.json").read_text() == "old" and os.listdir(tmp_path / "new") == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_with_the_path(tmp_path, monkeypatch):
    (tmp_path / "page.html").write_text("old")
    monkeypatch.setattr(Path, "with_name", lambda path, name: Path("/dev/full"))
    monkeypatch.setattr(Path, "unlink", lambda path: None)
    with pytest.raises(OSError, match=f"{tmp_path}/page.html .*{os.strerror(errno.ENOSPC)}"):
        write_file(tmp_path / "page.html", "new")
    assert (tmp_path / "page.html").read_text() == "old"


@pytest.mark.parametrize(
    ("error", "ends"),
    [(OSError("/nowhere is\ngone"), "test_endings: /nowhere is gone"), (KeyboardInterrupt, 130)],
)
def test_an_error_is_one_line_and_ctrl_c_exit_code_130(capsys, error, ends):
    @command
    def main(options: NoOptions) -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == ends
    if ends == 130:
        assert capsys.readouterr().err.startswith("test_endings: ")
