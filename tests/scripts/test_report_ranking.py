"""Which variant a report calls best: what compares with what, and when there is a winner."""

from pathlib import Path

import pytest

from scripts.report.ranking import Difference, best_first, common_seeds, rank, verdict
from scripts.report.runs import load_runs
from tests.scripts.fabricated import write_run, write_seeds


def orders(folder: Path) -> list[tuple[str, list[str]]]:
    return [(ranking.metric, list(ranking.losses)) for ranking in rank(load_runs([folder]))]


def told(folder: Path) -> tuple[str, str]:
    """The headline and the sentence of the only ranking."""
    (ranking,) = rank(load_runs([folder]))
    return verdict(ranking, at_length=False)


def test_pairs_by_seed_tell_variants_apart(tmp_path):
    """Seeds differ by far more than variants do: only pairs by seed show it."""
    write_seeds(tmp_path, "naive", 2.0, 2.5, 3.0)
    write_seeds(tmp_path, "tiled", 1.89, 2.4, 2.91)
    (ranking,) = rank(load_runs([tmp_path]))
    assert (ranking.best, ranking.baseline, ranking.level) == ("tiled", "naive", [])
    # Student's t of two degrees of freedom
    found = ranking.difference("tiled", "naive")
    assert found == pytest.approx((-0.1, 4.303 * 0.01 / 3**0.5))
    head, sentence = told(tmp_path)
    assert head == "tiled is best"
    assert all(fact in sentence for fact in ("2.400", "0.100", "+0.075 to +0.125"))


def test_the_baseline_may_win(tmp_path):
    write_seeds(tmp_path, "no_rescale", 2.31, 2.80, 3.29)
    write_seeds(tmp_path, "naive", 2.0, 2.5, 3.0)
    head, sentence = told(tmp_path)
    assert head == "naive is best"
    assert all(fact in sentence for fact in ("no_rescale", "0.300", "+0.275 to +0.325"))


def test_variants_that_seeds_do_not_tell_apart_have_no_winner(tmp_path):
    write_seeds(tmp_path, "naive", 2.0, 2.5, 3.0)
    write_seeds(tmp_path, "tiled", 1.9, 2.59, 2.99)
    write_seeds(tmp_path, "sdpa", 2.5, 3.09, 3.6)
    (ranking,) = rank(load_runs([tmp_path]))
    assert ranking.best == "tiled" and ranking.level == ["naive"]
    assert told(tmp_path)[0] == "No winner"


def test_one_seed_names_no_winner(tmp_path):
    write_seeds(tmp_path, "naive", 2.0)
    write_seeds(tmp_path, "tiled", 1.0)
    assert orders(tmp_path) == [("val/loss_exact", ["tiled", "naive"])]
    (ranking,) = rank(load_runs([tmp_path]))
    assert not ranking.difference("tiled", "naive").is_clear
    assert "no winner" in told(tmp_path)[0]


def test_one_variant_has_nothing_to_compare_with(tmp_path):
    write_seeds(tmp_path, "naive", 2.0, 2.5)
    head, sentence = told(tmp_path)
    assert head == "naive" and "2.250 ± 0.354" in sentence


def test_a_defect_is_judged_under_exact_attention(tmp_path):
    """Its own loss leads and means nothing."""
    write_seeds(tmp_path, "naive", 2.0, 2.5)
    write_seeds(tmp_path, "no_rescale", 1.0, 1.5, gap=2.0)
    assert orders(tmp_path) == [("val/loss_exact", ["naive", "no_rescale"])]


def test_a_function_that_is_not_softmax_ranks_apart_by_its_own_loss(tmp_path):
    write_seeds(tmp_path, "naive", 2.0, 2.5)
    write_seeds(tmp_path, "sigmoid", 1.5, 1.5, exact=False, gap=7.5)
    write_seeds(tmp_path, "linear", 3.5, 3.5, exact=False, gap=5.5)
    assert orders(tmp_path) == [
        ("val/loss_exact", ["naive"]),
        ("val/loss", ["sigmoid", "naive", "linear"]),
    ]


@pytest.mark.parametrize(
    "other",
    [
        {"seq_len": 512},
        {"tokens": 2_000_000},
        {"eval_sequences": 16},
        {"env": {"data_fingerprint": "corpus-2"}},
    ],
    ids=lambda other: next(iter(other)),
)
def test_only_equals_compare(tmp_path, other):
    write_seeds(tmp_path, "naive", 2.0, 2.5)
    write_seeds(tmp_path, "tiled", 1.0, 1.5, **other)
    assert sorted(names for _, names in orders(tmp_path)) == [["naive"], ["tiled"]]


def test_each_length_has_its_winner(tmp_path):
    for seq_len in (1024, 512):
        write_seeds(tmp_path, "naive", 2.0, 2.5, seq_len=seq_len)
        write_seeds(tmp_path, "tiled", 1.0, 1.5, seq_len=seq_len)
    rankings = rank(load_runs([tmp_path]))
    assert [(each.seq_len, each.best) for each in rankings] == [(512, "tiled"), (1024, "tiled")]
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
    assert "no_max" in told(tmp_path)[1]


def test_seeds_in_common():
    one = {"0": 0.0}
    two, three = one | {"1": 0.0}, one | {"1": 0.0, "2": 0.0}
    assert common_seeds({"a": three, "b": two}) == {"0", "1"}
    assert common_seeds({"a": three, "b": three, "c": one}) == {"0", "1", "2"}
    # some comparison is better than none
    assert common_seeds({"a": three, "b": one}) == {"0"}
    assert len(common_seeds({"a": one, "b": {"1": 0.0}})) == 1


def test_the_same_seed_twice_is_one_pair(tmp_path):
    write_seeds(tmp_path, "naive", 2.0, 2.5)
    write_seeds(tmp_path, "naive", 2.2)
    (ranking,) = rank(load_runs([tmp_path]))
    assert ranking.losses["naive"] == pytest.approx({"0": 2.1, "1": 2.5})


def test_a_difference_is_clear_where_its_interval_leaves_zero_out():
    assert Difference(-0.1, 0.05).is_clear and not Difference(0.1, 0.2).is_clear
    assert not Difference(0.0, 0.0).is_clear and not Difference(5.0, None).is_clear


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
    write_run(tmp_path / "diverged", "alpha_beta", status="diverged")
    runs = load_runs([tmp_path])
    order = [run.variant for run in best_first(runs, rank(runs))]
    assert list(dict.fromkeys(order)) == ["tiled", "naive", "no_rescale", "alpha_beta"]


def test_runs_of_before_the_claim_was_recorded(tmp_path):
    write_seeds(tmp_path, "naive", 2.0, exact=None)
    write_seeds(tmp_path, "no_rescale", 2.5, exact=None)
    assert orders(tmp_path) == [("val/loss_exact", ["naive", "no_rescale"])]


def test_runs_that_were_not_completed_have_no_ranking(tmp_path):
    write_run(tmp_path / "0", "naive", status="interrupted")
    assert orders(tmp_path) == []
