"""The trainer against an example worked by hand, an obvious slow trainer, and itself."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.tokenizer import RANKS_FILE, bpe, read_ranks
from scripts.train_bpe import count_pretokens, main, merge_pair, rank_lines, train


def slow_train(pretokens: Counter, vocab_size: int) -> list[bytes]:
    """Count every pair again before every merge."""
    vocab = [bytes([value]) for value in range(256)]
    words = {pretoken: list(pretoken) for pretoken in pretokens}
    while len(vocab) < vocab_size:
        counts = Counter()
        for pretoken, word in words.items():
            for pair in pairwise(word):
                counts[pair] += pretokens[pretoken]
        if not counts:
            break
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        words = {pretoken: merge_pair(word, best, len(vocab)) for pretoken, word in words.items()}
        vocab.append(vocab[best[0]] + vocab[best[1]])
    return vocab


words = st.text("abc", min_size=1, max_size=12).map(str.encode)


@given(st.dictionaries(words, st.integers(1, 5), min_size=1, max_size=12))
def test_equals_the_slow_trainer(pretokens):
    assert train(Counter(pretokens), 270) == slow_train(Counter(pretokens), 270)


def test_no_token_spans_two_words_and_the_order_of_the_texts_does_not_matter():
    texts = ["one two one two one two", "two ones", "onetwo"] * 9
    vocab = train(count_pretokens(texts), 300)
    assert b" two" in vocab and not any(b"e t" in token or b"o o" in token for token in vocab)
    assert train(count_pretokens(texts[::-1]), 300) == vocab


def test_the_trained_vocabulary_encodes_as_it_was_learned(tmp_path):
    """Merging in rank order, as tiktoken does, must find the tokens that training made."""
    vocab = train(count_pretokens(["hello hello help helm"]), 300)
    (tmp_path / "ranks").write_text("".join(rank_lines(vocab)))
    assert bpe(tmp_path / "ranks").encode("hello").tolist() == [vocab.index(b"hello")]


def test_the_command_writes_a_vocabulary(tmp_path, monkeypatch):
    counts = Counter({b"    ": 3, b"self": 2})
    monkeypatch.setattr("scripts.train_bpe.count_pretokens", lambda texts: counts)
    main([f"out={tmp_path / 'ranks.tiktoken'}", "vocab_size=300"])
    assert list(read_ranks(tmp_path / "ranks.tiktoken")) == train(counts, 300)
    assert len(read_ranks(RANKS_FILE)) == 8192  # as its name says
    monkeypatch.setattr("scripts.train_bpe.count_pretokens", None)
    with pytest.raises(SystemExit, match="^train_bpe: .*/proc/ranks"):
        main(["out=/proc/ranks"])  # before the corpus is read
