"""The processes that torchrun started to train one run together: its ranks.

Every rank builds the same model, takes its share of each step's sequences, and adds its gradients
to those of the others. So all ranks keep the same weights. The first rank's folder is the run's;
every other rank works in a temporary folder.

A process that torchrun did not start is alone: it forms no process group, and every method returns
its argument.
"""

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.loop.lost_ranks import RankLost, Watch, abort_nccl
from training.record.files import Row, write_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from attention.ranks import Shards

PATIENCE = 2.0  # seconds that the first rank has to report why all ranks end

log = logging.getLogger("tilegpt")
_store: Any = None  # torchrun's key-value store: a rank that fails tells the others why
_watch: Watch | None = None


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    world: int = 1
    local_rank: int = 0  # among those of this host
    local_world: int = 1  # of this host
    context: int = 1  # consecutive ranks that share a sequence
    shards: "Shards | None" = None  # how they share it; None if each rank has its own

    @property
    def data(self) -> int:
        """Into how many parts the sequences of a step are divided."""
        return self.world // self.context

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def several(self) -> bool:
        return self.world > 1

    def rows(self, count: int) -> slice:
        """This rank's share of the `count` sequences of a step."""
        size = count // self.data
        start = self.rank // self.context * size
        return slice(start, start + size)

    def columns(self, count: int) -> slice:
        """This rank's share of the `count` tokens of a sequence."""
        size = count // self.context
        start = self.rank % self.context * size
        return slice(start, start + size)

    @property
    def attention(self) -> "Callable[..., Any]":
        """attention() of this rank's tokens, the call= of GPT.using()."""
        from attention import attention

        return attention if self.shards is None else partial(self.shards.attention, attention)

    def positions(self, tokens: "Tensor") -> "Tensor | None":
        """The positions of this rank's tokens (B, n), for GPT.forward()."""
        return None if self.shards is None else self.shards.own_positions(tokens)

    def check(self) -> None:
        """Raise RankLost if another rank ended: results of the GPU since then may be wrong."""
        if _watch is not None:
            _watch.check()

    def sum(self, x: "Tensor") -> "Tensor":
        """Add up x over all ranks, in place."""
        if self.several:
            from torch import distributed

            self.check()
            distributed.all_reduce(x)
        return x

    def largest(self, x: "Tensor") -> "Tensor":
        """The element-wise maximum of x over all ranks, in place."""
        if self.several:
            from torch import distributed

            self.check()
            distributed.all_reduce(x, distributed.ReduceOp.MAX)
        return x

    def largest_of(self, row: dict[str, float | None]) -> dict[str, float | None]:
        """Each figure's maximum over all ranks; None for a figure that they lack."""
        if not self.several:
            return row
        import torch

        figures = torch.tensor([nan if x is None else x for x in row.values()], dtype=torch.float64)
        found = self.largest(figures).tolist()
        return {name: None if isnan(x) else x for name, x in zip(row, found, strict=True)}

    def gathered(self, x: Any) -> list[Any]:
        """x of every rank, in the order of the ranks."""
        if not self.several:
            return [x]
        from torch import distributed

        self.check()
        found = [None] * self.world
        distributed.all_gather_object(found, x)
        return found

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        if not self.several:
            return flag
        import torch

        return bool(self.sum(torch.tensor(int(flag))))

    def seed_step(self, seed: int, step: int) -> None:
        """Seed dropout. Ranks get different seeds; a resumed run gets the same ones again."""
        if self.several:
            import torch

            torch.manual_seed(hash((seed, step, self.rank)))

    @contextlib.contextmanager
    def first_goes_first(self) -> Iterator[None]:
        """Rank 0 runs this block first; the others run it afterwards and find what rank 0 built."""
        if not self.first:
            self.any(False)
        yield
        if self.first:
            self.any(False)


class GradientSum:
    """Adds up the gradients of all ranks while the last backward pass of a step still runs.

    total = GradientSum(ranks, parameters)
    with total:
        loss.backward()
    loss = total.of(loss)

    Gradients are sent in messages of MESSAGE bytes or a little more, in the order in which the
    backward pass yields them. That is the graph's order, the same on every rank. A rank that is
    alone sends nothing.
    """

    MESSAGE = 2**26

    def __init__(self, ranks: Ranks, parameters: "Sequence[torch.nn.Parameter]") -> None:
        self.parameters = parameters if ranks.several else ()
        self._ready: list[Tensor] = []
        self._sent: list[Any] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        self._hooks = [
            each.register_post_accumulate_grad_hook(self._add)
            for each in self.parameters
            if each.requires_grad
        ]

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def of(self, loss: "Tensor") -> "Tensor":
        """The sum of the ranks' losses. When it returns, the gradients are summed too."""
        if not self.parameters:
            return loss
        self._ready.append(loss)
        self._send()
        for message in self._sent:
            message.wait()
        return loss

    def _add(self, parameter: "torch.nn.Parameter") -> None:
        self._ready.append(parameter.grad)
        if sum(each.nbytes for each in self._ready) >= self.MESSAGE:
            self._send()

    def _send(self) -> None:
        from torch import distributed

        # NCCL adds up all tensors of a message in place, by one kernel
        with distributed.distributed_c10d._coalescing_manager(async_ops=True) as message:
            for each in self._ready:
                distributed.all_reduce(each)
        self._sent.append(message)
        self._ready = []


ALONE = Ranks()


def of_environment() -> Ranks:
    """The rank that torchrun, or a launcher like it, gave this process."""
    world = os.environ.get("WORLD_SIZE", "")
    if not world.isdecimal() or int(world) < 2:
        return ALONE
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return Ranks(rank, int(world), local_rank, local_world)


def join(
    device: str,
    context: int = 1,
    *,
    timeout: float = 600,
    settings: Mapping[str, Any] | None = None,
) -> Ranks:
    """Meet the other ranks; on CUDA, take the GPU of this rank. Does nothing if it is alone.

    Each `context` consecutive ranks share their sequences. A rank waits `timeout` seconds for
    another.

    Raises ValueError if the number of ranks is no multiple of `context`, if this host has no GPU
    for the rank, or if the others do not come or have other `settings`.
    """
    ranks = replace(of_environment(), context=context)
    if ranks.world % context:
        raise ValueError(
            f"parallel.context={context} needs that many ranks, or a multiple of it, and there "
            f"are {ranks.world}: start torchrun --standalone --nproc-per-node={context} train.py"
        )
    if not ranks.several:
        return ranks
    import torch
    from torch import distributed

    if device == "cuda":
        gpus = torch.cuda.device_count()
        if ranks.local_rank >= gpus:
            raise ValueError(
                f"rank {ranks.rank} has no GPU: this host has {gpus}, and runs "
                f"{ranks.local_world} ranks; start torchrun with "
                f"--nproc-per-node={gpus}, or add device=cpu"
            )
        torch.cuda.set_device(ranks.local_rank)
    if not distributed.is_initialized():
        global _watch
        _meet(ranks, device, timedelta(seconds=timeout))
        _compare_settings(ranks, settings or {})
        _watch = Watch(_store, ranks.rank, ranks.world)
        if device == "cuda":
            _compare_gpus(ranks)
    if context > 1:
        from attention.ranks import share

        shards = share(ranks.rank, ranks.world, context, timedelta(seconds=timeout))
        ranks = replace(ranks, shards=shards)
    return ranks


def _meet(ranks: Ranks, device: str, timeout: timedelta) -> None:
    global _store
    from torch import distributed

    try:
        kept, rank, world = next(distributed.rendezvous("env://", timeout=timeout))
        # restarted ranks must not find the addresses of the ranks before the restart
        _store = distributed.PrefixStore(f"ranks {_restarts()}", kept)
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            store=_store,
            rank=rank,
            world_size=world,
            timeout=timeout,
        )
    except (RuntimeError, ValueError) as error:  # DistError is a RuntimeError
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"rank {ranks.rank} of {ranks.world} did not meet the others: {reason}; start all of "
            "them by one torchrun, as in torchrun --standalone --nproc-per-node=2 train.py"
        ) from error


def _compare_settings(ranks: Ranks, settings: Mapping[str, Any]) -> None:
    """Raise ValueError if ranks differ: messages of unequal sizes would crash their processes."""
    _store.set(f"settings {ranks.rank}", json.dumps(settings, default=str))
    first = json.loads(_store.get("settings 0"))
    for rank in range(1, ranks.world):
        other = json.loads(_store.get(f"settings {rank}"))
        for key, value in first.items():
            if other[key] != value:
                raise ValueError(
                    f"all ranks need the same settings: {key}={value} on rank 0, and "
                    f"{key}={other[key]} on rank {rank}"
                )


def _compare_gpus(ranks: Ranks) -> None:
    """Warn if the GPUs differ, because all ranks run at the speed of the slowest."""
    import torch

    _store.set(f"GPU {ranks.rank}", torch.cuda.get_device_name())
    if ranks.first:
        names = [_store.get(f"GPU {rank}").decode() for rank in range(ranks.world)]
        if len(set(names)) > 1:
            listed = ", ".join(f"rank {rank}: {name}" for rank, name in enumerate(names))
            log.warning(f"the ranks' GPUs differ, and the slowest sets the pace ({listed})")


def leave() -> None:
    """Leave the other ranks at the end of a run."""
    if of_environment().several:
        from torch import distributed

        tell_end()
        if distributed.is_initialized():
            distributed.destroy_process_group()


def announce(run_dir: Path) -> None:
    """Store the run's folder with torchrun, which may restart the ranks."""
    if (store := _agents_store()) is not None and of_environment().first:
        store.set("run_dir", str(run_dir.absolute()))


def run_before_restart() -> Path | None:
    """The folder of the run whose ranks torchrun restarted (--max-restarts). None at the first
    start, or if the run had no folder yet.
    """
    return announced_folder() if _restarts() else None


def announced_folder() -> Path | None:
    """The run's own folder, which is the first rank's."""
    store = _agents_store()
    if store is None or not store.check(["run_dir"]):
        return None
    return Path(store.get("run_dir").decode())


def _restarts() -> int:
    """How often torchrun has restarted the ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _agents_store() -> Any:
    """The store that torchrun itself keeps, which outlives the ranks; None without one."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    from torch import distributed

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return distributed.PrefixStore("tilegpt", distributed.TCPStore(host, port, is_master=False))


def tell_end() -> None:
    """Tell the other ranks that this one ends normally."""
    if _store is not None:
        with contextlib.suppress(RuntimeError):  # the process that keeps the store may be gone
            _store.set(f"left {of_environment().rank}", "")
    _stop_watch()


def _stop_watch() -> None:
    global _watch
    if _watch is not None:
        _watch.stop()
        _watch = None


def tell_why(summary: Row) -> None:
    """Tell the other ranks why this one failed, and stop waiting for them."""
    _stop_watch()
    if _store is None:
        return
    if "rank" not in summary:  # else another rank failed
        words = {key: summary[key] for key in ("status", "error", "oom") if key in summary}
        with contextlib.suppress(RuntimeError):  # the process that keeps the store may be gone
            _store.set("failed", json.dumps({"rank": of_environment().rank} | words))
    abort_nccl()


def stand_in(summary: Row, began: float) -> None:
    """Report this rank's failure and write summary.json if the first rank has done neither. The
    first rank may be dead, or waiting for this one.
    """
    ranks = of_environment()
    if ranks.first:
        return
    time.sleep(PATIENCE)
    reason = summary.get("error") or summary["status"]
    folder = announced_folder()
    path = None if folder is None else folder / "summary.json"
    written = path is not None and path.exists() and path.stat().st_mtime >= began
    if written and json.loads(path.read_text()).get("error") == summary.get("error"):
        return
    print(f"rank {ranks.rank} of {ranks.world}: {reason}", file=sys.__stderr__)
    if path is not None and not written:
        write_json(path, {"rank": ranks.rank} | summary)


def why_another_failed(error: BaseException) -> Row | None:
    """What summary.json says of a run that another rank ended; None if this rank failed itself.

    `error` is what a collective of this rank raised, or RankLost, or a signal.
    """
    if not of_environment().several or _store is None:
        return None
    from torch import distributed

    message = isinstance(error, distributed.DistError) or "gloo" in str(error)
    # when one rank has ended, torchrun ends the others by a signal
    ended = isinstance(error, (RankLost, KeyboardInterrupt))
    if not ended and not (isinstance(error, RuntimeError) and message):
        return None
    if _watch is not None:
        if message:  # this error may come before the other process has ended
            _watch.noticed.wait(PATIENCE)
        if _watch.lost is not None:
            return _watch.lost
    # NCCL's own error says more, and a signal may have another cause
    if isinstance(error, KeyboardInterrupt) or "NCCL error" in str(error):
        return None
    reason = "another rank ended and did not say why: it was killed, or lost"
    return {"status": "failed", "error": reason}
