"""Train the byte-pair vocabulary that `tokenizer=bpe` reads: pure Python, deterministic, a few
seconds on one core.

    python -m scripts.train_bpe vocab_size=4096 out=/tmp/bpe_4096.tiktoken

vocab_size= is the number of ranks to learn, the 256 bytes included (8192), and out= the file to
write (data/bpe_8192.tiktoken, which `tokenizer=bpe` reads).

Byte-pair encoding (Sennrich et al., 2016, arXiv:1508.07909) starts from the 256 bytes and
repeatedly replaces the most frequent pair of neighbouring tokens by a new token. It counts pairs
only inside pre-tokens (words, numbers, runs of punctuation or space, split by
`data.tokenizer.PATTERN`), so no token spans two words.

Each distinct pre-token is stored once with its count, and a merge visits only the pre-tokens that
contain the pair:

    counts = {"the": 9, "then": 2}      pairs  t h: 11   h e: 11   e n: 2
    merge (t, h) -> 256                 pairs  256 e: 11           e n: 2      (h e is gone)
"""

import base64
import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from data.tokenizer import PATTERN, RANKS_FILE
from scripts.arguments import check_out, command
from training.record.files import write_file

Pair = tuple[int, int]
BYTES = 256  # the first tokens, so that any text can be encoded


@dataclass
class Options:
    vocab_size: Annotated[int, BYTES] = 8192
    out: Path = RANKS_FILE


def count_pretokens(texts: Iterable[str]) -> Counter[bytes]:
    """How often each pre-token occurs."""
    import regex

    split = regex.compile(PATTERN)
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(split.findall(text))
    return Counter({pretoken.encode(): count for pretoken, count in counts.items()})


def merge_pair(word: list[int], pair: Pair, new: int) -> list[int]:
    """The word with every `pair`, read from the left, replaced by `new`."""
    merged, i = [], 0
    while i < len(word):
        if i + 1 < len(word) and (word[i], word[i + 1]) == pair:
            merged.append(new)
            i += 2
        else:
            merged.append(word[i])
            i += 1
    return merged


def train(pretokens: Counter[bytes], vocab_size: int) -> list[bytes]:
    """The vocabulary in rank order: 256 bytes, then one token per merge; fewer than `vocab_size` if
    nothing is left to merge.

    The most frequent pair is merged first; among equals, the one with the smallest ranks. So the
    result depends only on the counts, not on the order of the text.
    """
    vocab = [bytes([value]) for value in range(BYTES)]
    words = [list(pretoken) for pretoken in pretokens]
    word_counts = list(pretokens.values())
    pair_counts: Counter[Pair] = Counter()
    words_with: defaultdict[Pair, set[int]] = defaultdict(set)
    for index, word in enumerate(words):
        for pair in pairwise(word):
            pair_counts[pair] += word_counts[index]
            words_with[pair].add(index)
    # a pair's count only falls after the merge that created it. So an outdated entry is too high,
    # comes up early and is pushed back with its new count
    heap = [(-count, pair) for pair, count in pair_counts.items()]
    heapq.heapify(heap)
    while heap and len(vocab) < vocab_size:
        negative_count, pair = heapq.heappop(heap)
        if -negative_count != pair_counts[pair]:
            if pair_counts[pair] > 0:
                heapq.heappush(heap, (-pair_counts[pair], pair))
            continue
        new = len(vocab)
        vocab.append(vocab[pair[0]] + vocab[pair[1]])
        created = set()
        for index in words_with.pop(pair):
            before, after = words[index], merge_pair(words[index], pair, new)
            for old_pair in pairwise(before):
                pair_counts[old_pair] -= word_counts[index]
            for new_pair in pairwise(after):
                pair_counts[new_pair] += word_counts[index]
                if new in new_pair:
                    words_with[new_pair].add(index)
                    created.add(new_pair)
            words[index] = after
        for new_pair in created:
            heapq.heappush(heap, (-pair_counts[new_pair], new_pair))
    return vocab


def rank_lines(vocab: list[bytes]) -> Iterator[str]:
    """tiktoken's file format: the token in base64, a space, its rank."""
    for rank, token in enumerate(vocab):
        yield f"{base64.b64encode(token).decode()} {rank}\n"


@command
def main(options: Options) -> None:
    from config import DataConfig
    from data.corpora import Corpus

    check_out(options.out, options.out.suffix)
    texts = (document.text for document in Corpus(DataConfig(source="stdlib")).documents())
    vocab = train(count_pretokens(texts), options.vocab_size)
    write_file(options.out, "".join(rank_lines(vocab)))
    print(f"{len(vocab)} ranks written to {options.out}")


if __name__ == "__main__":
    main()
