"""Train a byte-pair vocabulary, in some seconds on one core.

    python -m scripts.train_bpe vocab_size=4096 out=/tmp/bpe_4096.tiktoken

vocab_size= is the number of ranks to learn, the 256 bytes included (8192), and out= the file to
write. `tokenizer=bpe` reads data/bpe_8192.tiktoken: runs that were trained with another one cannot
be read any more.

Byte-pair encoding (Sennrich et al., 2016, arXiv:1508.07909) starts from the 256 bytes and
repeatedly replaces the most frequent pair of neighbouring tokens by a new token. It counts pairs
only inside words, numbers, and runs of punctuation or space (`data.tokenizer.PATTERN`), so no token
spans two words. The text is Python's standard library. Hugging Face's tokenizers does the work, so
it needs `pip install -e '.[hf]'`.
"""

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from data.tokenizer import PATTERN
from scripts.arguments import check_out, command
from training.record.files import write_file

BYTES = 256  # the first tokens, so that any text can be encoded


@dataclass
class Options:
    out: Path
    vocab_size: Annotated[int, Field(ge=BYTES)] = 8192


def train(texts: Iterable[str], vocab_size: int) -> list[bytes]:
    """The vocabulary in rank order: 256 bytes, then one token per merge; fewer than `vocab_size` if
    nothing is left to merge.

    The most frequent pair is merged first; among equals, the one with the smallest ranks. So the
    result does not depend on the order of the texts. Raises ValueError without tokenizers.
    """
    import regex

    try:
        from tokenizers import Tokenizer, models, trainers
    except ModuleNotFoundError as error:
        raise ValueError("tokenizers is missing: pip install -e '.[hf]'") from error

    split = regex.compile(PATTERN)
    # the library merges characters, and a byte is a character of Latin-1
    words = ([word.encode().decode("latin-1") for word in split.findall(text)] for text in texts)
    alphabet = list(map(chr, range(BYTES)))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.train_from_iterator(words, trainer)
    ranks = tokenizer.get_vocab()
    return [token.encode("latin-1") for token in sorted(ranks, key=ranks.__getitem__)]


@command
def main(options: Options) -> None:
    from config import DataConfig
    from data.corpora import Corpus

    check_out(options.out, ".tiktoken")
    documents = Corpus(DataConfig(source="stdlib")).documents()
    vocab = train((document.text for document in documents), options.vocab_size)
    # tiktoken's format: the token in base64, a space, its rank
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(vocab)]
    write_file(options.out, "".join(lines))
    print(f"{len(vocab)} ranks written to {options.out}")


if __name__ == "__main__":
    main()
