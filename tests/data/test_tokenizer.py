"""Every text survives the round trip; a missing or damaged vocabulary gives one clear error."""

import base64
import socket

import numpy as np
import pytest
import tiktoken
import tiktoken.load
from hypothesis import given
from hypothesis import strategies as st

from config import TokenizerConfig
from data import build_tokenizer
from data.tokenizer import (
    CHUNK,
    END_OF_TEXT,
    RANKS_FILE,
    Tokenizer,
    bpe,
    read_ranks,
)

BYTE, BPE = build_tokenizer(TokenizerConfig("byte")), build_tokenizer(TokenizerConfig("bpe"))
by_name = pytest.mark.parametrize("tokenizer", [BYTE, BPE], ids=lambda tokenizer: tokenizer.name)

TEXTS = {
    "empty": "",
    "non-ascii": "naïve 東京 🦜\u200d🔥 \x00 ﷽ e\u0301",
    "end-of-text-written-out": "before <|endoftext|> after",
    "separators": "a\x1cb\x1d c\u2028d\u00a0e\r\n\tf\x0b",
    "digits": "3.14159 1234567 ٣٤٥",
    "indented-code": "def f():\n    if x:\n\n        return '_'\n",
}


def gpt2_like() -> Tokenizer:
    """Our ranks under GPT-2's pattern, whose lookahead overflows on long runs of space."""
    from tiktoken_ext.openai_public import r50k_pat_str

    ranks = read_ranks(RANKS_FILE)
    encoding = tiktoken.Encoding(
        "gpt2_like",
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: len(ranks)},
    )
    return Tokenizer(encoding, "gpt2_like")


@by_name
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_round_trip(tokenizer, text):
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.uint16
    assert tokenizer.decode(tokens) == text
    # the end of text counts as a byte of its own
    ended = np.append(tokens, [tokenizer.end_of_text] * 2)
    assert tokenizer.count_bytes(ended) == len(text.encode()) + 2
    assert tokenizer.end_of_text not in tokens


@by_name
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_round_trip_of_any_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("name", ["byte", "bpe"])
def test_room_for_more_tokens_than_the_tokenizer_has(name):
    own = build_tokenizer(TokenizerConfig(name))
    roomy = build_tokenizer(TokenizerConfig(name, vocab_size=50304))
    assert roomy.vocab_size == 50304 and roomy.fingerprint == own.fingerprint
    assert roomy.encode("a tea").tolist() == own.encode("a tea").tolist()
    # a model that has learnt nothing yet samples them
    assert roomy.decode([own.vocab_size, *own.encode("a tea").tolist(), 50303]) == "a tea"
    with pytest.raises(ValueError, match=f"tokenizer.vocab_size=100 .*{own.vocab_size}"):
        build_tokenizer(TokenizerConfig(name, vocab_size=100))


@by_name
def test_broken_utf8_is_shown_not_raised(tokenizer):
    """A model may sample bytes in any order."""
    half_a_letter = "é".encode()[:1]
    token = half_a_letter[0] if tokenizer.name == "byte" else read_ranks(RANKS_FILE)[half_a_letter]
    assert tokenizer.decode([token]) == "\ufffd"


@by_name
def test_lone_surrogates_do_not_stop_a_prompt(tokenizer):
    """Python decodes invalid command-line bytes to lone surrogates, which UTF-8 cannot encode."""
    assert tokenizer.decode(tokenizer.encode("a\udcffb")) in ("a?b", "a\ufffdb")


LONG = {
    "space-word": " " * 1_000_000 + "x",
    "newline": "\n" * 1_000_000,
    "a": "a" * 1_000_000,
    "a-space": "a " * 500_000,
}


@pytest.mark.parametrize(
    ("make", "text"),
    [(bpe, LONG["newline"]), (bpe, LONG["a-space"]), (gpt2_like, LONG["space-word"])]
    + [(gpt2_like, LONG["a"])],
    ids=["bpe-newline", "bpe-a-space", "gpt2-space-word", "gpt2-a"],
)
def test_a_million_characters(make, text):
    """A regression test: a million spaces before a word killed the process.

    tiktoken's stack overflowed, a panic that no `except` catches.
    """
    tokenizer = make()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("make", [bpe, gpt2_like], ids=["bpe", "gpt2-pattern"])
def test_cutting_a_long_text_does_not_change_its_tokens(make):
    tokenizer = make()
    text = "def f(x):\n    return x  # naïve, 12345\n\n\n" * 5000
    assert len(CHUNK.findall(text)) > 2
    assert tokenizer.encode(text).tolist() == tokenizer.encoding.encode_ordinary(text)


def test_fingerprint_changes_with_the_order_of_the_ranks(tmp_path):
    """Merges go by rank: the same tokens with other ranks split a text differently."""
    (tmp_path / "same").write_bytes(RANKS_FILE.read_bytes())
    lines = RANKS_FILE.read_text().splitlines()
    lines[300:302] = [lines[301].replace(" 301", " 300"), lines[300].replace(" 300", " 301")]
    (tmp_path / "swapped").write_text("\n".join(lines))
    assert bpe(tmp_path / "same").fingerprint == BPE.fingerprint
    assert len({BYTE.fingerprint, BPE.fingerprint, bpe(tmp_path / "swapped").fingerprint}) == 3


def test_a_changed_vocabulary_is_read_anew(tmp_path):
    """tiktoken's own reader would return the old content."""
    file = tmp_path / "ranks"
    file.write_bytes(RANKS_FILE.read_bytes())
    before = bpe(file)
    file.write_text("".join(RANKS_FILE.read_text().splitlines(keepends=True)[:300]))
    assert (before.vocab_size, bpe(file).vocab_size) == (8193, 301)


BROKEN = {
    "three-words": lambda lines: [*lines, b"IHNl 1 2"],
    "rank": lambda lines: [*lines, b"IHNl x"],
    "half-base64": lambda lines: [*lines, b"IHN 256"],
}


@pytest.mark.parametrize("broken", [*BROKEN.values(), None], ids=[*BROKEN, "no-file"])
def test_a_broken_vocabulary_is_refused(tmp_path, broken):
    lines = [base64.b64encode(bytes([value])) + b" %d" % value for value in range(256)]
    if broken:
        (tmp_path / "ranks").write_bytes(b"\n".join(broken(lines)))
    with pytest.raises(ValueError, match=rf"{tmp_path}/ranks .*scripts\.train_bpe"):
        bpe(tmp_path / "ranks")


def test_a_vocabulary_with_a_gap_is_refused(tmp_path):
    """Its last token would be the end of text as well."""
    lines = RANKS_FILE.read_text().splitlines()
    (tmp_path / "ranks").write_text("\n".join(lines[:300] + lines[301:]))
    with pytest.raises(AssertionError):
        bpe(tmp_path / "ranks")


def test_gpt2_in_the_cache_is_used_without_asking_the_network(monkeypatch):
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("it was asked"))
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: {"gpt2": BPE.encoding}[name])
    assert build_tokenizer(TokenizerConfig("gpt2")).vocab_size == BPE.vocab_size


@pytest.mark.parametrize("answers", [False, True], ids=["silent", "breaks-off"])
def test_a_failed_download_names_the_way_out(tmp_path, monkeypatch, answers):
    def connect(*_, **__):
        if not answers:
            raise OSError("network unreachable")
        return socket.socket()

    def download(url):
        assert answers
        raise OSError("connection reset")

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.delitem(tiktoken.registry.ENCODINGS, "gpt2", raising=False)
    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(tiktoken.load, "read_file", download)
    reason = "connection reset" if answers else "server does not answer"
    with pytest.raises(ValueError, match=f"{reason}.*tokenizer=bpe"):
        build_tokenizer(TokenizerConfig("gpt2"))
    assert tiktoken.load.read_file is download
