"""A corpus as tokens on disk: written once, then checked and read by every run.

    <cache>/stdlib-1f0c.../  train.bin  val.bin                  flat tokens, <|endoftext|> after
                                                                 every document
                             meta.json                           counts, dtype, hashes; size and
                                                                 checksum of the files above

The folder is named by what it is built from: the corpus' identity, the tokenizer and the held-out
share. So a store is found without reading the corpus. Opening a store reads and checks every file.
If anything is wrong, the store is built again, with a warning that says what was wrong.

A store is written to unfinished-<uuid>/, synced to disk, and renamed when it is complete. So a
killed build is never taken for a store. If two processes build the same store, the first to finish
wins. The next process that opens any store here removes what killed builds left, unless a build is
running: a build holds a lock, which the system releases however the process ends.

Whole documents are held out, chosen by a hash of their path. A document stays in its half when
others join the corpus, and no validation text comes from a file that the model has partly read. The
exception is a corpus of one document, whose end is held out.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from config import DataConfig
from data.corpora import Corpus, subject
from data.interface import Tokenizer
from data.token_file import TokenFile, checksums, meta_checksum, sync
from data.tokenizer import token_dtype

log = logging.getLogger("tilegpt")

LAYOUT = 1  # raise it when the files change their meaning, so that older stores are not found
# this many are tokenized in parallel threads, because tiktoken releases the interpreter's lock
DOCUMENTS_AT_ONCE = 32
HALVES = ("train", "val")
FILES = ("train.bin", "val.bin")
# locks in the cache folder. Builds share the first; removing dead builds takes it exclusively, and
# so does putting a store in its place take the second
BUILDING, PUBLISHING = ".building.lock", ".publishing.lock"


class DamagedStore(ValueError):
    """A store that cannot be used, and why, in one line."""


class TokenStore(NamedTuple):
    train: TokenFile  # uint16 or uint32, as is val
    val: TokenFile
    meta: dict[str, Any]


def cache_folder(config: DataConfig) -> Path:
    """data.cache_dir, else TILEGPT_CACHE, else ~/.cache/tilegpt."""
    return Path(
        config.cache_dir or os.environ.get("TILEGPT_CACHE") or "~/.cache/tilegpt"
    ).expanduser()


def open_store(config: DataConfig, tokenizer: Tokenizer) -> TokenStore:
    """The corpus' tokens, built first if this machine has no store of them, or a damaged one."""
    corpus = Corpus(config)
    built_from = [LAYOUT, corpus.identity(), tokenizer.fingerprint, config.val_fraction]
    name = hashlib.sha256(json.dumps(built_from).encode()).hexdigest()[:16]
    folder = cache_folder(config) / f"{config.source}-{name}"
    remove_dead_builds(folder.parent)
    if os.path.exists(folder):  # unlike Path.exists(), it is False where the system cannot tell
        try:
            return load(folder)
        except DamagedStore as damage:
            log.warning(f"{damage}; it is built again")
    build(corpus, tokenizer, folder)
    return load(folder)


def load(folder: Path) -> TokenStore:
    """The store in that folder, after checking every byte of it.

    Raises DamagedStore if the store is not whole.
    """
    began = time.perf_counter()
    try:
        meta = read_meta(folder)
        verify(folder, meta["files"])
        halves = [TokenFile(folder / f"{half}.bin", meta["dtype"]) for half in HALVES]
    except OSError as error:
        raise DamagedStore(f"the token store {folder} cannot be read ({error})") from error
    except ValueError as error:
        raise DamagedStore(f"the token store {folder} is damaged: {error}") from error
    size = sum(entry["bytes"] for entry in meta["files"].values())
    log.info(f"token store checked: {size / 1e6:,.1f} MB in {time.perf_counter() - began:.2f} s")
    return TokenStore(*halves, meta)


def read_meta(folder: Path) -> dict[str, Any]:
    """The content of meta.json. Raises ValueError if it was altered or is of another store."""
    try:
        meta = json.loads((folder / "meta.json").read_bytes())
        checksum = meta_checksum(meta) if isinstance(meta, dict) else None
    except (ValueError, RecursionError) as error:
        raise ValueError("meta.json is not JSON") from error
    if checksum is None or "sha256" not in meta:
        raise ValueError("meta.json holds no checksum")
    if meta["sha256"] != checksum:
        raise ValueError("meta.json was altered")
    if meta["name"] != folder.name:
        raise ValueError(f"it is a copy of {meta['name']}")
    return meta


def verify(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """Raise ValueError, naming the first file that differs from what was written."""
    for name, expected in files.items():  # sizes first, because they take no time
        if (size := (folder / name).stat().st_size) != expected["bytes"]:
            raise ValueError(f"{name} has {size:,} bytes instead of {expected['bytes']:,}")
    for name, entry in checksums(folder, files).items():
        if entry != files[name]:
            raise ValueError(f"{name} was altered: its checksum differs")


def build(corpus: Corpus, tokenizer: Tokenizer, folder: Path) -> None:
    """Tokenize the corpus into `folder`, which appears complete or not at all."""
    cache, unfinished = folder.parent, unfinished_beside(folder)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with lock(cache / BUILDING, fcntl.LOCK_SH):
            unfinished.mkdir()
            try:
                write_store(corpus, tokenizer, unfinished, folder.name)
                publish(unfinished, folder)
            finally:
                remove(unfinished)
    # an error in reading the corpus is a ValueError already, so this one came from writing
    except OSError as error:
        raise ValueError(
            f"the token store cannot be written to {cache} ({error.strerror or error}); "
            "choose a folder with room and write permission: data.cache_dir=FOLDER, or "
            "TILEGPT_CACHE=FOLDER"
        ) from error


def publish(unfinished: Path, folder: Path) -> None:
    """Put a complete store in its place. It replaces a damaged store, but not a whole one."""
    for path in (*unfinished.iterdir(), unfinished):
        sync(path)
    with lock(folder.parent / PUBLISHING, fcntl.LOCK_EX):
        try:
            unfinished.rename(folder)
        except OSError:
            if not os.path.exists(folder):
                raise
            try:
                load(folder)  # if it is whole, another process was faster, and its store is as good
            except DamagedStore:
                damaged = unfinished_beside(folder)
                folder.rename(damaged)
                unfinished.rename(folder)
                remove(damaged)
        sync(folder.parent)


def unfinished_beside(folder: Path) -> Path:
    """A new name that no one takes for a store."""
    return folder.with_name(f"unfinished-{uuid.uuid4().hex}")


def remove_dead_builds(cache: Path) -> None:
    """Remove what killed builds left, if no process is building. Without file locks, do nothing."""
    # an error here must not stop a run: a store in a read-only folder is as good
    with contextlib.suppress(OSError):
        if not any(cache.glob("unfinished-*")):
            return
        with lock(cache / BUILDING, fcntl.LOCK_EX | fcntl.LOCK_NB) as is_locked:
            # listed again: a build may have ended before the lock was free
            for unfinished in cache.glob("unfinished-*") if is_locked else ():
                remove(unfinished)
                log.info(f"removed what a killed build had left in {unfinished}")


def remove(path: Path) -> None:
    """Remove a file, or a folder and everything in it, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def lock(path: Path, how: int) -> Iterator[bool]:
    """Lock a file inside a `with`, and say whether that worked: some file systems have no locks.

    The system releases the lock however the process ends.
    """
    try:
        file = path.open("a+")
    except PermissionError:
        # the file of another user in a shared folder: most file systems lock it opened for reading
        if not path.exists():
            raise
        file = path.open()
    with file:
        try:
            fcntl.flock(file, how)
            is_locked = True
        except OSError:
            is_locked = False
        yield is_locked


def write_store(corpus: Corpus, tokenizer: Tokenizer, folder: Path, name: str) -> None:
    """Write all files of the store called `name` into `folder`."""
    val_fraction = corpus.config.val_fraction
    dtype = token_dtype(tokenizer.vocab_size)
    digest = hashlib.sha256()
    lengths: dict[str, list[int]] = {half: [] for half in HALVES}  # tokens of each document
    lowest = (1.0, 0)  # hash and number of the training document that is next to be held out
    with open(folder / "train.bin", "wb") as train_file, open(folder / "val.bin", "wb") as val_file:
        for path, text, tokens in tokenized_documents(corpus, tokenizer):
            digest.update(f"{path}\0{text}\0".encode(errors="replace"))
            position = hash_of_path(path)
            # the first document is always trained on: every corpus needs a training half
            if position < val_fraction and lengths["train"]:
                half, file = "val", val_file
            else:
                half, file = "train", train_file
                lowest = min(lowest, (position, len(lengths["train"])))
            file.write(np.append(tokens, tokenizer.end_of_text).astype(dtype).tobytes())
            lengths[half].append(len(tokens) + 1)
    if not lengths["train"]:
        raise ValueError(
            f"{subject(corpus.config)} holds no text: it is empty, or every document in it is; "
            "name a source with text in it"
        )
    is_one_document = len(lengths["train"]) + len(lengths["val"]) == 1
    if not lengths["val"]:
        hold_out_one(folder, dtype, lengths, lowest[1], val_fraction)
    counts = {}
    for half in HALVES:
        counts[f"{half}_tokens"] = sum(lengths[half])
        counts[f"{half}_documents"] = len(lengths[half])
    meta = {
        "name": name,
        "corpus": digest.hexdigest(),
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "dtype": dtype.name,
        "held_out": "end" if is_one_document else "documents",
        **counts,
        "files": checksums(folder, FILES),
    }
    (folder / "meta.json").write_text(json.dumps(meta | {"sha256": meta_checksum(meta)}, indent=1))


def tokenized_documents(
    corpus: Corpus, tokenizer: Tokenizer
) -> Iterator[tuple[str, str, np.ndarray]]:
    """(path, text, tokens) of every document. On a terminal it shows a progress bar."""
    from tqdm import tqdm

    stream = corpus.documents().iter(batch_size=DOCUMENTS_AT_ONCE)
    progress = tqdm(
        total=corpus.max_documents(),
        desc=f"tokenizing {corpus.config.source}",
        unit=" documents",
        disable=None,
    )
    with ThreadPoolExecutor() as threads, progress:
        for rows in stream:
            tokens = threads.map(tokenizer.encode, rows["text"])
            for document in zip(rows["path"], rows["text"], tokens, strict=True):
                yield document
                progress.update()


def hold_out_one(
    folder: Path, dtype: np.dtype, lengths: dict[str, list[int]], document: int, val_fraction: float
) -> None:
    """Hold out the training document of this number, or the end of the only document.

    For a corpus so small that no document's hash is below val_fraction.
    """
    tokens = np.fromfile(folder / "train.bin", dtype)
    if len(lengths["train"]) > 1:
        start = sum(lengths["train"][:document])
        stop = start + lengths["train"].pop(document)
    else:
        stop = len(tokens)
        start = stop - max(1, round(stop * val_fraction))
        lengths["train"] = [start]
    lengths["val"] = [stop - start]
    tokens[start:stop].tofile(folder / "val.bin")
    np.delete(tokens, slice(start, stop)).tofile(folder / "train.bin")


def hash_of_path(path: str) -> float:
    """A hash of a document's path, uniform in [0, 1)."""
    return int.from_bytes(hashlib.sha256(path.encode(errors="replace")).digest()[:6]) / 2**48
