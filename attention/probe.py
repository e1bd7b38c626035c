"""A look at a backend before it is trained with: shapes, dtypes, NaN, causality, gradients, and,
where it claims them, document masks and exactness."""

import traceback
from collections.abc import Callable

import torch

from attention.interface import AttentionOutput, Backend, _short


def probe(
    backend: Backend,
    attend: Callable[..., AttentionOutput],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise ValueError, in one sentence, for a backend that no training run could trust.

    `attend` is attention(). The probe's sequence is long enough for several tiles, and ragged. A
    backend with exact=True must be as close to softmax attention in float64 as twice naive's own
    error in this dtype, the budget every exact backend is held to.
    """
    generator = torch.Generator().manual_seed(0)
    length = 150

    def random(heads: int, *, grad: bool = True) -> torch.Tensor:
        return (
            torch.randn(1, heads, length, head_dim, generator=generator)
            .to(device, dtype)
            .requires_grad_(grad)
        )

    q, k, v = random(num_heads), random(num_kv_heads), random(num_kv_heads)
    d_out = random(num_heads, grad=False)
    try:
        out = attend(
            q, k, v, backend=backend
        ).out  # shape and dtype are checked by attention() itself
    except ValueError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's function raises
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename}, line {frame.lineno}"
        raise ValueError(
            f"attention={backend.name} fails on ordinary inputs: {type(error).__name__}: "
            f"{error} ({where})"
        ) from error
    if not out.isfinite().all():
        raise ValueError(f"attention={backend.name} returns NaN or inf for ordinary inputs")
    if not out.requires_grad:
        raise ValueError(
            f"attention={backend.name} cuts the gradient: its output does not depend on q, k and "
            "v for autograd"
        )
    grads = torch.autograd.grad(out, (q, k, v), d_out, allow_unused=True)
    for name, x, grad in zip("qkv", (q, k, v), grads, strict=True):
        if grad is None or not grad.isfinite().all():
            raise ValueError(
                f"attention={backend.name} gives {'no' if grad is None else 'a non-finite'} "
                f"gradient for {name} {tuple(x.shape)}"
            )
    if backend.defect is not None:
        return

    half = length // 2
    with torch.no_grad():
        k2, v2 = k.clone(), v.clone()
        k2[:, :, half:], v2[:, :, half:] = -k2[:, :, half:], -v2[:, :, half:]
        leak = (attend(q, k2, v2, backend=backend).out - out)[:, :, :half].abs().max().item()
    if not leak <= 1e-3:  # a NaN is a leak too
        raise ValueError(
            f"attention={backend.name} is not causal: changing keys {half}:{length} moved the "
            f"outputs of queries 0:{half} by {leak:.2g}; "
            "query i may only see keys j <= i when it is called with causal=True"
        )
    if "document_ids" in backend.features:
        document_ids = (torch.arange(length, device=device) >= half).int()[None]
        with torch.no_grad():
            k2, v2 = k.clone(), v.clone()
            k2[:, :, :half], v2[:, :, :half] = -k2[:, :, :half], -v2[:, :, :half]
            one, other = (
                attend(q, *kv, backend=backend, document_ids=document_ids).out[:, :, half:]
                for kv in ((k, v), (k2, v2))
            )
            leak = (one - other).abs().max().item()
        if not leak <= 1e-3:
            raise ValueError(
                f"attention={backend.name} declares the feature document_ids and does not keep "
                f"documents apart: changing keys 0:{half} "
                f"moved the outputs of queries {half}:{length}, which are another document, "
                f"by {leak:.2g}"
            )
    if not backend.exact:
        return

    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    reference = attend(*exact, backend="naive").out
    references = (reference, *torch.autograd.grad(reference, exact, d_out.double()))
    baseline = [x.detach().requires_grad_() for x in (q, k, v)]
    naive = attend(*baseline, backend="naive").out
    naives = (naive, *torch.autograd.grad(naive, baseline, d_out))
    for name, found, expected, plain in zip(
        ("out", "dq", "dk", "dv"), (out, *grads), references, naives, strict=True
    ):
        error, own = ((x.double() - expected).abs().max().item() for x in (found, plain))
        budget = 2 * own + torch.finfo(dtype).eps * expected.abs().max().item()
        if not error <= budget:
            raise ValueError(
                f"attention={backend.name} says exact=True, but its {name} is {error:.2g} away "
                "from softmax attention in float64 where "
                f"{budget:.2g} is allowed in {_short(dtype)}; mend it, or declare exact=False to "
                "train with it as a variant of its own"
            )
