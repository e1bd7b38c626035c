"""Text to tokens and back: bytes, our own 8,192 byte pairs, or GPT-2's vocabulary.

byte   "naïve" -> 110 97 195 175 118 101: one token per byte, 257 in all, nothing to download
bpe    about 4 bytes of source code per token; scripts/train_bpe.py made data/bpe_8192.tiktoken
gpt2   comparable with published GPT-2 losses; tiktoken downloads its vocabulary once
"""

import base64
import hashlib
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data.network import answers

if TYPE_CHECKING:
    import tiktoken

END_OF_TEXT = "<|endoftext|>"
RANKS_FILE = Path(__file__).with_name("bpe_8192.tiktoken")

# a word with the space or the sign before it, up to three digits, a run of signs, or a run of white
# space. Without lookahead it splits in linear time. A line break and all the indentation after it
# are one token
PATTERN = r"[^\s\p{L}\p{N}]?\p{L}+| \p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"

# tiktoken gets at most this many characters at once, because GPT-2's pattern looks ahead, and a
# million spaces before a word overflow its stack. The cut falls between a character and the white
# space after it, where every pattern here starts a new token anyway. Only a text without such a
# place is cut elsewhere
CHUNK = re.compile(r"(?s:.{1,65536})(?:\Z|(?<=\S)(?=[ \n]))|(?s:.{1,65536})")


def token_dtype(vocab_size: int) -> np.dtype:
    """The smaller of the two types that can store the tokens of this vocabulary."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


class Tokenizer:
    """A tiktoken encoding with one special token, the end of text, which follows every document."""

    def __init__(self, encoding: "tiktoken.Encoding", fingerprint: str) -> None:
        self.encoding = encoding
        self.name = encoding.name
        self.vocab_size = encoding.n_vocab  # tokenizer.vocab_size adds unused tokens
        self.end_of_text = encoding.eot_token
        self.fingerprint = fingerprint  # equal fingerprints give equal tokens

    def encode(self, text: str) -> np.ndarray:
        """The tokens of any text; `<|endoftext|>` written in it is ordinary text."""
        # not encode(), which refuses a text in which <|endoftext|> is written out
        chunks = map(self.encoding.encode_ordinary, CHUNK.findall(text))
        return np.fromiter(itertools.chain.from_iterable(chunks), token_dtype(self.vocab_size))

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The text of any tokens. Invalid UTF-8 becomes U+FFFD; unused tokens become nothing."""
        used = [token for token in np.asarray(tokens).tolist() if token < self.encoding.n_vocab]
        return self.encoding.decode(used)

    def count_bytes(self, tokens: np.ndarray) -> int:
        """UTF-8 bytes that these tokens stand for. The end of text counts as one byte, as it does
        for bytes as tokens, so that tokenizers compare.
        """
        words = tokens[tokens != self.end_of_text]
        return len(self.encoding.decode_bytes(words.tolist())) + tokens.size - words.size


def read_ranks(file: Path) -> dict[bytes, int]:
    """Token -> rank, from lines of `base64 rank`. Raises ValueError for any other content.

    tiktoken's own reader caches by file name, and returns the old content after the file changed.
    """
    pairs = map(bytes.split, file.read_bytes().splitlines())
    return {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}


def own(name: str, pattern: str, ranks: dict[bytes, int], fingerprint: str) -> Tokenizer:
    """A vocabulary of these ranks. The end of text is the rank after the last."""
    import tiktoken

    encoding = tiktoken.Encoding(
        name,
        pat_str=pattern,
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: max(ranks.values()) + 1},
        explicit_n_vocab=len(ranks) + 1,  # tiktoken then refuses ranks with a gap
    )
    return Tokenizer(encoding, fingerprint)


def byte() -> Tokenizer:
    return own("byte", r"[\s\S]+", {bytes([value]): value for value in range(256)}, "byte")


def bpe(ranks_file: Path = RANKS_FILE) -> Tokenizer:
    """The project's own vocabulary."""
    ranks = read_ranks(ranks_file)
    learned = hashlib.sha256(PATTERN.encode() + ranks_file.read_bytes()).hexdigest()
    return own("bpe", PATTERN, ranks, f"bpe-{learned[:16]}")


def gpt2() -> Tokenizer:
    """GPT-2's vocabulary, from tiktoken's cache or from its server."""
    import tiktoken.load

    download = tiktoken.load.read_file  # called for what is not cached; it has no timeout

    def ask_first(url: str) -> bytes:
        if not answers(url):
            raise OSError("it is not on this machine and its server does not answer")
        return download(url)

    try:
        tiktoken.load.read_file = ask_first
        return Tokenizer(tiktoken.get_encoding("gpt2"), "gpt2")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tokenizer=gpt2: the vocabulary could not be loaded ({error}); use tokenizer=bpe or "
            "tokenizer=byte, which need no network, or set TIKTOKEN_CACHE_DIR to a folder in "
            "which tiktoken has already stored it"
        ) from error
    finally:
        tiktoken.load.read_file = download


BUILDERS = {"byte": byte, "bpe": bpe, "gpt2": gpt2}
