"""A corpus becomes two files of tokens: train.bin and val.bin, flat, an end of text after each.

Whole documents are held out, chosen by a hash of their path. A document stays in its half when
others join the corpus, and no validation text comes from a file that the model has partly read. The
exception is a corpus of one document, whose end is held out.
"""

import hashlib
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from data.corpora import Corpus, Document, subject
from data.tokenizer import Tokenizer, token_dtype

# this many are tokenized in parallel threads, because tiktoken releases the interpreter's lock
DOCUMENTS_AT_ONCE = 32


def write_halves(corpus: Corpus, tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Write both files; return what a store says of them. Raises ValueError for no text."""
    val_fraction = corpus.config.val_fraction
    dtype = token_dtype(tokenizer.vocab_size)
    end_of_text = np.array([tokenizer.end_of_text], dtype)
    train_file, val_file = folder / "train.bin", folder / "val.bin"
    documents, digest = {"train": 0, "val": 0}, hashlib.sha256()
    lowest = (1.0, 0, 0)  # the training document that is next to be held out: hash, and its bytes
    with open(train_file, "wb") as train, open(val_file, "wb") as val:
        for (path, text), tokens in tokenized(corpus, tokenizer):
            digest.update(f"{path}\0{text}\0".encode(errors="replace"))
            position = hash_of_path(path)
            # the first document is always trained on: every corpus needs a training half
            is_held_out = position < val_fraction and documents["train"] > 0
            documents["val" if is_held_out else "train"] += 1
            file = val if is_held_out else train
            start = file.tell()
            file.write(tokens)
            file.write(end_of_text)
            if not is_held_out:
                lowest = min(lowest, (position, start, file.tell()))
    if not documents["train"]:
        raise ValueError(
            f"{subject(corpus.config)} holds no text: it is empty, or every document in it is; "
            "name a source with text in it"
        )
    # a corpus so small that no hash is below val_fraction
    if not documents["val"]:
        tokens = np.fromfile(train_file, dtype)
        start, stop = (place // dtype.itemsize for place in lowest[1:])
        if documents["train"] == 1:
            start = stop - max(1, round(stop * val_fraction))
        tokens[start:stop].tofile(val_file)
        np.delete(tokens, slice(start, stop)).tofile(train_file)
        documents = {"train": max(1, documents["train"] - 1), "val": 1}
    return {"corpus": digest.hexdigest(), "dtype": dtype.name, "documents": documents}


def tokenized(corpus: Corpus, tokenizer: Tokenizer) -> Iterator[tuple[Document, np.ndarray]]:
    """Every document and its tokens. On a terminal it shows a progress bar."""
    from tqdm import tqdm

    description = f"tokenizing {corpus.config.source}"
    stream = iter(tqdm(corpus.documents(), description, unit=" documents", disable=None))
    with ThreadPoolExecutor() as threads:
        while some := list(itertools.islice(stream, DOCUMENTS_AT_ONCE)):
            texts = (document.text for document in some)
            yield from zip(some, threads.map(tokenizer.encode, texts), strict=True)


def hash_of_path(path: str) -> float:
    """A hash of a document's path, uniform in [0, 1)."""
    return int.from_bytes(hashlib.sha256(path.encode(errors="replace")).digest()[:6]) / 2**48
