"""A corpus as tokens on disk: written once, checked and read by every run after.

    <cache>/stdlib-1f0c.../  train.bin  val.bin                  flat tokens, <|endoftext|> after
                             every document
                             train_offsets.npy  val_offsets.npy  int64: document d is
                                                tokens[offsets[d]:offsets[d + 1]]
                             meta.json                           counts, dtype, hashes; size and
                             checksum of the files above

The folder is named by what it is built from (the corpus' identity, the tokenizer, the held-out
share), so a store is found without reading the corpus. Every file is read and checked when a store
is opened. A store with anything wrong is built again, with a warning that says what was wrong.

A store is written to unfinished-<uuid>/, pushed to the disk, and renamed when complete. So a killed
build is never taken for a store. If two processes build the same store, the first to finish wins.
The next process that opens any store here removes what killed builds left, unless somebody builds:
a build holds a lock, which the system releases however the process ends.

Held out are whole documents, chosen by a hash of their path: a document stays on its side when
others join the corpus, and no validation loss comes from the rest of a file the model has read. A
corpus of one document is the exception: its end is held out.
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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from config import DataConfig
from data import corpora
from data.interface import Tokenizer
from data.token_file import TokenFile, checksums, sync
from data.tokenizer import token_dtype

log = logging.getLogger("tilegpt")

LAYOUT = 1  # to be raised when the files change their meaning: older stores are then not found
DOCUMENTS_AT_ONCE = (
    32  # tiktoken works outside the interpreter's lock: threads tokenize these side by side
)
HALVES = ("train", "val")
FILES = ("train.bin", "val.bin", "train_offsets.npy", "val_offsets.npy")
# in the cache folder: every build holds the first together with the others, and alone what removes
# dead builds; the second is held alone while a store is put in its place
BUILDING, PUBLISHING = ".building.lock", ".publishing.lock"


class DamagedStore(ValueError):
    """A store that cannot be used, and why, in one line."""


@dataclass(frozen=True)
class Split:
    tokens: TokenFile  # T tokens of uint16 or uint32
    offsets: np.ndarray  # (documents + 1,) int64


@dataclass(frozen=True)
class TokenStore:
    train: Split
    val: Split
    meta: dict[str, Any]


def cache_folder(config: DataConfig) -> Path:
    """data.cache_dir, else TILEGPT_CACHE, else ~/.cache/tilegpt."""
    return Path(
        config.cache_dir or os.environ.get("TILEGPT_CACHE") or "~/.cache/tilegpt"
    ).expanduser()


def open_store(config: DataConfig, tokenizer: Tokenizer) -> TokenStore:
    """The corpus' tokens, built now if this machine does not have them yet, or not whole."""
    built_from = json.dumps(
        [LAYOUT, corpora.identity(config), tokenizer.fingerprint, config.val_fraction]
    )
    folder = (
        cache_folder(config)
        / f"{config.source}-{hashlib.sha256(built_from.encode()).hexdigest()[:16]}"
    )
    remove_dead_builds(folder.parent)
    try:
        store = load(folder)
    except DamagedStore as damage:
        log.warning(f"{damage}; it is built again")
        store = None
    if store is None:
        build(config, tokenizer, folder)
        store = load(folder)
        assert store is not None, f"{folder} was built and is not there"
    return store


def load(folder: Path) -> TokenStore | None:
    """The store in that folder, after every byte of it has been checked; None where there is none,
    DamagedStore where it is not whole.
    """
    if not os.path.exists(folder):
        return None
    began = time.perf_counter()
    try:
        meta = read_meta(folder)
        verify(folder, meta["files"])
        halves = [
            Split(
                TokenFile(folder / f"{name}.bin", meta["dtype"]),
                np.load(folder / f"{name}_offsets.npy", mmap_mode="r"),
            )
            for name in HALVES
        ]
    except OSError as error:
        raise DamagedStore(f"the token store {folder} cannot be read ({error})") from error
    except ValueError as error:
        raise DamagedStore(f"the token store {folder} is damaged: {error}") from error
    size = sum(entry["bytes"] for entry in meta["files"].values())
    log.info(f"token store checked: {size / 1e6:,.1f} MB in {time.perf_counter() - began:.2f} s")
    return TokenStore(*halves, meta)


def read_meta(folder: Path) -> dict[str, Any]:
    """What meta.json says, which is just what was written there for the store of this name;
    ValueError otherwise.
    """
    try:
        meta = json.loads((folder / "meta.json").read_bytes())
        found = meta_checksum(meta) if isinstance(meta, dict) else None
    except (ValueError, RecursionError) as error:
        raise ValueError("meta.json is not JSON") from error
    if found is None or "sha256" not in meta:
        raise ValueError("meta.json holds no checksum")
    if meta["sha256"] != found:
        raise ValueError("meta.json was altered")
    if meta["name"] != folder.name:
        raise ValueError(f"it is a copy of {meta['name']}")
    return meta


def meta_checksum(meta: dict[str, Any]) -> str:
    """Of all that meta.json holds besides."""
    content = {key: value for key, value in meta.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def verify(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """ValueError names the first file that is not what was written."""
    for name, expected in files.items():  # first, because it takes no time
        if (size := (folder / name).stat().st_size) != expected["bytes"]:
            raise ValueError(f"{name} has {size:,} bytes instead of {expected['bytes']:,}")
    for name, found in checksums(folder, files).items():
        if found != files[name]:
            raise ValueError(f"{name} was altered: its checksum is another")


def build(config: DataConfig, tokenizer: Tokenizer, folder: Path) -> None:
    """Tokenize the corpus into `folder`, which appears complete or not at all."""
    unfinished = unfinished_beside(folder)
    with writing_to(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with lock(folder.parent / BUILDING, fcntl.LOCK_SH):
            unfinished.mkdir()
            try:
                write_store(config, tokenizer, unfinished, folder.name)
                publish(unfinished, folder)
            finally:
                remove(unfinished)


def publish(unfinished: Path, folder: Path) -> None:
    """Put a complete store in its place: a whole one that is there already stays, a damaged one
    makes room.
    """
    for path in (*unfinished.iterdir(), unfinished):
        sync(path)
    with lock(folder.parent / PUBLISHING, fcntl.LOCK_EX):
        try:
            unfinished.rename(folder)
        except OSError as error:
            damaged = unfinished_beside(folder)
            try:
                if (
                    load(folder) is None
                ):  # otherwise another process was faster: its store is as good
                    raise error
            except DamagedStore:
                folder.rename(damaged)
                unfinished.rename(folder)
                remove(damaged)
        sync(folder.parent)


def unfinished_beside(folder: Path) -> Path:
    """A new name for what is not to be found as a store."""
    return folder.with_name(f"unfinished-{uuid.uuid4().hex}")


def remove_dead_builds(cache: Path) -> None:
    """Remove what killed builds have left, where no process builds and the file system can tell."""
    # a store in a folder that cannot be written to is as good: nothing here may stop a run
    with contextlib.suppress(OSError):
        if not any(cache.glob("unfinished-*")):
            return
        with lock(cache / BUILDING, fcntl.LOCK_EX | fcntl.LOCK_NB) as locked:
            # looked up anew: a build may have come to its end before the lock was free
            for unfinished in cache.glob("unfinished-*") if locked else ():
                remove(unfinished)
                log.info(f"removed what a killed build had left in {unfinished}")


def remove(path: Path) -> None:
    """A folder and all in it, or a file, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def lock(path: Path, how: int) -> Iterator[bool]:
    """Whether the file is locked in this block. The system unlocks it however the process ends;
    some file systems have no locks.
    """
    try:
        file = path.open("a+")
    except (
        PermissionError
    ):  # another user's, in a folder that several share: enough for most file systems
        if not path.exists():
            raise
        file = path.open()
    with file:
        try:
            fcntl.flock(file, how)
            locked = True
        except OSError:
            locked = False
        yield locked


def write_store(config: DataConfig, tokenizer: Tokenizer, folder: Path, name: str) -> None:
    """All files of the store of that name."""
    dtype = token_dtype(tokenizer.vocab_size)
    corpus = hashlib.sha256()
    lengths: dict[str, list[int]] = {half: [] for half in HALVES}
    lowest = (
        1.0,
        0,
    )  # hash and number of the training document that is next in line to be held out
    with open(folder / "train.bin", "wb") as train_file, open(folder / "val.bin", "wb") as val_file:
        for path, text, tokens in tokenized_documents(config, tokenizer):
            corpus.update(f"{path}\0{text}\0".encode(errors="replace"))
            position = hash_of_path(path)
            # the first document is always trained on: there is no corpus without a training half
            if position < config.val_fraction and lengths["train"]:
                half, file = "val", val_file
            else:
                half, file = "train", train_file
                lowest = min(lowest, (position, len(lengths["train"])))
            file.write(tokens.astype(dtype).tobytes() + dtype.type(tokenizer.end_of_text).tobytes())
            lengths[half].append(len(tokens) + 1)
    if not lengths["train"]:
        raise ValueError(
            f"{corpora.subject(config)} holds no text: it is empty, or every document in it is; "
            "name a source with text in it"
        )
    held_out = "documents" if len(lengths["train"]) + len(lengths["val"]) > 1 else "end"
    if not lengths["val"]:
        hold_out_one(folder, dtype, lengths, lowest[1], config.val_fraction)
    for half in HALVES:
        np.save(folder / f"{half}_offsets.npy", np.cumsum([0, *lengths[half]], dtype=np.int64))
    meta = {
        "name": name,
        "corpus": corpus.hexdigest(),
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "dtype": dtype.name,
        "held_out": held_out,  # whole documents, or the end of the only one
        "train_tokens": sum(lengths["train"]),
        "train_documents": len(lengths["train"]),
        "val_tokens": sum(lengths["val"]),
        "val_documents": len(lengths["val"]),
        "files": checksums(folder, FILES),
    }
    (folder / "meta.json").write_text(json.dumps(meta | {"sha256": meta_checksum(meta)}, indent=1))


def tokenized_documents(
    config: DataConfig, tokenizer: Tokenizer
) -> Iterator[tuple[str, str, np.ndarray]]:
    """(path, text, tokens) of every document, under a progress bar that is silent where nobody
    watches.
    """
    from tqdm import tqdm

    stream = corpora.documents(config).iter(batch_size=DOCUMENTS_AT_ONCE)
    progress = tqdm(
        total=corpora.count_documents(config),
        desc=f"tokenizing {config.source}",
        unit=" documents",
        disable=None,
    )
    with ThreadPoolExecutor() as threads, progress:
        for rows in stream:
            for document in zip(
                rows["path"], rows["text"], threads.map(tokenizer.encode, rows["text"]), strict=True
            ):
                yield document
                progress.update()


def hold_out_one(
    folder: Path, dtype: np.dtype, lengths: dict[str, list[int]], document: int, val_fraction: float
) -> None:
    """Give a corpus too small for its hashes a held-out half: that document, or the end of the only
    one.
    """
    tokens = np.fromfile(folder / "train.bin", dtype)
    if len(lengths["train"]) > 1:
        start = sum(lengths["train"][:document])
        lengths["val"] = [lengths["train"].pop(document)]
    else:
        held_out = max(1, round(len(tokens) * val_fraction))
        start = len(tokens) - held_out
        lengths.update(train=[start], val=[held_out])
    stop = start + lengths["val"][0]
    tokens[start:stop].tofile(folder / "val.bin")
    np.concatenate([tokens[:start], tokens[stop:]]).tofile(folder / "train.bin")


def hash_of_path(path: str) -> float:
    """Uniform in [0, 1)."""
    return int.from_bytes(hashlib.sha256(path.encode(errors="replace")).digest()[:6]) / 2**48


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Say what to do about a full or read-only folder; what goes wrong with reading a corpus is a
    ValueError already.
    """
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"the token store cannot be written to {folder} ({error.strerror or error}); "
            "choose a folder with room and write permission: data.cache_dir=FOLDER, or "
            "TILEGPT_CACHE=FOLDER"
        ) from error
