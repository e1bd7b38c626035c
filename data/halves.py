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

from data.corpora import Corpus, subject
from data.interface import Tokenizer
from data.tokenizer import token_dtype

# this many are tokenized in parallel threads, because tiktoken releases the interpreter's lock
DOCUMENTS_AT_ONCE = 32


def write_halves(corpus: Corpus, tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Write both files; return what a store says of them. Raises ValueError for no text."""
    val_fraction = corpus.config.val_fraction
    dtype = token_dtype(tokenizer.vocab_size)
    digest = hashlib.sha256()
    lengths: dict[str, list[int]] = {"train": [], "val": []}  # tokens of each document
    hashes = []  # of the training documents' paths
    end_of_text = np.array([tokenizer.end_of_text], dtype).tobytes()
    with open(folder / "train.bin", "wb") as train_file, open(folder / "val.bin", "wb") as val_file:
        for path, text, tokens in tokenized_documents(corpus, tokenizer):
            for part in (path, text):
                digest.update(part.encode(errors="replace"))
                digest.update(b"\0")
            # the first document is always trained on: every corpus needs a training half
            if hashes and hash_of_path(path) < val_fraction:
                half, file = "val", val_file
            else:
                half, file = "train", train_file
                hashes.append(hash_of_path(path))
            file.write(tokens.astype(dtype, copy=False))
            file.write(end_of_text)
            lengths[half].append(len(tokens) + 1)
    if not lengths["train"]:
        raise ValueError(
            f"{subject(corpus.config)} holds no text: it is empty, or every document in it is; "
            "name a source with text in it"
        )
    is_one_document = len(lengths["train"]) + len(lengths["val"]) == 1
    if not lengths["val"]:
        hold_out_one(folder, dtype, lengths, hashes.index(min(hashes)), val_fraction)
    return {
        "corpus": digest.hexdigest(),
        "tokenizer": tokenizer.fingerprint,
        "dtype": dtype.name,
        "held_out": "end" if is_one_document else "documents",
        **{f"{half}_tokens": sum(of_half) for half, of_half in lengths.items()},
        **{f"{half}_documents": len(of_half) for half, of_half in lengths.items()},
    }


def tokenized_documents(
    corpus: Corpus, tokenizer: Tokenizer
) -> Iterator[tuple[str, str, np.ndarray]]:
    """(path, text, tokens) of every document. On a terminal it shows a progress bar."""
    from tqdm import tqdm

    description = f"tokenizing {corpus.config.source}"
    documents = tqdm(corpus.documents(), desc=description, unit=" documents", disable=None)
    with ThreadPoolExecutor() as threads, documents:
        stream = iter(documents)
        while some := list(itertools.islice(stream, DOCUMENTS_AT_ONCE)):
            tokens = threads.map(tokenizer.encode, (document.text for document in some))
            for document, encoded in zip(some, tokens, strict=True):
                yield *document, encoded


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
