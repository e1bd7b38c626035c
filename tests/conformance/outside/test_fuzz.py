"""`attn-conform fuzz`: random calls of an exact attention are green, those of a wrong one red, and
they reach every feature.
"""

import re
from dataclasses import replace

import pytest
import torch

from attention import get_backend
from conformance.backend_under_test import Subject
from conformance.outside import command
from conformance.outside import fuzz as fuzzing
from conformance.outside.dialects import target
from conformance.outside.fuzz import fuzz
from conformance.views import LAYOUTS
from tests import user_backends


def trials(name: str, dtype: torch.dtype = torch.float32, *, calls: int, seed: int = 0) -> list:
    subject = Subject(get_backend(name), "cpu", dtype)
    return list(fuzz(subject, calls=calls, seed=seed))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_exact_attention_is_green(dtype):
    for trial in trials("tiled", dtype, calls=40):
        assert not trial.failures and (trial.checks or trial.refused)


def test_calls_reach_every_feature_and_layout():
    naive, drawn = get_backend("naive"), trials("naive", calls=80)
    for feature in naive.features - {"max_score", "cu_seqlens"}:  # none is drawn for these
        lacking = replace(naive, features=naive.features - {feature})
        subject = Subject(lacking, "cpu", torch.float32)
        assert not all(subject.takes(trial.case) for trial in drawn), feature
    assert any("sinks" in trial.case.optional for trial in drawn)
    assert {trial.layout for trial in drawn} == {"contiguous", *LAYOUTS}


def test_a_seed_gives_the_same_calls_again_and_another_one_others():
    first, again, other = (
        [str(trial.case) for trial in trials("naive", calls=5, seed=seed)] for seed in (0, 0, 1)
    )
    assert first == again and not set(first) & set(other)


def test_on_a_gpu_calls_of_a_kind_follow_one_another(monkeypatch):
    """Calls of a kind share compiled kernels. A kind that is refused is drawn once."""

    def try_out(subject, case, layout):
        refused = "softcap" if "softcap" in case.optional else ""
        return fuzzing.Trial(case, layout, refused=refused)

    monkeypatch.setattr(fuzzing, "try_out", try_out)
    subject = Subject(get_backend("naive"), "cpu", torch.float32)
    subject.device, subject.length = "cuda", 330
    taken = [trial.case for trial in fuzz(subject, calls=400, seed=0) if not trial.refused]
    size = fuzzing.CALLS_OF_A_KIND
    assert 300 < len(taken) < 400
    for first in range(0, len(taken) // size * size, size):
        cases = taken[first : first + size]
        kinds = {(x.batch, x.num_heads, x.head_dim, x.causal, *x.optional) for x in cases}
        assert len(kinds) == 1 and len({x.num_queries for x in cases}) > size / 3


def test_wrong_attention_is_red():
    drawn = trials("no_scale", calls=10)
    assert any(trial.failures for trial in drawn)
    assert max(check.share for trial in drawn for check in trial.checks) > 1


@pytest.mark.parametrize(
    "backend, error", [(user_backends.RAISES, "KeyError"), (user_backends.EXITS, "SystemExit")]
)
def test_an_attention_that_raises_is_a_failure_and_not_the_end(backend, error):
    subject = Subject(backend, "cpu", torch.float32)
    failed = [trial.failures for trial in fuzz(subject, calls=12, seed=0) if not trial.refused]
    assert failed and all(error in str(each) for each in failed)


def test_inputs_that_change_are_a_failure():
    """A regression test: the result was compared with a reference on the changed inputs."""
    how = {"layout": "BHND", "gqa": "no", "backward": False}
    found = target("tests.user_attentions:scales_in_place", None, how)
    for trial in fuzz(Subject(found.backend, "cpu", torch.float32), calls=3, seed=0):
        assert "changes its inputs" in str(trial.failures)


def test_an_interrupted_command_says_what_it_found(monkeypatch, capsys):
    try_out, left = fuzzing.try_out, list(range(10))

    def interrupted(*call):
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return try_out(*call)

    monkeypatch.setattr(fuzzing, "try_out", interrupted)
    with pytest.raises(KeyboardInterrupt):
        command.run_fuzz(["naive", "device=cpu"])
    found = re.match(r"fp32  (\d+) calls .* (\d+) failures", capsys.readouterr().out)
    assert found is not None and int(found[1]) > 0 and found[2] == "0"
