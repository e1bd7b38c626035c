"""Our tokenizers in the files that transformers reads, by its own converter of tiktoken's ranks.

To Hugging Face all three are byte-level BPE; `byte` has no merges. One difference stays:
transformers reads `<|endoftext|>` in a text as the end of text, and our tokenizers read it as
ordinary text.
"""

import json
from typing import Any

from data.interface import Tokenizer
from data.tokenizer import END_OF_TEXT, BytePairTokenizer

# in these files a byte that is not a visible Latin-1 character is a character from U+0100 on, as in
# GPT-2 (Radford et al. 2019): " the\n" is "ĠtheĊ"
VISIBLE = (*range(33, 127), *range(161, 173), *range(174, 256))
HIDDEN = [byte for byte in range(256) if byte not in VISIBLE]
CHARACTERS = [chr(256 + HIDDEN.index(byte) if byte in HIDDEN else byte) for byte in range(256)]


def as_characters(token: bytes) -> str:
    return "".join(CHARACTERS[byte] for byte in token)


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
    """{name: content} of the files. max_length is in tokens.

    Raises ValueError if transformers is not installed.
    """
    try:
        from transformers.convert_slow_tokenizer import TikTokenConverter
    except ImportError as error:
        raise ValueError(
            f"transformers writes the tokenizer's files ({error}); pip install 'tilegpt[hf]'"
        ) from error

    plain = isinstance(tokenizer, BytePairTokenizer)
    pattern = tokenizer.encoding._pat_str if plain else r"[\s\S]+"
    converter = TikTokenConverter(pattern=pattern, extra_special_tokens=[END_OF_TEXT])
    converter.load_tiktoken_bpe = lambda _: ranks_of(tokenizer)  # it would read them from a file
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT),
    }
    return {
        "tokenizer.json": converter.converted().to_str(),
        "tokenizer_config.json": json.dumps(about),
    }
