"""Cases for any backend, random and adversarial, and the error budget of each result.

The reference is naive attention in float64 on the same rounded inputs. A result may have twice the
error of naive attention in the same dtype, plus the roundings that no implementation can avoid
(`unavoidable`): err <= 2 * err(naive, same dtype) + unavoidable.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention import AttentionOutput, Backend, ScoreMod, attention, attention_varlen
from conformance.adversarial import ADVERSARIAL

SHORT = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


@dataclass(frozen=True)
class Case:
    batch: int = 1
    num_heads: int = 2
    num_kv_heads: int = 2
    num_queries: int = 70
    num_keys: int = 70
    head_dim: int = 16
    value_dim: int | None = None  # None: head_dim
    causal: bool = True
    inputs: str = "normal"
    # window and softcap by value; alibi_slopes, document_ids, score_mod, key_lengths, cu_seqlens
    # and sinks as True
    optional: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __str__(self) -> str:
        def unless(usual: Any, name: str, value: Any) -> str:
            return "" if value == usual else f"{name}{value}".replace(" ", "")

        optional = [unless(None, *each).removesuffix("True") for each in self.optional.items()]
        parts = [
            f"B{self.batch}",
            f"H{self.num_heads}{unless(self.num_heads, 'kv', self.num_kv_heads)}",
            f"N{self.num_queries}{unless(self.num_queries, '-M', self.num_keys)}",
            f"D{self.head_dim}{unless(None, 'v', self.value_dim)}",
            "causal" if self.causal else "full",
            *optional,
            unless("normal", "", self.inputs),
            unless(0, "seed", self.seed),
        ]
        return "-".join(filter(None, parts))

    def __hash__(self) -> int:
        return hash(str(self))

    def make(
        self, dtype: torch.dtype, device: str
    ) -> tuple[list[Tensor], dict[str, Any], Tensor, Tensor]:
        """q, k, v in dtype; the keyword arguments; and the gradients of out and lse."""
        generator = torch.Generator().manual_seed(self.seed)
        random = partial(torch.randn, generator=generator, dtype=torch.float64)
        q = random(self.batch, self.num_heads, self.num_queries, self.head_dim)
        k = random(self.batch, self.num_kv_heads, self.num_keys, self.head_dim)
        v = random(self.batch, self.num_kv_heads, self.num_keys, self.value_dim or self.head_dim)
        d_out, d_lse = random(*q.shape[:3], v.shape[3]), random(q.shape[:3])
        q, k, v = ADVERSARIAL[self.inputs](q, k, v)
        arguments: dict[str, Any] = {"causal": self.causal} | self.optional
        # no powers of two, which every dtype holds exactly. Keys after a query gain weight, but no
        # exponential overflows
        slopes = (
            torch.logspace(-0.7, -3.7, self.num_heads, base=2)
            * (1 if self.causal else 4 / self.num_keys)
        ).to(device)
        if "alibi_slopes" in arguments:
            arguments["alibi_slopes"] = slopes
        if "score_mod" in arguments:
            arguments["score_mod"] = ScoreMod(
                every_index, "conformance.every_index_kernel:every_index", slopes
            )
        if "sinks" in arguments:
            # one sink takes much of a row, one takes little, also if scores are shifted
            shift = {"up": 100, "down": -120}.get(self.inputs, 0)
            sinks = torch.linspace(2.0, -3.0, self.num_heads) + shift
            arguments["sinks"] = sinks.to(device)
        if "document_ids" in arguments:
            # each sequence of the batch has different documents
            documents = (7 // torch.arange(1, 1 + 2 * self.batch, 2)).clamp(min=1)[:, None]
            number = torch.arange(self.num_queries) * documents // self.num_queries
            # 0 2 1 0 2 1 0: ids rise and fall, and a later document repeats an id. Two neighbours
            # are equal in 32 bits, as integers or as floats
            ids = torch.tensor([2**24, 2**24 + 1, 2**24 + 2**32])[2 * number % 3]
            arguments["document_ids"] = ids.to(device)
        if "key_lengths" in arguments:
            # a little padding, a lot of it, only padding
            lengths = torch.tensor([max(self.num_keys - 5, 0), self.num_keys // 3, 0])
            arguments["key_lengths"] = lengths[torch.arange(self.batch) % 3].to(device)
        if "cu_seqlens" in arguments:
            arguments["cu_seqlens"] = self.sequences().to(device)
        return (
            [x.to(device, dtype) for x in (q, k, v)],
            arguments,
            d_out.to(device),
            d_lse.to(device),
        )

    def sequences(self) -> Tensor:
        """Bounds of the packed sequences, (2, S + 1) int32, for queries and keys: more queries than
        keys, no queries, no keys, fewer queries than keys. If N = M, both have the same bounds.
        """
        of_queries = torch.tensor([0, 3, 3, 4, 6, 10]) * self.num_queries // 10
        of_keys = torch.tensor([0, 1, 2, 2, 6, 10]) * self.num_keys // 10
        if self.num_queries == self.num_keys:
            of_keys = of_queries
        return torch.stack((of_queries, of_keys)).int()


def every_index(
    score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, params: Tensor
) -> tuple[Tensor, Tensor]:
    """A score_mod that uses every argument; its kernel is in conformance/every_index_kernel.py.
    params: one slope a head.
    """
    gain = 1 / (1 + b)
    return gain * (score + score * score / 8) - params[h] * (i - j), gain * (1 + score / 4)


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor | None = None, **arguments: Any
) -> AttentionOutput:
    """attention(), or attention_varlen() if sequences are packed into one."""
    if cu_seqlens is None:
        return AttentionOutput(*attention(q, k, v, **arguments)[:2])
    packed = (x[0].transpose(0, 1) for x in (q, k, v))
    out, lse = attention_varlen(*packed, *cu_seqlens, **arguments)
    return AttentionOutput(out.transpose(0, 1)[None], None if lse is None else lse[None])


class Call(NamedTuple):
    """A forward pass whose backward pass may come later."""

    output: AttentionOutput
    leaves: dict[str, Tensor]  # by the name of their gradient

    def results(self, d_out: Tensor, d_lse: Tensor | None) -> dict[str, Tensor]:
        """out, lse (if there is one) and the gradients of leaves that require one, as float64."""
        out, lse = self.output
        results: dict[str, Tensor] = {}
        if self.leaves["dq"].requires_grad:
            loss = (out.double() * d_out).sum()
            if d_lse is not None and lse is not None:
                # a row without a key has lse = -inf and passes no gradient
                loss = loss + (torch.where(lse.isinf(), 0.0, lse).double() * d_lse).sum()
            gradients = torch.autograd.grad(loss, tuple(self.leaves.values()))
            results |= zip(self.leaves, gradients, strict=True)
        results["out"] = out.detach()
        if lse is not None:
            results["lse"] = lse.detach()
        return {name: x.double() for name, x in results.items()}


def call(
    backend: str | Backend,
    tensors: list[Tensor],
    arguments: dict[str, Any],
    *,
    backward: bool = True,
) -> Call:
    """The forward pass. The reference "naive" has its own code for sinks."""
    leaves: dict[str, Tensor] = dict(zip(("dq", "dk", "dv"), tensors, strict=True))
    if "sinks" in arguments:
        leaves["dsinks"] = arguments["sinks"]
    leaves = {name: x.detach().requires_grad_(backward) for name, x in leaves.items()}
    given = arguments | {name.removeprefix("d"): x for name, x in leaves.items()}
    sinks = given.pop("sinks", None) if backend == "naive" else None
    output = attend(backend=backend, **given)
    return Call(output if sinks is None else sunk(output, sinks), leaves)


def sunk(output: AttentionOutput, sinks: Tensor) -> AttentionOutput:
    """The reference for sinks: the keys' share of the weight is a sigmoid. attention() merges sinks
    with the same code for all backends, so comparing two backends would not test it. The gradient
    is exact also for a sink of almost no weight.
    """
    out, lse = output
    assert lse is not None
    sinks = sinks.to(lse.dtype)[:, None]
    logit, log_sigmoid = lse - sinks, torch.nn.functional.logsigmoid
    share = log_sigmoid(logit).exp().unsqueeze(-1)
    total = torch.where(logit > 0, lse - log_sigmoid(logit), sinks - log_sigmoid(-logit))
    return AttentionOutput((out * share).to(out.dtype), total)


def run(
    backend: str | Backend,
    tensors: list[Tensor],
    arguments: dict[str, Any],
    d_out: Tensor,
    d_lse: Tensor | None,
    *,
    backward: bool = True,
) -> dict[str, Tensor]:
    """out, lse (if there is one) and, with backward, the gradients, as float64."""
    return call(backend, tensors, arguments, backward=backward).results(d_out, d_lse)


def probabilities(q: Tensor, k: Tensor, arguments: dict[str, Any]) -> Tensor:
    """p (B, H, N, M): the output of naive attention for v = identity."""
    identity = torch.eye(k.shape[2], dtype=q.dtype, device=q.device).expand(*k.shape[:2], -1, -1)
    return call("naive", [q, k, identity], arguments, backward=False).output.out


def scores_of(q: Tensor, k: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The scores after score_mod, before the mask, and what it multiplies their gradients by. q and
    k (B, H, N or M, D); the scores (B, H, N, M).
    """
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if "score_mod" not in arguments:
        return scores, torch.ones((), dtype=torch.float64, device=q.device)
    indices = (torch.arange(size, device=q.device) for size in scores.shape)
    b, h, i, j = torch.meshgrid(*indices, indexing="ij")
    return arguments["score_mod"](scores, b, h, i + k.shape[2] - q.shape[2], j)


def error_of_delta(
    v: Tensor, p: Tensor, out: Tensor, d_out: Tensor, d_lse: Tensor, dtype: torch.dtype
) -> Tensor:
    """What rounding does to delta, and to dp beside it: (B, H, N, 1). The tensors hold exact
    values; v is (B, H, M, D_v), p (B, H, N, M). `dtype` is that of the inputs.
    """
    statistics = torch.promote_types(dtype, torch.float32)
    of_sums = (d_out.abs() @ v.abs().mT).amax(-1, keepdim=True) + d_lse.abs().unsqueeze(-1)
    of_stored = (d_out * (out.to(dtype).double() - out)).sum(-1, keepdim=True).abs()
    of_p = (d_out.abs() * (p @ v.abs())).sum(-1, keepdim=True)
    eps, eps_statistics = torch.finfo(dtype).eps, torch.finfo(statistics).eps
    return of_stored + 4 * eps_statistics * of_sums + eps / 2 * of_p


def unavoidable(
    tensors: list[Tensor],
    arguments: dict[str, Any],
    d_out: Tensor,
    d_lse: Tensor,
    reference: dict[str, Tensor],
) -> dict[str, float]:
    """The error that rounding alone may cause in each result, in units of the result.

    Each tensor is rounded once to its own dtype. Rounding a score or lse gives exp(score - lse) a
    relative error of eps * (|score| + |lse|). The backward subtracts delta = rowsum(d_out * out)
    from dp = d_out v^T. If one key holds all the weight, the two cancel and their roundings remain:
    those of the sums (in the statistics' dtype) and of `out`. Every flash backward reads `out` as
    stored, computed from a p that was rounded for its product with v. ds is rounded for its own two
    products. The gradient of a sink sums the errors of delta and of the exponential over all rows.
    Beside a large sink all weights of a row may be so small that a GPU flushes them to zero.
    """
    q, k, v = (x.double() for x in tensors)
    dtype, statistics = tensors[0].dtype, torch.promote_types(tensors[0].dtype, torch.float32)
    eps, eps_statistics = torch.finfo(dtype).eps, torch.finfo(statistics).eps
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scale = q.shape[-1] ** -0.5
    scores, steepness = scores_of(q, k, arguments)
    lse = torch.where(reference["lse"].isinf(), 0.0, reference["lse"]).abs()
    exponents = scores.abs() + lse.unsqueeze(-1)
    largest_exponent = scores.abs().max().item() + lse.max().item()
    p = probabilities(q, k, arguments)
    delta_error = error_of_delta(v, p, reference["out"], d_out, d_lse, dtype)
    delta = (d_out * reference["out"]).sum(-1, keepdim=True)
    moved = (d_out @ v.mT - delta).abs()
    # the backward computes p again, and may round a score differently than the forward
    of_p = eps / 2 + 2 * eps_statistics * exponents
    ds_error = p * scale * steepness.abs() * (delta_error + of_p * moved)
    # of a weight and of ds: float32 loses its subnormal numbers, a narrower dtype rounds to its own
    tiny = torch.finfo(statistics).tiny
    lost = tiny + torch.finfo(dtype).tiny * eps / 2
    ds_error = ds_error + lost * (1 + scale * steepness.abs() * moved)
    cancelled = {
        "out": lost * v.abs().sum(2),
        "dv": lost * d_out.abs().sum(2).unflatten(1, (-1, groups)).sum(2),
        "dq": ds_error @ k.abs(),
        "dk": (ds_error.mT @ q.abs()).unflatten(1, (-1, groups)).sum(2),
    }
    if "dsinks" in reference:  # a sum over all rows; the weight of a sink may underflow
        sink = arguments["sinks"].double().unsqueeze(-1)
        weight = torch.exp(sink - reference["lse"])
        each = (d_lse.unsqueeze(-1) - delta).abs().squeeze(-1)
        rounding = delta_error.squeeze(-1) + eps_statistics * (1 + largest_exponent) * each
        cancelled["dsinks"] = (weight * rounding + tiny * each).sum((0, 2))
    relative = {name: eps + eps_statistics * largest_exponent for name in reference} | {
        "lse": eps_statistics * (1 + largest_exponent)
    }
    return {
        name: relative[name] * torch.where(x == -torch.inf, 0.0, x).abs().max().item()
        + cancelled.get(name, torch.zeros(1)).max().item()
        for name, x in reference.items()
    }


class Check(NamedTuple):
    case: str
    error: float
    budget: float
    # error divided by that of naive attention, or by the unavoidable rounding if that is larger
    multiple: float | None = None

    @property
    def excess(self) -> str:
        """Where and how far the budget is exceeded."""
        return f"{self.case}: {self.error:.3g} where {self.budget:.3g} is allowed"

    @property
    def share(self) -> float:
        """Share of the budget that is used; more than 1 fails."""
        return self.error / self.budget if self.budget else float("inf" if self.error else 0)


class Expected(NamedTuple):
    """The exact results of a case, and the error budgets."""

    tensors: list[Tensor]
    arguments: dict[str, Any]
    d_out: Tensor
    d_lse: Tensor
    reference: dict[str, Tensor]  # out, lse, dq, dk, dv, and dsinks, in float64
    own: dict[str, float]  # error of naive attention in the case's dtype
    roundings: dict[str, float]  # from unavoidable()

    @property
    def inputs(self) -> tuple[list[Tensor], dict[str, Any], Tensor, Tensor]:
        """The arguments of run() after the backend."""
        return self[:4]

    def budget(self, name: str) -> float:
        return 2 * self.own[name] + self.roundings[name]

    def checks(self, case: Case, results: dict[str, Tensor], where: str = "") -> dict[str, Check]:
        """A check by tensor name, for float64 `results` that the oracle has too."""
        found, dtype = {}, SHORT[self.tensors[0].dtype]
        for name, exact in self.reference.items():
            if name in results:
                error = distance(results[name], exact)
                # with a single key naive is exact, so divide by a rounding at least
                unit = max(self.own[name], self.roundings[name], 1e-300)
                what = f"{name} of {case}-{dtype}{where and f', {where}'}"
                found[name] = Check(what, error, self.budget(name), error / unit)
        return found


def expect(case: Case, dtype: torch.dtype, device: str, *, with_lse: bool = True) -> Expected:
    """The results of naive attention. Without lse, no gradient arrives through lse."""
    tensors, arguments, d_out, d_lse = case.make(dtype, device)
    if not with_lse:
        d_lse = torch.zeros_like(d_lse)
    reference = run("naive", [x.double() for x in tensors], arguments, d_out, d_lse)
    roundings = unavoidable(tensors, arguments, d_out, d_lse, reference)
    if dtype == torch.float64:
        # the reference is no more exact than the backend
        own = {name: 16 * rounding for name, rounding in roundings.items()}
    else:
        naive = run("naive", tensors, arguments, d_out, d_lse)
        own = {name: distance(naive[name], reference[name]) for name in reference}
    return Expected(tensors, arguments, d_out, d_lse, reference, own, roundings)


def distance(x: Tensor, reference: Tensor) -> float:
    """Largest difference; inf if only one of the two is infinite, or one is NaN. Equal infinities
    differ by 0: a row without a key has lse = -inf in both.
    """
    return (
        torch.where(x == reference, 0.0, (x - reference).abs())
        .nan_to_num(nan=torch.inf)
        .max()
        .item()
    )
