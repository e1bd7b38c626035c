"""Oracle and budgets for an attention that does not claim to be softmax attention (exact=False).

The oracle is the `reference` of the Backend, else the backend itself, in float64. No naive
attention exists whose error could set the budget. Instead we round the oracle's inputs and the
result of each of its operators at random, and measure how far its results move. This is Monte Carlo
arithmetic (Parker 1997, "Monte Carlo Arithmetic: exploiting randomness in floating-point
arithmetic").

Dimensions: B batch, N queries, M keys.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attention import Backend
from attention.interface import ALL_DTYPES, statistics_dtype
from attention.mask import visible_keys
from conformance.cases import Case, Expected, attend, distance, run

DRAWS = 4  # of random roundings


class Rounded(TorchDispatchMode):
    """Inside, each element of an operator's result gets a random relative error up to `eps`."""

    def __init__(self, eps: float, generator: torch.Generator) -> None:
        super().__init__()
        self.eps, self.generator = eps, generator

    def off(self, x: Tensor) -> Tensor:
        random = torch.rand(x.shape, generator=self.generator, dtype=torch.float64)
        return 1 + self.eps * (2 * random - 1).to(x.device, x.dtype)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        # views round nothing
        if not any(each.alias_info for each in func._schema.returns):
            for x in tree_leaves(result):
                if isinstance(x, Tensor) and x.is_floating_point():
                    x.mul_(self.off(x))
        return result


def widest(backend: Backend) -> torch.dtype:
    """The dtype of the oracle: float64 with a reference, else the widest that the backend takes."""
    return ALL_DTYPES[0] if backend.reference else min(backend.dtypes, key=ALL_DTYPES.index)


def expect_function(backend: Backend, case: Case, dtype: torch.dtype, device: str) -> Expected:
    """The results of the oracle for a case, and the error budgets for the backend."""
    oracle = backend
    if backend.reference is not None:
        fn, takes_all = backend.reference, {"dtypes": ALL_DTYPES, "head_dims": None}
        oracle = replace(backend, fn=fn, requirements=None, **takes_all)
    tensors, arguments, d_out, d_lse = case.make(dtype, device)
    if "lse" not in backend.features:
        d_lse = torch.zeros_like(d_lse)

    def results(tensors: Sequence[Tensor], d_out: Tensor) -> dict[str, Tensor]:
        wide = [x.to(widest(backend)) for x in tensors]
        backward = not oracle.unsupported_reasons(
            *(x.detach().requires_grad_() for x in wide), **arguments
        )
        return run(oracle, wide, arguments, d_out, d_lse, backward=backward)

    reference, eps = results(tensors, d_out), torch.finfo(dtype).eps
    finite = {name: torch.where(x.isinf(), 0.0, x) for name, x in reference.items()}
    roundings = {name: eps * x.abs().max().item() for name, x in finite.items()}
    generator = torch.Generator().manual_seed(case.seed)
    inputs = Rounded(eps, generator)
    operators = Rounded(torch.finfo(statistics_dtype(tensors[0])).eps, generator)
    for _ in range(DRAWS):
        *rounded, d_rounded = (x.double() * inputs.off(x.double()) for x in (*tensors, d_out))
        with operators:
            found = results(rounded, d_rounded)
        for name, x in found.items():
            roundings[name] = max(roundings[name], distance(x, reference[name]))
    return Expected(tensors, arguments, d_out, d_lse, reference, roundings, roundings)


def hidden_keys_with_gradient(
    q: Tensor, k: Tensor, v: Tensor, *, backend: Backend, **arguments
) -> int:
    """How many keys get a gradient from the output of a query that does not see them."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attend(q, k, v, backend=backend, **arguments).out
    visible, wrong = visible_keys(q, k, **arguments).mask()[:, 0], 0  # (B or 1, N, M)
    for row in range(0, q.shape[2], max(1, q.shape[2] // 8)):
        gradients = torch.autograd.grad(out[:, :, row].sum(), (k, v), retain_graph=True)
        depends = sum(x.abs().sum((1, 3)) for x in gradients) != 0  # (B, M); true of NaN
        wrong += int((depends & ~visible[:, row]).sum())
    return wrong
