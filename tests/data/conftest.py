"""A small corpus of text files."""

import pytest

from config import DataConfig


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEGPT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def config(tmp_path):
    """Sixty files of growing length, one in five held out."""
    (tmp_path / "corpus").mkdir()
    for number in range(60):
        (tmp_path / "corpus" / f"{number:02}.txt").write_text(f"file {number} " * (number + 1))
    return DataConfig(source="text", path=str(tmp_path / "corpus"), val_fraction=0.2)
