"""One sequence over several processes: each holds some of its tokens.

Heads: ranks exchange tokens for heads before a call of attention(), and back after it. So every
backend, mask and defect computes what it computes in one process. Jacobs et al., "DeepSpeed
Ulysses" (2023, arXiv:2309.14509).

    tokens of rank r, all heads  --to_heads-->  all tokens, heads of rank r
                                                    attention(), any backend
    tokens of rank r, all heads  <--to_tokens--

Ring: keys and values go round any number of ranks; see attention.ring. Both together make a grid:
consecutive ranks exchange heads, and a ring joins the ranks that hold the same heads.

Dimensions: B batch, H heads, N tokens of the sequence, W ranks, D head dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

import attention.exchange as exchange
from attention.interface import (
    AttentionOutput,
    Backend,
    Output,
    Refusal,
    ScoredOutput,
    ScoreMod,
    empty_heads,
    flag,
    operator,
    statistics_dtype,
)
from attention.ring import (
    GatherCall,
    RankProgram,
    RingCall,
    Sent,
    make_call,
    token_major,
    zigzag,
)
from attention.sinks import with_sinks

_backends: dict[str, Backend] = {}  # backends that run on a ring, by name


@dataclass(frozen=True)
class Group:
    """Ranks that exchange messages, and the place of this process among them."""

    name: str = ""  # "" sends no message
    place: int = 0
    size: int = 1


@dataclass(frozen=True)
class Shards:
    """The ranks that share a sequence."""

    heads: Group = field(default_factory=Group)
    ring: Group = field(default_factory=Group)
    gather: bool = False  # whether a rank gathers all keys of the ring before it uses any

    def attention(
        self,
        attend: Callable[..., Output],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        backend: Backend,
        causal: bool = True,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        document_ids: Tensor | None = None,
        score_mod: ScoreMod | None = None,
        sinks: Tensor | None = None,
        return_max_score: bool | Tensor = False,
        exchanged: bool = False,
    ) -> Output:
        """Run `attend`, which is attention(), on the whole sequence; return the part of this rank.

        q (B, H, n, D), k, v (B, H_kv, n, D), out (B, H, n, D) and lse (B, H, n) hold the n tokens
        at positions(). document_ids (B, N) cover the whole sequence, alibi_slopes and sinks (H,)
        all heads. lse is None where heads are exchanged. max_score covers the scores that this rank
        computed; it is -inf for the heads of other ranks. exchanged: q, k and v come from
        to_heads(), and out is for to_tokens().
        """
        if not exchanged:
            q, k, v = self.to_heads(q, k, v)
        arguments = {
            "causal": causal,
            "scale": q.shape[-1] ** -0.5 if scale is None else scale,
            "window": window,
            "softcap": softcap,
            "document_ids": document_ids,
            "return_max_score": return_max_score,
        }
        alibi_slopes, sinks = (
            None if x is None else x.unflatten(0, (self.heads.size, -1))[self.heads.place]
            for x in (alibi_slopes, sinks)
        )
        if self.ring.size > 1:
            if alibi_slopes is not None or score_mod is not None:
                raise Refusal("a ring takes no alibi_slopes or score_mod; exchange heads")
            out, lse, max_score = ring(q, k, v, self, backend=backend, **arguments)
            if sinks is not None:
                out, lse = with_sinks(out, lse, sinks)
        else:
            if score_mod is not None:
                first_head = self.heads.place * q.shape[1]
                score_mod = replace(score_mod, first_head=score_mod.first_head + first_head)
            changes = {"alibi_slopes": alibi_slopes, "score_mod": score_mod, "sinks": sinks}
            out, lse, *scores = attend(q, k, v, backend=backend, **changes, **arguments)
            max_score = scores[0] if scores else None
        if self.heads.size > 1:
            out, lse = out if exchanged else self.to_tokens(out), None
        if return_max_score is False:
            return AttentionOutput(out, lse)
        return ScoredOutput(out, lse, None if max_score is None else self.of_all_heads(max_score))

    def to_heads(self, *tensors: Tensor) -> Sequence[Tensor]:
        """From (B, H, n, D), this rank's tokens, to (B, H / W, W n, D), its heads. All tensors go
        in one message; their H may differ.
        """
        if self.heads.size == 1:
            return tensors
        if len(widths := {x.shape[-1] for x in tensors}) > 1:
            raise Refusal(f"ranks exchange heads with v as wide as q and k, not of {widths}")
        return exchange.exchanged(tensors, self.heads.name, self.heads.size, back=False)

    def to_tokens(self, x: Tensor) -> Tensor:
        """The inverse of to_heads()."""
        return exchange.exchanged([x], self.heads.name, self.heads.size, back=True)[0]

    def of_all_heads(self, x: Tensor) -> Tensor:
        """From (B, H / W) of this rank's heads to (B, H), -inf for the heads of the others."""
        count = x.shape[1]
        own = slice(self.heads.place * count, (self.heads.place + 1) * count)
        found = x.new_full((x.shape[0], count * self.heads.size), -torch.inf)
        found[:, own] = x
        return found

    def positions(self, num_tokens: int, device: torch.device | None = None) -> Tensor:
        """Sorted positions of this rank's tokens in a sequence of `num_tokens`."""
        place = self.ring.place * self.heads.size + self.heads.place
        return tokens_of_ranks(num_tokens, self.ring.size, self.heads.size, device)[place]

    def own_positions(self, tokens: Tensor) -> Tensor:
        """The positions of this rank's tokens (B, n) in the whole sequence."""
        total = tokens.shape[1] * self.heads.size * self.ring.size
        return self.positions(total, tokens.device)


def tokens_of_ranks(
    num_tokens: int, ring: int, heads: int, device: torch.device | None = None
) -> list[Tensor]:
    """The positions of each rank's tokens. Ranks that exchange heads split one part of the ring."""
    parts = zigzag(num_tokens, ring, device)
    return [own for part in parts for own in part.tensor_split(heads)]


def ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shards: Shards,
    *,
    backend: Backend,
    causal: bool,
    scale: float,
    window: int | None,
    softcap: float | None,
    document_ids: Tensor | None,
    return_max_score: bool | Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, lse and max_score of this rank's queries, computed on a ring."""
    if isinstance(return_max_score, Tensor) and not torch.compiler.is_compiling():
        return_max_score = bool(return_max_score)
    look = flag(return_max_score)
    group = (shards.ring.name, shards.ring.place, shards.ring.size, shards.gather)
    tiles = [backend.options.get(name, 0) for name in ("block_q", "block_kv")]
    kernel = backend.options.get("kernel", "")
    settings = (backend.name, *group, causal, scale, window, softcap, *tiles, kernel)
    out, lse, max_score = ring_attention(q, k, v, document_ids, look, *settings)
    return out, lse, None if look is None else max_score.detach()


def register_ring(backend: Backend) -> None:
    """Make a backend known to the ring's operators."""
    _backends[backend.name] = backend


def share(
    rank: int,
    world: int,
    context: int,
    *,
    heads: int,
    gather: bool = False,
    timeout: timedelta | None = None,
) -> Shards:
    """Form the process groups in which every `context` consecutive ranks share a sequence: each
    `heads` consecutive ranks exchange heads, and rings join the rest. All ranks of the world must
    call this. A rank waits `timeout` for another; None takes PyTorch's default.
    """
    from torch import distributed

    for first in range(0, world, context):
        members = range(first, first + context)
        parts = {
            "heads": [members[i : i + heads] for i in range(0, context, heads)],
            "ring": [members[i::heads] for i in range(heads)],
        }
        for name, groups in parts.items():
            for each in groups:
                if len(each) > 1:  # every rank takes part in making each group
                    group = distributed.new_group(list(each), timeout=timeout)
                    if rank in each:
                        exchange.groups[name] = group
    place, head = divmod(rank % context, heads)
    return Shards(Group("heads", head, heads), Group("ring", place, context // heads), gather)


# clock cycles, about 10 us, that a GPU waits between sending a message and computing. Attention
# takes all multiprocessors until it is done, so the kernel that sends has to start before it
HEAD_START = 20_000


def take_part(program: RankProgram, group: str, place: int, size: int) -> Any:
    """Run this rank's program, exchanging messages with the other ranks; return its result."""
    leaving = next(program)
    while True:
        arriving = [empty_heads(each.receives, each.tensor) for each in leaving]
        works = _pass_on(leaving, arriving, group, place, size) if group and leaving else []
        if works and leaving[0].tensor.is_cuda:
            torch.cuda._sleep(HEAD_START)

        def arrived(works: list = works, arriving: list[Tensor] = arriving) -> list[Tensor]:
            for work in works:
                work.wait()
            return arriving

        try:
            leaving = program.send(arrived)
        except StopIteration as end:
            return end.value


def _pass_on(
    leaving: list[Sent], arriving: list[Tensor], group: str, place: int, size: int
) -> list[Any]:
    """Send to the next rank and receive from the previous one; return the works to wait for."""
    from torch import distributed

    members = exchange.groups[group]
    after, before = (
        distributed.get_global_rank(members, (place + step) % size) for step in (1, -1)
    )
    return distributed.batch_isend_irecv(
        [
            distributed.P2POp(transfer, x, peer, members)
            for each, buffer in zip(leaving, arriving, strict=True)
            for transfer, x, peer in (
                (distributed.isend, token_major(each.tensor).transpose(-3, -2), after),
                (distributed.irecv, buffer.transpose(-3, -2), before),
            )
        ]
    )


# arguments of the ring's operators after the tensors, with their types in PyTorch's schemas
SETTINGS = {
    "backend": "str",
    "group": "str",
    "place": "int",
    "size": "int",
    "gather": "bool",
    "causal": "bool",
    "scale": "float",
    "window": "int?",
    "softcap": "float?",
    "block_q": "int",
    "block_kv": "int",
    "kernel": "str",
}
SCHEMA = ", ".join(f"{kind} {name}" for name, kind in SETTINGS.items())


def run_on_ring(
    direction: str,
    tensors: Sequence[Tensor],
    document_ids: Tensor | None,
    values: tuple[Any, ...],
    *,
    look: bool = False,
) -> Any:
    """Run RingCall.forward or backward for this rank, on q, k, v, ...; `values` are those of
    SETTINGS.
    """
    given, q = dict(zip(SETTINGS, values, strict=True)), tensors[0]
    size, length = given["size"], q.shape[2] * given["size"]
    mask = {name: given[name] for name in ("causal", "window")}
    settings = {name: given[name] for name in ("scale", "softcap", "block_q", "block_kv")}
    if given["kernel"]:  # backends without this option get no argument
        settings["kernel"] = given["kernel"]
    kind = GatherCall if given["gather"] else RingCall
    used = _backends[given["backend"]].ring
    shape = length, length, size, q.device
    call = make_call(kind, used, *shape, settings, look=look, document_ids=document_ids, **mask)
    place = {name: given[name] for name in ("group", "place", "size")}
    with torch.autocast(q.device.type, enabled=False):
        return take_part(getattr(call, direction)(given["place"], *tensors), **place)


@operator(
    "ring_attention",
    f"(Tensor q, Tensor k, Tensor v, Tensor? document_ids, Tensor? look, {SCHEMA}) "
    "-> (Tensor, Tensor, Tensor)",
)
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    document_ids: Tensor | None,
    look: Tensor | None,
    *values: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """out (B, H, n, D), lse (B, H, n) and max_score (B, H) of this rank's n queries. `values` are
    those of SETTINGS. max_score is computed where `look` holds True.
    """
    looked = look is not None and bool(look)
    out, lse, max_score = run_on_ring("forward", (q, k, v), document_ids, values, look=looked)
    if max_score is None:
        max_score = lse.new_empty(lse.shape[:2])
    return token_major(out), lse.contiguous(), max_score


@torch.library.register_fake("tilegpt::ring_attention")
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dtype = statistics_dtype(q)
    lse, max_score = (q.new_empty(q.shape[:dims], dtype=dtype) for dims in (3, 2))
    return empty_heads(q.shape, q), lse, max_score


@operator(
    "ring_attention_backward",
    "(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor d_out, Tensor d_lse, "
    f"Tensor? document_ids, {SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
def ring_attention_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of this rank's tokens, from the inputs and results of ring_attention."""
    *tensors, document_ids = arguments[:8]
    dq, dk, dv = run_on_ring("backward", tensors, document_ids, arguments[8:])
    return token_major(dq), token_major(dk), token_major(dv)


@torch.library.register_fake("tilegpt::ring_attention_backward")
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_heads(q.shape, q), empty_heads(k.shape, k), empty_heads(v.shape, v)


def _save_ring(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, document_ids, _, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output[:2], document_ids)


def _backward_of_ring(
    ctx: Any, d_out: Tensor, d_lse: Tensor, _: Tensor
) -> tuple[Tensor | None, ...]:
    *tensors, document_ids = ctx.saved_tensors
    gradients = ring_attention_backward(*tensors, d_out, d_lse, document_ids, *ctx.settings)
    return *gradients, None, None, *([None] * len(ctx.settings))


def _no_second_derivative(ctx: Any, *_: Tensor) -> None:
    raise RuntimeError("attention on a ring has no second derivative: use attention=naive")


torch.library.register_autograd(
    "tilegpt::ring_attention", _backward_of_ring, setup_context=_save_ring
)
torch.library.register_autograd("tilegpt::ring_attention_backward", _no_second_derivative)
