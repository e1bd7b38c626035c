"""Our tokenizers in the files that transformers reads, by its own converter of tiktoken's ranks.

To Hugging Face all three are byte-level BPE; `byte` has no merges. One difference stays:
transformers reads `<|endoftext|>` in a text as the end of text, and our tokenizers read it as
ordinary text.
"""

import json

from data.interface import Tokenizer
from data.tokenizer import END_OF_TEXT, BytePairTokenizer


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

    ranks, pattern = {bytes([byte]): byte for byte in range(256)}, r"[\s\S]+"
    if isinstance(tokenizer, BytePairTokenizer):
        ranks, pattern = tokenizer.encoding._mergeable_ranks, tokenizer.encoding._pat_str
    converter = TikTokenConverter(pattern=pattern, extra_special_tokens=[END_OF_TEXT])
    converter.load_tiktoken_bpe = lambda _: ranks  # it would read them from a file
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
