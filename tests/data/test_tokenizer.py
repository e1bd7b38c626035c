"""Every text survives the round trip; what gives other tokens has another fingerprint."""

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
from data.tokenizer import CHUNK, RANKS_FILE, Tokenizer, bpe, own, read_ranks

BYTE, BPE = build_tokenizer(TokenizerConfig("byte")), build_tokenizer(TokenizerConfig("bpe"))
by_name = pytest.mark.parametrize("tokenizer", [BYTE, BPE], ids=lambda tokenizer: tokenizer.name)

TEXTS = {
    "empty": "",
    "non-ascii": "naïve 東京 🦜\u200d🔥 \x00 ﷽ e\u0301",
    "end-of-text-written-out": "before <|endoftext|> after",
    "separators": "a\x1cb\x1d c\u2028d\u00a0e\r\n\tf\x0b\x85 g",
    "digits": "3.14159 1234567 ٣٤٥ it's WE'LL you've",
    "indented-code": "def f():\n    if x:\n\n        return '_'   \n\n\n  ",
    "runs": "aaaaaaaaaaaaaaa          aaaa                    ",
}


def gpt2_like() -> Tokenizer:
    """Our ranks under GPT-2's pattern, whose lookahead overflows on long runs of space."""
    from tiktoken_ext.openai_public import r50k_pat_str

    return own("gpt2_like", r50k_pat_str, read_ranks(RANKS_FILE), "gpt2_like")


@by_name
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_round_trip(tokenizer, text):
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.uint16 and tokenizer.end_of_text not in tokens
    assert tokenizer.decode(tokens) == text
    # the end of text counts as a byte of its own
    ended = np.append(tokens, [tokenizer.end_of_text] * 2)
    assert tokenizer.count_bytes(ended) == len(text.encode()) + 2


@by_name
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_round_trip_of_any_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@by_name
def test_room_for_more_tokens_than_the_tokenizer_has(tokenizer):
    roomy = build_tokenizer(TokenizerConfig(tokenizer.name, vocab_size=50304))
    assert roomy.vocab_size == 50304 and roomy.fingerprint == tokenizer.fingerprint
    tokens = tokenizer.encode("a tea").tolist()
    assert roomy.encode("a tea").tolist() == tokens
    # a model that has learnt nothing yet samples them
    assert roomy.decode([tokenizer.vocab_size, *tokens, 50303]) == "a tea"
    with pytest.raises(ValueError, match=f"tokenizer.vocab_size=100 .*{tokenizer.vocab_size}"):
        build_tokenizer(TokenizerConfig(tokenizer.name, vocab_size=100))


@by_name
def test_bytes_that_are_no_text_stop_nothing(tokenizer):
    """A model may sample bytes in any order; Python decodes an invalid command line to lone
    surrogates, which UTF-8 cannot encode.
    """
    half_a_letter = "é".encode()[:1]
    token = half_a_letter[0] if tokenizer is BYTE else read_ranks(RANKS_FILE)[half_a_letter]
    assert tokenizer.decode([token]) == "\ufffd"
    assert tokenizer.decode(tokenizer.encode("a\udcffb")) in ("a?b", "a\ufffdb")


LONG = {
    "bpe-a-space": (bpe, "a " * 500_000),
    "gpt2-space-word": (gpt2_like, " " * 1_000_000 + "x"),
    "gpt2-a": (gpt2_like, "a" * 1_000_000),
}


@pytest.mark.parametrize(("make", "text"), LONG.values(), ids=LONG)
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
    """Merges go by rank. tiktoken's own reader would return the content of the first reading."""
    file = tmp_path / "ranks"
    file.write_bytes(RANKS_FILE.read_bytes())
    assert bpe(file).fingerprint == BPE.fingerprint != BYTE.fingerprint
    lines = RANKS_FILE.read_text().splitlines()
    lines[300:302] = [lines[301].replace(" 301", " 300"), lines[300].replace(" 300", " 301")]
    file.write_text("\n".join(lines))
    swapped = bpe(file)
    assert swapped.fingerprint not in (BPE.fingerprint, BYTE.fingerprint)
    token = base64.b64decode(lines[300].split()[0])
    assert swapped.encoding.decode_single_token_bytes(300) == token


@pytest.mark.parametrize("lines", [["IHN 256"], ["IHNl x"], ["IHNl 300"]])
def test_a_broken_vocabulary_is_refused(tmp_path, lines):
    """With a gap in the ranks, the last token would be the end of text as well."""
    whole = [f"{base64.b64encode(bytes([value])).decode()} {value}" for value in range(256)]
    (tmp_path / "ranks").write_text("\n".join([*whole, *lines]))
    with pytest.raises((ValueError, AssertionError)):
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
