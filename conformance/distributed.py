"""A distributed attention under test: each process holds its part of every sequence.

    with Processes(Setting(4, target="my_package.my_ring:ATTENTION")) as processes:
        subject = Subject(processes.backend, "cpu", torch.float32, 20, 0, multiple=8)
        cells = [examine(subject, name, check) for name, check in processes.properties.items()]

The suite passes whole sequences to `processes.backend`, which splits them. Each process calls the
attention on its part, and the backend joins the partial results. So the properties for one process
are checked on many.

Dimensions: B batch, H query heads, H_kv key/value heads, N tokens, D head dim, W processes.
"""

import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, multiprocessing
from torch.utils._pytree import tree_map_only

from attention import AttentionOutput, Backend, attention, get_backend
from attention.context import register_ring, share, tokens_of_ranks
from attention.interface import Refusal
from attention.played_ring import collected
from conformance.backend_under_test import Check, Subject
from conformance.memory_growth import saved_storages
from conformance.properties import PROPERTIES, Property

KEPT = 8  # calls whose graph a process keeps for a backward pass
KEEPS = 1.5  # bytes that a process may keep, as a multiple of its own part
PATIENCE = 120  # seconds that a process waits for another process
# the parent process cannot observe these in its workers
NOT_HERE = ("saved bytes", "largest tensor", "compiled = eager")


@dataclass(frozen=True)
class Setting:
    """What runs in each process, and how tokens are distributed."""

    world: int
    device: str = "cpu"
    attention: str = ""  # a backend of one process, which `heads` and `gather` distribute
    options: tuple[tuple[str, Any], ...] = ()
    heads: int = 1  # processes that exchange heads; a ring connects these groups
    gather: bool = False
    target: str = ""  # pkg.module:NAME of a Backend that is already distributed
    layout: str = "zigzag"  # of the tokens of `target`; or contiguous

    @property
    def given(self) -> Backend:
        if self.target:
            return get_backend(self.target)
        return get_backend(self.attention, **dict(self.options))

    def positions(self, length: int) -> list[Tensor]:
        """The tokens of each process."""
        if self.layout == "contiguous":
            return list(torch.arange(length).tensor_split(self.world))
        return tokens_of_ranks(length, self.world // self.heads, self.heads)


class Processes:
    """Starts the processes, and terminates them after the block."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.calls = 0

    def __enter__(self) -> "Processes":
        context = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.workers = [], []
        for rank in range(self.setting.world):
            ours, theirs = context.Pipe()
            arguments = (rank, os.path.join(self.folder.name, "meeting"), theirs, self.setting)
            worker = context.Process(target=serve, args=arguments, daemon=True)
            worker.start()
            theirs.close()  # else we would not notice that the worker ended
            self.pipes.append(ours)
            self.workers.append(worker)
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.terminate()
            worker.join()
        self.folder.cleanup()

    @property
    def backend(self) -> Backend:
        """The distributed attention as a Backend that takes whole sequences."""
        given = self.setting.given
        without = {"cross_length", "max_score", "two_sided_window", "key_lengths", "cu_seqlens"}
        without |= {"value_dim"}  # keys and values travel as one tensor
        if not self.setting.target and self.setting.heads < self.setting.world:
            without |= {"alibi_slopes", "score_mod"}  # a ring does not take them
        if self.setting.heads > 1:
            without |= {"lse"}
        return replace(
            given,
            name=self.setting.target or given.name,
            fn=self._attend,
            options={},
            features=given.features - without,
            traceable=False,
            observable=False,
            implementations={},
            requirements=self._requirements,
            ring=None,
        )

    def _requirements(self, q: Tensor, k: Tensor, *_: Tensor, **__: Any) -> list[str]:
        parts, heads = 2 * self.setting.world, self.setting.heads
        reasons = []
        if q.shape[2] % parts:
            reasons.append(f"{self.setting.world} processes share lengths that {parts} divides")
        if q.shape[1] % heads or k.shape[1] % heads:
            reasons.append(f"{heads} processes share heads that {heads} divides")
        return reasons

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> AttentionOutput:
        out, lse = DistributedCall.apply(q, k, v, self, arguments)
        return AttentionOutput(out, lse)

    def ask(self, what: str, *message: Any) -> list[Any]:
        """The answers of all processes. An error in one of them is raised here."""
        for pipe in self.pipes:
            pipe.send((torch.get_deterministic_debug_mode(), what, *message))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(PATIENCE):
                raise RuntimeError(f"process {rank} did not answer within {PATIENCE} s")
            answers.append(pipe.recv())
        for rank, answer in enumerate(answers):
            if isinstance(answer, Refusal):
                raise answer
            if isinstance(answer, str):
                raise RuntimeError(f"process {rank}: {answer}")
        return answers

    @property
    def properties(self) -> dict[str, Property]:
        """The properties that can be checked across processes."""
        here = {name: check for name, check in PROPERTIES.items() if name not in NOT_HERE}
        return here | {"bytes of a rank": self.bytes_of_a_rank}

    def bytes_of_a_rank(self, subject: Subject) -> Iterator[Check]:
        """For the backward pass, a process keeps its own part of q, k, v, out and lse, but not the
        keys of other processes.
        """
        case = subject.case()
        if subject.passes(case) == "both":
            subject.run(case)
            for rank, share_kept in enumerate(self.ask("kept")):
                yield Check(f"rank {rank} of {case}, times its own part", share_kept, KEEPS)

    def joined(self, parts: Sequence[Tensor], like: Tensor) -> Tensor:
        """The whole tensor from the parts (B, H, n) or (B, H, n, D) of all processes."""
        return collected(parts, self.setting.positions(like.shape[2])).to(like.device)


class DistributedCall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, processes: Processes, arguments: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        processes.calls += 1
        ctx.number, ctx.processes = processes.calls, processes
        ctx.save_for_backward(q, k, v)
        # pickling a view would send its whole storage
        whole = [x.detach().cpu().clone(memory_format=torch.contiguous_format) for x in (q, k, v)]
        arguments = tree_map_only(Tensor, Tensor.cpu, arguments)
        mod = arguments.get("score_mod")
        if mod is not None and mod.params is not None:
            arguments["score_mod"] = replace(mod, params=mod.params.cpu())
        outs, lses = zip(*processes.ask("call", ctx.number, whole, arguments), strict=True)
        lse = None if lses[0] is None else processes.joined(lses, q)
        return processes.joined(outs, q), lse

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, d_out: Tensor, d_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        gradients = tree_map_only(Tensor, Tensor.cpu, [d_out, d_lse])
        answers = ctx.processes.ask("backward", ctx.number, gradients)
        wholes = zip(*answers, strict=True)
        joined = ctx.processes.joined
        return *map(joined, wholes, ctx.saved_tensors), None, None


def serve(rank: int, meeting: str, pipe: Any, setting: Setting) -> None:
    """Main loop of a process: answer requests until the pipe closes."""
    from torch import distributed

    torch.set_num_threads(1)
    if setting.device == "cuda":
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if setting.device == "cuda" else "gloo"
    distributed.init_process_group(
        backend,
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=setting.world,
        timeout=timedelta(seconds=PATIENCE),
    )
    attend, given = attention, setting.given
    if not setting.target:
        shards = share(
            rank, setting.world, setting.world, heads=setting.heads, gather=setting.gather
        )
        if shards.ring.size > 1:
            register_ring(given)
        attend = partial(shards.attention, attention)
    worker = Worker(rank, setting, partial(attend, backend=given))
    while True:
        try:
            deterministic, what, *message = pipe.recv()
        except EOFError:
            return
        torch.set_deterministic_debug_mode(deterministic)
        try:
            answer = getattr(worker, what)(*message)
        except Refusal as error:
            answer = error
        except Exception as error:  # whatever an attention raises
            traceback.print_exc()
            answer = f"{type(error).__name__}: {error}"
        pipe.send(answer)


class Worker:
    """Answers the requests to one process; each request names a method."""

    def __init__(self, rank: int, setting: Setting, attend: Callable[..., Any]) -> None:
        self.rank, self.setting, self.attend = rank, setting, attend
        self.graphs: dict[int, tuple[list[Tensor], Any]] = {}
        self.bytes_kept = 0.0

    def own(self, x: Tensor) -> Tensor:
        part = x[:, :, self.setting.positions(x.shape[2])[self.rank]]
        return part.to(self.setting.device)

    def call(
        self, number: int, whole: list[Tensor], arguments: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """out and lse of this process's tokens."""
        parts = [self.own(x).requires_grad_() for x in whole]
        arguments = tree_map_only(Tensor, lambda x: x.to(self.setting.device), arguments)
        with saved_storages() as saved:
            output = self.attend(*parts, **arguments)
        out, lse = output[:2]
        owned = [*parts, out] + ([] if lse is None else [lse])
        self.bytes_kept = sum(saved.values()) / sum(x.nbytes for x in owned)
        self.graphs[number] = parts, (out, lse)
        self.graphs.pop(number - KEPT, None)
        return out.detach().cpu(), None if lse is None else lse.detach().cpu()

    def backward(self, number: int, gradients: list[Tensor | None]) -> list[Tensor]:
        """dq, dk and dv of this process's tokens."""
        parts, outputs = self.graphs[number]
        pairs = [
            (x, self.own(gradient))
            for x, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and x is not None and x.requires_grad
        ]
        found = torch.autograd.grad(
            [x for x, _ in pairs], parts, [y for _, y in pairs], retain_graph=True
        )
        return [x.cpu() for x in found]

    def kept(self) -> float:
        return self.bytes_kept
