"""Several processes train one run: the same numbers, one folder, one end."""

import atexit
import math
import os
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from attention import ScoreMod, attention, get_backend
from conformance.cases import every_index
from tests import processes
from tests.command import (
    Done,
    checkpoint,
    computed,
    metrics,
    run,
    same,
    summary,
    tiny,
    tiny_sweep,
)
from training.launch.command_line import compose
from training.loop.ranks import GradientSum, Ranks, check_shares, join

# the ranks of a step share four sequences
SHARED = ("batch_size=4", "seq_len=32", "log_every=2", "eval_sequences=6", "eval_every=2")
SHARED += ("optim.schedule=constant",)  # which a resume does not change
# alone, what two ranks do is two passes
TWO_PASSES = ("batch_size=2", "tokens_per_step=128")


# what is forked need not import torch
HOW = get_context("fork")


class Rank(HOW.Process):
    """A function in a process with these environment variables."""

    def __init__(self, function: Callable, **variables: str) -> None:
        super().__init__(daemon=True)  # a test that fails leaves none behind
        self.function, self.variables = function, variables
        self.output = Path(tempfile.mkdtemp()) / "output"

    def run(self) -> None:
        with self.output.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        os.environ.update(self.variables)
        tempfile.tempdir = None  # as TMPDIR says now
        atexit._clear()  # what is registered by now is the parent's
        try:
            self.function()
        finally:
            atexit._run_exitfuncs()  # which a forked process leaves out

    def end(self) -> Done:
        self.join(processes.SECONDS)
        if self.is_alive():
            self.kill()
            pytest.fail(f"still running: {self.output.read_text()}")
        return Done(self.exitcode, self.output.read_text())

    def error(self) -> str:
        """What torchrun prints of its end."""
        return (self.output.with_name("error.json")).read_text()


def train(*arguments: str) -> None:
    done = run(*arguments)
    print(done.output, end="", flush=True)
    sys.exit(done.code)


def start_ranks(*functions: Callable, **variables: str) -> list[Rank]:
    # they meet at a store that is open already, as torchrun has it: no port is named before it is
    # taken
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    told |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": str(len(functions))}
    ranks = [Rank(function, **told, **variables) for function in functions]
    for number, rank in enumerate(ranks):
        rank.variables |= {"RANK": str(number), "LOCAL_RANK": str(number)}
        rank.variables["TORCHELASTIC_ERROR_FILE"] = str(rank.output.with_name("error.json"))
        rank.start()
        rank.store = store  # it lives as long as the ranks; a process that is spawned has none
    return ranks


def run_ranks(*arguments: str, world: int = 2, **variables: str) -> list[Done]:
    ranks = start_ranks(*[partial(train, *arguments)] * world, **variables)
    return [each.end() for each in ranks]


def call_on_ranks(world: int, function: Callable) -> None:
    for rank in start_ranks(*[function] * world):
        done = rank.end()
        assert done.code == 0, done.output


def alike(one: Path, other: Path) -> bool:
    """The rows and the checkpoint, but not where the random numbers stand."""
    ours, theirs = checkpoint(one), checkpoint(other)
    del ours["random"], theirs["random"]
    return computed(one) == computed(other) and same(ours, theirs)


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture
def exchange() -> None:
    """What an exchange of tokens for heads imports at its first call: 2 s, once for all ranks."""
    import torch._dynamo  # noqa: F401


@pytest.mark.parametrize(
    "settings",
    [("optim=muon",), slow(("data=last_write", "tokenizer.vocab_size=null"))],
    ids=["muon", "last_write"],
)
def test_two_ranks_are_two_passes_to_the_bit(tmp_path, settings):
    """A run of two ranks, of one, and of two again. It leaves one folder: the second rank's own is
    gone. Muon has AdamW beside it.
    """
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    alone = run(*tiny(whole, *SHARED, *TWO_PASSES, *settings, "steps=6"))
    assert alone.code == 0, alone.output
    (tmp_path / "tmp").mkdir()
    asked = tiny(moved, *SHARED, *settings, "steps=2")
    first, second = run_ranks(*asked, TMPDIR=str(tmp_path / "tmp"))
    assert (first.code, second.code, second.output) == (0, 0, ""), first.output
    assert "2 ranks" in first.output and not list((tmp_path / "tmp").glob("tilegpt-rank-*"))
    assert run(f"resume={moved}", *TWO_PASSES, "steps=4").code == 0
    first, second = run_ranks(f"resume={moved}", "steps=6", "batch_size=4", "tokens_per_step=null")
    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert alike(whole, moved)
    assert [each["step"] for each in summary(moved)["starts"]] == [0, 2, 4]


TILES = ("attention=tiled", "attention.block_q=8", "attention.block_kv=8")
MODERN = ("attention.sinks=true", "model=modern", "model.num_kv_heads=2", "model.num_heads=4")


@pytest.mark.parametrize(
    "settings",
    [
        (*TILES, *MODERN),
        slow((*TILES, "model.positions=alibi", "model.checkpoint=attention")),
        slow(("attention=kv_outer", "compile=true", *TWO_PASSES)),
    ],
    ids=["sinks-rope-gqa", "alibi-kept", "compiled-two-passes"],
)
def test_a_shared_sequence_is_the_same_attention(exchange, tmp_path, settings):
    """Each rank computes whole sequences for its heads. What is computed token by token is summed
    in another order.
    """
    asked = (*SHARED, "log_every=1", *settings)
    alone = run(*tiny(tmp_path / "alone", *asked))
    first, second = run_ranks(*tiny(tmp_path / "two", *asked, "parallel.context=2"))
    assert (alone.code, first.code, second.code) == (0, 0, 0), alone.output + first.output
    ours, theirs = metrics(tmp_path / "alone"), metrics(tmp_path / "two")
    for one, other in zip(ours, theirs, strict=True):
        for key in one.keys() & {"train/loss", "grad_norm", "val/loss", "attention/max_score"}:
            # AdamW's first steps make much of a rounding, and the largest score shows it first
            near = 1e-3 if key == "attention/max_score" else 2e-5
            assert other[key] == pytest.approx(one[key], rel=near), (key, one["step"])


def shared_calls() -> None:
    """On one of several ranks, of which two share a sequence."""
    ranks, draw = join("cpu", 2), torch.Generator().manual_seed(0)
    own, call = ranks.columns(48), partial(ranks.shards.attention, attention)
    backend = get_backend("tiled", block_q=8, block_kv=8)
    q, k, v, weights = (torch.randn(2, heads, 48, 16, generator=draw) for heads in (4, 2, 2, 4))
    sinks, slopes = torch.tensor([1.0, -1.0, 0.5, 2.0]), torch.tensor([0.5, 0.25, 0.125, 0.0625])
    masks = [{}, {"window": 20, "softcap": 2.0}, {"causal": False}, {"alibi_slopes": slopes}]
    masks += [{"document_ids": torch.tensor([[0] * 11 + [1] * 30 + [0] * 7, [5] * 48])}]
    masks += [{"score_mod": ScoreMod(every_index, params=slopes)}, {"sinks": sinks}]

    def results(call, part, mask):
        tensors = [x[:, :, part].detach().requires_grad_() for x in (q, k, v)]
        out, _, max_score = call(*tensors, backend=backend, return_max_score=True, **mask)
        return out, *torch.autograd.grad((out * weights[:, :, part]).sum(), tensors), max_score

    for mask in masks:
        *expected, largest = results(attention, slice(None), mask)
        *found, own_largest = results(call, own, mask)
        for name, one, other in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
            # exp() of the sinks rounds by where a number stands in memory
            near = {"atol": 1e-5 if "sinks" in mask else 0.0, "rtol": 0.0}
            assert torch.allclose(one, other[:, :, own], **near), (mask, name)
        assert torch.equal(ranks.largest(own_largest), largest), mask


@pytest.mark.parametrize("world", [2, slow(4)], ids=["a-pair", "two-pairs"])
def test_a_shared_call_to_the_bit(exchange, world):
    """Output, largest score and gradients are what one process computes."""
    call_on_ranks(world, shared_calls)


def summed_gradients() -> None:
    """On one of two ranks, in several messages, which leave during the backward pass, and in one:
    the same sums. And the largest figures.
    """
    ranks = join("cpu")
    assert ranks.largest_of({"a": 1.0 + ranks.rank, "b": None}) == {"a": 2.0, "b": None}
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(size, size + 1) for size in range(5, 9)))
    model[1].bias.requires_grad_(False)
    unused = torch.nn.Parameter(torch.ones(3))

    def sums(message: int, ranks: Ranks, rank: int) -> list[torch.Tensor]:
        total = GradientSum(ranks, [*model.parameters(), unused])
        total.MESSAGE = message
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
        model.zero_grad()
        (model(x).square().sum() / 3).backward()  # a pass before the last, which sends nothing
        with total:
            loss = model(x).sin().sum()
            loss.backward()
        grads = [each.grad for each in model.parameters() if each.grad is not None]
        return [total.of(loss.detach()), *grads]

    several, one = (sums(size, ranks, ranks.rank) for size in (100, 2**20))
    first, second = (sums(1, Ranks(), rank) for rank in range(2))
    assert all(map(torch.equal, several, one)) and unused.grad is None
    for total, x, y in zip(one, first, second, strict=True):
        assert torch.allclose(total, x + y, atol=1e-6)


def test_sums_of_gradients_and_the_largest_figures():
    call_on_ranks(2, summed_gradients)


@pytest.mark.parametrize(
    "settings, said",
    [
        ("batch_size=3", "batch_size=3 .* 2 ranks"),
        ("batch_size=2 tokens_per_step=192", "tokens_per_step=192 .* 128"),
        ("parallel.context=2 seq_len=33", "parallel.context=2 .* seq_len=33"),
        ("parallel.context=8 seq_len=32", "parallel.context=8 .* model.num_heads=4"),
        ("parallel.context=2 model.num_kv_heads=1", "parallel.context=2 .*num_kv_heads=1"),
        ("parallel.context=2", "parallel.context=2 .* attention=own "),
    ],
)
def test_a_step_that_the_ranks_cannot_share_is_refused(settings, said):
    """Nor can they share an attention with parameters for all heads."""
    config = compose("seq_len=32", *settings.split())
    own = replace(get_backend("naive"), name="own", exact=False, module=torch.nn.Identity)
    with pytest.raises(ValueError, match=said):
        check_shares(config, Ranks(0, 2, context=config.parallel.context), [own])


def test_a_refusal_ends_all_ranks(tmp_path):
    """Ranks with other settings would train other models."""
    ranks = start_ranks(*(partial(train, *tiny(tmp_path, seed)) for seed in ("seed=1", "seed=2")))
    first, second = (each.end() for each in ranks)
    said = "seed: 1 on rank 0, and 2 on rank 1"
    assert said in first.complaint() and second.code == 1 and said in ranks[1].error()


def test_a_sweep_under_torchrun_is_refused(tmp_path):
    done = run(*tiny_sweep(tmp_path / "sweep", "seed=0,1"), WORLD_SIZE="2", RANK="0")
    assert "torchrun" in done.complaint() and not (tmp_path / "sweep").exists()


def test_dropout_is_another_on_each_rank_and_step_and_the_same_again():
    def drawn(rank: int, step: int) -> tuple[float, ...]:
        Ranks(rank, 2).seed_step(0, step)
        return tuple(torch.rand(4).tolist())

    draws = [drawn(rank, step) for rank in (0, 1) for step in (3, 4)]
    assert len(set(draws)) == 4 and drawn(0, 3) == draws[0]


def start_long(folder: Path, *settings: str) -> list[Rank]:
    """Ranks that have saved a checkpoint."""
    asked = tiny(folder, *SHARED, "steps=100000", "eval_every=0", "checkpoint_every=2", *settings)
    ranks = start_ranks(*[partial(train, *asked)] * 2)
    while ranks[0].is_alive() and not (folder / "checkpoint").exists():
        ranks[0].join(0.01)
    return ranks


def test_a_signal_to_one_rank_ends_all_at_a_step_from_which_they_go_on_to_the_bit(tmp_path):
    """With dropout."""
    settings = ("model.dropout=0.2", "checkpoint_every=2", "eval_every=0", "optim.warmup_steps=0")
    ranks = start_long(tmp_path / "run", *settings)
    ranks[1].terminate()
    assert [each.end().code for each in ranks] == [130, 130]
    ended = summary(tmp_path / "run")
    assert ended["status"] == "interrupted"
    assert checkpoint(tmp_path / "run")["step"] == ended["steps_done"]
    steps = f"steps={ended['steps_done'] + 3}"
    whole = tiny(tmp_path / "whole", *SHARED, *settings, steps)
    for asked in (whole, (f"resume={tmp_path / 'run'}", steps)):
        assert all(each.code == 0 for each in run_ranks(*asked))
    assert alike(tmp_path / "whole", tmp_path / "run")


def test_a_rank_that_is_killed_ends_the_run(tmp_path):
    ranks = start_long(tmp_path / "run")
    ranks[1].kill()
    assert ranks[0].end().code == 1 and summary(tmp_path / "run")["status"] == "failed"


def nan_where_all_values_are_alike(q, k, v, **options):
    output = get_backend("naive").fn(q, k, v, **options)
    alike = (v == v[:, :, :1]).flatten(1).all(1)  # (B,)
    return output._replace(out=output.out.masked_fill(alike[:, None, None, None], math.nan))


BREAKS = replace(get_backend("naive"), name="breaks", fn=nan_where_all_values_are_alike)


def test_a_divergence_in_another_ranks_sequence_is_found(tmp_path):
    """With seed 6 the third step draws a window of one letter, for the second rank."""
    letters = random.Random(0).choices("abcdefgh", k=8000)
    letters[3000:3600] = "z" * 600
    (tmp_path / "letters.txt").write_text("".join(letters))
    asked = (*SHARED, "data=text", f"data.path={tmp_path}/letters.txt", "seed=6", "steps=50")
    asked += ("attention=tests.training.test_ranks:BREAKS", "model.positions=rope", "eval_every=0")
    first, _ = run_ranks(*tiny(tmp_path / "run", *asked, "diagnose_every=0"))
    ended = summary(tmp_path / "run")
    assert (ended["status"], ended["first_bad_step"]) == ("diverged", 3), first.output
    assert ended["diagnosis"].items() >= {"layer": 0, "tensor": "out", "sequence": 2}.items()


@pytest.mark.parametrize(
    "device, context, said",
    [("cuda", 1, "1 GPUs for 2 ranks.* --nproc-per-node=1"), ("cpu", 3, "parallel.context=3 .* 2")],
)
def test_ranks_that_cannot_meet_are_refused(monkeypatch, device, context, said):
    """By each of them, which does not wait for the others."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=said):
        join(device, context)
