"""One run on two GPUs, by torchrun and NCCL: the numbers of one GPU, and its ends.

Every test starts what it needs, so that pytest -n can deal the tests out.
"""

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.command import (
    ROOT,
    Done,
    checkpoint,
    computed,
    environment,
    finish,
    index,
    metrics,
    summary,
    tiny,
    tiny_sweep,
    wait_until,
)
from tests.processes import Process
from tests.test_gpus import LAUNCHER, OWN
from tests.training.test_ranks import alike
from training.record.runs import read_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

# head_dim 64, which the Hopper kernels take; dropout would differ
SMALL = ("device=cuda", "attention=triton", "model.num_layers=2", "model.hidden_size=128")
SMALL += ("seq_len=256", "eval_every=2", "optim.schedule=constant")
TWO_PASSES = ("batch_size=2", "tokens_per_step=1024")  # alone, what two ranks do at once
LONG = ("steps=20000", "eval_every=0", "diagnose_every=0")


def begin(*arguments: str, ranks: int = 2, **variables: str) -> Process:
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    return Process(*(torchrun if ranks > 1 else ()), *arguments, env=environment(**variables))


def train(*arguments: str, **how) -> Done:
    done = finish(begin("train.py", *arguments, **how))
    assert done.code == 0, done.output
    return done


def pid_of(rank: int, torchrun: Process) -> int:
    for task in Path(f"/proc/{torchrun.pid}/task").iterdir():
        for pid in (task / "children").read_text().split():
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in variables:
                return int(pid)
    raise AssertionError(f"no rank {rank}")


@pytest.mark.parametrize(
    "settings",
    [
        ("dtype=bf16", "deterministic=true"),
        ("dtype=fp32", "deterministic=true", "compile=false", "optim=muon"),
    ],
    ids=["bf16-compiled", "fp32-muon"],
)
def test_two_ranks_are_two_passes_to_the_bit(tmp_path, settings):
    """The sum of two ranks' gradients has one rounding, in whichever order."""
    train(*tiny(tmp_path / "alone", *SMALL, *TWO_PASSES, *settings), ranks=1)
    done = train(*tiny(tmp_path / "two", *SMALL, *settings))
    assert "2 ranks" in done.output
    assert computed(tmp_path / "two") == computed(tmp_path / "alone")
    assert alike(tmp_path / "two", tmp_path / "alone")


# relative bounds for rounding to bfloat16, 2**-9. A loss averages it over a thousand tokens. A
# gradient's norm collects it from all layers. The largest score is one product of rounded vectors
NEAR = {"train/loss": 1e-3, "val/loss": 1e-3, "grad_norm": 2e-2, "attention/max_score": 2e-2}


@pytest.mark.parametrize(
    "settings",
    [
        ("attention.sinks=true", "model.checkpoint=block"),
        ("model.checkpoint=attention",),
        ("model=modern", "model.num_kv_heads=2", "data.documents=true"),
        ("attention.window=100", "attention.softcap=20", "compile=false"),
    ],
    ids=["sinks-recomputed", "kept", "gqa-documents", "softcap-eager"],
)
def test_a_shared_sequence_trains_as_on_one_gpu(tmp_path, settings):
    train(*tiny(tmp_path / "alone", *SMALL, *settings), ranks=1)
    done = train(*tiny(tmp_path / "two", *SMALL, *settings, "parallel.context=2"))
    assert "Memory block" not in done.output
    ours, theirs = metrics(tmp_path / "two"), metrics(tmp_path / "alone")
    for key, near in NEAR.items():
        found, expected = ([row[key] for row in rows if key in row] for rows in (ours, theirs))
        assert expected and found == pytest.approx(expected, rel=near), key


CALLS = """
import sys, torch
from functools import partial
from attention import attention, get_backend
from training.loop.ranks import join, leave

dim = int(sys.argv[1])
ranks = join("cuda", 2)
torch.use_deterministic_algorithms(True)
draw = torch.Generator().manual_seed(0)
B, H, N = 2, 4, 516  # tiles that are not full
shapes = [(B, H, N, dim), (B, 2, N, dim), (B, 2, N, dim), (B, H, N, dim)]
q, k, v, weights = (torch.randn(x, generator=draw).cuda().bfloat16() for x in shapes)
inputs = [x.requires_grad_() for x in (q, k, v)]
ids = torch.tensor([[0] * 130 + [1] * 300 + [0] * 86, [5] * N], device="cuda")
sinks = torch.tensor([1.0, -1.0, 0.5, 2.0], device="cuda", requires_grad=True)
own = ranks.columns(N)

def results(call, tensors, weights, **arguments):
    out = call(*tensors, **arguments).out
    return out, *torch.autograd.grad((out * weights).sum(), tensors)

masks = [{}, {"window": 100}, {"causal": False}, {"document_ids": ids}, {"sinks": sinks}]
for kernel, tried in ("hopper", masks), ("portable", [{}, {"softcap": 2.0}, *masks[3:]]):
    backend = get_backend("triton", kernel=kernel)
    for mask in tried:
        one = results(attention, inputs, weights, backend=backend, **mask)
        parts = [x[:, :, own].detach().requires_grad_() for x in inputs]
        call = partial(ranks.shards.attention, attention)
        two = results(call, parts, weights[:, :, own], backend=backend, **mask)
        for name, x, y in zip("out dq dk dv".split(), two, one):
            y = y[:, :, own]
            assert torch.equal(x, y), (kernel, mask, name, (x - y).abs().max())
leave()
"""


@pytest.mark.parametrize("dim", [64, 128])
def test_a_shared_call(tmp_path, dim):
    """One GPU's output and gradients to the bit, where kernels are deterministic."""
    (tmp_path / "calls.py").write_text(CALLS)
    process = begin(str(tmp_path / "calls.py"), str(dim), PYTHONPATH=str(ROOT))
    output = process.end(400)
    assert process.returncode == 0, output


@pytest.mark.parametrize(
    "rank, settings",
    [(1, ()), (0, ()), (1, ("parallel.context=2",))],
    ids=["second", "first", "shared-sequence"],
)
def test_a_rank_that_is_killed_ends_the_run(tmp_path, rank, settings):
    """By torchrun, which ends the other rank too: NCCL would wait. The last checkpoint resumes."""
    run_dir = tmp_path / "run"
    process = begin("train.py", *tiny(run_dir, *SMALL, *LONG, "checkpoint_every=5", *settings))
    wait_until((run_dir / "checkpoint/meta.json").exists, process)
    killed = pid_of(rank, process)
    os.kill(killed, signal.SIGKILL)
    done = finish(process)
    # the other rank may be listed before it, if it was just waiting for this one
    listed = done.output.partition("train.py FAILED")[2]
    assert done.code != 0 and f"SIGKILL) received by PID {killed}" in listed, done.output
    assert read_run(run_dir)["status"] in ("unfinished", "failed")
    saved = checkpoint(run_dir)["step"]
    train(f"resume={run_dir}", f"steps={saved + 2}")
    assert summary(run_dir)["steps_done"] == saved + 2


def test_a_sweep_over_two_gpus(tmp_path):
    """Four jobs: one killed, one without memory, and two that complete."""
    own = "\nONE, TWO = (replace(get_backend('triton'), name=name) for name in ('one', 'two'))\n"
    (tmp_path / "own.py").write_text(OWN + own)
    swept = "attention=own:KILLED,own:NO_MEMORY,own:ONE,own:TWO"
    asked = tiny_sweep(
        tmp_path / "sweep", *SMALL, LAUNCHER, swept, "steps=12", "compile=false", "eval_every=0"
    )
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2]
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(names), "PYTHONPATH": str(tmp_path)}
    done = finish(begin("train.py", *asked, ranks=1, **visible))
    assert done.code == 1 and "Traceback" not in done.output, done.output
    statuses = [row["status"] for row in index(tmp_path / "sweep")]
    assert statuses == ["failed", "oom", "completed", "completed"], done.output
    for job in range(4):
        (line,) = [x for x in done.output.splitlines() if x.startswith(f"job {job} on GPU ")]
        gpu = line.split()[4].rstrip(":")
        assert gpu in names and (gpu == names[job] if job < 2 else True), line
        assert f"it sees {gpu}\n" in (tmp_path / f"sweep/{job}/output.log").read_text()
    table = (tmp_path / "sweep/table.txt").read_text()
    assert table.count("completed") == 2 and "oom" in table and "failed" in table
