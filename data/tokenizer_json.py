"""Our tokenizers in the files that transformers reads.

To Hugging Face all three are byte-level BPE; `byte` has no merges. Its files hold characters. So a
byte that is not a visible Latin-1 character becomes a character from U+0100 on, as in GPT-2
(Radford et al. 2019):

    " the\\n"   ->   "Ġtheċ"

One difference stays: transformers reads `<|endoftext|>` in a text as the end of text, and our
tokenizers read it as ordinary text.
"""

import json
from typing import Any

from data.interface import Tokenizer
from data.tokenizer import END_OF_TEXT, PATTERN, BytePairTokenizer

VISIBLE = (*range(33, 127), *range(161, 173), *range(174, 256))
HIDDEN = [byte for byte in range(256) if byte not in VISIBLE]
CHARACTERS = [chr(256 + HIDDEN.index(byte) if byte in HIDDEN else byte) for byte in range(256)]


def as_characters(token: bytes) -> str:
    return "".join(CHARACTERS[byte] for byte in token)


def merges(ranks: dict[bytes, int]) -> list[list[str]]:
    """The two tokens that each longer token is made of, in the order in which they merge."""
    pairs = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:  # merge as the encoding does, except the last merge
            earlier = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:], strict=False)]
            i = earlier.index(min(earlier))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            pairs.append([as_characters(part) for part in parts])
    return pairs


def ranks_of(tokenizer: Tokenizer) -> dict[bytes, int]:
    if isinstance(tokenizer, BytePairTokenizer):
        return tokenizer.encoding._mergeable_ranks
    return {bytes([byte]): byte for byte in range(256)}


def has_vocabulary(content: dict[str, Any], tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer.json, which may be of any kind, has exactly the tokens of `tokenizer`.

    Special tokens that it adds to them are not in a plain text, so they do not count. A vocabulary
    lists its tokens in the order of its merges, so equal ones split a word equally.
    """
    ours = {as_characters(token): rank for token, rank in ranks_of(tokenizer).items()}
    try:
        theirs, added = content["model"]["vocab"], content["added_tokens"]
        ends = [each["id"] for each in added if each["content"] == END_OF_TEXT]
        plain = {token: rank for token, rank in theirs.items() if token != END_OF_TEXT}
    except (KeyError, TypeError, AttributeError):
        return False
    return (plain, ends, content.get("normalizer")) == (ours, [tokenizer.end_of_text], None)


def tokenizer_files(tokenizer: Tokenizer, *, max_length: int) -> dict[str, str]:
    """{name: content} of the files. max_length is in tokens."""
    ranks = ranks_of(tokenizer)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    # by its own regex, ByteLevel splits a text as GPT-2 does
    split: dict[str, Any] = byte_level | {"use_regex": tokenizer.name == "gpt2"}
    if tokenizer.name == "bpe":
        cut = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated"}
        split = {"type": "Sequence", "pretokenizers": [cut | {"invert": False}, split]}
    vocabulary = {as_characters(token): rank for token, rank in ranks.items()}
    pairs = merges(ranks)
    end = {"id": tokenizer.end_of_text, "content": END_OF_TEXT, "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": split,
        "post_processor": None,
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": pairs,
        },
    }
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT),
    }
    files = {"tokenizer.json": whole, "tokenizer_config.json": about}
    if tokenizer.name == "gpt2":  # GPT-2 was published with these
        files["vocab.json"] = vocabulary | {END_OF_TEXT: tokenizer.end_of_text}
    written = {name: json.dumps(content, ensure_ascii=False) for name, content in files.items()}
    if tokenizer.name == "gpt2":
        lines = ["#version: 0.2", *(" ".join(pair) for pair in pairs)]
        written["merges.txt"] = "\n".join(lines) + "\n"
    return written
