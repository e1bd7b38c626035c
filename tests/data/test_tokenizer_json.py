"""The tokenizer files of an export give the tokens of our own tokenizers."""

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.tokenizer import END_OF_TEXT
from data.tokenizer_json import tokenizer_files
from tests.data.test_tokenizer import BPE, BYTE, TEXTS, gpt2_like

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

OURS = {"byte": BYTE, "bpe": BPE, "gpt2": gpt2_like()}
THEIRS = {
    name: tokenizers.Tokenizer.from_str(tokenizer_files(own, max_length=8)["tokenizer.json"])
    for name, own in OURS.items()
}
by_name = pytest.mark.parametrize("name", OURS)


def check(name: str, text: str) -> None:
    text = text.replace(END_OF_TEXT, "")  # a special token there, and ordinary text here
    tokens = OURS[name].encode(text).tolist()
    assert THEIRS[name].encode(text).ids == tokens
    assert THEIRS[name].decode(tokens) == text


@by_name
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_the_same_tokens(name, text):
    check(name, text)


@by_name
@settings(max_examples=60)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs", "Cn", "Co"])))
def test_the_same_tokens_of_any_text(name, text):
    check(name, text)


@by_name
def test_the_end_of_text_is_a_special_token(name):
    assert THEIRS[name].encode(END_OF_TEXT).ids == [OURS[name].end_of_text]
    assert THEIRS[name].get_vocab_size() == OURS[name].vocab_size


def test_without_transformers_the_way_out_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.convert_slow_tokenizer", None)
    with pytest.raises(ValueError, match=r"tilegpt\[hf\]"):
        tokenizer_files(OURS["byte"], max_length=8)
