"""Time steps of GPT-2 on ranks, data parallel and context parallel, and compare with one GPU and
with PyTorch's context_parallel.

    torchrun --standalone --nproc-per-node=4 -m lab.steps_on_ranks
    seq_len=131072 steps=2 repeats=5 out=steps_on_ranks.json
    torchrun --standalone --nproc-per-node=4 -m lab.steps_on_ranks
    seq_len=1024 batch=32,128 who=ours:alone,ours:data steps=20 out=data_parallel.json

    seq_len   lengths of a sequence (32768,131072)
    batch     sequences of a step (1)
    who       several of these, in the order to run:
              ours:alone            each GPU trains on all sequences, independently
              ours:data             each rank trains on its share of the sequences
              ours:heads            ranks share every sequence, as with parallel.context
              cudnn:alltoall        PyTorch's context_parallel: cuDNN's kernels, and alltoall to
                                    move keys
    steps     steps that are timed together (8)
    repeats   number of such timings (3)

Other arguments are settings of train.py and replace model=gpt2 tokenizer.vocab_size=50304
attention=triton.

Every row trains the same weights on the same sequences with our step: data, loss and AdamW are
ours, and everything but attention is compiled. Under context_parallel, attention is an uncompiled
F.scaled_dot_product_attention. A row has the seconds per step of the slowest rank (median, least
and most of the repeats) and the largest peak memory of any rank.

A wrong row gets no speed. One GPU decides: the first loss must equal that of our GPT there within
LOSS, and the norm of the first gradients that of our compiled model within ERROR. The initial
weights are so small that attention hardly changes either. So where ranks share a sequence, we also
compare one layer's attention of normal inputs with ours on one GPU, forward and backward. The norm
of the error must be within ERROR of the norm of the result.
"""

import copy
import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, partial
from math import inf, isnan
from statistics import median
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import _attention as theirs
from torch.nn.attention import sdpa_kernel

from attention import AttentionOutput, attention
from attention.sdpa import KERNELS
from data.prefetch import Pass
from model import GPT
from model.fast import fast_mlp
from model.gpt import Block, Rope
from model.kernels import add_norm
from scripts.arguments import Count, Json, command, default
from scripts.tables import Row
from training import build_run, compose
from training.loop.device import pick_device
from training.loop.graph import WARM_UP, StepGraphs
from training.loop.optimizer import set_learning_rate
from training.loop.ranks import ALONE, Ranks, leave, of_environment
from training.loop.run import Run
from training.loop.schedule import prepare_model, run_compiles, will_graph
from training.loop.step import Figures, gradients, update
from training.record.environment import measured_on
from training.record.files import write_json
from training.record.memory import GIB

LOSS, ERROR = 1e-2, 2e-2  # bfloat16 alone causes errors of 0.003
TIMEOUT = 60  # seconds that a rank waits for another
THEIRS = "cudnn:alltoall"
WHO = ("ours:alone", "ours:heads", THEIRS)


@dataclass
class Options:
    seq_len: list[Count] = default(32768, 131072)
    batch: list[Count] = default(1)
    who: list[Literal[("ours:data", *WHO)]] = default(*WHO)
    steps: Count = 8
    repeats: Count = 3
    out: Json = Json("steps_on_ranks.json")
    overrides: list[str] = default()  # train.py's own settings

    def run(self, seq_len: int, batch: int) -> Run:
        settings = {
            "model": "gpt2",
            "tokenizer.vocab_size": "50304",
            "attention": "triton",
            "batch_size": batch,
            "seq_len": seq_len,
            "parallel.context": max(2, of_environment().world),
        } | dict(each.split("=", 1) for each in self.overrides)
        return build_run(compose(*(f"{key}={value}" for key, value in settings.items())))


@dataclass
class ContextParallel:
    """Replaces attention.ranks.Shards inside context_parallel()."""

    positions: Tensor  # (n,)

    def own_positions(self, tokens: Tensor) -> Tensor:
        return self.positions

    def attention(
        self, attend: Callable, q: Tensor, k: Tensor, v: Tensor, **settings: Any
    ) -> AttentionOutput:
        """out of attention() for q, k, v (B, H, n, D)."""
        # the memory layout of block_around_attention(): cuDNN has a plan for each layout
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
        with torch.autocast(q.device.type, enabled=False):
            return AttentionOutput(sdpa(q, k.contiguous(), v.contiguous()))


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # look it up in F at every call, because context_parallel() replaces it there
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@cache
def mesh(device: str) -> DeviceMesh:
    """All ranks, with a separate communicator: keys do not wait for sums of gradients."""
    group = distributed.new_group(timeout=timedelta(seconds=TIMEOUT))
    return DeviceMesh.from_group(group, device)


@contextmanager
def context_parallel(inputs: Tensor, targets: Tensor) -> Iterator[ContextParallel]:
    """Inside, inputs and targets (1, N) are replaced by this rank's part, (1, n)."""
    theirs.set_rotate_method("alltoall")
    positions = torch.arange(inputs.shape[1], device=inputs.device)
    buffers, dims = [inputs, targets, positions], [1, 1, 0]
    cut = theirs.context_parallel(mesh(inputs.device.type), buffers=buffers, buffer_seq_dims=dims)
    with sdpa_kernel(KERNELS["cudnn"]), cut:
        yield ContextParallel(positions)


def block_around_attention(*, compiled: bool) -> Callable:
    """fast_block() with two compiled graphs, one before attention and one after it."""

    def before(block: Block, x: Tensor, branch: Tensor | None, rope: Rope | None) -> Any:
        x, normed = add_norm(x, branch, block.attention_norm)
        q, k, v = block.attention.heads(block.attention.qkv(normed), rope)
        # PyTorch's ring needs contiguous keys and values, so the graph writes them. Views of one
        # tensor would also have their gradients summed by uncompiled operators
        return x, q.transpose(1, 2).contiguous(), k.contiguous(), v.contiguous()

    def after(block: Block, x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        x, normed = add_norm(x, block.dropout(block.attention.proj(out)), block.mlp_norm)
        return x, block.dropout(fast_mlp(block, normed))

    before, after = (torch.compile(part, disable=not compiled) for part in (before, after))

    def run_block(block: Block, x: Tensor, branch: Tensor | None, rope: Any, *rest: None) -> Any:
        x, q, k, v = before(block, x, branch, rope)
        out, _ = block.attention.attend(q.transpose(1, 2), k, v, None, None)
        return after(block, x, out)

    return run_block


def errors(run: Run, shards: Any, own: Tensor | slice) -> Row:
    """Relative errors of a layer's attention on ranks against one GPU; the largest of any rank."""
    layer, generator = run.model.blocks[0].attention, torch.Generator(run.device).manual_seed(0)
    qkv, d_out = (
        torch.randn(1, run.config.seq_len, size, device=run.device, generator=generator)
        for size in (layer.qkv.out_features, layer.proj.in_features)
    )

    def results(qkv: Tensor, d_out: Tensor) -> Sequence[Tensor]:
        qkv = qkv.to(run.dtype).requires_grad_()
        out, _ = layer.attend(*layer.heads(qkv, None), None, None)
        (gradient,) = torch.autograd.grad(out, qkv, d_out.to(run.dtype))
        return out.detach().float(), *gradient.float().split(layer.qkv.rows, -1)

    truth = [x[:, own] for x in results(qkv, d_out)]
    with run.model.using(call=partial(shards.attention, attention)):
        found = results(qkv[:, own], d_out[:, own])
    figures = zip(("out", "dq", "dk", "dv"), found, truth, strict=True)
    apart = {name: ((x - true).norm() / true.norm()).item() for name, x, true in figures}
    # largest_of() ignores NaN
    return run.ranks.largest_of({name: inf if isnan(x) else x for name, x in apart.items()})


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(run: Run, model: GPT, ranks: Ranks, tensors: Sequence[Tensor], options: Options) -> Row:
    """Run a first step, which compiles; then measure seconds per step and peak memory."""
    optim, number = run.config.optimizer(), itertools.count(1)
    passes = [Pass(tuple(tensors), float(ranks.world))]
    part = replace(run, ranks=ranks, step_model=model)
    graphs = StepGraphs(gradients)
    graphed = will_graph(run.config, run.model.backend, dtype=run.dtype, device=run.device)
    compute = graphs if graphed else gradients

    def step(before: Figures | None = None) -> Figures:
        """A step as train.py takes it where nothing is due: it waits for the step before."""
        done = next(number)
        set_learning_rate(run.optimizer, done - 1, run.config.steps, optim)
        figures = Figures(done, *compute(part, passes))
        if before is not None:
            _ = before.loss
        update(part, figures)
        return figures

    def seconds() -> float:
        run.ranks.any(False)  # a barrier: all ranks begin together
        begin, before = now(run.device), None
        for _ in range(options.steps):
            before = step(before)
        took = torch.tensor((now(run.device) - begin) / options.steps, dtype=torch.float64)
        return run.ranks.largest(took).item()

    first = step()
    loss, grad_norm = first.loss, first.grad_norm
    for _ in range(WARM_UP):  # the last one captures, where it can
        _ = step().loss
    _, *each = (seconds() for _ in range(1 + options.repeats))  # the first is a warm-up
    # since the first step: what a graph holds is allocated once
    peak = torch.cuda.max_memory_allocated() / GIB if run.device.type == "cuda" else None
    row = {"loss": loss, "grad_norm": grad_norm, "steps": options.steps, "seconds": median(each)}
    row |= {"least_and_most": [min(each), max(each)], "graph": bool(graphs.graphs)}
    row |= run.ranks.largest_of({"peak_gib": peak})
    tokens = run.config.sequences_per_step * run.config.seq_len
    return row | {"tokens_per_sec": tokens / median(each)}


def is_right(row: Row) -> bool:
    """Whether a row's errors, first loss and first gradients are near those of one GPU."""
    near = max(row["errors"].values(), default=0) <= ERROR
    near &= abs(row["grad_norm"] / row["grad_norm_of_one"] - 1) <= ERROR
    return near and abs(row["loss"] - row["loss_of_one"]) <= LOSS


def start_again(run: Run, weights: dict[str, Tensor]) -> None:
    gc.collect()
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    run.model.load_state_dict(weights)
    run.optimizer.state.clear()
    run.optimizer.zero_grad()


def rows(options: Options, seq_len: int, batch: int) -> Iterator[Row]:
    # each shape has kernels of its own, as in a run of train.py
    torch._dynamo.reset()
    torch._dynamo.config.automatic_dynamic_shapes = False
    run = options.run(seq_len, batch)
    compiled = run_compiles(run.config, run.schedule[0], run.device.type)
    ours = prepare_model(run.model, run.schedule[0], compiled=compiled)
    peer = copy.copy(ours)
    peer._block = block_around_attention(compiled=compiled)
    (whole,) = run.sequences(1)
    with torch.no_grad(), run.autocast:
        loss = run.model(*whole).loss.item()
    alone = replace(run, ranks=ALONE, step_model=ours)
    norm = gradients(alone, [Pass(whole, 1.0)])[1].item()
    weights = {name: x.to("cpu", copy=True) for name, x in run.model.state_dict().items()}

    def measured(who: str) -> Row:
        if who == "ours:alone":
            return {"errors": {}} | measure(run, ours, ALONE, whole, options)
        if who == "ours:data":
            ranks = replace(run.ranks, context=1, shards=None)
            parts = [x[ranks.rows(batch)] for x in whole]
            return {"errors": {}} | measure(run, ours, ranks, parts, options)
        if who == THEIRS:
            parts = [x.clone() for x in whole]
            with context_parallel(*parts) as shards:
                found = {"errors": errors(run, shards, shards.positions)}
                ranks = replace(run.ranks, shards=shards)
                return found | measure(run, peer, ranks, parts, options)
        own = run.ranks.columns(seq_len)
        found = {"errors": errors(run, run.ranks.shards, own)}
        return found | measure(run, ours, run.ranks, [x[:, own] for x in whole], options)

    for who in options.who:
        start_again(run, weights)
        row = {"who": who, "seq_len": seq_len, "batch": batch, "loss_of_one": loss}
        row |= {"grad_norm_of_one": norm} | measured(who)
        row["right"] = is_right(row)
        for speed in () if row["right"] else ("seconds", "least_and_most", "tokens_per_sec"):
            del row[speed]
        yield row


@command
def main(options: Options) -> None:
    settings = {name: x for name, x in vars(options).items() if name != "out"}
    result: Row = {"environment": measured_on(pick_device("auto")), "settings": settings}
    result["rows"] = []
    for seq_len, batch in itertools.product(options.seq_len, options.batch):
        for row in rows(options, seq_len, batch):
            if of_environment().first:
                result["rows"].append(row)
                print(", ".join(f"{key} {x}" for key, x in row.items()), flush=True)
                write_json(options.out, result)
    leave()


if __name__ == "__main__":
    main()
