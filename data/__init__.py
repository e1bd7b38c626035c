"""Text in, batches out: a corpus is tokenized once into a store on disk and read as random windows
from then on.

    tokenizer.py    text <-> tokens: byte, bpe, gpt2
    corpora.py      where the documents come from: stdlib, torch_source, text, hub
    token_store.py  documents -> flat token files, built once, found again by what they were built
                    from
    batches.py      token files -> train and held-out windows
    last_write.py   the synthetic recall task, which needs none of the above
    prefetch.py     batches on the GPU before their step has come

Importing this package loads neither torch nor datasets nor tiktoken; building does, where it has
to.
"""

from config import DataConfig, TokenizerConfig
from data.interface import Batch, PackedBatch, Tokenizer, TrainingData

__all__ = ["Batch", "PackedBatch", "Tokenizer", "TrainingData", "build_data", "build_tokenizer"]


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer of that name; ValueError where gpt2's vocabulary is neither cached nor within
    reach, or vocab_size is too small.
    """
    from data.tokenizer import BUILDERS

    tokenizer = BUILDERS[config.name]()
    if config.vocab_size is not None:
        if config.vocab_size < tokenizer.vocab_size:
            raise ValueError(
                f"tokenizer.vocab_size={config.vocab_size} is less than the "
                f"{tokenizer.vocab_size} tokens of tokenizer={config.name}"
            )
        tokenizer.vocab_size = config.vocab_size
    return tokenizer


def build_data(
    config: DataConfig, tokenizer: TokenizerConfig, *, seq_len: int, seed: int
) -> TrainingData:
    """The data of a run; ValueError names the setting where the corpus cannot be read, is too
    short, cannot be stored, or is another.
    """
    data = _build_data(config, tokenizer, seq_len=seq_len, seed=seed)
    if config.fingerprint not in (None, data.fingerprint):
        raise ValueError(
            f"data.fingerprint={config.fingerprint} is asked for, and data={config.source} has "
            f"{data.fingerprint}: other documents, "
            "tokenizer or share held out; data.fingerprint=null takes what is there"
        )
    return data


def _build_data(
    config: DataConfig, tokenizer: TokenizerConfig, *, seq_len: int, seed: int
) -> TrainingData:
    if config.source == "last_write":
        from data.last_write import LastWriteData

        return LastWriteData(
            num_keys=config.num_keys, num_values=config.num_values, seq_len=seq_len, seed=seed
        )
    from data.batches import TextData

    return TextData(config, build_tokenizer(tokenizer), seq_len=seq_len, seed=seed)
