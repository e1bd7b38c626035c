"""`python -m scripts.agree`: exact attentions agree but for rounding, another function does not."""

import json

import pytest

from scripts import agree
from tests.scripts.test_sample import write_run


@pytest.fixture
def small(tmp_path):
    write_run(tmp_path / "run")
    return tmp_path / "run"


def pairs_of(found: dict) -> dict:
    return {(pair["a"], pair["b"]): pair for pair in found["pairs"]}


def test_exact_attentions_agree_and_another_function_does_not(small, capsys):
    """The model's weights are large and random: its attention decides what it says."""
    asked = ["under=naive,tiled:block_kv=8,no_rescale:block_kv=8", "sequences=2", "tokens=8"]
    agree.main([str(small), *asked, "device=cpu"])
    found = json.loads((small / "agree.json").read_text())
    pairs = pairs_of(found)
    assert len(pairs) == 6  # of four readings
    assert pairs["naive in float32", "naive"]["log_p"] == {"mean": 0, "largest": 0}
    near, far = pairs["naive", "tiled:block_kv=8"], pairs["naive", "no_rescale:block_kv=8"]
    assert 0 < near["log_p"]["largest"] < 1e-4 < 1e-2 < far["log_p"]["mean"]
    assert near["equal_tokens"] == [8, 8] and near["other_token"] == 0 < far["other_token"]
    # a cache changes no exact attention, and with it the tiles of a broken one stay
    decoding = {row["attention"]: row for row in found["decoding"]}
    assert decoding["tiled:block_kv=8"]["largest"] < 1e-4
    assert "naive and tiled:block_kv=8" in capsys.readouterr().out


def test_the_dtype_is_the_scale(small):
    agree.main([str(small), "under=naive,sdpa", "sequences=1", "tokens=1", "dtype=bf16"])
    pairs = pairs_of(json.loads((small / "agree.json").read_text()))
    assert pairs["naive in float32", "naive"]["log_p"]["mean"] > 1e-3


@pytest.mark.parametrize(
    "asked, said",
    [
        (["under=naive"], "one attention"),
        (["under=naive,tield"], "tield"),
        (["sequences=0"], "at least 1"),
    ],
)
def test_refused_in_one_line(small, asked, said):
    with pytest.raises(SystemExit, match=said):
        agree.main([str(small), *asked])
