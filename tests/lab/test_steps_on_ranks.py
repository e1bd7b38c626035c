"""`python -m lab.steps_on_ranks`, as on two GPUs but for one thing: PyTorch refuses a CPU's
attention there, so its ring is called with a CPU's kernel.
"""

import json
import socket

import pytest

from tests import forked
from tests.command import TINY, environment
from training.run import build_run, compose
from training.step import compute_gradients

# by the kernel that is asked for: the ring, each rank alone, which is wrong, and PyTorch's refusal
FOR_CPU = """
import torch
from lab import steps_on_ranks
from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

aten, refused = torch.ops.aten, steps_on_ranks.sdpa


class Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        group = steps_on_ranks.mesh("cpu").get_group()
        op = aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = theirs._templated_ring_attention(group, 2, op, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, d_out):
        def op(*, query, key, value, out, logsumexp, is_causal, grad_out):
            op = aten._scaled_dot_product_flash_attention_for_cpu_backward
            return op(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)

        saved = dict(zip(("query", "key", "value", "out", "logsumexp"), ctx.saved_tensors))
        group = steps_on_ranks.mesh("cpu").get_group()
        return theirs._templated_ring_attention_backward(
            group, 2, op, grad_out=d_out, grad_out_name="grad_out", is_causal=True, **saved
        )


def sdpa(q, k, v):
    if torch.backends.cuda.cudnn_sdp_enabled():
        return Ring.apply(q, k, v)
    if torch.backends.cuda.mem_efficient_sdp_enabled():
        return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
    return refused(q, k, v)


steps_on_ranks.sdpa = sdpa
steps_on_ranks.main()
"""
SHAPE = [each for each in TINY if not each.startswith(("seq_len", "steps", "batch_size"))]
WHO = ("cudnn:alltoall", "flash:allgather", "efficient:alltoall", "cudnn:allgather", "ours:heads")
WHO += ("ours:alone", "ours:data", "ddp:data")


@pytest.mark.slow
def test_two_ranks_beside_one_process(tmp_path):
    own = (
        "seq_len=64",
        "batch=2",
        "steps=2",
        "repeats=2",
        f"who={','.join(WHO)}",
        f"out={tmp_path}/out.json",
    )
    given = (*SHAPE, *own, "attention=tiled", "tokenizer.vocab_size=null", "model=tiny")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    variables = environment(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    ranks = [
        forked.Process("-c", FOR_CPU, *given, env=variables | {"RANK": rank, "LOCAL_RANK": rank})
        for rank in "01"
    ]
    assert [each.wait() for each in ranks] == [0, 0], [each.stdout.read_text() for each in ranks]
    rows = {row["who"]: row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}

    run = build_run(compose(*SHAPE, "seq_len=64", "batch_size=2"))
    how = {"optimizer": run.optimizer, "scaler": run.scaler, "autocast": run.autocast}
    with run.batches() as batches:
        loss, norm = compute_gradients(run.model, batches.passes(0), **how, grad_clip=0.0)
    for name in ("cudnn:alltoall", "cudnn:allgather", *WHO[4:]):
        row = rows[name]
        assert row["loss"] == pytest.approx(loss.item(), rel=1e-6) and row["right"]
        assert row["loss_of_one"] == pytest.approx(loss.item(), rel=1e-6)
        assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        assert max(row["errors"].values(), default=0) < 1e-5 and row["steps"] == 2
        assert row["tokens_per_sec"] == pytest.approx(128 / row["seconds"])
    alone = rows["efficient:alltoall"]
    assert alone["loss"] == pytest.approx(loss.item(), abs=1e-2)  # it does not tell
    assert min(alone["errors"].values()) > 0.1 and not alone["right"]
    assert "seconds" not in alone and "tokens_per_sec" not in alone
    assert "does not have a sharding strategy" in rows["flash:allgather"]["error"]
