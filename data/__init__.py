"""Text in, batches out.

A corpus is tokenized once into a store on disk. Every run reads random windows from that store.

    tokenizer.py    text <-> tokens: byte, bpe, gpt2
    corpora.py      where the documents come from: stdlib, torch_source, text, hub
    halves.py       documents -> flat tokens, a training half and a held-out half
    token_store.py  keeps both on disk, named by what they were built from
    batches.py      token files -> training and held-out windows
    synthetic.py    last_write, recall, needle: tasks that need none of the above
    prefetch.py     copies batches to the GPU before their step comes

Importing this package loads neither torch nor datasets nor tiktoken. Building loads what it needs.
"""

from config import SYNTHETIC_SOURCES, DataConfig, TokenizerConfig
from data.interface import Batch, PackedBatch, TrainingData
from data.tokenizer import BUILDERS, Tokenizer

__all__ = ["Batch", "PackedBatch", "Tokenizer", "TrainingData", "build_data", "build_tokenizer"]


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that the settings name.

    Raises ValueError if vocab_size is too small, or if gpt2's vocabulary is neither cached nor
    within reach.
    """
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
    """The data of a run.

    Raises ValueError, naming the setting, if the corpus cannot be read or stored, or is too short.
    """
    if config.source in SYNTHETIC_SOURCES:
        from data.synthetic import SyntheticData

        return SyntheticData(config, seq_len=seq_len, seed=seed)
    from data.batches import TextData

    return TextData(config, build_tokenizer(tokenizer), seq_len=seq_len, seed=seed)
