"""A corpus as tokens on disk: written once, memory-mapped by every run after.

    <cache>/stdlib-1f0c.../  train.bin  val.bin                  flat tokens, <|endoftext|> after every document
                             train_offsets.npy  val_offsets.npy  int64: document d is tokens[offsets[d]:offsets[d + 1]]
                             meta.json                           counts, dtype, hashes

The folder is named by what it is built from (the corpus' identity, the tokenizer, the held-out share), so a store is found
without reading the corpus. It is written under another name and renamed when complete: a killed build is never taken for a
store, and of two processes that build the same one the first to finish wins.

Held out are whole documents, chosen by a hash of their path: a document stays on its side when others join the corpus, and no
validation loss comes from the rest of a file the model has read. A corpus of one document is the exception: its end is held out.
"""

import hashlib
import json
import os
import shutil
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
from data.tokenizer import token_dtype

LAYOUT = 1  # to be raised when the files change their meaning: older stores are then not found
DOCUMENTS_AT_ONCE = 32  # tiktoken works outside the interpreter's lock: threads tokenize these side by side


@dataclass(frozen=True)
class Split:
    tokens: np.ndarray  # (T,) uint16 or uint32, memory-mapped
    offsets: np.ndarray  # (documents + 1,) int64


@dataclass(frozen=True)
class TokenStore:
    train: Split
    val: Split
    meta: dict[str, Any]


def cache_folder(config: DataConfig) -> Path:
    """data.cache_dir, else TILEGPT_CACHE, else ~/.cache/tilegpt."""
    return Path(config.cache_dir or os.environ.get("TILEGPT_CACHE") or "~/.cache/tilegpt").expanduser()


def open_store(config: DataConfig, tokenizer: Tokenizer) -> TokenStore:
    """The corpus' tokens, built now if this machine does not have them yet."""
    built_from = json.dumps([LAYOUT, corpora.identity(config), tokenizer.fingerprint, config.val_fraction])
    folder = cache_folder(config) / f"{config.source}-{hashlib.sha256(built_from.encode()).hexdigest()[:16]}"
    store = load(folder)
    if store is None:
        build(config, tokenizer, folder)
        store = load(folder)
        assert store is not None, f"{folder} was built and cannot be read"
    return store


def load(folder: Path) -> TokenStore | None:
    """The store in that folder; None where there is none, or where a file is missing or not as long as it was written."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        return TokenStore(*(load_split(folder, name, meta) for name in ("train", "val")), meta)
    except (OSError, ValueError, KeyError):
        return None


def load_split(folder: Path, name: str, meta: dict[str, Any]) -> Split:
    tokens = np.memmap(folder / f"{name}.bin", dtype=meta["dtype"], mode="r")
    offsets = np.load(folder / f"{name}_offsets.npy", mmap_mode="r")
    if len(tokens) != meta[f"{name}_tokens"]:
        raise ValueError(f"{folder} is damaged")
    return Split(tokens, offsets)


def build(config: DataConfig, tokenizer: Tokenizer, folder: Path) -> None:
    """Tokenize the corpus into `folder`, which appears complete or not at all."""
    unfinished = folder.with_name(f"unfinished-{uuid.uuid4().hex}")
    with writing_to(folder.parent):
        unfinished.mkdir(parents=True)
        try:
            write_store(config, tokenizer, unfinished)
            publish(unfinished, folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def publish(unfinished: Path, folder: Path) -> None:
    if load(folder) is None:  # a damaged store makes room
        shutil.rmtree(folder, ignore_errors=True)
    try:
        unfinished.rename(folder)
    except OSError:
        if load(folder) is None:  # otherwise another process was faster: its store is as good
            raise


def write_store(config: DataConfig, tokenizer: Tokenizer, folder: Path) -> None:
    """All files of a store."""
    dtype = token_dtype(tokenizer.vocab_size)
    corpus = hashlib.sha256()
    lengths: dict[str, list[int]] = {"train": [], "val": []}
    lowest = (1.0, 0)  # hash and number of the training document that is next in line to be held out
    with open(folder / "train.bin", "wb") as train_file, open(folder / "val.bin", "wb") as val_file:
        for path, text, tokens in tokenized_documents(config, tokenizer):
            corpus.update(f"{path}\0{text}\0".encode(errors="replace"))
            position = hash_of_path(path)
            # the first document is always trained on: there is no corpus without a training half
            if position < config.val_fraction and lengths["train"]:
                name, file = "val", val_file
            else:
                name, file = "train", train_file
                lowest = min(lowest, (position, len(lengths["train"])))
            file.write(tokens.astype(dtype).tobytes() + dtype.type(tokenizer.end_of_text).tobytes())
            lengths[name].append(len(tokens) + 1)
    if not lengths["train"]:
        raise ValueError(f"{corpora.subject(config)} holds no text: it is empty, or every document in it is; name a source with text in it")
    held_out = "documents" if len(lengths["train"]) + len(lengths["val"]) > 1 else "end"
    if not lengths["val"]:
        hold_out_one(folder, dtype, lengths, lowest[1], config.val_fraction)
    for name in lengths:
        np.save(folder / f"{name}_offsets.npy", np.cumsum([0, *lengths[name]], dtype=np.int64))
    meta = {
        "corpus": corpus.hexdigest(),
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "dtype": dtype.name,
        "held_out": held_out,  # whole documents, or the end of the only one
        "train_tokens": sum(lengths["train"]),
        "train_documents": len(lengths["train"]),
        "val_tokens": sum(lengths["val"]),
        "val_documents": len(lengths["val"]),
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))


def tokenized_documents(config: DataConfig, tokenizer: Tokenizer) -> Iterator[tuple[str, str, np.ndarray]]:
    """(path, text, tokens) of every document, under a progress bar that is silent where nobody watches."""
    from tqdm import tqdm

    stream = corpora.documents(config).iter(batch_size=DOCUMENTS_AT_ONCE)
    progress = tqdm(total=corpora.count_documents(config), desc=f"tokenizing {config.source}", unit=" documents", disable=None)
    with ThreadPoolExecutor() as threads, progress:
        for rows in stream:
            for document in zip(rows["path"], rows["text"], threads.map(tokenizer.encode, rows["text"]), strict=True):
                yield document
                progress.update()


def hold_out_one(folder: Path, dtype: np.dtype, lengths: dict[str, list[int]], document: int, val_fraction: float) -> None:
    """Give a corpus too small for its hashes a held-out half: that document, or the end of the only one."""
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
    """Say what to do about a full or read-only folder; what goes wrong with reading a corpus is a ValueError already."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"the token store cannot be written to {folder} ({error.strerror or error}); "
            "choose a folder with room and write permission: data.cache_dir=FOLDER, or TILEGPT_CACHE=FOLDER"
        ) from error
