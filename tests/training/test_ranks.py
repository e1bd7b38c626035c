"""Several processes train one run: the same numbers, one folder, one end."""

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from attention import attention, get_backend
from attention.context import Group, Shards
from attention.interface import Refusal
from tests import forked
from tests.command import (
    QUICK,
    ROOT,
    Done,
    checkpoint,
    computed,
    environment,
    finish,
    metrics,
    run,
    same,
    start,
    start_quick,
    summary,
    tiny,
    wait_for_rows,
)
from training.command_line import compose
from training.ranks import Ranks, join
from training.sharing import check_shares, way_to_share

# the ranks of a step share four sequences; dropout would differ
CHUNKS = ("model.checkpoint=attention", "model.chunk_tokens=5")
SHARED = ("batch_size=4", "seq_len=32", "log_every=2", "eval_sequences=6", "eval_every=2")
FADE = "tests.attention.test_score_mod:FADE"
SHARED += ("optim.schedule=constant",)  # which a resume does not change
# alone, what two ranks do is two passes
TWO_PASSES = ("batch_size=2", "tokens_per_step=128")


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def start_ranks(
    *arguments: str, world: int = 2, how: Callable = start_quick, **variables: str
) -> list[forked.Process]:
    """As torchrun starts them, in processes that need not import torch."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        how(
            *arguments,
            WORLD_SIZE=str(world),
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            **meeting,
            **variables,
        )
        for rank in range(world)
    ]


def run_ranks(*arguments: str, **options) -> list[Done]:
    return [finish(each) for each in start_ranks(*arguments, **options)]


def alike(one: Path, other: Path) -> bool:
    """The rows and the checkpoint, but not where the random numbers stand."""
    ours, theirs = checkpoint(one), checkpoint(other)
    del ours["random"], theirs["random"]
    return computed(one) == computed(other) and same(ours, theirs)


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("optim=muon", "optim.qk_clip=0.001", "optim.z_loss=0.1"),
        ("data=last_write", "tokenizer.vocab_size=null"),
        pytest.param(("attention=naive",), marks=pytest.mark.slow),
    ],
    ids=["adamw", "muon-qk_clip-z_loss", "last_write", "naive"],
)
def test_two_ranks_are_two_passes_to_the_bit(tmp_path, settings):
    alone = run(*tiny(tmp_path / "alone", *SHARED, *TWO_PASSES, *settings))
    assert alone.code == 0, alone.output
    first, second = run_ranks(*tiny(tmp_path / "two", *SHARED, *settings))
    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert alike(tmp_path / "alone", tmp_path / "two")
    assert "4 x 32 tokens a step on 2 ranks" in first.output and second.output == ""


@pytest.mark.parametrize(
    "settings",
    [
        ("attention=tiled", "attention.block_q=8", "attention.block_kv=8", "attention.sinks=true")
        + ("optim.qk_clip=0.001", "optim.z_loss=0.1"),
        pytest.param(
            ("attention=naive", "tokens_per_step=128", "batch_size=2"), marks=pytest.mark.slow
        ),
        ("attention=sdpa", "model=modern", "model.num_kv_heads=2", "model.num_heads=4"),
        ("attention=no_rescale", "attention.block_kv=8", "data.documents=true"),
        pytest.param(("attention=kv_outer", "compile=true"), marks=pytest.mark.slow),
        ("attention=tiled", "model.checkpoint=block", "attention.block_kv=8"),
        ("attention=tiled", "attention.window=9", "attention.pattern=SL", "attention.softcap=1"),
        ("attention=tiled", "model.positions=alibi", "attention.block_kv=8", *CHUNKS),
    ],
    ids=[
        "tiled",
        "naive-two-passes",
        "sdpa-rope-gqa",
        "no_rescale-documents",
        "compiled",
        "recomputed",
        "window-softcap",
        "alibi-chunks",
    ],
)
def test_a_shared_sequence_is_the_same_attention(tmp_path, settings):
    """Also where it is broken: each rank computes whole sequences for its heads. What is computed
    token by token is summed in another order.
    """
    folders = [tmp_path / "alone", tmp_path / "two"]
    asked = [tiny(folder, *SHARED, "log_every=1", *settings) for folder in folders]
    alone = run(*asked[0])
    assert alone.code == 0, alone.output
    first, second = run_ranks(*asked[1], "parallel.context=2")
    assert (first.code, second.code) == (0, 0), first.output + second.output
    ours, theirs = (metrics(folder) for folder in folders)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        for key in one.keys() & {"train/loss", "grad_norm", "val/loss", "attention/max_score"}:
            # AdamW's first steps make much of a rounding, and the largest score shows it first
            near = 1e-3 if key == "attention/max_score" else 2e-5
            assert other[key] == pytest.approx(one[key], rel=near), (key, one["step"])


@pytest.mark.parametrize(
    "settings, how, alone",
    [
        (
            ("attention=tiled", "model=modern", "model.num_kv_heads=1", "data.documents=true"),
            ("parallel.how=ring",),
            (),
        ),
        (("attention=ring_no_rescale",), (), ("attention.ranks=2",)),
        pytest.param(
            ("attention=ring_no_rescale", "compile=true"),
            (),
            ("attention.ranks=2",),
            marks=pytest.mark.slow,
        ),
        pytest.param(("attention=tiled",), ("parallel.how=gather",), (), marks=pytest.mark.slow),
        (("attention=tiled", "attention.window=9", "attention.softcap=1"), (), ()),
    ],
    ids=["rope-documents", "broken-merge", "compiled", "gathered", "window-softcap"],
)
def test_a_ring_trains_as_one_process_does(tmp_path, settings, how, alone):
    tiles = ("attention.block_q=8", "attention.block_kv=8", "model.num_heads=3")
    tiles += ("model.hidden_size=24",)  # three heads do not divide among two ranks
    one = finish(start_quick(*tiny(tmp_path / "alone", *SHARED, *tiles, *settings, *alone)))
    assert one.code == 0, one.output
    asked = tiny(tmp_path / "two", *SHARED, *tiles, *settings, *how, "parallel.context=2")
    done = run_ranks(*asked)
    assert [each.code for each in done] == [0, 0], done[0].output + done[1].output
    # PyTorch warns where a step frees what one before it left
    assert "Memory block" not in one.output + done[0].output + done[1].output
    ours, theirs = (metrics(tmp_path / name) for name in ("alone", "two"))
    for key in (
        "train/loss",
        "grad_norm",
        "val/loss",
        "val/loss_exact",
        "attention/max_score",
        "attention/dq_cosine",
    ):
        found, expected = ([row[key] for row in rows if key in row] for rows in (theirs, ours))
        near = 1e-3 if key.startswith("attention") else 2e-5
        assert expected and found == pytest.approx(expected, rel=near), key


def test_four_ranks_share_two_sequences_each(tmp_path):
    """Two of them a sequence, and two pairs."""
    folders = [tmp_path / "alone", tmp_path / "four"]
    asked = [tiny(folder, *SHARED, "model.num_heads=4") for folder in folders]
    assert run(*asked[0]).code == 0
    done = run_ranks(*asked[1], "parallel.context=2", world=4)
    assert [each.code for each in done] == [0] * 4, done[0].output
    ours, theirs = ([row["val/loss"] for row in metrics(each)] for each in folders)
    assert theirs == pytest.approx(ours, rel=2e-5)


CALLS = """
import sys, torch
from functools import partial
from attention import ScoreMod, attention, get_backend
from attention.context import register_ring
from conformance.cases import every_index
from training.ranks import join

context, heads, gather, *backends = sys.argv[1:]
ranks = join("cpu", int(context), heads=int(heads), gather=gather == "True")
torch.set_num_threads(1)
draw = torch.Generator().manual_seed(0)
q = torch.randn(2, 4, 48, 16, generator=draw, requires_grad=True)
k, v = (torch.randn(2, 2, 48, 16, generator=draw, requires_grad=True) for _ in range(2))
weights = torch.randn(2, 4, 48, 16, generator=draw)
documents = torch.tensor([[0] * 11 + [1] * 30 + [0] * 7, [5] * 48])
own = ranks.columns(48)
tiles = {"block_q": 8, "block_kv": 8}

def results(call, tensors, weights, **arguments):
    out, lse, max_score = call(*tensors, return_max_score=True, **arguments)
    total = (out * weights).sum() + (0 if int(heads) > 1 else lse.sin().sum())
    return out, *torch.autograd.grad(total, tensors), lse, max_score

for name in backends:
    options = {key: tiles[key] for key in get_backend(name).options if key in tiles}
    backend = get_backend(name, **options)
    alone = backend
    if int(heads) < int(context):
        register_ring(backend)
        one = name if name.startswith("ring") else "ring"
        alone = get_backend(one, ranks=int(context) // int(heads), **options)
    sinks = torch.tensor([1.0, -1.0, 0.5, 2.0], requires_grad=True)
    masks = [{}, {"window": 20}, {"causal": False}, {"softcap": 2.0}]
    masks += [{"document_ids": documents}, {"sinks": sinks}]
    if heads == context:
        slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
        masks += [{"alibi_slopes": slopes}, {"score_mod": ScoreMod(every_index, params=slopes)}]
    for mask in masks:
        if not mask.keys() - {"causal", "sinks"} <= backend.features:
            continue
        if "sinks" in mask and "lse" not in backend.features:
            continue
        expected = results(attention, (q, k, v), weights, backend=alone, **mask)
        parts = [x[:, :, own].detach().requires_grad_() for x in (q, k, v)]
        call = partial(ranks.shards.attention, attention)
        found = results(call, parts, weights[:, :, own], backend=backend, **mask)
        for what, one, other in zip("out dq dk dv lse".split(), found, expected):
            if one is None:  # heads are exchanged without their lse
                continue
            other = other[:, :, own]
            # exp() rounds by where a number stands in memory
            near = {gather!r} or "sinks" in mask
            same = torch.allclose(one, other, atol=1e-5) if near else torch.equal(one, other)
            assert same, (name, mask, what, (one - other).abs().max())
        assert torch.equal(ranks.largest(found[-1]), expected[-1]), (name, mask)
"""


def call_on_ranks(world: int, *arguments: object, code: str = CALLS) -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    meeting["WORLD_SIZE"] = str(world)
    processes = [
        forked.Process(
            *("-c", code, *map(str, arguments)),
            env=environment(RANK=str(rank), **meeting),
            loaded=QUICK,
        )
        for rank in range(world)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output


EVERY_RING = ("ring", "tiled", "ring_no_max", "ring_no_rescale", "ring_local_softmax")


@pytest.mark.parametrize(
    "context, heads, backends",
    [
        (2, 2, ("tiled", "naive", "sdpa", "no_max", "relative_mask")),
        (2, 1, EVERY_RING),
        pytest.param(4, 1, EVERY_RING, marks=pytest.mark.slow),
        (4, 2, ("tiled", "ring_no_rescale")),
    ],
    ids=["heads", "ring", "ring-of-4", "heads-x-ring"],
)
def test_a_shared_call_to_the_bit(context, heads, backends):
    """Output, lse, largest score and gradients. Heads are what one process computes without ranks,
    a ring what it computes where it plays them.
    """
    code = CALLS.replace("{gather!r}", "False")
    call_on_ranks(context, context, heads, False, *backends, code=code)


SUMS = """
import torch
from training.ranks import GradientSum, join

ranks = join("cpu")
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(size, size + 1) for size in range(5, 9)))
model[1].bias.requires_grad_(False)
unused = torch.nn.Parameter(torch.ones(3))
parameters = [*model.parameters(), unused]

def sums(message):
    GradientSum.MESSAGE = message
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(ranks.rank))
    total, loss = GradientSum(ranks, parameters), 0.0
    for parameter in parameters:
        parameter.grad = None
    (model(x).square().sum() / 3).backward()  # a pass before the last, which sends nothing
    with total:
        loss = model(x).sin().sum()
        loss.backward()
    early, loss = len(total._sent), total.of(loss.detach())
    return early, [loss, *(each.grad for each in parameters if each.grad is not None)]

early, several = sums(100)
assert early == 4, early
none_early, one = sums(2**20)
assert none_early == 0
assert all(map(torch.equal, several, one)) and unused.grad is None
alone = GradientSum(type(ranks)(), parameters)
with alone:
    model(torch.ones(1, 5)).sum().backward()
assert not any(each._post_accumulate_grad_hooks for each in parameters)
gathered = ranks.gathered([each.sum().item() for each in one])
assert gathered[0] == gathered[1], gathered
"""


def test_gradients_that_leave_during_the_backward_pass_are_the_same_sums():
    call_on_ranks(2, code=SUMS)


def test_a_ring_refuses_what_needs_positions():
    x = torch.zeros(1, 2, 4, 8)
    shards = Shards(ring=Group("ring", 0, 2))
    with pytest.raises(Refusal, match="exchange heads"):
        shards.attention(
            attention, x, x, x, backend=get_backend("tiled"), alibi_slopes=x[0, :, 0, 0]
        )


def test_gathered_keys_are_the_same_attention():
    call_on_ranks(2, 2, 1, True, "tiled", code=CALLS.replace("{gather!r}", "True"))


JUDGE = """
import sys, torch
from torch.distributed.tensor.experimental._context_parallel import _attention as judge
from attention import attention, get_backend
from attention.context import register_ring
from training.ranks import join
from torch import distributed

ranks = join("cpu", 2, heads=1)
draw = torch.Generator().manual_seed(0)
q, k, v, weights = (torch.randn(2, 4, 48, 16, generator=draw) for _ in range(4))
own = ranks.columns(48)
tiled = get_backend("tiled", block_q=8, block_kv=8)

def call(query, key, value, is_causal=False, **ignored):
    return attention(query, key, value, backend=tiled, causal=is_causal)

def gradients(query, key, value, out, logsumexp, is_causal, grad_out, **ignored):
    arguments = {"causal": is_causal, "scale": 0.25, **tiled.options}
    lse = torch.zeros_like(logsumexp)
    return tiled.fn.backward(query, key, value, out, logsumexp, grad_out, lse, **arguments)

parts = [x[:, :, own].contiguous() for x in (q, k, v)]
given = weights[:, :, own].contiguous()
group = distributed.group.WORLD
out, lse = judge._templated_ring_attention(group, 2, call, *parts, is_causal=True)
known = (given, "grad_out", *parts, out, lse, True)
expected = (out, *judge._templated_ring_attention_backward(group, 2, gradients, *known)[:3])
register_ring(tiled)
parts = [x.requires_grad_() for x in parts]
found = ranks.shards.attention(attention, *parts, backend=tiled)
found = (found.out, *torch.autograd.grad((found.out * given).sum(), parts))
for name, one, other in zip("out dq dk dv".split(), found, expected):
    assert torch.allclose(one, other, atol=3e-6), (name, (one - other).abs().max())
"""


def test_pytorchs_own_ring_agrees():
    """An independent judge: its hops, its merge, its way of dealing tokens out."""
    call_on_ranks(2, code=JUDGE)


def test_passes_are_accumulated_before_they_are_added_up(tmp_path):
    """Four ranks of one pass, two of two: the sum is grouped otherwise."""
    step = ("batch_size=1", "tokens_per_step=128", "eval_every=0")
    runs = {world: tmp_path / str(world) for world in (1, 2, 4)}
    for world, folder in runs.items():
        done = run_ranks(*tiny(folder, *SHARED, *step), world=world)[0]
        assert done.code == 0, done.output
    one, two, four = ([row["train/loss"] for row in metrics(x)] for x in runs.values())
    assert two == pytest.approx(one, rel=1e-6) and four == pytest.approx(one, rel=1e-6)


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path):
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    assert run(*tiny(whole, *SHARED, *TWO_PASSES, "steps=6")).code == 0
    first, _ = run_ranks(*tiny(moved, *SHARED, "steps=2"))
    assert first.code == 0, first.output
    assert run(f"resume={moved}", *TWO_PASSES, "steps=4").code == 0
    first, second = run_ranks(f"resume={moved}", "steps=6", "batch_size=4", "tokens_per_step=null")
    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert alike(whole, moved)
    assert [each["step"] for each in summary(moved)["starts"]] == [0, 2, 4]


@pytest.mark.slow
def test_dropout_is_another_on_each_rank_and_the_same_again_after_a_resume(tmp_path):
    settings = (*SHARED, "model.dropout=0.2", "steps=4")
    for name in ("whole", "again", "moved"):
        steps = "steps=2" if name == "moved" else "steps=4"
        assert run_ranks(*tiny(tmp_path / name, *settings, steps))[0].code == 0
    assert run_ranks(f"resume={tmp_path / 'moved'}", "steps=4")[0].code == 0
    assert alike(tmp_path / "whole", tmp_path / "again")
    assert alike(tmp_path / "whole", tmp_path / "moved")
    numbers = []
    for rank in range(2):
        Ranks(rank, 2).seed_step(0, 1)
        numbers.append(torch.rand(4))
    assert not torch.equal(*numbers)


def test_one_folder_and_no_other_is_left(tmp_path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    how = partial(start, loaded=QUICK)
    done = run_ranks(*tiny(tmp_path / "run", *SHARED), how=how, TMPDIR=str(temporary))
    assert done[0].code == 0, done[0].output
    assert not list(temporary.glob("tilegpt-rank-*"))
    assert summary(tmp_path / "run")["tokens"] == 4 * 4 * 32


@pytest.mark.parametrize(
    "settings, said",
    [
        (("batch_size=3",), "batch_size=3 does not divide among 2 ranks; take batch_size=4"),
        (("batch_size=2", "tokens_per_step=192"), "2 * 2 * 32 = 128; take tokens_per_step=256"),
        (("parallel.context=2", "seq_len=33"), "into 2 parts for the 2 ranks"),
        (("parallel.context=2", "parallel.how=ring", "seq_len=30"), "take seq_len=32"),
        (
            ("parallel.context=2", "parallel.how=heads", "model.num_kv_heads=1"),
            "parallel.context can be only 1; parallel.how=ring takes any number",
        ),
        (("parallel.context=2", "parallel.how=ring", "attention=sdpa"), "attention=sdpa cannot"),
        (
            ("parallel.context=2", "parallel.how=gather", "model.positions=alibi"),
            "is a ring here: model.positions=alibi needs the positions of keys, which it does not "
            "send; take parallel.how=heads, where parallel.context can be 2, 4",
        ),
        (
            ("parallel.context=2", "model.num_kv_heads=1", f"attention.score_mod={FADE}"),
            f"attention.score_mod={FADE} needs the positions of keys",
        ),
        (
            ("parallel.context=2", "attention=ring", "attention.ranks=3"),
            "attention.ranks=3 are ranks that one process plays",
        ),
        (
            ("parallel.context=2", "parallel.how=gather", "attention=ring_no_max"),
            "breaks the merge, of which parallel.how=gather has none",
        ),
    ],
)
def test_a_step_that_the_ranks_cannot_share_is_refused(settings, said):
    config = compose("seq_len=32", *settings)
    with pytest.raises(ValueError, match=re.escape(said)):
        way = way_to_share(config)
        context = config.parallel.context
        shards = None if context == 1 else Shards(ring=Group("", 0, context // way["heads"]))
        check_shares(config, Ranks(0, 2, context=context, shards=shards))


def test_a_refusal_ends_all_ranks(tmp_path):
    first, second = run_ranks(*tiny(tmp_path / "run", "parallel.context=3"))
    said = "parallel.context=3 needs that many ranks, or a multiple"
    assert said in first.complaint()
    assert second.code == 1 and second.output.startswith("rank 1 of 2: ") and said in second.output


def test_ranks_with_other_settings_are_refused(tmp_path):
    """A regression test: the first process was aborted by gloo, the other one printed stacks."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        start_quick(*tiny(tmp_path / "run", f"seq_len={length}"), RANK=str(rank), **meeting)
        for rank, length in enumerate((32, 64))
    ]
    first, second = map(finish, ranks)
    said = "all ranks need the same settings: seq_len=32 on rank 0, and seq_len=64 on rank 1"
    assert first.complaint() == f"error: {said}"
    assert (second.code, second.output) == (1, f"rank 1 of 2: {said}\n")


def test_a_sweep_under_torchrun_is_refused(tmp_path):
    sweep = ("-m", "seed=0,1", f"hydra.sweep.dir={tmp_path / 'sweep'}", *tiny(tmp_path)[:-1])
    first, second = run_ranks(*sweep)
    assert "start each by a torchrun of its own" in first.complaint()
    assert second.code == 1 and not (tmp_path / "sweep").exists()


def test_a_signal_to_one_rank_ends_all_at_the_same_step(tmp_path):
    ranks = start_ranks(*tiny(tmp_path / "run", *SHARED, "steps=100000", "eval_every=0"))
    wait_for_rows(ranks[0], tmp_path / "run", 3)
    ranks[1].send_signal(signal.SIGTERM)
    first, second = map(finish, ranks)
    assert (first.code, second.code) == (130, 130), first.output + second.output
    ended = summary(tmp_path / "run")
    assert ended["status"] == "interrupted"
    assert checkpoint(tmp_path / "run")["step"] == ended["steps_done"]
    done = run_ranks(f"resume={tmp_path / 'run'}", f"steps={ended['steps_done'] + 2}")
    assert [each.code for each in done] == [0, 0], done


def test_a_rank_that_is_killed_ends_the_run(tmp_path):
    ranks = start_ranks(*tiny(tmp_path / "run", *SHARED, "steps=100000", "eval_every=0"))
    wait_for_rows(ranks[0], tmp_path / "run", 3)
    ranks[1].kill()
    first = finish(ranks[0])
    ended = summary(tmp_path / "run")
    assert first.code == 1 and ended["status"] == "failed", first.output
    assert ended["error"].startswith("rank 1 ended and did not say why") and ended["rank"] == 1
    assert first.complaint().startswith(f"error: {ended['error']}; go on with: ")


@pytest.mark.slow
def test_what_outlives_the_first_rank_says_one_line(tmp_path):
    """A regression test: PyTorch's C++ printed that the connection was reset, with its stacks."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    asked = tiny(tmp_path / "run", *SHARED, "steps=100000", "eval_every=0")
    first = start_quick(*asked, RANK="0", **meeting)
    other = subprocess.Popen(  # it loads PyTorch, which reads at its start what it prints
        [sys.executable, "train.py", *asked],
        cwd=ROOT,
        env=environment(RANK="1", **meeting),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for_rows(first, tmp_path / "run", 3)
    first.kill()
    said = "rank 1 of 2: rank 0 ended and did not say why: it was killed, or lost\n"
    assert other.communicate(timeout=60)[0] == said and other.returncode == 1


FAILS = """
import os
from attention import get_backend
from dataclasses import replace

calls = []

def attend(*args, **options):
    calls.append(1)
    if os.environ.get("RANK") == "1" and len(calls) > 12:
        raise {error}
    return get_backend("naive").fn(*args, **options)

ATTENTION = replace(get_backend("naive"), name="fails", fn=attend)
"""


@pytest.mark.parametrize(
    "error, status",
    [
        ("MemoryError('no more')", "oom"),
        pytest.param("ValueError('as asked')", "failed", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_says_why_in_the_summary(tmp_path, error, status):
    (tmp_path / "own.py").write_text(FAILS.replace("{error}", error))
    asked = (*SHARED, "attention=own:ATTENTION", "steps=50", "eval_every=0")
    first, second = run_ranks(*tiny(tmp_path / "run", *asked), PYTHONPATH=str(tmp_path))
    ended = summary(tmp_path / "run")
    assert (first.code, second.code) == (1, 1), first.output + second.output
    assert ended["status"] == status and ended["rank"] == 1
    assert "rank 1: " in first.output


def test_a_divergence_names_its_rank(tmp_path):
    code = FAILS.replace("raise {error}", "return output._replace(out=output.out * float('nan'))")
    code = code.replace(
        "calls.append(1)", "calls.append(1)\n    output = get_backend('naive').fn(*args, **options)"
    )
    (tmp_path / "own.py").write_text(code)
    asked = (*SHARED, "attention=own:ATTENTION", "steps=50", "eval_every=0", "diagnose_every=0")
    done = run_ranks(*tiny(tmp_path / "run", *asked), PYTHONPATH=str(tmp_path))
    ended = summary(tmp_path / "run")
    assert ended["status"] == "diverged", done[0].output
    found = ended["diagnosis"]
    assert (found["rank"], found["layer"], found["tensor"]) == (1, 0, "out")
    assert found["sequence"] == 2 and "rank 1: layer 0, head 0" in done[0].output


def torchrun(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env=environment(**variables),
        capture_output=True,
        text=True,
    )


AGENT = """
import sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from tests.quick import main

def rank(*arguments):
    sys.argv[1:] = arguments
    main()

how = LaunchConfig(
    1, 1, nproc_per_node=2, max_restarts=2, start_method="fork", run_id="tests",
    rdzv_backend="c10d", rdzv_endpoint="localhost:0",
)
elastic_launch(how, rank)(*sys.argv[1:])
"""


def torchruns_agent(folder: Path, *arguments: str) -> Done:
    """What `torchrun --standalone --max-restarts=2 train.py` does, whose ranks are forked.

    folder: for temporary files, which such a rank leaves, and for a user's modules.
    """
    given = environment(TMPDIR=str(folder), PYTHONPATH=str(folder))
    return finish(forked.Process("-c", AGENT, *arguments, env=given, loaded=QUICK))


@pytest.mark.slow
def test_by_torchrun(tmp_path):
    done = torchrun("train.py", *tiny(tmp_path / "run", *SHARED))
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary(tmp_path / "run")["status"] == "completed"
    assert done.stdout.count(" 4/4 ") == 1


def test_alone_there_is_no_process_group(tmp_path):
    code = (
        "import sys; from training.run import run; run(*sys.argv[1:]); "
        "from torch import distributed; assert not distributed.is_initialized()"
    )
    forked.run("-c", code, *tiny(tmp_path), env=environment(), check=True, loaded=QUICK)


def test_a_rank_that_never_comes_ends_the_others(tmp_path):
    asked = tiny(tmp_path / "run", "parallel.timeout=1")
    alone = start_quick(
        *asked, WORLD_SIZE="2", RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())
    )
    done = finish(alone)
    assert done.code == 1 and "rank 0 of 2 did not meet the others" in done.output


def test_a_port_in_use_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = finish(start_quick(*tiny(tmp_path / "run"), WORLD_SIZE="2", RANK="0", **meeting))
    assert done.code == 1 and port in done.complaint() and "in use" in done.complaint()


def test_a_rank_without_a_gpu_is_refused(monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    said = "rank 1 has no GPU: this host has 1, and runs 2 ranks; start torchrun with "
    with pytest.raises(ValueError, match=said + "--nproc-per-node=1, or add device=cpu"):
        join("cuda")


def test_memory_is_that_of_the_rank_that_needs_most():
    code = """
from training.ranks import join
ranks = join("cpu")
assert ranks.largest_of({"a": 1.0 + ranks.rank, "b": None}) == {"a": 2.0, "b": None}
"""
    call_on_ranks(2, code=code)
    assert Ranks().largest_of({"a": 1.0, "b": None}) == {"a": 1.0, "b": None}


def test_shares():
    assert [Ranks(rank, 2).rows(6) for rank in range(2)] == [slice(0, 3), slice(3, 6)]
    assert Ranks().rows(6) == slice(0, 6) and Ranks().first and not Ranks().several


@pytest.mark.slow
def test_where_the_first_rank_dies_another_writes_the_summary(tmp_path):
    (tmp_path / "own.py").write_text(
        KILLED.replace('"RANK"] == "1"', '"RANK"] == "0"').replace("{when}", "len(calls) > 8")
    )
    asked = (*SHARED, "attention=own:ATTENTION", "steps=50", "eval_every=0")
    done = torchrun("train.py", *tiny(tmp_path / "run", *asked), PYTHONPATH=str(tmp_path))
    ended = summary(tmp_path / "run")
    assert done.returncode == 1 and ended["status"] == "failed" and ended["rank"] == 0
    assert "rank 0 ended" in ended["error"] and "rank 1 of 2: " in done.stderr


KILLED = """
import os
from attention import get_backend
from dataclasses import replace

calls = []

def attend(*args, **options):
    calls.append(1)
    first_time = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
    if first_time and os.environ["RANK"] == "1" and {when}:
        os.kill(os.getpid(), 9)
    return get_backend("naive").fn(*args, **options)

ATTENTION = replace(get_backend("naive"), name="killed", fn=attend)
"""


@pytest.mark.parametrize(
    ("saved", "real"),
    [
        pytest.param(True, False, id="after-a-checkpoint"),
        pytest.param(False, False, id="before-the-first", marks=pytest.mark.slow),
        pytest.param(True, True, id="by-torchrun", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_torchrun_starts_again_go_on(tmp_path, saved, real):
    """The whole run, to the bit, in the same folder."""
    when = f"os.path.isdir({str(tmp_path / 'run/checkpoint')!r})" if saved else "len(calls) > 8"
    (tmp_path / "own.py").write_text(KILLED.replace("{when}", when))
    asked = (*SHARED, "attention=own:ATTENTION", "steps=12", "eval_every=0", "diagnose_every=0")
    asked += ("checkpoint_every=4",) if saved else ()
    where = {"PYTHONPATH": str(tmp_path)}
    assert finish(start_quick(*tiny(tmp_path / "whole", *asked, *TWO_PASSES), **where)).code == 0
    ranks = tiny(tmp_path / "run", *asked)
    if real:
        done = torchrun("--max-restarts=2", "train.py", *ranks, **where)
        assert done.returncode == 0, done.stdout + done.stderr
    else:
        done = torchruns_agent(tmp_path, *ranks)
        assert done.code == 0, done.output
    assert alike(tmp_path / "whole", tmp_path / "run")
    begun = [each["step"] for each in summary(tmp_path / "run")["starts"]]
    assert begun == ([0, 4] if saved else [0])
