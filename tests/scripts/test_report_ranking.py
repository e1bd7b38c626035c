"""Which variant a report calls best: what compares with what, and when there is a winner."""

from pathlib import Path

import pytest

from scripts.report.ranking import best_first, rank, verdict
from scripts.report.runs import load_runs
from tests.scripts.fabricated import write_run, write_seeds


def orders(folder: Path) -> list[list[str]]:
    return [list(ranking.losses) for ranking in rank(load_runs([folder]))]


SAID = {
    # seeds differ by far more than variants do: only pairs by seed show it
    "a winner": (
        {"naive": (2.0, 2.5, 3.0), "tiled": (1.89, 2.4, 2.91)},
        ("tiled is best", "2.400", "0.100", "+0.075 to +0.125"),
    ),
    "the baseline wins": (
        {"no_rescale": (2.31, 2.80, 3.29), "naive": (2.0, 2.5, 3.0)},
        ("naive is best", "0.300 below the next, no_rescale", "+0.275 to +0.325"),
    ),
    "seeds do not tell": (
        {"naive": (2.0, 2.5, 3.0), "tiled": (1.9, 2.59, 2.99), "sdpa": (2.5, 3.09, 3.6)},
        ("No winner", "tiled from naive."),
    ),
    "one seed": ({"naive": (2.0,), "tiled": (1.0,)}, ("One seed: no winner", "1.000 of tiled")),
    "one variant": ({"naive": (2.0, 2.5)}, ("naive", "2.250 ± 0.354")),
}


@pytest.mark.parametrize(("losses", "said"), SAID.values(), ids=SAID)
def test_the_verdict(tmp_path, losses, said):
    for variant, own in losses.items():
        write_seeds(tmp_path, variant, *own)
    (ranking,) = rank(load_runs([tmp_path]))
    head, sentence = verdict(ranking, at_length=False)
    assert head == said[0]
    assert [fact for fact in said[1:] if fact not in sentence] == []


def test_a_defect_is_judged_under_exact_attention(tmp_path):
    """Its own loss leads and means nothing."""
    write_seeds(tmp_path, "naive", 2.0, 2.5)
    write_seeds(tmp_path, "no_rescale", 1.0, 1.5, gap=2.0)
    assert orders(tmp_path) == [["naive", "no_rescale"]]


def test_a_function_that_is_not_softmax_is_judged_by_its_own_loss(tmp_path):
    write_seeds(tmp_path, "naive", 2.0, 2.5)
    write_seeds(tmp_path, "sigmoid", 1.5, 1.5, exact=False, gap=7.5)
    write_seeds(tmp_path, "linear", 3.5, 3.5, exact=False, gap=5.5)
    assert orders(tmp_path) == [["sigmoid", "naive", "linear"]]
    (ranking,) = rank(load_runs([tmp_path]))
    assert ranking.baseline == "naive" and "val/loss 1.500" in verdict(ranking, at_length=False)[1]


@pytest.mark.parametrize(
    "other",
    [
        {"tokens": 2_000_000},
        {"eval_sequences": 16},
        {"env": {"data_fingerprint": "corpus-2"}},
    ],
    ids=lambda other: next(iter(other)),
)
def test_only_equals_compare(tmp_path, other):
    write_seeds(tmp_path, "naive", 2.0, 2.5)
    write_seeds(tmp_path, "tiled", 1.0, 1.5, **other)
    assert sorted(orders(tmp_path)) == [["naive"], ["tiled"]]


def test_each_length_has_its_winner(tmp_path):
    for seq_len in (1024, 512):
        write_seeds(tmp_path, "naive", 2.0, 2.5, seq_len=seq_len)
        write_seeds(tmp_path, "tiled", 1.0, 1.5, seq_len=seq_len)
    rankings = rank(load_runs([tmp_path]))
    found = [(each.seq_len, *each.losses) for each in rankings]
    assert found == [(512, "tiled", "naive"), (1024, "tiled", "naive")]
    assert "1,024" in verdict(rankings[1], at_length=True)[0]


def test_seeds_that_some_variant_lacks_do_not_count(tmp_path):
    """A regression test of means over different seeds: seed 2 is an easy one."""
    write_seeds(tmp_path, "naive", 2.0, 2.5, 0.1)
    write_seeds(tmp_path, "tiled", 1.9, 2.39)
    (ranking,) = rank(load_runs([tmp_path]))
    assert ranking.losses == {
        "tiled": pytest.approx({"0": 1.9, "1": 2.39}),
        "naive": pytest.approx({"0": 2.0, "1": 2.5}),
    }


def test_a_variant_without_the_seeds_of_the_others_is_left_out_by_name(tmp_path):
    for attention in ("naive", "tiled", "sdpa"):
        write_seeds(tmp_path, attention, 2.0, 2.5, 3.0)
    write_seeds(tmp_path, "no_max", 1.0)
    write_run(tmp_path / "diverged", "no_max", loss=1.0, seed=1, status="diverged")
    (ranking,) = rank(load_runs([tmp_path]))
    assert "no_max" not in ranking.losses and ranking.unranked == ["no_max"]
    assert "no_max" in verdict(ranking, at_length=False)[1]


def test_the_baseline(tmp_path):
    for attention in ("tiled", "triton", "no_rescale"):
        write_seeds(tmp_path, attention, 2.0, 2.5)
    runs = load_runs([tmp_path])
    assert rank(runs)[0].baseline == "tiled"
    assert rank(runs, "no_rescale")[0].baseline == "no_rescale"
    with pytest.raises(ValueError, match="baseline=naive"):
        rank(runs, "naive")


def test_runs_come_in_the_order_of_the_result(tmp_path):
    write_seeds(tmp_path, "naive", 2.0, 2.5)
    write_seeds(tmp_path, "no_rescale", 3.0, 3.5)
    write_seeds(tmp_path, "tiled", 1.9, 2.5)
    # it was evaluated after its last step
    write_run(tmp_path / "stopped", "alpha_beta", status="interrupted", steps_done=280)
    runs = load_runs([tmp_path])
    order = [run.variant for run in best_first(runs, rank(runs))]
    assert list(dict.fromkeys(order)) == ["tiled", "naive", "no_rescale", "alpha_beta"]
    assert rank([run for run in runs if run.status == "interrupted"]) == []
