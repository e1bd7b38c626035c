"""A corpus as tokens on disk: written once, then read by every run.

    <cache>/stdlib-1f0c.../  train.bin  val.bin     the two halves (halves.py)
                             meta.json              documents of each half, hash of the corpus;
                                                    size, time and SHA-256 of both files

The folder is named by what it is built from, so a store is found without reading the corpus. A file
whose size or time stamp changed is read and compared with its checksum. A store that is not whole
is built again, with a warning that says what was wrong.

The files are written to a temporary folder, synced to disk and renamed, meta.json last. So a killed
build is never taken for a store; its stdlib-1f0c....unfinished-... may be deleted. If two processes
build the same store, both write the same bytes. Nothing else in the cache folder is touched.
"""

import hashlib
import json
import logging
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from config import DataConfig
from data.corpora import Corpus
from data.halves import write_halves
from data.token_file import TokenFile, check, entry, meta_checksum, sync
from data.tokenizer import Tokenizer

log = logging.getLogger("tilegpt")

LAYOUT = 4  # raise it when the files change their meaning, so that older stores are not found
FILES = ("train.bin", "val.bin")
META = "meta.json"


class TokenStore(NamedTuple):
    train: TokenFile  # uint16 or uint32, as is val
    val: TokenFile
    meta: dict[str, Any]


def cache_folder() -> Path:
    """TILEGPT_CACHE, else ~/.cache/tilegpt."""
    return Path(os.environ.get("TILEGPT_CACHE") or "~/.cache/tilegpt").expanduser()


def open_store(config: DataConfig, tokenizer: Tokenizer) -> TokenStore:
    """The corpus' tokens, built first if this machine has no store of them, or a damaged one."""
    corpus = Corpus(config)
    built_from = [LAYOUT, corpus.identity(), tokenizer.fingerprint, config.val_fraction]
    name = hashlib.sha256(json.dumps(built_from).encode()).hexdigest()[:16]
    folder = cache_folder() / f"{config.source}-{name}"
    if os.path.exists(folder / META):  # Path.exists() raises an error where it cannot tell
        try:
            return load(folder)
        # another OSError, such as too many open files, says nothing about the store
        except (FileNotFoundError, ValueError, RecursionError) as damage:
            log.warning(f"the token store {folder} is damaged: {damage}; it is built again")
    try:
        build(corpus, tokenizer, folder)
    # an error in reading the corpus is a ValueError already, so this one came from writing
    except OSError as error:
        raise ValueError(
            f"the token store cannot be written to {folder.parent} ({error}); set TILEGPT_CACHE to "
            "a folder with room and write permission"
        ) from error
    return load(folder)


def load(folder: Path) -> TokenStore:
    """The store in that folder. Raises ValueError or FileNotFoundError if it is not whole."""
    meta = json.loads((folder / META).read_bytes())
    if not isinstance(meta, dict) or meta.get("sha256") != meta_checksum(meta):
        raise ValueError(f"{META} was altered")
    for name in FILES:
        check(folder / name, meta["files"][name])
    train, val = (TokenFile(folder / name, meta["dtype"]) for name in FILES)
    return TokenStore(train, val, meta)


def build(corpus: Corpus, tokenizer: Tokenizer, folder: Path) -> None:
    log.info(f"tokenising the data into {folder}")  # this can take minutes
    cache = folder.parent
    cache.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f"{folder.name}.unfinished-", dir=cache) as temporary:
        unfinished = Path(temporary)
        meta = write_halves(corpus, tokenizer, unfinished)
        meta["files"] = {name: entry(unfinished / name) for name in FILES}
        meta["sha256"] = meta_checksum(meta)
        (unfinished / META).write_text(json.dumps(meta, indent=1))
        for file in unfinished.iterdir():
            sync(file)
        folder.mkdir(exist_ok=True)
        for name in (*FILES, META):
            (unfinished / name).replace(folder / name)
