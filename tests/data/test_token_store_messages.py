"""What a user reads while a store is built, and when it cannot be."""

import os
import pty
import termios

import pytest

from config import TokenizerConfig
from data import build_tokenizer
from data.token_store import cache_folder, open_store
from tests import processes

BYTE = build_tokenizer(TokenizerConfig("byte"))
WAY_OUT = (
    r"choose a folder with room and write permission: data\.cache_dir=FOLDER, or "
    r"TILEGPT_CACHE=FOLDER"
)


def test_a_cache_folder_that_cannot_be_made(config, tmp_path):
    (tmp_path / "file").touch()
    config.cache_dir = str(tmp_path / "file" / "cache")
    with pytest.raises(
        ValueError, match=rf"cannot be written to {config.cache_dir} \(Not a directory\); {WAY_OUT}"
    ):
        open_store(config, BYTE)


def test_a_cache_folder_whose_name_is_too_long(config, tmp_path):
    """The system cannot even say whether such a folder exists."""
    config.cache_dir = str(tmp_path / ("x" * 300))
    with pytest.raises(
        ValueError,
        match=rf"cannot be written to {config.cache_dir} \(File name too long\); {WAY_OUT}",
    ):
        open_store(config, BYTE)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_cache_folder(config, tmp_path):
    (tmp_path / "cache").mkdir(mode=0o500)
    with pytest.raises(
        ValueError,
        match=rf"cannot be written to {config.cache_dir} \(Permission denied\); {WAY_OUT}",
    ):
        open_store(config, BYTE)


def test_a_full_disk(config):
    """A limit on file size stands in for a full disk: the same calls fail."""
    code = (
        "import resource; from config import *; from data import build_data;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000));"
        f"build_data({config!r}, TokenizerConfig('byte'), seq_len=8, seed=0)"
    )
    failed = processes.run("-c", code)
    last_line = failed.stderr.strip().splitlines()[-1]
    assert last_line.startswith(
        f"ValueError: the token store cannot be written to {config.cache_dir} (File too large); "
        "choose a folder"
    )
    assert list(cache_folder(config).glob("[!.]*")) == []


@pytest.mark.parametrize("path", ["empty/a.txt", "empty"], ids=["empty-file", "only-empty-files"])
def test_a_corpus_without_text(config, tmp_path, path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").touch()
    config.path = str(tmp_path / path)
    with pytest.raises(
        ValueError, match=rf"data\.path={config.path} holds no text.*name a source with text"
    ):
        open_store(config, BYTE)
    assert list(cache_folder(config).glob("[!.]*")) == []


def test_building_is_silent_without_a_terminal(config, capfd):
    open_store(config, BYTE)
    assert capfd.readouterr() == ("", "")


def test_building_shows_one_progress_bar_on_a_terminal(config):
    master, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 100))
    code = (
        f"from config import *; from data import build_data; build_data({config!r}, "
        "TokenizerConfig('byte'), seq_len=8, seed=0)"
    )
    assert processes.Process("-c", code, stderr=terminal).wait() == 0
    shown = os.read(master, 1 << 16).decode()
    os.close(terminal)
    os.close(master)
    assert "tokenizing text: 100%" in shown and "60/60" in shown
    assert shown.count("\n") == 1, shown
