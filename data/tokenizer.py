"""Text to tokens and back: bytes, our own 8,192 byte pairs, or GPT-2's vocabulary.

byte   "naïve" -> 110 97 195 175 118 101: one token per byte, 257 in all, nothing to download
bpe    about 4 bytes of source code per token; scripts/train_bpe.py made data/bpe_8192.tiktoken
gpt2   comparable with published GPT-2 losses; tiktoken downloads its vocabulary once
"""

import base64
import hashlib
import itertools
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

# a word with the space or the sign before it, up to three digits, a run of signs, or a run of white
# space. Without lookahead it splits in linear time. A line break and all the indentation after it
# are one token
PATTERN = r"[^\s\p{L}\p{N}]?\p{L}+| \p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"

GPT2_FILES = tuple(
    f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
    for name in ("vocab.bpe", "encoder.json")
)

# tiktoken gets at most this many characters at once, because GPT-2's pattern looks ahead, and a
# million spaces before a word overflow its stack. The cut falls between a character and the white
# space after it, where every pattern here starts a new token anyway. Only a text without such a
# place is cut elsewhere
CHUNK = re.compile(r"(?s:.{1,65536})(?:\Z|(?<=\S)(?=[ \n]))|(?s:.{1,65536})")


def token_dtype(vocab_size: int) -> np.dtype:
    """The smaller of the two types that can store the tokens of this vocabulary."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


class ByteTokenizer:
    """256 byte values, and one token for the end of text."""

    name = "byte"
    vocab_size = 257
    end_of_text = 256
    fingerprint = "byte"

    def encode(self, text: str) -> np.ndarray:
        content = np.frombuffer(text.encode(errors="replace"), dtype=np.uint8)
        return content.astype(token_dtype(self.vocab_size))

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        pieces = [*(bytes([value]) for value in range(256)), END_OF_TEXT.encode()]
        used = [token for token in np.asarray(tokens).tolist() if token < len(pieces)]
        return b"".join(pieces[token] for token in used).decode(errors="replace")

    def count_bytes(self, tokens: np.ndarray) -> int:
        return tokens.size


class BytePairTokenizer:
    """A tiktoken encoding with one special token, the end of text."""

    def __init__(self, encoding: "tiktoken.Encoding", fingerprint: str) -> None:
        self.encoding = encoding
        self.name = encoding.name
        self.vocab_size = encoding.n_vocab
        self.end_of_text = encoding.eot_token
        self.fingerprint = fingerprint

    def encode(self, text: str) -> np.ndarray:
        # not encode(), which refuses a text in which <|endoftext|> is written out
        chunks = map(self.encoding.encode_ordinary, CHUNK.findall(text))
        return np.fromiter(itertools.chain.from_iterable(chunks), token_dtype(self.vocab_size))

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        used = [token for token in np.asarray(tokens).tolist() if token < self.encoding.n_vocab]
        return self.encoding.decode(used)

    def count_bytes(self, tokens: np.ndarray) -> int:
        distinct, counts = np.unique(tokens, return_counts=True)
        pieces = map(self.encoding.decode_single_token_bytes, distinct.tolist())
        lengths = np.fromiter(map(len, pieces), np.int64)
        return int(counts @ np.where(distinct == self.end_of_text, 1, lengths))


def read_ranks(file: Path) -> dict[bytes, int]:
    """Token -> rank, from lines of `base64 rank`. Raises ValueError for any other content.

    tiktoken's own reader caches by file name, and returns the old content after the file changed.
    """
    way_out = "restore it from the repository, or learn another with python -m scripts.train_bpe"
    try:
        lines = file.read_bytes().splitlines()
        pairs = [line.split() for line in lines]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (OSError, ValueError) as error:
        raise ValueError(f"the vocabulary {file} cannot be read ({error}); {way_out}") from error
    # tiktoken checks neither, and fails much later
    is_gapless = sorted(ranks.values()) == list(range(len(ranks)))
    if not is_gapless or not ranks.keys() >= {bytes([value]) for value in range(256)}:
        raise ValueError(
            f"the vocabulary {file} is damaged: ranks must run from 0 without a gap and hold all "
            f"256 bytes; {way_out}"
        )
    return ranks


def bpe(ranks_file: Path = RANKS_FILE) -> BytePairTokenizer:
    """The project's own vocabulary. The end of text is the rank after the last."""
    import tiktoken

    ranks = read_ranks(ranks_file)
    encoding = tiktoken.Encoding(
        "bpe", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: len(ranks)}
    )
    learned = hashlib.sha256(PATTERN.encode() + ranks_file.read_bytes()).hexdigest()
    return BytePairTokenizer(encoding, f"bpe-{learned[:16]}")


def gpt2_is_cached() -> bool:
    """Whether GPT-2's two files are in tiktoken's cache, where the SHA-1 of a URL names a file."""
    default = os.path.join(tempfile.gettempdir(), "data-gym-cache")
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR", default))
    return bool(folder) and all(
        Path(folder, hashlib.sha1(url.encode()).hexdigest()).is_file() for url in GPT2_FILES
    )


def gpt2() -> BytePairTokenizer:
    """GPT-2's vocabulary, from tiktoken's cache or from its server."""
    import tiktoken

    try:
        # tiktoken downloads without a timeout, so first see whether the server answers
        if not gpt2_is_cached() and not answers(GPT2_FILES[0]):
            raise OSError("it is not on this machine and its server does not answer")
        return BytePairTokenizer(tiktoken.get_encoding("gpt2"), "gpt2")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tokenizer=gpt2: the vocabulary could not be loaded ({error}); use tokenizer=bpe or "
            "tokenizer=byte, which need no network, or set TIKTOKEN_CACHE_DIR to a folder in "
            "which tiktoken has already stored it"
        ) from error


BUILDERS: dict[str, Callable[[], Tokenizer]] = {"byte": ByteTokenizer, "bpe": bpe, "gpt2": gpt2}
