"""Try a user's attention out before a run trains with it: values, gradients, strides, causality,
documents and writes into its inputs. And check a user's change of the scores.

Dimensions: B batch, H query heads, H_kv key/value heads, N tokens, D head dim.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attention import Backend, ScoreMod, attention, dtype_name, get_backend
from attention.interface import Output
from attention.look.blame import is_foreign, with_place
from attention.look.diagnose import REFERENCE_SCORES, with_gradients


def try_out(
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    module: nn.Module | None = None,
    **function: Any,
) -> None:
    """Raise ValueError, in one sentence, for a backend that no training run could trust.

    q (B, H, N, D), k and v (B, H_kv, N, D) are what a layer of the model hands to its attention: in
    its strides and with a graph behind them. `function` is what else it passes: window, softcap,
    ... If exact=True, the distance from softmax attention in float64 must be at most twice naive's
    own error in this dtype, plus one rounding; or plus a few, for lse if it is returned and for
    max_score if it is declared.
    """
    # the model merges the heads of out, so the gradient of out is a view of (B, N, H, D)
    d_out = torch.randn(q.transpose(1, 2).shape, generator=torch.Generator().manual_seed(0))
    d_out = d_out.to(q).transpose(1, 2)
    d_out[:, :, compared_rows(q) :] = 0
    given = {"q": q, "k": k, "v": v, "d_out": d_out}
    copies = {name: x.contiguous() for name, x in given.items()}
    try:
        Trial(backend, given, function, module).run()
    except ValueError as error:
        try:
            Trial(backend, copies, function, module).run()
        except ValueError:
            raise error from None  # whatever the strides
        strides = ", ".join(f"{name} {x.stride()}" for name, x in given.items())
        raise ValueError(
            f"attention={backend.name} is right for contiguous tensors and wrong for the strides "
            f"of the model, {strides}: use x.stride(), or begin with x.contiguous()"
        ) from error


def compared_rows(q: Tensor) -> int:
    """How many queries, from the first, are compared with naive attention: its scores must fit into
    memory.
    """
    return min(q.shape[2], math.isqrt(REFERENCE_SCORES // (q.shape[0] * q.shape[1])))


@dataclass
class Trial:
    """Calls of a backend with the same tensors. Its methods raise ValueError for what is wrong."""

    backend: Backend
    tensors: dict[str, Tensor]  # q, k, v, d_out
    function: dict[str, Any]
    module: nn.Module | None

    def call(self, *tensors: Tensor, seed: int = 0, **others: Any) -> Output:
        torch.manual_seed(seed)  # for an attention that draws random numbers
        own = {"backend": self.backend, "module": self.module}
        return attention(*tensors, **own, **self.function, **others)

    def wrong(self, what: str) -> ValueError:
        return ValueError(f"attention={self.backend.name} {what}")

    @contextmanager
    def inputs_stay(self) -> Iterator[None]:
        """Inside, the backend may not write into its inputs."""
        copies = {name: x.detach().clone() for name, x in self.tensors.items()}
        try:
            yield
        finally:  # what was overwritten may explain an error
            for name, x in copies.items():
                if not torch.equal(x, self.tensors[name]):
                    raise self.wrong(f"writes into {name}, which others still read: copy it first")

    def run(self) -> None:
        try:
            with torch.random.fork_rng(devices=[]):
                with self.inputs_stay():
                    results = self.out_and_gradients()
                    if self.backend.defect is None:
                        self.check_hidden_keys()
                self.check_values(results)
        except (Exception, SystemExit) as error:  # the user's function may raise anything
            if isinstance(error, ValueError) and not is_foreign(error):
                raise
            raise self.wrong(f"fails on ordinary inputs: {with_place(error)}") from error

    def out_and_gradients(self) -> list[Tensor]:
        """out, dq, dk, dv."""
        q, k, v, d_out = self.tensors.values()
        inputs = {"q": q, "k": k, "v": v}
        if self.module is not None:
            own = self.module.named_parameters()
            inputs |= {f"own.{name}": x for name, x in own if x.requires_grad}
        with torch.no_grad():  # as an evaluation calls it
            self.call(q, k, v)
        out = self.call(q, k, v).out  # attention() itself checks shape and dtype
        if not out.isfinite().all():
            raise self.wrong("returns NaN or inf for ordinary inputs")
        if not out.requires_grad:
            raise self.wrong("gives no gradient")
        found = torch.autograd.grad(out, [*inputs.values()], d_out, allow_unused=True)
        for (name, x), gradient in zip(inputs.items(), found, strict=True):
            if gradient is None or not gradient.isfinite().all():
                kind = "no" if gradient is None else "a non-finite"
                raise self.wrong(f"gives {kind} gradient for {name} {tuple(x.shape)}")
        return [out.detach(), *found[:3]]

    def check_hidden_keys(self) -> None:
        """No output may depend on keys of the future, or of another document."""
        q, k, v, _ = self.tensors.values()
        length = q.shape[2]
        first, second = slice(0, length // 2), slice(length // 2, length)
        ways = [("is not causal under causal=True", first, second, {})]
        if "document_ids" in self.backend.features:
            ids = (torch.arange(length, device=q.device) >= length // 2).int().expand(len(q), -1)
            mixes = "declares document_ids and mixes documents"
            ways.append((mixes, second, first, {"document_ids": ids}))
        for what, queries, keys, mask in ways:
            out = self.call(q, k, v, **mask).out[:, :, queries]
            for x in torch.autograd.grad(out, (k, v), torch.randn_like(out)):
                if (x[:, :, keys].abs() > 1e-3 * x.abs().max()).any():
                    raise self.wrong(
                        f"{what}: the outputs of queries {queries.start}:{queries.stop} move with "
                        f"keys {keys.start}:{keys.stop}"
                    )

    def check_values(self, results: list[Tensor]) -> None:
        """If the backend is exact, out, dq, dk, dv and statistics() must be those of softmax
        attention. Else out, dq, dk and dv must be close to its own for contiguous tensors.
        """
        tensors = list(self.tensors.values())
        if self.backend.exact:
            rows = compared_rows(tensors[0])
            tensors, results = ([x[:, :, :rows] for x in each] for each in (tensors, results))
            naive = partial(attention, backend="naive", **self.function)
            expected = with_gradients(naive, *(x.double() for x in tensors))
            others = with_gradients(naive, *tensors)
            slack = torch.finfo(tensors[0].dtype).eps
            reference = (
                "softmax attention in float64 (declare exact=False for a variant of its own)"
            )
        else:
            # memory of others is far off; what sorts, rounds or draws may differ
            tensors = [x.contiguous() for x in tensors]
            expected = with_gradients(self.call, *tensors)
            others = with_gradients(partial(self.call, seed=1), *tensors)
            slack, reference = 0.1, "itself for other strides"
        names = ("out", "dq", "dk", "dv")
        compared = dict(zip(names, zip(results, expected, others, strict=True), strict=True))
        if self.backend.exact:
            compared |= self.statistics()
        for name, each in compared.items():
            x, right, other = (y.detach().double() for y in each)
            size = root_mean_square(right.masked_fill(right.isinf(), 0.0))
            # a score is rounded several times: multiplied, scaled, changed to base 2 and back
            rounding = slack * (size if name in names else 4 * (1 + size))
            error, budget = difference(x, right), 2 * difference(other, right) + rounding
            if not error <= budget:
                raise self.wrong(
                    f"says exact={self.backend.exact}, but its {name} is {error:.2g} away from "
                    f"{reference}, where {budget:.2g} is allowed in {dtype_name(tensors[0].dtype)}"
                )

    def statistics(self) -> dict[str, list[Tensor]]:
        """lse if the backend returns it, and max_score if it declares it: its own, those in
        float64, and those of exact attention in this dtype.
        """
        q, k, v, _ = self.tensors.values()
        declared = "max_score" in self.backend.features
        output = self.call(q, k, v, return_max_score=declared)
        rows = compared_rows(q)  # of lse; the largest score may be in any other row
        given = [x[:, :, : q.shape[2] if declared else rows] for x in (q, k, v)]
        tiled = get_backend("tiled", block_q=rows, block_kv=rows)
        exact = partial(attention, backend=tiled, return_max_score=True, **self.function)
        every: list[Any] = [output]
        with torch.no_grad():
            every += [exact(*(x.to(dtype) for x in given)) for dtype in (torch.float64, q.dtype)]
        compared = {}
        if output.lse is not None:
            compared["lse"] = [x.lse[:, :, :rows] for x in every]
        if declared:
            compared["max_score"] = [x.max_score for x in every]
        return compared


def difference(x: Tensor, y: Tensor) -> Tensor:
    """The root mean square of x - y, where equal infinities differ by 0."""
    return root_mean_square(torch.where(x == y, 0.0, x - y))


def root_mean_square(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def check_score_mod(mod: ScoreMod, name: str, num_heads: int, device: torch.device) -> None:
    """Raise ValueError, in one sentence, unless fn is an elementwise function of the score and
    returns its derivative. An attention that differentiates fn itself, such as naive, would never
    notice. name: what the sentence calls the score_mod.
    """

    def wrong(what: str) -> ValueError:
        return ValueError(f"attention.score_mod={name}: fn {what}")

    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(2, 3, num_heads, 12, 20, dtype=torch.float64, generator=generator)
    score, step = draws.to(device)
    sizes = enumerate(score.shape)
    places = [torch.arange(n, device=device).view(n, *[1] * (3 - dim)) for dim, n in sizes]

    still, inputs = step < 0, score.clone().requires_grad_()
    try:
        changed, derivative = (x.expand_as(score) for x in mod(inputs, *places))
        again, _ = mod(torch.where(still, score, score + step), *places)
        seen = changed.isfinite()
        (slope,) = torch.autograd.grad((changed + 0 * inputs)[seen].sum(), inputs)
        beside_others = again.expand_as(score)[still]
    except (Exception, SystemExit) as error:  # the user's function may raise anything
        what = "must return two tensors of the score's shape, (changed, derivative)"
        raise wrong(f"{what}: {with_place(error)}") from error
    if changed.isnan().any() or not derivative[seen].isfinite().all():
        raise wrong("returns NaN or inf for ordinary scores")
    if not torch.equal(beside_others, changed[still]):
        raise wrong("is not elementwise: the same score has another result beside other scores")
    off = (derivative - slope).abs().masked_fill(~seen, 0.0)
    if (off > 1e-3 * (1 + slope.abs())).any():
        at, says, is_ = (x.flatten()[off.argmax()].item() for x in (score, derivative, slope))
        raise wrong(f"says its derivative at a score of {at:.4g} is {says:.4g}, it is {is_:.4g}")
