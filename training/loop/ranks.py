"""The processes that torchrun started to train one run together: its ranks.

Every rank builds the same model, takes its share of each step's sequences, and adds its gradients
to those of the others. So all ranks keep the same weights. The first rank's folder is the run's;
every other rank works in a temporary folder.

A process that torchrun did not start is alone: it forms no process group, and every method returns
its argument.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from training.record.starts import differences

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from attention import Backend
    from attention.ranks import Shards
    from config import RunConfig

TIMEOUT = timedelta(minutes=10)  # that a rank waits for another


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    world: int = 1
    local_rank: int = 0  # among those of this host
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

    def sum(self, x: "Tensor") -> "Tensor":
        """Add up x over all ranks, in place."""
        return self._reduced(x, "SUM")

    def largest(self, x: "Tensor") -> "Tensor":
        """The element-wise maximum of x over all ranks, in place."""
        return self._reduced(x, "MAX")

    def _reduced(self, x: "Tensor", how: str) -> "Tensor":
        if self.several:
            from torch import distributed

            distributed.all_reduce(x, getattr(distributed.ReduceOp, how))
        return x

    def gathered(self, x: Any) -> list[Any]:
        """x of every rank, in the order of the ranks."""
        if not self.several:
            return [x]
        from torch import distributed

        found = [None] * self.world
        distributed.all_gather_object(found, x)
        return found

    def largest_of(self, row: dict[str, float | None]) -> dict[str, float | None]:
        """Each figure's maximum over all ranks; None for a figure that they lack."""
        rows = self.gathered(row)
        return {
            key: max((each[key] for each in rows if each[key] is not None), default=None)
            for key in row
        }

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank. One that stops alone leaves the others waiting."""
        if not self.several:
            return flag
        import torch

        return bool(self.sum(torch.tensor(int(flag))))

    def check_same(self, config: "RunConfig", fingerprint: str) -> None:
        """Raise ValueError if ranks have different settings or data: they would train different
        models. Only files may be elsewhere, and another logger may be chosen.
        """
        own = {"resume": None, "init_from": None, "logger": None, "fingerprint": fingerprint}
        settings = asdict(config) | own
        del settings["data"]["path"]
        first, *others = self.gathered(settings)
        for rank, other in enumerate(others, start=1):
            for key, (here, there) in differences(first, other).items():
                raise ValueError(
                    f"all ranks need the same {key}: {here} on rank 0, and {there} on rank {rank}"
                )

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
        self.parameters = [x for x in parameters if x.requires_grad] if ranks.several else ()
        self._ready: list[Tensor] = []
        self._sent: list[Any] = []

    def __enter__(self) -> None:
        self._hooks = [
            each.register_post_accumulate_grad_hook(self._add) for each in self.parameters
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
    world = int(os.environ.get("WORLD_SIZE") or 1)
    if world == 1:
        return ALONE
    rank = int(os.environ["RANK"])
    return Ranks(rank, world, int(os.environ.get("LOCAL_RANK", rank)))


def join(device: str, context: int = 1) -> Ranks:
    """Meet the other ranks; on CUDA, take the GPU of this rank. Does nothing if it is alone.

    Each `context` consecutive ranks share their sequences.

    Raises ValueError for a number of ranks that is no multiple of `context`, and for more ranks
    than GPUs on this host.
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
        # every rank of the host says so, and none waits for the others
        count = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world))
        if count > (gpus := torch.cuda.device_count()):
            raise ValueError(
                f"this host has {gpus} GPUs for {count} ranks: start torchrun with "
                f"--nproc-per-node={gpus}, or add device=cpu"
            )
        torch.cuda.set_device(ranks.local_rank)
    if not distributed.is_initialized():
        kinds = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        distributed.init_process_group(kinds, timeout=TIMEOUT)
    if context > 1:
        from attention.ranks import share

        ranks = replace(ranks, shards=share(ranks.rank, ranks.world, context, TIMEOUT))
    return ranks


def check_shares(config: "RunConfig", ranks: Ranks, backends: "Iterable[Backend]") -> None:
    """Raise ValueError for a step that the ranks cannot share equally."""
    context, step, unit = ranks.context, "batch_size", ranks.data
    if config.tokens_per_step is not None:
        step, unit = "tokens_per_step", ranks.data * config.batch_size * config.seq_len
    divided = {
        "seq_len": config.seq_len,
        "model.num_heads": config.model.num_heads,
        "model.num_kv_heads": config.model.kv_heads,
    }
    for key, count in divided.items():
        if count % context:
            raise ValueError(f"parallel.context={context} must divide {key}={count}")
    if (count := getattr(config, step)) % unit:
        raise ValueError(
            f"{step}={count} is shared by {ranks.data} ranks, and must be a multiple of {unit}"
        )
    for backend in backends:
        if context > 1 and backend.module is not None:
            raise ValueError(
                f"parallel.context={context} gives each rank some heads, and attention="
                f"{backend.name} has parameters for all of them; leave out parallel.context"
            )


def leave() -> None:
    """Leave the other ranks at the end of a run."""
    if of_environment().several:
        from torch import distributed

        if distributed.is_initialized():
            distributed.destroy_process_group()


def report(error: BaseException) -> None:
    """Tell torchrun which error ends this rank, inside its `except` block. Of all ranks that end,
    torchrun prints the error of the first.
    """
    if not of_environment().several:
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)
