"""Steps as one CUDA graph: to the bit as without, in which cases, and with how much memory."""

import gc
from dataclasses import replace

import pytest
import torch

from attention import get_backend
from training import build_run
from training.launch.command_line import compose
from training.loop.graph import reason_against
from training.loop.step import Stepper

SMALL = ("model.num_layers=2", "model.hidden_size=128", "model.num_heads=2", "seq_len=128")
SMALL += ("batch_size=4", "steps=12", "log_every=3", "eval_every=0", "diagnose_every=0")
CUDA = torch.device("cuda")


def steps(*settings, of=12):
    """Losses, norms and scores of each step, the weights at the end, and how many were captured."""
    run = build_run(compose("device=cuda", "deterministic=true", *SMALL, *settings))
    rows = []
    with Stepper(run) as stepper:
        for result in stepper.steps():
            rows.append((result.loss, result.grad_norm, result.max_scores))
            stepper.update(result)
        graphs = stepper.graphs and stepper.graphs.graphs
        captured = len(graphs or ())
    return rows, [x.detach().clone() for x in run.model.parameters()], captured


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("settings", "captured"),
    [
        ("attention=triton", 2),
        ("attention=triton tokens_per_step=1024", 2),
        ("attention=triton model.dropout=0.1", 2),
        ("attention=triton optim.name=muon", 2),
        ("attention=triton attention.window=20", 2),
        ("attention=triton data.documents=true", 2),
        ("attention=naive", 2),
        ("attention=sdpa", 1),
        ("attention=flex", 1),
        ("attention=triton attention.switch_at=6 attention.switch_to=naive", 2),
        ("attention=triton data=last_write tokens_per_step=1024", 0),
        # the user's Python runs each time, unless the user says otherwise
        ("attention=tests.user_backends:RIGHT", 0),
        ("attention=tests.user_backends:RIGHT cuda_graph=true", 1),
        # asks the GPU in the middle of the capture, which ends it
        ("attention=tests.user_backends:ASKS_THE_GPU cuda_graph=true", 0),
    ],
)
def test_a_graph_changes_no_bit(settings, captured):
    asked = settings.split()
    rows, weights, replayed = steps(*asked)
    without = [setting for setting in asked if not setting.startswith("cuda_graph")]
    expected, other, none = steps(*without, "cuda_graph=false")
    assert (replayed, none) == (captured, 0)
    assert rows == expected
    assert all(map(torch.equal, weights, other))


@pytest.mark.gpu
def test_a_graph_needs_little_more_memory():
    """What is held of the GPU, free for other steps or not."""
    held = {}
    for mode in ("false", "auto"):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        steps("attention=triton", "seq_len=1024", "batch_size=16", f"cuda_graph={mode}")
        held[mode] = torch.cuda.max_memory_reserved()
    assert held["auto"] <= 1.2 * held["false"]


@pytest.mark.parametrize(
    ("backend", "how", "says"),
    [
        ("triton", {"compiled": False}, "not compiled"),
        ("triton", {"scaled": True}, "fp16"),
        ("tiled", {}, "attention=tiled"),
        ("triton", {}, None),
        ("triton", {"score_mod": True}, "your Python"),
        ("naive", {}, None),
        (replace(get_backend("naive"), name="mine"), {}, "your Python"),
        (replace(get_backend("naive"), fn=lambda q, k, v: q), {}, "your Python"),
    ],
)
def test_what_can_be_a_graph(backend, how, says):
    backend = get_backend(backend) if isinstance(backend, str) else backend
    why = reason_against(backend, CUDA, **{"compiled": True, "scaled": False} | how)
    assert why is None if says is None else says in why
