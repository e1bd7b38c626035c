"""`python -m lab.steps_on_ranks` on two processes. PyTorch's context_parallel refuses a CPU's
attention, so there each rank attends to its own keys alone, which is wrong.
"""

import json
import math

import pytest

from lab.steps_on_ranks import is_right
from tests import processes
from tests.command import ROOT, TINY, environment
from training import build_run, compose
from training.loop.step import gradients

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
FOR_CPU = """
from lab import steps_on_ranks
steps_on_ranks.sdpa = lambda q, k, v: (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
steps_on_ranks.main()
"""
SHAPE = [each for each in TINY if not each.startswith(("seq_len", "steps", "batch_size"))]


def test_a_run_with_other_gradients_is_wrong():
    """A regression test: a compiled run with them was right by its loss and one eager layer."""
    row = {"loss": 10.9, "loss_of_one": 10.9, "grad_norm": 2.5, "grad_norm_of_one": 2.5}
    row["errors"] = {"out": 0.01}
    assert is_right(row)
    for wrong in ({"grad_norm": 2.6}, {"grad_norm": math.nan}, {"loss": 11.0}):
        assert not is_right(row | wrong), wrong


@pytest.mark.slow
def test_two_ranks_beside_one_process(tmp_path):
    who = "who=cudnn:alltoall,ours:heads,ours:alone,ours:data"
    own = ("seq_len=64", "batch=2", "steps=2", "repeats=2", who, f"out={tmp_path}/out.json")
    given = (*SHAPE, *own, "attention=tiled", "tokenizer.vocab_size=null", "model=tiny")
    (tmp_path / "ranks.py").write_text(FOR_CPU)
    command = (*TORCHRUN, str(tmp_path / "ranks.py"), *given)
    processes.run(*command, env=environment(PYTHONPATH=str(ROOT)), check=True)
    alone, *rows = json.loads((tmp_path / "out.json").read_text())["rows"]

    run = build_run(compose(*SHAPE, "seq_len=64", "batch_size=2"))
    run.step_model = run.model
    with run.batches() as batches:
        loss, norm, _ = gradients(run, batches.passes(0))
    assert len(rows) == 3
    expected = dict.fromkeys(("loss", "loss_of_one"), loss.item())
    expected |= dict.fromkeys(("grad_norm", "grad_norm_of_one"), norm.item())
    for row in rows:
        assert {key: row[key] for key in expected} == pytest.approx(expected, rel=1e-5)
        assert row["right"] and max(row["errors"].values(), default=0) < 1e-5
        assert row["tokens_per_sec"] == pytest.approx(128 / row["seconds"])
    assert alone["loss"] == pytest.approx(loss.item(), abs=1e-2)  # it does not tell
    assert min(alone["errors"].values()) > 0.1 and not alone["right"]
    assert "seconds" not in alone and "tokens_per_sec" not in alone
