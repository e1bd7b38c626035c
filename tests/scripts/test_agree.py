"""`python -m scripts.agree`: exact attentions agree but for rounding, another function does not."""

import json

import pytest

from scripts import agree
from tests.run_folder import write_run


@pytest.fixture
def small(tmp_path):
    write_run(tmp_path / "run")
    return tmp_path / "run"


def pairs_of(run: dict) -> dict:
    return {(pair["a"], pair["b"]): pair for pair in run["pairs"]}


def test_exact_attentions_agree_and_another_function_does_not(small, capsys):
    """The model's weights are large and random: its attention decides what it says."""
    asked = ["under=naive,tiled:block_kv=8,no_rescale:block_kv=8", "sequences=2", "tokens=8"]
    agree.main([str(small), *asked, "device=cpu"])
    (run,) = json.loads((small / "agree.json").read_text())["runs"]
    pairs = pairs_of(run)
    assert len(pairs) == 6  # of four readings
    assert pairs["naive in float32", "naive"]["log_p"] == {"mean": 0, "largest": 0}
    near, far = pairs["naive", "tiled:block_kv=8"], pairs["naive", "no_rescale:block_kv=8"]
    assert 0 < near["log_p"]["largest"] < 1e-4 < 1e-2 < far["log_p"]["mean"]
    assert near["equal_tokens"] == [8, 8] and near["other_token"] == 0 < far["other_token"]
    # a cache changes no exact attention, and with it the tiles of a broken one stay
    decoding = {row["attention"]: row for row in run["decoding"]}
    assert decoding["tiled:block_kv=8"]["largest"] < 1e-4
    assert "naive and tiled:block_kv=8" in capsys.readouterr().out


def test_the_dtype_is_the_scale(small):
    agree.main([str(small), "under=naive,sdpa", "sequences=1", "tokens=1", "dtype=bf16"])
    (run,) = json.loads((small / "agree.json").read_text())["runs"]
    assert pairs_of(run)["naive in float32", "naive"]["log_p"]["mean"] > 1e-3


def test_several_runs_have_a_mean_and_a_deviation(small, tmp_path, capsys):
    write_run(tmp_path / "other", seed=1)
    asked = [str(small), str(tmp_path / "other"), "under=naive,sdpa", "sequences=1", "tokens=1"]
    agree.main([*asked, "dtype=bf16", f"out={tmp_path / 'both.json'}"])
    runs = json.loads((tmp_path / "both.json").read_text())["runs"]
    first, second = (pairs_of(run)["naive", "sdpa"]["log_p"] for run in runs)
    assert first != second
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("naive and sdpa"))
    assert " ± " in line and f"{max(first['largest'], second['largest']):.1e}" in line


@pytest.mark.parametrize(
    "asked, said",
    [
        (["under=naive"], "one attention"),
        (["under=naive,tield"], "tield"),
        (
            ["under=naive,tests.user_backends:RAISES"],
            r"attention=tests\S+RAISES .*KeyError: .*user_backends.py",
        ),
    ],
)
def test_refused_in_one_line(small, asked, said):
    with pytest.raises(SystemExit, match=said):
        agree.main([str(small), *asked])


def test_a_mistyped_run_leaves_no_folder(tmp_path):
    with pytest.raises(SystemExit, match="^agree: .*typo "):
        agree.main([str(tmp_path / "typo")])
    assert not (tmp_path / "typo").exists()
