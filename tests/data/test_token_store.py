"""A store holds its corpus, is built once, and survives killed and rival builds.

A damaged store is never taken for a whole one.
"""

import os
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest

from config import DataConfig, TokenizerConfig
from data import build_tokenizer
from data.corpora import Corpus
from data.halves import hash_of_path
from data.token_store import cache_folder, open_store
from data.tokenizer import Tokenizer
from tests.processes import limited

BYTE = build_tokenizer(TokenizerConfig("byte"))


def corpus_of(folder, texts, **settings):
    """The settings for a folder of these texts: {name: text}."""
    (folder / "corpus").mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / "corpus" / name).write_text(text)
    return DataConfig(source="text", path=str(folder / "corpus"), **settings)


def tokens_of(half):
    return half.rows(np.array([0]), len(half))[0]


def texts_of(half):
    """The documents of a half, each of which has its end of text."""
    tokens = tokens_of(half)
    *pieces, rest = np.split(tokens, np.flatnonzero(tokens == BYTE.end_of_text) + 1)
    assert not len(rest)
    return [BYTE.decode(piece[:-1]) for piece in pieces]


def both_halves(config, tokenizer=BYTE):
    store = open_store(config, tokenizer)
    return [tokens_of(half).tolist() for half in (store.train, store.val)]


def stores():
    """The names in the cache folder."""
    return sorted(path.name for path in cache_folder().iterdir())


def built():
    """The folder of the only store, and when its tokens were written."""
    (name,) = stores()
    folder = cache_folder() / name
    return folder, (folder / "train.bin").stat().st_mtime_ns


# what a store holds


def test_both_halves_hold_the_corpus(config, capfd):
    """Without a terminal it is built in silence."""
    store = open_store(config, BYTE)
    expected = {"train": [], "val": []}
    for row in Corpus(config).documents():
        expected["val" if hash_of_path(row.path) < 0.2 else "train"].append(row.text)
    assert {"train": texts_of(store.train), "val": texts_of(store.val)} == expected
    assert len(expected["val"]) > 1
    assert store.meta["documents"] == {half: len(texts) for half, texts in expected.items()}
    assert capfd.readouterr() == ("", "")


def test_many_tokens_are_stored_in_32_bits(config):
    assert tokens_of(open_store(config, BYTE).train).dtype == np.uint16
    wide = Tokenizer(BYTE.encoding, "wide")
    wide.vocab_size, wide.end_of_text = 100_000, 99_999
    tokens = tokens_of(open_store(config, wide).train)
    assert tokens.dtype == np.uint32 and (tokens == 99_999).sum() > 40


def test_documents_are_held_out_whole_and_stay_there_when_others_join(config, tmp_path):
    before = texts_of(open_store(config, BYTE).val)
    config = corpus_of(tmp_path, {f"more{i}.txt": f"more {i}" for i in range(40)}, val_fraction=0.2)
    after = open_store(config, BYTE)
    assert set(before) < set(texts_of(after.val))
    assert not set(texts_of(after.train)) & set(texts_of(after.val))
    config.val_fraction = 0.4
    assert set(texts_of(after.val)) < set(texts_of(open_store(config, BYTE).val))


def test_some_document_is_held_out_of_a_small_corpus(tmp_path):
    """By hashes alone, three in four corpora of five documents would have no held-out half."""
    texts = {f"{number}.txt": f"text {number}" for number in range(5)}
    store = open_store(corpus_of(tmp_path, texts, val_fraction=1e-6), BYTE)
    held_out = texts.pop(min(texts, key=hash_of_path))
    assert texts_of(store.val) == [held_out]
    assert texts_of(store.train) == list(texts.values())
    assert store.meta["documents"] == {"train": 4, "val": 1}


@pytest.mark.parametrize("by_hash", [False, True], ids=["trained-on", "held-out-by-hash"])
def test_the_end_of_an_only_document_is_held_out(tmp_path, by_hash):
    names = (f"{number}.txt" for number in range(1000))
    name = next(name for name in names if (hash_of_path(name) < 0.1) == by_hash)
    text = "0123456789" * 100
    train, val = both_halves(corpus_of(tmp_path, {name: text}, val_fraction=0.1))
    assert (len(train), len(val)) == (901, 100)
    assert BYTE.decode(train + val[:-1]) == text and val[-1] == BYTE.end_of_text


# when it is built


def test_built_anew_only_when_something_it_is_made_of_changes(config, tmp_path):
    open_store(config, BYTE)
    before = built()
    open_store(config, BYTE)
    assert built() == before
    (tmp_path / "corpus" / "03.txt").write_text("something else")
    open_store(config, BYTE)
    (tmp_path / "corpus" / "new.txt").write_text("new")
    open_store(config, BYTE)
    open_store(config, build_tokenizer(TokenizerConfig("bpe")))
    config.val_fraction = 0.3
    open_store(config, BYTE)
    assert len(stores()) == 5


def test_corpus_hash_is_of_the_texts_not_of_the_place(config, tmp_path):
    here = open_store(config, BYTE).meta["corpus"]
    moved = (tmp_path / "corpus").rename(tmp_path / "moved")
    config.path = str(moved)
    assert open_store(config, BYTE).meta["corpus"] == here
    (moved / "03.txt").rename(moved / "03b.txt")
    assert open_store(config, BYTE).meta["corpus"] != here


def test_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEGPT_CACHE", "~/elsewhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "elsewhere"
    monkeypatch.delenv("TILEGPT_CACHE")
    assert cache_folder() == tmp_path / ".cache/tilegpt"


# damage


def flip(file, position):
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


# what is done to the store's folder, and the file that the warning must name
DAMAGE = {
    "a-bit": (lambda folder: flip(folder / "train.bin", 1000), "train.bin"),
    "truncated-held-out": (lambda folder: os.truncate(folder / "val.bin", 100), "val.bin"),
    "no-tokens": (lambda folder: (folder / "train.bin").unlink(), "train.bin"),
    "other-counts": (lambda folder: flip(folder / "meta.json", 60), "meta.json"),
    "a-list": (lambda folder: (folder / "meta.json").write_text("[]"), "meta.json"),
    "deep": (lambda folder: (folder / "meta.json").write_text("[" * 100_000), "recursion"),
    "half-a-meta": (lambda folder: os.truncate(folder / "meta.json", 20), "char"),
}


@pytest.mark.parametrize(("damage", "named"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_store_is_built_again(config, caplog, damage, named):
    """A regression test: a run trained on zeros, or validated on its training data."""
    before = both_halves(config)
    folder, _ = built()
    damage(folder)
    assert both_halves(config) == before
    assert stores() == [folder.name]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert str(folder) in warning and named in warning and "\n" not in warning


def test_a_file_is_read_again_only_if_its_size_or_time_stamp_changed(config, caplog):
    """A copy without time stamps is not built again; a change that keeps both is not seen."""
    before = both_halves(config)
    folder, written = built()
    os.utime(folder / "train.bin", ns=(1, 1))
    assert both_halves(config) == before
    assert built() == (folder, 1)
    flip(folder / "train.bin", 1000)
    os.utime(folder / "train.bin", ns=(written, written))
    assert both_halves(config) != before
    os.utime(folder / "train.bin", ns=(1, 1))
    assert both_halves(config) == before
    assert sum("train.bin" in line for line in caplog.messages) == 1


def test_too_many_open_files_are_no_damage(config, caplog):
    """A regression test: a long sweep took it for damage, and built its store again."""
    config.path += "/59.txt"
    open_store(config, BYTE)
    before = built()
    free = os.dup(0)
    os.close(free)
    with (
        limited(resource.RLIMIT_NOFILE, free),
        pytest.raises(OSError, match="Too many open files.*meta.json"),
    ):
        open_store(config, BYTE)
    assert built() == before
    assert not [each for each in caplog.messages if "the token store" in each]


# builds that are killed, slow, or not alone


@pytest.mark.parametrize("renamed", range(3))
def test_a_build_that_ends_before_its_end_is_never_taken_for_a_store(config, monkeypatch, renamed):
    """Whichever of the three files have their name by then."""
    left = list(range(renamed))
    rename = Path.replace

    def ends(file, target):
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return rename(file, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "replace", ends)
        open_store(config, BYTE)
    assert len(texts_of(open_store(config, BYTE).train)) > 40
    assert len(stores()) == 1


def test_two_processes_may_build_at_once(config):
    """Another one builds the same store while this one reads its first text."""
    expected = both_halves(config)
    folder, _ = built()
    shutil.rmtree(folder)
    slower, others = build_tokenizer(TokenizerConfig("byte")), [BYTE]

    def encode(text):
        if others:
            open_store(config, others.pop())
        return BYTE.encode(text)

    slower.encode = encode
    assert both_halves(config, slower) == both_halves(config) == expected
    assert built()[0] == folder


# what a user reads


def test_a_full_disk_leaves_what_was_there(config):
    """A limit on file size stands in for a full disk: the same calls fail. The owner of a damaged
    store may know how to repair it.
    """
    open_store(config, BYTE)
    folder, _ = built()
    flip(folder / "train.bin", 7)
    content = {file: file.read_bytes() for file in folder.iterdir()}
    with (
        limited(resource.RLIMIT_FSIZE, 10_000),
        pytest.raises(ValueError, match=f"{cache_folder()}.*TILEGPT_CACHE"),
    ):
        open_store(config, BYTE)
    assert {file: file.read_bytes() for file in cache_folder().glob("*/*")} == content
    assert stores() == [folder.name]


def test_a_corpus_without_text(tmp_path):
    config = corpus_of(tmp_path, {"a.txt": "", "b.txt": ""})
    with pytest.raises(ValueError, match=f"data.path={config.path} "):
        open_store(config, BYTE)
    assert stores() == []
