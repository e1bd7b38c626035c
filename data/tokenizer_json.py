"""Our tokenizers in the files that transformers reads, by its own converter of tiktoken's ranks.

To Hugging Face all three are byte-level BPE; `byte` has no merges. One difference stays:
transformers reads `<|endoftext|>` in a text as the end of text, and our tokenizers read it as
ordinary text.
"""

import json
from typing import Any

from data.tokenizer import END_OF_TEXT, Tokenizer

# in these files a byte is a Latin-1 character if that is visible, else one from U+0100 on, as in
# GPT-2 (Radford et al. 2019): " the\n" is "ĠtheĊ"
HIDDEN = (*range(33), *range(127, 161), 173)
SHOWN = {byte: 256 + number for number, byte in enumerate(HIDDEN)}


def has_vocabulary(content: dict[str, Any], tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer.json, which may be of any kind, splits a text as `tokenizer` does.

    A vocabulary lists its tokens in the order of its merges, so equal ones split a word equally.
    """
    ranks = tokenizer.encoding._mergeable_ranks.items()
    ours = {token.decode("latin-1").translate(SHOWN): rank for token, rank in ranks}
    try:
        is_whole = ours.items() <= content["model"]["vocab"].items()
    except (KeyError, TypeError, AttributeError):
        return False
    return is_whole and content.get("normalizer") is None


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

    encoding = tokenizer.encoding
    converter = TikTokenConverter(pattern=encoding._pat_str, extra_special_tokens=[END_OF_TEXT])
    # it would read them from a file
    converter.load_tiktoken_bpe = lambda _: encoding._mergeable_ranks
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
