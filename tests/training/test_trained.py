"""Scripts refuse a run's weights under another tokenizer, and warn of other data."""

import json
import logging
from base64 import b64encode
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

from data.tokenizer import BUILDERS, RANKS_FILE, bpe, read_ranks
from scripts import cross_eval
from tests.command import environment, run, summary, tiny


@pytest.fixture
def books(tmp_path, monkeypatch):
    """A text of the user's own."""
    monkeypatch.setenv("TILEGPT_CACHE", environment()["TILEGPT_CACHE"])
    file = tmp_path / "books.txt"
    file.write_text("the quick brown fox jumps over the lazy dog\n\n" * 200)
    return file


@pytest.fixture
def learned(tmp_path, books):
    def learn(*settings: str) -> Path:
        run_dir = tmp_path / "run"
        assert run(*tiny(run_dir, "data=text", f"data.path={books}", *settings)).code == 0
        return run_dir

    return learn


def test_another_vocabulary_is_refused(learned, books, tmp_path, monkeypatch):
    """A regression test: sample wrote wrong words, export a tokenizer.json that does not belong to
    the weights, and cross_eval a wrong loss.
    """
    run_dir, out = learned("tokenizer=bpe"), tmp_path / "out"
    (start,) = summary(run_dir)["starts"]
    ranks = [*read_ranks(RANKS_FILE)]
    ranks[256:] = ranks[:255:-1]
    other = tmp_path / "other.tiktoken"
    lines = (f"{b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks))
    other.write_text("".join(lines))
    monkeypatch.setitem(BUILDERS, "bpe", partial(bpe, other))
    named = (start["tokenizer"], bpe(other).fingerprint, str(run_dir))
    for command, arguments in {
        "sample": [f"run={run_dir}"],
        "export": [f"run={run_dir}", f"out={out}"],
        "trace": [f"run={run_dir}", f"out={tmp_path}/trace.html"],
        "cross_eval": [str(run_dir)],
        "agree": [str(run_dir)],
    }.items():
        with pytest.raises(SystemExit) as ended:
            import_module(f"scripts.{command}").main(arguments)
        assert all(name in ended.value.code for name in named), ended.value.code
    # nor does a run go on with it, whatever else changes
    books.write_text("sphinx of black quartz, judge my vow\n\n" * 300)
    answer = run(f"resume={run_dir}", "steps=6", "data.val_fraction=0.2").complaint()
    assert all(name in answer for name in named)
    written = {path.name for path in (*tmp_path.iterdir(), *run_dir.iterdir())}
    assert not written & {"out", "trace.html", "cross_eval.json", "agree.json"}


def test_other_data_are_named_and_only_where_they_are_read(learned, books, caplog, monkeypatch):
    """A regression test: cross_eval gave the loss on other text without a word."""
    run_dir = learned()
    # in place of the handlers of that run
    monkeypatch.setattr(logging.root, "handlers", [caplog.handler])
    caplog.set_level(logging.WARNING)
    cross_eval.main([str(run_dir), "under=sdpa"])
    assert not caplog.messages
    books.write_text("sphinx of black quartz, judge my vow\n\n" * 300)
    cross_eval.main([str(run_dir), "under=sdpa"])
    (warning,) = caplog.messages
    (row,) = json.loads((run_dir / "cross_eval.json").read_text())["rows"]
    assert summary(run_dir)["data"] in warning and row["data"] in warning
    books.unlink()
    import_module("scripts.sample").main([f"run={run_dir}", "tokens=4"])
    assert caplog.messages == [warning]
