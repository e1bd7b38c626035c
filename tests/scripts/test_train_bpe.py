"""`python -m scripts.train_bpe`: the vocabulary that it learns, and the file that it writes."""

from types import SimpleNamespace

import pytest

from data.corpora import Corpus
from data.tokenizer import RANKS_FILE, bpe, read_ranks
from scripts.train_bpe import main, train

TEXTS = ["one two one two one two", "two ones", "naïve onetwo"] * 9


def test_the_most_frequent_pair_first_and_among_equals_the_smallest():
    """ "th" and "he" occur 11 times, "en" twice."""
    vocab = train(["the" + 8 * " the" + 2 * " then"], 260)
    assert vocab[:256] == [bytes([value]) for value in range(256)]
    assert vocab[256:] == [b"he", b"the", b" the", b" then"]


def test_no_token_spans_two_words_and_the_order_of_the_texts_does_not_matter():
    vocab = train(TEXTS, 300)
    assert b" two" in vocab and not any(b"e t" in token or b"o o" in token for token in vocab)
    assert train(TEXTS[::-1], 300) == vocab


def test_the_written_vocabulary_encodes_as_it_was_learned(tmp_path, monkeypatch):
    """Merging in rank order, as tiktoken does, must find the tokens that training made."""
    documents = [SimpleNamespace(text=text) for text in TEXTS]
    monkeypatch.setattr(Corpus, "documents", lambda self: documents)
    main([f"out={tmp_path / 'ranks.tiktoken'}", "vocab_size=300"])
    vocab = list(read_ranks(tmp_path / "ranks.tiktoken"))
    assert vocab == train(TEXTS, 300)
    for word in ("one", " two", "naïve"):
        assert bpe(tmp_path / "ranks.tiktoken").encode(word).tolist() == [
            vocab.index(word.encode())
        ]
    assert len(read_ranks(RANKS_FILE)) == 8192  # as its name says


def test_a_file_that_cannot_be_written_is_refused_before_the_corpus_is_read(monkeypatch):
    monkeypatch.setattr(Corpus, "documents", None)
    with pytest.raises(SystemExit, match="^train_bpe: .*/proc/ranks"):
        main(["out=/proc/ranks.tiktoken"])
