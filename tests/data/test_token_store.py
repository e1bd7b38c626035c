"""A store holds its corpus, is built once, and survives killed and rival builds.

A damaged store is never taken for a whole one.
"""

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import subprocess
import sys
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
from data.corpora import Corpus
from data.token_store import DamagedStore, cache_folder, hash_of_path, open_store
from tests import processes

BYTE = build_tokenizer(TokenizerConfig("byte"))


def text_config(tmp_path, **settings):
    return DataConfig(
        **dict(
            source="text",
            path=str(tmp_path / "corpus"),
            cache_dir=str(tmp_path / "cache"),
            val_fraction=0.2,
        )
        | settings
    )


def texts_of(half):
    """The documents of a half, each of which has its end of text."""
    *pieces, rest = np.split(half[:], np.flatnonzero(half[:] == BYTE.end_of_text) + 1)
    assert not len(rest)
    return [BYTE.decode(piece[:-1]) for piece in pieces]


def stores(config):
    """The names in the cache folder, except its locks."""
    return sorted(
        path.name for path in cache_folder(config).iterdir() if not path.name.startswith(".")
    )


def build_counter(monkeypatch):
    """A list that grows with every build from now on."""
    builds, build = [], data.token_store.build

    def counted(*arguments):
        builds.append(arguments)
        build(*arguments)

    monkeypatch.setattr(data.token_store, "build", counted)
    return builds


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
    store = open_store(config, BYTE)
    assert store.train.dtype == store.train[:4].dtype == np.uint16


def test_a_large_vocabulary_is_stored_in_32_bits(config):
    class Wide(type(BYTE)):
        vocab_size, end_of_text, fingerprint = 100_000, 99_999, "wide"

    store = open_store(config, Wide())
    assert store.train.dtype == np.uint32
    assert (store.train[:] == 99_999).sum() == store.meta["train_documents"]
    assert store.train[-1:].tolist() == [99_999]


def test_documents_are_held_out_whole_and_stay_there_when_others_join(config, tmp_path):
    before = texts_of(open_store(config, BYTE).val)
    for number in range(40):
        (tmp_path / "corpus" / f"more{number}.txt").write_text(f"more {number}")
    after = open_store(config, BYTE)
    assert set(before) <= set(texts_of(after.val))
    assert not set(texts_of(after.train)) & set(texts_of(after.val))


def test_a_wider_share_holds_out_the_same_documents_and_more(tmp_path, config):
    assert set(texts_of(open_store(config, BYTE).val)) < set(
        texts_of(open_store(text_config(tmp_path, val_fraction=0.4), BYTE).val)
    )


def test_some_document_is_held_out_of_a_small_corpus(tmp_path):
    """By hashes alone, three in four corpora of five documents would have no held-out half."""
    (tmp_path / "corpus").mkdir()
    for number in range(5):
        (tmp_path / "corpus" / f"{number}.txt").write_text(f"text {number}")
    store = open_store(text_config(tmp_path, val_fraction=1e-6), BYTE)
    lowest = min(range(5), key=lambda number: hash_of_path(f"{number}.txt"))
    assert texts_of(store.val) == [f"text {lowest}"]
    assert texts_of(store.train) == [f"text {number}" for number in range(5) if number != lowest]


@pytest.mark.parametrize("name", ["book.txt", "held-out-by-hash.txt"])
def test_the_end_of_an_only_document_is_held_out(tmp_path, monkeypatch, name):
    if name != "book.txt":
        monkeypatch.setattr(data.token_store, "hash_of_path", lambda path: 0.0)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / name).write_text("0123456789" * 100)
    store = open_store(text_config(tmp_path, val_fraction=0.1), BYTE)
    assert (len(store.train), len(store.val)) == (901, 100)
    whole = np.concatenate([store.train[:], store.val[:]])
    assert BYTE.decode(whole[:-1]) == "0123456789" * 100 and whole[-1] == BYTE.end_of_text
    assert store.meta["held_out"] == "end"


def test_built_once(config, monkeypatch):
    builds = build_counter(monkeypatch)
    first, second = open_store(config, BYTE), open_store(config, BYTE)
    assert len(builds) == 1 and (first.train[:] == second.train[:]).all()


def test_an_open_store_needs_no_datasets(config):
    open_store(config, BYTE)
    code = (
        "import sys; from config import *; from data import build_tokenizer; from "
        "data.token_store import open_store;"
        f"open_store({config!r}, build_tokenizer(TokenizerConfig('byte')));"
        "print('datasets' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "False\n"
    )


@pytest.mark.parametrize("change", ["text", "new-file", "share", "tokenizer", "max-documents"])
def test_built_anew_when_something_it_is_made_of_changes(config, tmp_path, monkeypatch, change):
    open_store(config, BYTE)
    builds, tokenizer = build_counter(monkeypatch), BYTE
    if change == "text":
        (tmp_path / "corpus" / "03.txt").write_text("something else")
    elif change == "new-file":
        (tmp_path / "corpus" / "new.txt").write_text("new")
    elif change == "share":
        config.val_fraction = 0.3
    elif change == "tokenizer":
        tokenizer = build_tokenizer(TokenizerConfig("bpe"))
    else:
        config.max_documents = 30
    open_store(config, tokenizer)
    assert len(builds) == 1 and len(stores(config)) == 2


def test_corpus_hash_is_of_the_texts_not_of_the_place(config, tmp_path):
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    here = open_store(config, BYTE).meta["corpus"]
    (tmp_path / "corpus").rename(moved)
    assert open_store(text_config(tmp_path, path=str(moved)), BYTE).meta["corpus"] == here
    (moved / "03.txt").rename(moved / "03b.txt")
    assert open_store(text_config(tmp_path, path=str(moved)), BYTE).meta["corpus"] != here


def both_halves(config):
    store = open_store(config, BYTE)
    return store.train[:].tolist(), store.val[:].tolist()


def overwrite(file, content):
    """Overwrite the beginning of a file; its length stays."""
    file.write_bytes(content[: file.stat().st_size] + file.read_bytes()[len(content) :])


def flip(file, position):
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


def swap(one, other):
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def without(folder, key):
    """Remove a key from meta.json, as if it were older than the key."""
    meta = json.loads((folder / "meta.json").read_text())
    del meta[key]
    (folder / "meta.json").write_text(json.dumps(meta))


def meta_becomes(content):
    return lambda folder: (folder / "meta.json").write_bytes(content)


def a_folder(path):
    path.unlink()
    path.mkdir()


# what is done to the store's folder, and what the warning must name
DAMAGE = {
    "zeros": (
        lambda folder: overwrite(folder / "train.bin", bytes(10**6)),
        "train.bin was altered",
    ),
    "a-bit": (lambda folder: flip(folder / "train.bin", 1000), "train.bin was altered"),
    "the-last-bit": (lambda folder: flip(folder / "val.bin", -1), "val.bin was altered"),
    "no-such-token": (
        lambda folder: overwrite(folder / "train.bin", b"\xff" * 64),
        "train.bin was altered",
    ),
    "val-is-the-head-of-train": (
        lambda folder: overwrite(folder / "val.bin", (folder / "train.bin").read_bytes()),
        "val.bin was alt",
    ),
    "val-is-train": (
        lambda folder: shutil.copy(folder / "train.bin", folder / "val.bin"),
        "val.bin has",
    ),
    "halves-swapped": (
        lambda folder: swap(folder / "train.bin", folder / "val.bin"),
        "train.bin has",
    ),
    "truncated-tokens": (
        lambda folder: os.truncate(folder / "train.bin", 100),
        "train.bin has 100 bytes instead of",
    ),
    "odd-length": (
        lambda folder: os.truncate(folder / "val.bin", (folder / "val.bin").stat().st_size - 1),
        "val.bin has",
    ),
    "longer-tokens": (
        lambda folder: os.truncate(folder / "val.bin", (folder / "val.bin").stat().st_size + 2),
        "val.bin has",
    ),
    "empty-tokens": (lambda folder: os.truncate(folder / "train.bin", 0), "train.bin has 0 bytes"),
    "no-tokens": (lambda folder: (folder / "train.bin").unlink(), "train.bin"),
    "tokens-are-a-folder": (lambda folder: a_folder(folder / "train.bin"), "train.bin"),
    "no-meta": (lambda folder: (folder / "meta.json").unlink(), "meta.json"),
    "meta-is-a-folder": (lambda folder: a_folder(folder / "meta.json"), "meta.json"),
    "half-a-meta": (lambda folder: os.truncate(folder / "meta.json", 20), "meta.json is not JSON"),
    "empty-meta": (meta_becomes(b""), "meta.json is not JSON"),
    "meta-of-nul": (meta_becomes(bytes(400)), "meta.json is not JSON"),
    "binary-meta": (meta_becomes(b"\x80\xff\x00\x01"), "meta.json is not JSON"),
    "deep-meta": (meta_becomes(b"[" * 100_000), "meta.json is not JSON"),
    "deep-meta-that-ends": (meta_becomes(b'{"a":' * 3000 + b"1" + b"}" * 3000), "meta.json"),
    "long-number": (meta_becomes(b'{"dtype": ' + b"9" * 10_000 + b"}"), "meta.json is not JSON"),
    "list": (meta_becomes(b'["uint16"]'), "meta.json holds no checksum"),
    "meta-of-something-else": (meta_becomes(b'{"dtype": "uint16"}'), "meta.json holds no checksum"),
    "no-checksums": (
        lambda folder: (without(folder, "files"), without(folder, "sha256")),
        "meta.json holds no checksum",
    ),
    "unknown-type": (lambda folder: change(folder, dtype="token"), "meta.json was altered"),
    "corpus-is-a-number": (lambda folder: change(folder, corpus=3), "meta.json was altered"),
    "no-held-out": (lambda folder: without(folder, "held_out"), "meta.json was altered"),
    "another-count": (lambda folder: change(folder, train_documents=7), "meta.json was altered"),
    "checksum-of-another-type": (
        lambda folder: change(folder, sha256=[1]),
        "meta.json was altered",
    ),
    "empty-folder": (lambda folder: [file.unlink() for file in folder.iterdir()], "meta.json"),
    "a-file-in-its-place": (
        lambda folder: (shutil.rmtree(folder), folder.write_text("no store")),
        "Not a directory",
    ),
    "a-link-in-its-place": (
        lambda folder: (shutil.rmtree(folder), folder.symlink_to("/")),
        "meta.json",
    ),
}


def change(folder, **values):
    """Change values in meta.json, but not its checksum."""
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | values))


@pytest.mark.parametrize("damage, said", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_store_is_built_again(config, caplog, damage, said):
    """A regression test: a run trained on zeros, or validated on its training data."""
    before = both_halves(config)
    folder = cache_folder(config) / stores(config)[0]
    meta = (folder / "meta.json").read_bytes()
    caplog.clear()
    damage(folder)
    assert both_halves(config) == before and (folder / "meta.json").read_bytes() == meta
    assert stores(config) == [folder.name]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert re.fullmatch(
        rf"the token store {folder} (is damaged: |cannot be read \().*{said}.*; it is built again",
        warning,
    )


def test_a_store_appears_in_one_step(config, monkeypatch):
    """If it were copied into place, a process could open half a store, or a kill leave it."""
    publish, written = data.token_store.publish, []

    def watched(unfinished, folder):
        written.append(
            (unfinished.stat().st_ino, sorted(file.name for file in unfinished.iterdir()))
        )
        publish(unfinished, folder)

    monkeypatch.setattr(data.token_store, "publish", watched)
    open_store(config, BYTE)
    folder = cache_folder(config) / stores(config)[0]
    assert written == [(folder.stat().st_ino, sorted(file.name for file in folder.iterdir()))]


def test_an_interrupted_build_leaves_nothing(config, monkeypatch):
    encode, seen = BYTE.encode, []

    def interrupted(text):
        seen.append(text)
        if len(seen) == 40:
            raise KeyboardInterrupt
        return encode(text)

    monkeypatch.setattr(BYTE, "encode", interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt):
        open_store(config, BYTE)
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


def unfinished(config):
    return [name for name in stores(config) if name.startswith("unfinished-")]


def test_a_killed_build_is_never_taken_for_a_store_and_removed_by_the_next(config, monkeypatch):
    (process,) = start_builds(config, 1)
    process.kill()
    process.wait()
    assert len(stores(config)) == len(unfinished(config)) == 1
    builds = build_counter(monkeypatch)
    assert len(texts_of(open_store(config, BYTE).train)) > 40 and len(builds) == 1
    assert len(stores(config)) == 1 and not unfinished(config)


def test_a_killed_build_is_removed_by_a_process_that_builds_nothing(config, monkeypatch):
    open_store(config, BYTE)
    leave_a_dead_build(config)
    builds = build_counter(monkeypatch)
    open_store(config, BYTE)
    assert len(stores(config)) == 1 and not unfinished(config) and not builds


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


def test_without_locks_no_build_is_removed(config, monkeypatch):
    """On a file system without locks, no process can tell whether a build is alive."""

    def refuse(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    leave_a_dead_build(config)
    # in this module alone: `datasets` locks files too
    monkeypatch.setattr(
        data.token_store, "fcntl", SimpleNamespace(**vars(fcntl) | {"flock": refuse})
    )
    assert len(texts_of(open_store(config, BYTE).train)) > 40
    assert len(stores(config)) == 2 and len(unfinished(config)) == 1


def test_a_whole_store_needs_no_permission_to_write(config, monkeypatch):
    """For example, in a cache that an administrator filled."""
    open_store(config, BYTE)
    leave_a_dead_build(config)

    def refuse(path, *_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    for lock in cache_folder(config).glob(".*.lock"):
        lock.unlink()
    opened = Path.open
    for name in ("mkdir", "unlink", "rename"):
        monkeypatch.setattr(Path, name, refuse)
    monkeypatch.setattr(
        Path,
        "open",
        lambda path, mode="r", *_, **__: (opened if mode.startswith("r") else refuse)(path, mode),
    )
    assert len(texts_of(open_store(config, BYTE).train)) > 40


def test_a_lock_of_another_user_is_enough(config, monkeypatch):
    open_store(config, BYTE)
    path = cache_folder(config) / data.token_store.BUILDING
    opened = Path.open

    def read_only(path, mode="r"):
        if mode != "r":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, mode)

    monkeypatch.setattr(Path, "open", read_only)
    exclusive = fcntl.LOCK_EX | fcntl.LOCK_NB
    with (
        data.token_store.lock(path, fcntl.LOCK_SH) as shared,
        data.token_store.lock(path, exclusive) as alone,
    ):
        assert shared and not alone
    with data.token_store.lock(path, exclusive) as alone:
        assert alone
    with pytest.raises(PermissionError), data.token_store.lock(path.with_name("none"), exclusive):
        pass


@pytest.mark.parametrize("before", ["nothing", "damaged"])
def test_two_processes_may_build_at_once(config, before):
    if before == "damaged":
        open_store(config, BYTE)
        flip(cache_folder(config) / stores(config)[0] / "train.bin", 7)
    rivals = start_builds(config, 2)
    assert len(unfinished(config)) == 2
    for rival in rivals:
        rival.go_on()
    outputs = [rival.end() for rival in rivals]
    assert [rival.returncode for rival in rivals] == [0, 0]
    assert outputs == [f"building\nopened {len(open_store(config, BYTE).train)}\n"] * 2
    assert len(stores(config)) == 1


def test_a_store_is_on_the_disk_before_it_is_published(config, monkeypatch):
    """After a power cut, a renamed folder may otherwise hold files of zeros."""
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
    assert files == sorted(
        file.name for file in (cache_folder(config) / stores(config)[0]).iterdir()
    )
    assert folder.startswith("unfinished-") and events[at + 1 :] == [cache_folder(config).name]


def test_a_copy_of_another_store_is_noticed(config, tmp_path, caplog):
    before = both_halves(config)
    folder = cache_folder(config) / stores(config)[0]
    open_store(text_config(tmp_path, val_fraction=0.4), BYTE)
    (other,) = [name for name in stores(config) if name != folder.name]
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name(other), folder)
    assert both_halves(config) == before
    assert (
        f"the token store {folder} is damaged: it is a copy of {other}; it is built again"
        in caplog.messages
    )


@pytest.mark.parametrize("failure", ["no-corpus", "interrupted"])
def test_a_damaged_store_stays_until_another_is_built(config, tmp_path, monkeypatch, failure):
    """The corpus may be out of reach, and the owner may know how to repair the store."""
    open_store(config, BYTE)
    folder = cache_folder(config) / stores(config)[0]
    flip(folder / "train.bin", 7)
    damaged = {file.name: file.read_bytes() for file in folder.iterdir()}

    def fail(*_):
        raise ValueError("no corpus") if failure == "no-corpus" else KeyboardInterrupt

    monkeypatch.setattr(
        *(Corpus, "documents") if failure == "no-corpus" else (BYTE, "encode"),
        fail,
        raising=False,
    )
    with pytest.raises(ValueError if failure == "no-corpus" else KeyboardInterrupt):
        open_store(config, BYTE)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == damaged and len(
        stores(config)
    ) == 1


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
    (folder / "text.txt").write_text("0123456789" * 100)
    config = DataConfig(
        source="text", path=str(folder / "text.txt"), cache_dir=str(folder / "cache")
    )
    open_store(config, BYTE)
    return cache_folder(config) / stores(config)[0]


def loads_or_says_why(folder, content, meta):
    """With this content of meta.json, the store loads, or says what is damaged."""
    file = folder / "meta.json"
    before = file.read_bytes()
    try:
        file.write_bytes(content)
        assert data.token_store.load(folder).meta == meta
    except DamagedStore as damage:
        assert str(damage).startswith(f"the token store {folder} ") and "\n" not in str(damage)
    finally:
        file.write_bytes(before)


@given(JSON, st.data())
def test_any_json_loads_or_is_damage(whole, value, draw):
    meta = json.loads((whole / "meta.json").read_text())
    loads_or_says_why(whole, json.dumps(value).encode(), meta)
    key = draw.draw(st.sampled_from(sorted(meta)))
    loads_or_says_why(whole, json.dumps(meta | {key: value}).encode(), meta)


@given(st.binary(max_size=12), st.data())
def test_any_bytes_load_or_are_damage(whole, some, draw):
    content = (whole / "meta.json").read_bytes()
    meta = json.loads(content)
    loads_or_says_why(whole, some, meta)
    start, stop = sorted(draw.draw(st.tuples(*[st.integers(0, len(content))] * 2)))
    loads_or_says_why(whole, content[:start] + some + content[stop:], meta)


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


def test_stdlib_opens_at_once_the_second_time(tmp_path, caplog):
    config = DataConfig(source="stdlib", cache_dir=str(tmp_path))
    first = open_store(config, BYTE)
    start = time.perf_counter()
    caplog.clear()
    with caplog.at_level(logging.INFO, "tilegpt"):
        assert open_store(config, BYTE).meta == first.meta
    assert time.perf_counter() - start < 1
    (line,) = caplog.messages
    assert re.fullmatch(r"token store checked: \d\d\.\d MB in 0\.\d\d s", line)
    assert (
        first.meta["train_tokens"] > 5_000_000
        and 0.02 < first.meta["val_tokens"] / first.meta["train_tokens"] < 0.1
    )
