"""Try out a backend before training a model with it: shapes, dtypes, NaN, causality, gradients, and
side effects. If the backend claims them, document masks and exactness too.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attention.interface import Backend, Output, ScoreMod, dtype_name
from attention.look.blame import is_foreign, with_place
from attention.look.diagnose import with_gradients
from attention.own import build_module

LENGTH = 150  # several tiles, the last one ragged
HALF = LENGTH // 2

Attend = Callable[..., Output]  # attention(), usually with its backend bound


def _restore_default_device(device: torch.device) -> None:
    torch.set_default_device(None)
    # an explicit default device intercepts every call and breaks compiled graphs, even if it
    # changes nothing
    if torch.get_default_device() != device:
        torch.set_default_device(device)


# settings of the whole program: the function that reads each, and the one that restores it
SETTINGS: Mapping[Callable[[], Any], Callable[[Any], Any]] = {
    torch.get_default_dtype: torch.set_default_dtype,
    torch.get_default_device: _restore_default_device,
    torch.get_float32_matmul_precision: torch.set_float32_matmul_precision,
    torch.is_grad_enabled: torch.set_grad_enabled,
    torch.initial_seed: torch.manual_seed,
}


def probe(
    backend: Backend,
    attend: Attend,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    function: dict[str, Any] | None = None,
) -> None:
    """Raise ValueError, in one sentence, for a backend that no training run could trust.

    `attend` is attention(); `function` holds the arguments that a layer of the model passes to it:
    window, softcap, ... If exact=True, the backend's distance from softmax attention in float64
    must be at most twice naive's own error in this dtype, plus one rounding. That is the budget of
    every exact backend.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_out = (
        torch.randn(1, heads, LENGTH, head_dim, generator=generator).to(device, dtype)
        for heads in (num_heads, num_kv_heads, num_kv_heads, num_heads)
    )
    function = dict(function or {})
    if function.get("window"):
        function["window"] = min(function["window"], HALF // 2)  # so that it hides keys here
    if function.get("alibi_slopes") is not None:
        function["alibi_slopes"] = function["alibi_slopes"].to(device)
    if function.get("sinks"):
        function["sinks"] = torch.zeros(num_heads, device=device)
    attend = partial(attend, **function)
    attend_with, own = partial(attend, backend=backend), {}
    if backend.module is not None:
        shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        module = build_module(backend, **shape, max_seq_len=LENGTH, layer=0).to(device)
        attend_with = partial(attend_with, module=module)
        own = {f"own.{name}": x for name, x in module.named_parameters() if x.requires_grad}
    try:
        results = _call(backend, attend_with, q, k, v, d_out, own)
        if backend.defect is not None:
            return
        _check_causal(backend, attend_with, q, k, v)
        if "document_ids" in backend.features:
            _check_documents(backend, attend_with, q, k, v)
    except (Exception, SystemExit) as error:  # the user's function may raise anything
        if isinstance(error, ValueError) and not is_foreign(error):
            raise
        raise ValueError(
            f"attention={backend.name} fails on ordinary inputs: {with_place(error)}"
        ) from error
    if backend.exact:
        naive = partial(attend, backend="naive")
        try:
            _check_exact(backend, naive, results, q, k, v, d_out)
        except ValueError as error:
            if "score_mod" not in function:
                raise
            hint = "the score_mod's fn, its derivative and its kernel must agree"
            raise ValueError(f"{hint}: {error}") from None


def check_score_mod(mod: ScoreMod, name: str, num_heads: int, device: torch.device) -> None:
    """Raise ValueError, in one sentence, unless fn is an elementwise function of the score and
    returns its derivative. An attention that differentiates fn itself, such as naive, would never
    notice. name: what the sentence calls the score_mod.
    """

    def wrong(what: str) -> ValueError:
        return ValueError(f"attention.score_mod={name}: {what}")

    draw = partial(torch.randn, 2, num_heads, 12, 20, generator=torch.Generator().manual_seed(0))
    score, step = (draw(dtype=torch.float64).to(device) for _ in range(2))
    sizes = enumerate(score.shape)
    places = [torch.arange(n, device=device).view(n, *[1] * (3 - dim)) for dim, n in sizes]

    def call(score: Tensor) -> list[Tensor]:
        """The changed score and its derivative."""
        try:
            found = mod(score, *places)
        except (Exception, SystemExit) as error:  # the user's function may raise anything
            raise wrong(f"fn fails on ordinary scores: {with_place(error)}") from error
        items = found if isinstance(found, (tuple, list)) else [found]
        if len(items) != 2 or not all(isinstance(x, Tensor) for x in items):
            what = f"{len(items)} items" if items is found else type(found).__name__
            raise wrong(f"fn must return two tensors, (changed, derivative); it returned {what}")
        try:
            return [x.expand_as(score) for x in found]
        except RuntimeError:
            shapes = " and ".join(str(tuple(x.shape)) for x in found)
            raise wrong(
                f"fn must return tensors of the score's shape {tuple(score.shape)}; it returned "
                f"{shapes}"
            ) from None

    inputs = score.clone().requires_grad_()
    changed, derivative = call(inputs)
    if changed.isnan().any() or not derivative[changed.isfinite()].isfinite().all():
        raise wrong("fn returns NaN or inf for ordinary scores")
    if not torch.equal(call(score)[0], changed):
        raise wrong("fn gives another result for the same scores")
    moved = step > 0
    if not torch.equal(call(torch.where(moved, score + step, score))[0][~moved], changed[~moved]):
        raise wrong("fn is not elementwise: a score changes the results of others")
    slope = torch.zeros_like(score)
    if changed.requires_grad:
        (slope,) = torch.autograd.grad(changed[changed.isfinite()].sum(), inputs)
    off = (derivative - slope).abs().masked_fill(~changed.isfinite(), 0.0)
    if (off > 1e-3 * (1 + slope.abs())).any():
        worst = off.argmax()
        says, is_, at = (x.flatten()[worst].item() for x in (derivative, slope, score))
        raise wrong(f"its derivative is {says:.4g} at a score of {at:.4g}, where fn's is {is_:.4g}")


def _call(
    backend: Backend,
    attend: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    own: Mapping[str, Tensor],
) -> list[Tensor]:
    """out, dq, dk, dv. `own` are the backend's parameters by name; they must get a gradient too."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    q, k, v = (x.clone() for x in inputs)  # not leaves, as in a model
    with _leaves_alone(backend, q=q, k=k, v=v):
        out = attend(q, k, v).out  # attention() itself checks shape and dtype
    if not out.isfinite().all():
        raise ValueError(f"attention={backend.name} returns NaN or inf for ordinary inputs")
    if not out.requires_grad:
        raise ValueError(
            f"attention={backend.name} cuts the gradient: its output does not depend on q, k and "
            "v for autograd"
        )
    inputs += own.values()
    with _leaves_alone(backend, q=q, k=k, v=v, d_out=d_out):
        gradients = torch.autograd.grad(out, inputs, d_out, allow_unused=True)
    for name, x, gradient in zip([*"qkv", *own], inputs, gradients, strict=True):
        if gradient is None or not gradient.isfinite().all():
            raise ValueError(
                f"attention={backend.name} gives {'no' if gradient is None else 'a non-finite'} "
                f"gradient for {name} {tuple(x.shape)}"
            )
    return [out.detach(), *gradients[:3]]


@contextmanager
def _leaves_alone(backend: Backend, **tensors: Tensor) -> Iterator[None]:
    """Raise ValueError if the backend writes into these tensors or changes a setting of the whole
    program. The setting is restored.
    """
    copies = {name: x.detach().clone() for name, x in tensors.items()}
    before = {read: read() for read in SETTINGS}
    try:
        yield
    finally:
        changed = {read: read() for read in SETTINGS if read() != before[read]}
        for read in changed:
            SETTINGS[read](before[read])
    for read, value in changed.items():
        raise ValueError(
            f"attention={backend.name} changes torch.{read.__name__}() from {before[read]} to "
            f"{value} for all code that runs after it; put it back before returning"
        )
    for name, x in tensors.items():
        if not torch.equal(x, copies[name]):
            raise ValueError(
                f"attention={backend.name} writes into {name}, which others still read; write into "
                f"a copy, as {name}.clone(), or into a new tensor"
            )


@torch.no_grad()
def _largest_move(
    backend: Backend,
    attend: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    keys: slice,
    queries: slice,
    **arguments: Tensor,
) -> float:
    """How far the outputs of `queries` move when `keys` and their values change their sign."""
    sign = torch.ones(LENGTH, 1, dtype=q.dtype, device=q.device)
    sign[keys] = -1
    found = []
    for other_k, other_v in ((k, v), (k * sign, v * sign)):
        with _leaves_alone(backend, q=q, k=other_k, v=other_v):
            found.append(attend(q, other_k, other_v, **arguments).out[:, :, queries])
    before, after = found
    return (after - before).abs().max().item()


def _check_causal(backend: Backend, attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    leak = _largest_move(backend, attend, q, k, v, keys=slice(HALF, None), queries=slice(HALF))
    if not leak <= 1e-3:  # a NaN is a leak too
        raise ValueError(
            f"attention={backend.name} is not causal: changing keys {HALF}:{LENGTH} moved the "
            f"outputs of queries 0:{HALF} by {leak:.2g}; "
            "query i may only see keys j <= i when it is called with causal=True"
        )


def _check_documents(backend: Backend, attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    document_ids = (torch.arange(LENGTH, device=q.device) >= HALF).int()[None]
    second = slice(HALF, None)
    leak = _largest_move(
        backend, attend, q, k, v, keys=slice(HALF), queries=second, document_ids=document_ids
    )
    if not leak <= 1e-3:
        raise ValueError(
            f"attention={backend.name} declares the feature document_ids and does not keep "
            f"documents apart: changing keys 0:{HALF} moved the outputs of queries "
            f"{HALF}:{LENGTH}, which are another document, by {leak:.2g}"
        )


def _check_exact(
    backend: Backend,
    naive: Attend,
    results: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
) -> None:
    exact = with_gradients(naive, *(x.double() for x in (q, k, v, d_out)))
    in_dtype = with_gradients(naive, q, k, v, d_out)
    for name, x, expected, plain in zip(
        ("out", "dq", "dk", "dv"), results, exact, in_dtype, strict=True
    ):
        error, own = ((y.double() - expected).abs().max().item() for y in (x, plain))
        budget = 2 * own + torch.finfo(q.dtype).eps * expected.abs().max().item()
        if not error <= budget:
            raise ValueError(
                f"attention={backend.name} says exact=True, but its {name} is {error:.2g} away "
                f"from softmax attention in float64 where {budget:.2g} is allowed in "
                f"{dtype_name(q.dtype)}; mend it, or declare exact=False to train with it as a "
                "variant of its own"
            )
