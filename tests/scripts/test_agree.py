"""`python -m scripts.agree`: exact attentions agree but for rounding, another function does not."""

import json
from pathlib import Path

import pytest
import torch

from data.interface import IGNORED
from scripts import agree
from tests.run_folder import write_run


@pytest.fixture
def small(tmp_path):
    write_run(tmp_path / "run")
    return tmp_path / "run"


def pairs_of(out: Path, seed: int = 0) -> dict[tuple[str, str], dict]:
    rows = json.loads(out.read_text())["rows"]
    return {(row["a"], row["b"]): row for row in rows if row["seed"] == seed}


def test_exact_attentions_agree_and_another_function_does_not(small, capsys):
    """The model's weights are large and random: its attention decides what it says."""
    asked = ["under=naive,tiled:block_kv=8,no_rescale:block_kv=8", "sequences=2", "tokens=8"]
    agree.main([str(small), *asked, "device=cpu"])
    pairs = pairs_of(small / "agree.json")
    assert len(pairs) == 6  # of four readings
    assert pairs["naive in float32", "naive"]["largest"] == 0
    near, far = pairs["naive", "tiled:block_kv=8"], pairs["naive", "no_rescale:block_kv=8"]
    assert 0 < near["largest"] < 1e-4 < 1e-2 < far["mean"]
    assert near["equal_tokens"] == [8, 8] and min(far["equal_tokens"]) < 8
    assert "naive and tiled:block_kv=8" in capsys.readouterr().out


def test_several_runs_have_a_mean_and_a_deviation(small, tmp_path, capsys):
    """In bfloat16, whose distance from float32 is larger than that between kernels in float32."""
    write_run(tmp_path / "other", seed=1)
    asked = ["under=naive,sdpa", "sequences=1", "tokens=1", "dtype=bf16"]
    agree.main([str(tmp_path), *asked, f"out={tmp_path / 'both.json'}"])
    runs = [pairs_of(tmp_path / "both.json", seed) for seed in (0, 1)]
    assert all(run["naive in float32", "naive"]["mean"] > 1e-3 for run in runs)
    first, second = (run["naive", "sdpa"] for run in runs)
    assert first["mean"] != second["mean"]
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("naive and sdpa"))
    assert " ± " in line and f"{max(first['largest'], second['largest']):.1e}" in line


def test_only_targets_that_take_a_loss_count(tmp_path):
    """A regression test: of a synthetic task, token 0 counted wherever nothing is asked."""
    model = write_run(tmp_path / "run")
    inputs = torch.arange(16).view(2, 8)
    targets = torch.full_like(inputs, IGNORED)
    targets[:, -1] = 3
    with torch.no_grad():
        log_p = agree.read(model, inputs, targets, 1).log_p
        expected = model(inputs).logits[:, -1].log_softmax(-1)[:, 3]
    assert torch.allclose(log_p, expected)


def test_tokens_count_as_equal_up_to_the_first_that_differs():
    written = [torch.tensor([tokens]) for tokens in ([1, 2, 3, 4], [1, 2, 9, 4])]
    found = agree.compare(*(agree.Reading(torch.zeros(1, 4), each) for each in written))
    assert found["equal_tokens"] == [2]
