"""Text to tokens and back: bytes, our own 8,192 byte pairs, or GPT-2's vocabulary.

"naïve"  ->  byte  110 97 195 175 118 101       one token a byte, 257 in all: nothing to train,
         nothing to download
         ->  bpe   about 4 bytes of source code a token; data/bpe_8192.tiktoken, made by
             lab/train_bpe.py
         ->  gpt2  for comparison with published GPT-2 losses; tiktoken downloads its vocabulary
             once
"""

import base64
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data.interface import Tokenizer
from data.network import answers

if TYPE_CHECKING:
    import tiktoken

END_OF_TEXT = "<|endoftext|>"
RANKS_FILE = Path(__file__).with_name("bpe_8192.tiktoken")

# a word with the space or the sign before it, up to three digits, a run of signs, a run of white
# space. There is no lookahead in it, so it splits in linear time, and an indented line costs one
# token for its line break and all of its indentation
PATTERN = r"[^\s\p{L}\p{N}]?\p{L}+| \p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"

GPT2_FILES = tuple(
    f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
    for name in ("vocab.bpe", "encoder.json")
)

# at most this many characters go to tiktoken at once: GPT-2's pattern looks ahead, and a million
# spaces before a word overflow its stack. The cut falls between a character and the white space
# after it, where every pattern here starts a new piece anyway; only a text without such a place is
# cut elsewhere
CHUNK = re.compile(r"(?s:.{1,65536})(?:\Z|(?<=\S)(?=[ \n]))|(?s:.{1,65536})")


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest type that tokens are stored in."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


class ByteTokenizer:
    """The 256 bytes of UTF-8, and one token for the end of a text."""

    name = "byte"
    vocab_size = 257
    end_of_text = 256
    fingerprint = "byte"

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(errors="replace"), dtype=np.uint8).astype(
            token_dtype(self.vocab_size)
        )

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        known = (token for token in np.asarray(tokens).tolist() if token <= self.end_of_text)
        return b"".join(
            END_OF_TEXT.encode() if token == self.end_of_text else bytes([token]) for token in known
        ).decode(errors="replace")


class BytePairTokenizer:
    """A tiktoken encoding with one special token, the end of text."""

    def __init__(self, encoding: "tiktoken.Encoding", fingerprint: str) -> None:
        self.encoding = encoding
        self.name = encoding.name
        self.vocab_size = encoding.n_vocab
        self.end_of_text = encoding.eot_token
        self.fingerprint = fingerprint

    def encode(self, text: str) -> np.ndarray:
        # encode_ordinary: encode() refuses a text in which <|endoftext|> is written out
        chunks = [self.encoding.encode_ordinary(chunk) for chunk in CHUNK.findall(text)]
        return np.concatenate(
            [np.array(chunk, dtype=token_dtype(self.vocab_size)) for chunk in chunks or [[]]]
        )

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        return self.encoding.decode(
            [token for token in np.asarray(tokens).tolist() if token < self.encoding.n_vocab]
        )


def read_ranks(file: Path) -> dict[bytes, int]:
    """Token -> rank, from lines of `base64 rank`; ValueError where the file holds anything else.

    tiktoken's own reader keeps a copy by file name and goes on returning it after the file has
    changed.
    """
    way_out = "restore it from the repository, or learn another with python -m lab.train_bpe"
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(
            f"the vocabulary {file} cannot be read ({error.strerror}); {way_out}"
        ) from error
    ranks = {}
    for number, line in enumerate(lines, start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise ValueError(
                f"the vocabulary {file} is damaged: line {number} is not a token in base64 and "
                f"its rank; {way_out}"
            ) from error
    # tiktoken checks neither and fails much later
    if sorted(ranks.values()) != list(range(len(ranks))) or any(
        bytes([value]) not in ranks for value in range(256)
    ):
        raise ValueError(
            f"the vocabulary {file} is damaged: ranks must run from 0 without a gap and hold all "
            f"256 bytes; {way_out}"
        )
    return ranks


def bpe(ranks_file: Path = RANKS_FILE) -> BytePairTokenizer:
    """The project's own vocabulary; the end of text is the rank after the last."""
    import tiktoken

    ranks = read_ranks(ranks_file)
    encoding = tiktoken.Encoding(
        "bpe", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: len(ranks)}
    )
    learned = hashlib.sha256(PATTERN.encode() + ranks_file.read_bytes()).hexdigest()
    return BytePairTokenizer(encoding, f"bpe-{learned[:16]}")


def gpt2_is_cached() -> bool:
    """Whether tiktoken would find GPT-2's two files on this machine: it names a cached file by the
    SHA-1 of its address.
    """
    default = os.path.join(tempfile.gettempdir(), "data-gym-cache")
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR", default))
    return bool(folder) and all(
        Path(folder, hashlib.sha1(url.encode()).hexdigest()).is_file() for url in GPT2_FILES
    )


def gpt2() -> BytePairTokenizer:
    """GPT-2's vocabulary, from tiktoken's cache or, where the network answers, from its server."""
    import tiktoken

    way_out = (
        "use tokenizer=bpe or tokenizer=byte, which need no network, "
        "or set TIKTOKEN_CACHE_DIR to a folder in which tiktoken has already stored it"
    )
    # tiktoken downloads without a timeout: it must not be asked where nobody answers
    if not gpt2_is_cached() and not answers(GPT2_FILES[0]):
        raise ValueError(
            "tokenizer=gpt2: the vocabulary is not on this machine and its server does not "
            f"answer; {way_out}"
        )
    try:
        return BytePairTokenizer(tiktoken.get_encoding("gpt2"), "gpt2")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tokenizer=gpt2: the vocabulary could not be loaded ({error}); {way_out}"
        ) from error


BUILDERS: dict[str, Callable[[], Tokenizer]] = {"byte": ByteTokenizer, "bpe": bpe, "gpt2": gpt2}
