"""One run on two GPUs, by torchrun and NCCL: the numbers of one GPU, and its ends.

Every test starts what it needs, so that pytest -n can deal the tests out.
"""

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.command import (
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
from tests.test_gpus import LAUNCHER
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
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2]
    asked = tiny_sweep(tmp_path, *SMALL, LAUNCHER, "seed=0,1", "compile=false")
    done = train(*asked, ranks=1, CUDA_VISIBLE_DEVICES=",".join(names))
    assert [row["status"] for row in index(tmp_path)] == ["completed"] * 2
    for job, name in enumerate(names):
        assert f"job {job} on GPU {name}: " in done.output
