"""A store holds its corpus, is built once, and survives killed and rival builds.

A damaged store is never taken for a whole one, before a run nor under it.
"""

import errno
import fcntl
import json
import logging
import os
import pty
import random
import resource
import shutil
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import data.token_store
from config import DataConfig, TokenizerConfig
from data import build_tokenizer
from data.batches import TextData
from data.corpora import Corpus
from data.token_store import DamagedStore, cache_folder, hash_of_path, open_store
from tests import processes
from tests.command import checkpoint, computed, run, same, summary, tiny

BYTE = build_tokenizer(TokenizerConfig("byte"))


class Interrupted(type(BYTE)):
    """Ctrl-C comes in the middle of a build."""

    def encode(self, text):
        if text.startswith("file 40"):
            raise KeyboardInterrupt
        return super().encode(text)


class Wide(type(BYTE)):
    vocab_size, end_of_text, fingerprint = 100_000, 99_999, "wide"


def text_config(tmp_path, **settings):
    places = {"path": str(tmp_path / "corpus"), "cache_dir": str(tmp_path / "cache")}
    return DataConfig(**{"source": "text", "val_fraction": 0.2} | places | settings)


def texts_of(half):
    """The documents of a half, each of which has its end of text."""
    *pieces, rest = np.split(half[:], np.flatnonzero(half[:] == BYTE.end_of_text) + 1)
    assert not len(rest)
    return [BYTE.decode(piece[:-1]) for piece in pieces]


def both_halves(config):
    store = open_store(config, BYTE)
    return store.train[:].tolist(), store.val[:].tolist()


def stores(config):
    """The names in the cache folder, except its locks."""
    names = (path.name for path in cache_folder(config).iterdir())
    return sorted(name for name in names if not name.startswith("."))


def unfinished(config):
    return [name for name in stores(config) if name.startswith("unfinished-")]


def built(config):
    """The folder of the only store, and when its tokens were written."""
    (name,) = stores(config)
    folder = cache_folder(config) / name
    return folder, (folder / "train.bin").stat().st_mtime_ns


# what a store holds


def test_both_halves_hold_the_corpus(config):
    store = open_store(config, BYTE)
    expected = {"train": [], "val": []}
    for row in Corpus(config).documents():
        expected["val" if hash_of_path(row["path"]) < 0.2 else "train"].append(row["text"])
    assert texts_of(store.train) == expected["train"]
    assert texts_of(store.val) == expected["val"]
    assert len(expected["val"]) > 1
    assert store.meta["train_documents"] + store.meta["val_documents"] == 60


def test_tokens_are_stored_in_the_smallest_type(config):
    assert open_store(config, BYTE).train[:4].dtype == np.uint16
    store = open_store(config, Wide())
    assert store.train.dtype == np.uint32
    assert (store.train[:] == 99_999).sum() == store.meta["train_documents"]
    assert store.train[-1:].tolist() == [99_999]


def test_documents_are_held_out_whole_and_stay_there_when_others_join(config, tmp_path):
    before = texts_of(open_store(config, BYTE).val)
    for number in range(40):
        (tmp_path / "corpus" / f"more{number}.txt").write_text(f"more {number}")
    after = open_store(config, BYTE)
    assert set(before) < set(texts_of(after.val))
    assert not set(texts_of(after.train)) & set(texts_of(after.val))
    wider = open_store(text_config(tmp_path, val_fraction=0.4), BYTE)
    assert set(texts_of(after.val)) < set(texts_of(wider.val))


def test_some_document_is_held_out_of_a_small_corpus(tmp_path):
    """By hashes alone, three in four corpora of five documents would have no held-out half."""
    (tmp_path / "corpus").mkdir()
    for number in range(5):
        (tmp_path / "corpus" / f"{number}.txt").write_text(f"text {number}")
    store = open_store(text_config(tmp_path, val_fraction=1e-6), BYTE)
    lowest = min(range(5), key=lambda number: hash_of_path(f"{number}.txt"))
    assert texts_of(store.val) == [f"text {lowest}"]
    assert texts_of(store.train) == [f"text {number}" for number in range(5) if number != lowest]


@pytest.mark.parametrize("by_hash", [False, True], ids=["trained-on", "held-out-by-hash"])
def test_the_end_of_an_only_document_is_held_out(tmp_path, by_hash):
    names = (f"{number}.txt" for number in range(1000))
    name = next(name for name in names if (hash_of_path(name) < 0.1) == by_hash)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / name).write_text("0123456789" * 100)
    store = open_store(text_config(tmp_path, val_fraction=0.1), BYTE)
    assert (len(store.train), len(store.val)) == (901, 100)
    whole = np.concatenate([store.train[:], store.val[:]])
    assert BYTE.decode(whole[:-1]) == "0123456789" * 100 and whole[-1] == BYTE.end_of_text
    assert store.meta["held_out"] == "end"


# when it is built


@pytest.mark.parametrize(
    "change", ["nothing", "text", "new-file", "share", "tokenizer", "max-documents"]
)
def test_built_anew_when_something_it_is_made_of_changes(config, tmp_path, change):
    open_store(config, BYTE)
    before, tokenizer = built(config), BYTE
    if change == "text":
        (tmp_path / "corpus" / "03.txt").write_text("something else")
    elif change == "new-file":
        (tmp_path / "corpus" / "new.txt").write_text("new")
    elif change == "share":
        config.val_fraction = 0.3
    elif change == "tokenizer":
        tokenizer = build_tokenizer(TokenizerConfig("bpe"))
    elif change == "max-documents":
        config.max_documents = 30
    open_store(config, tokenizer)
    assert len(stores(config)) == 1 + (change != "nothing")
    assert change != "nothing" or built(config) == before


def test_corpus_hash_is_of_the_texts_not_of_the_place(config, tmp_path):
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    here = open_store(config, BYTE).meta["corpus"]
    (tmp_path / "corpus").rename(moved)
    assert open_store(text_config(tmp_path, path=str(moved)), BYTE).meta["corpus"] == here
    (moved / "03.txt").rename(moved / "03b.txt")
    assert open_store(text_config(tmp_path, path=str(moved)), BYTE).meta["corpus"] != here


def test_stdlib_opens_at_once_the_second_time(tmp_path, caplog):
    config = DataConfig(source="stdlib", cache_dir=str(tmp_path))
    first = open_store(config, BYTE)
    start = time.perf_counter()
    caplog.clear()
    with caplog.at_level(logging.INFO, "tilegpt"):
        assert open_store(config, BYTE).meta == first.meta
    assert time.perf_counter() - start < 1
    assert any(" MB in 0." in line for line in caplog.messages)
    assert first.meta["train_tokens"] > 5_000_000
    assert 0.02 < first.meta["val_tokens"] / first.meta["train_tokens"] < 0.1


@pytest.mark.parametrize("setting", ["cache_dir", "TILEGPT_CACHE", "HOME"])
def test_cache_folder(tmp_path, monkeypatch, setting):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TILEGPT_CACHE", raising=False)
    config, expected = DataConfig(), tmp_path / ".cache" / "tilegpt"
    if setting != "HOME":
        monkeypatch.setenv("TILEGPT_CACHE", str(tmp_path / "from-environment"))
        expected = tmp_path / "from-environment"
    if setting == "cache_dir":
        config.cache_dir, expected = "~/mine", tmp_path / "mine"
    assert cache_folder(config) == expected


# damage


def flip(file, position):
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


def val_is_the_head_of_train(folder):
    size = (folder / "val.bin").stat().st_size
    (folder / "val.bin").write_bytes((folder / "train.bin").read_bytes()[:size])


def a_file_in_its_place(folder):
    shutil.rmtree(folder)
    folder.write_text("no store")


# what is done to the store's folder, and the file that the warning must name
DAMAGE = {
    "a-bit": (lambda folder: flip(folder / "train.bin", 1000), "train.bin"),
    "val-is-the-head-of-train": (val_is_the_head_of_train, "val.bin"),
    "truncated": (lambda folder: os.truncate(folder / "train.bin", 100), "train.bin has 100"),
    "no-tokens": (lambda folder: (folder / "train.bin").unlink(), "train.bin"),
    "half-a-meta": (lambda folder: os.truncate(folder / "meta.json", 20), "meta.json"),
    "a-file-in-its-place": (a_file_in_its_place, "directory"),
}


@pytest.mark.parametrize(("damage", "named"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_store_is_built_again(config, caplog, damage, named):
    """A regression test: a run trained on zeros, or validated on its training data."""
    before = both_halves(config)
    folder, _ = built(config)
    meta = (folder / "meta.json").read_bytes()
    caplog.clear()
    damage(folder)
    assert both_halves(config) == before and (folder / "meta.json").read_bytes() == meta
    assert stores(config) == [folder.name]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert str(folder) in warning and named in warning and "\n" not in warning


def test_a_copy_of_another_store_is_noticed(config, tmp_path, caplog):
    before = both_halves(config)
    folder, _ = built(config)
    open_store(text_config(tmp_path, val_fraction=0.4), BYTE)
    (other,) = [name for name in stores(config) if name != folder.name]
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name(other), folder)
    assert both_halves(config) == before
    assert any(str(folder) in line and other in line for line in caplog.messages)


def test_a_damaged_store_stays_until_another_is_built(config):
    """The corpus may be out of reach, and the owner may know how to repair the store."""
    open_store(config, BYTE)
    folder, _ = built(config)
    flip(folder / "train.bin", 7)
    damaged = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(KeyboardInterrupt):
        open_store(config, Interrupted())
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == damaged
    assert stores(config) == [folder.name]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["files", "sha256", "name", "dtype", "bytes"]), inner)
    ),
)


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The folder of a store."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "corpus").mkdir()
    (folder / "corpus/text.txt").write_text("0123456789" * 100)
    config = text_config(folder)
    open_store(config, BYTE)
    return built(config)[0]


def loads_or_says_why(folder, content):
    """With this content of meta.json, the store loads as it was, or says what is damaged."""
    file = folder / "meta.json"
    before = file.read_bytes()
    try:
        file.write_bytes(content)
        assert data.token_store.load(folder).meta == json.loads(before)
    except DamagedStore as damage:
        assert str(folder) in str(damage) and "\n" not in str(damage)
    finally:
        file.write_bytes(before)


@given(JSON, st.data())
def test_any_json_loads_or_is_damage(whole, value, draw):
    meta = json.loads((whole / "meta.json").read_text())
    loads_or_says_why(whole, json.dumps(value).encode())
    key = draw.draw(st.sampled_from(sorted(meta)))
    loads_or_says_why(whole, json.dumps(meta | {key: value}).encode())


def test_json_that_python_cannot_read_is_damage(whole):
    for content in (b"[" * 100_000, b'{"dtype": ' + b"9" * 10_000 + b"}"):
        loads_or_says_why(whole, content)


@given(st.binary(max_size=12), st.data())
def test_any_bytes_load_or_are_damage(whole, some, draw):
    content = (whole / "meta.json").read_bytes()
    loads_or_says_why(whole, some)
    start, stop = sorted(draw.draw(st.tuples(*[st.integers(0, len(content))] * 2)))
    loads_or_says_why(whole, content[:start] + some + content[stop:])


# builds that are killed, slow, or not alone


def test_an_interrupted_build_leaves_nothing(config):
    with pytest.raises(KeyboardInterrupt):
        open_store(config, Interrupted())
    assert stores(config) == []


GATED_BUILD = """
import sys, threading
from config import DataConfig, TokenizerConfig
from data import build_tokenizer
from data.token_store import open_store
tokenizer = build_tokenizer(TokenizerConfig("byte"))
encode, lock, passed = tokenizer.encode, threading.Lock(), []
def gated(text):
    with lock:
        if not passed:
            print("building", flush=True)
            passed.append(sys.stdin.readline())
    return encode(text)
tokenizer.encode = gated
print("opened", len(open_store({config!r}, tokenizer).train), flush=True)
"""


class Build(processes.Process):
    """A process that pauses in the middle of a build until it gets a line."""

    def __init__(self, config):
        streams = {"stdin": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        super().__init__("-c", GATED_BUILD.format(config=config), **streams)

    def paused(self):
        while self.poll() is None and self.output() != "building\n":
            time.sleep(0.01)
        return self.returncode is None

    def go_on(self):
        self.stdin.write("go on\n")
        self.stdin.close()


def start_builds(config, count):
    builds = [Build(config) for _ in range(count)]
    assert all(build.paused() for build in builds)
    return builds


def leave_a_dead_build(config):
    """Leave an unfinished build, as a killed process does."""
    folder = cache_folder(config) / "unfinished-0123"
    folder.mkdir(parents=True)
    (folder / "train.bin").write_bytes(bytes(100))


def test_a_killed_build_is_never_taken_for_a_store_and_removed_by_the_next(config):
    (process,) = start_builds(config, 1)
    process.kill()
    process.wait()
    assert len(stores(config)) == len(unfinished(config)) == 1
    assert len(texts_of(open_store(config, BYTE).train)) > 40
    assert len(stores(config)) == 1 and not unfinished(config)
    # and by a process that builds nothing
    before = built(config)
    leave_a_dead_build(config)
    open_store(config, BYTE)
    assert built(config) == before


def test_the_build_of_a_live_process_is_left_alone(config, tmp_path):
    """No start may touch it, whether it builds or not, though a dead build lies beside it."""
    (alive,) = start_builds(config, 1)
    leave_a_dead_build(config)
    other = text_config(tmp_path, val_fraction=0.4)
    for _ in range(2):
        open_store(other, BYTE)
        assert len(unfinished(config)) == 2  # which of the two is dead cannot be seen now
    alive.go_on()
    assert "\nopened" in alive.end() and alive.returncode == 0
    open_store(other, BYTE)
    assert len(stores(config)) == 2 and not unfinished(config)


@pytest.mark.parametrize("before", [pytest.param("nothing", marks=pytest.mark.slow), "damaged"])
def test_two_processes_may_build_at_once(config, before):
    """9 s: each process imports torch."""
    if before == "damaged":
        open_store(config, BYTE)
        flip(built(config)[0] / "train.bin", 7)
    rivals = start_builds(config, 2)
    assert len(unfinished(config)) == 2
    for rival in rivals:
        rival.go_on()
    outputs = [rival.end() for rival in rivals]
    assert [rival.returncode for rival in rivals] == [0, 0]
    assert outputs == [f"building\nopened {len(open_store(config, BYTE).train)}\n"] * 2
    assert len(stores(config)) == 1


def test_without_locks_no_build_is_removed(config, monkeypatch):
    """On a file system without locks, no process can tell whether a build is alive."""

    def refuse(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    leave_a_dead_build(config)
    # in this module alone: `datasets` locks files too
    without = SimpleNamespace(**vars(fcntl) | {"flock": refuse})
    monkeypatch.setattr(data.token_store, "fcntl", without)
    assert len(texts_of(open_store(config, BYTE).train)) > 40
    assert len(stores(config)) == 2 and len(unfinished(config)) == 1


def refuse_to_write(monkeypatch, *names):
    """Files can be read. Permissions do not stop root, so Python's own functions refuse."""
    opened = Path.open

    def refuse(path, *_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    def reading(path, mode="r", *rest, **options):
        return (opened if mode.startswith("r") else refuse)(path, mode, *rest, **options)

    for name in names:
        monkeypatch.setattr(Path, name, refuse)
    monkeypatch.setattr(Path, "open", reading)


def test_a_whole_store_needs_no_permission_to_write(config, monkeypatch):
    """For example, in a cache that an administrator filled."""
    open_store(config, BYTE)
    leave_a_dead_build(config)
    for lock in cache_folder(config).glob(".*.lock"):
        lock.unlink()
    refuse_to_write(monkeypatch, "mkdir", "unlink", "rename")
    assert len(texts_of(open_store(config, BYTE).train)) > 40


def test_a_lock_of_another_user_is_enough(config, monkeypatch):
    """In a shared folder it can be read alone, and most file systems lock it then too."""
    open_store(config, BYTE)
    leave_a_dead_build(config)
    refuse_to_write(monkeypatch)
    open_store(config, BYTE)
    assert not unfinished(config)


def test_a_store_is_on_the_disk_before_it_is_published(config, monkeypatch):
    """In one step: a kill may not leave half a store. After a power cut, a renamed folder may
    otherwise hold files of zeros.
    """
    events, fsync, rename = [], os.fsync, Path.rename

    def synced(descriptor):
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def renamed(path, target):
        events.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    open_store(config, BYTE)
    at = events.index("rename")
    files, folder = sorted(events[: at - 1]), events[at - 1]
    assert files == sorted(file.name for file in built(config)[0].iterdir())
    assert folder.startswith("unfinished-") and events[at + 1 :] == [cache_folder(config).name]


# what a user reads


def test_a_full_disk(config):
    """A limit on file size stands in for a full disk: the same calls fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises((OSError, ValueError)) as error:
            open_store(config, BYTE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert config.cache_dir in str(error.value) and "data.cache_dir=FOLDER" in str(error.value)
    assert "\n" not in str(error.value)
    assert stores(config) == []


@pytest.mark.parametrize("path", ["empty/a.txt", "empty"], ids=["empty-file", "only-empty-files"])
def test_a_corpus_without_text(config, tmp_path, path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").touch()
    config.path = str(tmp_path / path)
    with pytest.raises(ValueError, match=f"data.path={config.path} "):
        open_store(config, BYTE)
    assert stores(config) == []


def test_building_is_silent_without_a_terminal(config, capfd):
    open_store(config, BYTE)
    assert capfd.readouterr() == ("", "")


def test_building_shows_one_progress_bar_on_a_terminal(config, monkeypatch):
    master, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 100))
    with os.fdopen(terminal, "w") as screen:
        monkeypatch.setattr(sys, "stderr", screen)
        open_store(config, BYTE)
        monkeypatch.undo()
        shown = os.read(master, 1 << 16).decode()
    os.close(master)
    assert "100%" in shown and "60/60" in shown
    assert shown.count("\n") == 1, shown


# under a run


@pytest.mark.parametrize("when", ["before", "under"])
def test_a_run_on_a_damaged_store_is_the_undisturbed_run(tmp_path, monkeypatch, when):
    """Regression tests: it trained on the damaged tokens; and SIGBUS ended it without a summary."""
    words = random.Random(0)
    (tmp_path / "corpus").mkdir()
    for number in range(40):
        text = " ".join(words.choices(["if", "else", "for", "in", "return", "None"], k=100))
        (tmp_path / "corpus" / f"{number}.txt").write_text(text)
    asked = ("data=text", f"data.path={tmp_path}/corpus", "data.val_fraction=0.2", "steps=8")
    asked += ("eval_every=4", "checkpoint_every=2")
    cache = {"TILEGPT_CACHE": str(tmp_path / "cache")}
    straight, disturbed = tmp_path / "straight", tmp_path / "disturbed"
    assert run(*tiny(straight, *asked), **cache).code == 0
    (tokens,) = (tmp_path / "cache").glob("text-*/train.bin")
    if when == "before":
        tokens.write_bytes(bytes(tokens.stat().st_size))
        done = run(*tiny(disturbed, *asked), **cache)
    else:
        train_batch, pending = TextData.train_batch, [0]

        def harmed(self, step, num_sequences):
            """At the first reading of that step alone: no user can choose the moment."""
            if step == 5 and pending:
                os.truncate(tokens, pending.pop())
            return train_batch(self, step, num_sequences)

        monkeypatch.setattr(TextData, "train_batch", harmed)
        answer = run(*tiny(disturbed, *asked), **cache).complaint()
        assert str(tokens) in answer and f"resume={disturbed}" in answer
        assert summary(disturbed)["status"] == "failed"
        assert str(tokens) in summary(disturbed)["error"]
        done = run(f"resume={disturbed}", **cache)
    assert done.code == 0 and "Traceback" not in done.output, done.output
    assert done.output.count(str(tokens.parent)) == 1
    assert summary(disturbed)["status"] == "completed"
    assert summary(disturbed)["data"] == summary(straight)["data"]
    assert same(checkpoint(disturbed), checkpoint(straight))
    assert computed(disturbed) == computed(straight)
