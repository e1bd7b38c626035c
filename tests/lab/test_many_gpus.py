"""Which ways `lab.many_gpus` compares."""

import pytest

from lab.many_gpus import Options, turns


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_run_is_measured_twice_in_a_round(ranks):
    """Two ranks are one pair: a regression test, they ran "heads" again as "pairs"."""
    ways = [way for _, way, _ in turns(Options(cases=["context_131072"], ranks=ranks, rounds=1))]
    assert ways == ["alone", "heads", "ring"] + ["pairs"] * (ranks > 2)
