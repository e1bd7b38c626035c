"""A published test of attention as data: its calls, its reference and its rule.

Dimensions: B batch, H query heads, H_kv key/value heads, N queries, M keys, D head dim.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention import Backend
from attention.mask import visible_keys
from conformance.cases import Case, run

Results = dict[str, Tensor]  # out, lse, dq, dk, dv, dsinks


@dataclass(frozen=True)
class Call:
    """One call of a suite; q (B, H, N, D), k and v (B, H_kv, M, D)."""

    tensors: list[Tensor]
    arguments: dict[str, Any]  # of attention(): causal, and those that differ from the defaults
    d_out: Tensor | None = None  # None: the suite compares no gradient here
    d_lse: Tensor | None = None
    finish: Callable[[Tensor], Tensor] | None = (
        None  # what the suite does to out before it compares
    )
    note: Any = None  # extra data for the rule


# whether a result is accepted: rule(name, found, reference, low, call); low is plain attention in
# the inputs' dtype, if the suite has this second reference
Rule = Callable[[str, Tensor, Tensor, Tensor | None, Call], bool]


class Source(NamedTuple):
    repository: str
    file: str
    commit: str


@dataclass(frozen=True)
class Suite:
    """A published test, restated. A mistake is in its reach only if it could express a case."""

    title: str
    source: Source
    inputs: str  # in words
    accepts: str  # its rule, in words
    left_out: str  # what was cut, in words
    dtype: torch.dtype
    features: frozenset[str]  # of attention.interface.FEATURES, and causal, full, sinks, backward
    calls: Callable[[], Iterable[Call]]
    reference: Callable[[Call], Results]
    rule: Rule
    low: Callable[[Call], Results] | None = None
    lse: bool = False  # whether it compares lse
    lse_gradient: bool = False
    # tile sizes of the attention under test
    tiles: Mapping[str, int] = field(default_factory=lambda: {"block_q": 128, "block_kv": 64})

    @cached_property
    def expected(self) -> list[tuple[Call, Results, Results]]:
        """Every call with its references, computed once for all attentions."""
        return [
            (call, self.reference(call), self.low(call) if self.low else {})
            for call in self.calls()
        ]

    def passes(self, backend: Backend) -> bool:
        """Whether the suite accepts an attention; one that raises is not accepted."""
        if self.tiles.keys() <= backend.options.keys():
            backend = backend.configured(**self.tiles)
        try:
            return all(self.accepted(backend, *each) for each in self.expected)
        except Exception:  # a broken attention may raise anything
            return False

    def accepted(self, backend: Backend, call: Call, reference: Results, low: Results) -> bool:
        found = run(
            backend,
            call.tensors,
            call.arguments,
            torch.zeros(()) if call.d_out is None else call.d_out.double(),
            call.d_lse,
            backward=call.d_out is not None,
        )
        if call.finish is not None:
            found["out"] = call.finish(found["out"].to(self.dtype)).double()
        return all(
            self.rule(name, found[name], x.double(), low[name].double() if low else None, call)
            for name, x in reference.items()
        )

    def expresses(self, case: Case) -> bool:
        """Whether the suite could make the call of a case, whatever its inputs and lengths."""
        kinds = {"causal"} if case.causal else {"full"}
        if "sinks" in case.optional:
            kinds.add("sinks")
        if case.causal and case.num_queries != case.num_keys:
            kinds.add("causal_cross_length")
        return (case.features() | kinds) - {"lse", "non_causal"} <= self.features


def plain(
    call: Call,
    *,
    inside: torch.dtype | None = None,
    hidden: float = -torch.inf,
    weights: torch.dtype | None = None,
    scale_keys: bool = False,
    lse: bool = False,
) -> Results:
    """Plain softmax attention, and its gradients by autograd.

    inside: the dtype to compute in, else that of the inputs. hidden: the score of a hidden
    key. weights: the dtype that the softmax is rounded to. scale_keys: scale k instead of the
    scores.
    """
    sinks = call.arguments.get("sinks")
    leaves = dict(zip(("dq", "dk", "dv"), call.tensors, strict=True))
    if sinks is not None:
        leaves["dsinks"] = sinks
    leaves = {name: x.detach().requires_grad_(call.d_out is not None) for name, x in leaves.items()}
    q, k, v = (leaves[name].to(inside or call.tensors[0].dtype) for name in ("dq", "dk", "dv"))
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scale = call.arguments.get("scale") or q.shape[-1] ** -0.5
    scores = q @ (k * scale).mT if scale_keys else q @ k.mT * scale
    if softcap := call.arguments.get("softcap"):
        scores = softcap * torch.tanh(scores / softcap)
    masks = {name: call.arguments[name] for name in ("causal", "window") if name in call.arguments}
    visible = visible_keys(q, k, **masks).mask()
    scores = scores.masked_fill(~visible, hidden)
    if sinks is not None:
        column = leaves["dsinks"].to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    # a row of only -inf would give NaN
    none = (scores == -torch.inf).all(-1, keepdim=True)
    p = scores.masked_fill(none, 0.0).float().softmax(-1).masked_fill(none, 0.0)
    p = p.to(weights or v.dtype).to(v.dtype)[..., : k.shape[2]]
    out = p @ v
    results: Results = {}
    if call.d_out is not None:
        loss = (out * call.d_out.to(out.dtype)).sum()
        if call.d_lse is not None:
            loss = loss + (scores.logsumexp(-1) * call.d_lse).sum()
        found = torch.autograd.grad(loss, list(leaves.values()))
        results |= zip(leaves, found, strict=True)
    results["out"] = out.detach()
    if lse:
        results["lse"] = scores.detach().logsumexp(-1)
    return results


def close(atol: float, rtol: float) -> Rule:
    """|found - reference| <= atol + rtol |reference|, everywhere."""

    def rule(name: str, found: Tensor, reference: Tensor, *_: Any) -> bool:
        return bool(((found - reference).abs() <= atol + rtol * reference.abs()).all())

    return rule
