"""An attention that is not softmax attention: green if it has the properties of every attention,
red for each way to break one.

Dimensions: B batch, H heads, N queries, M keys, D head dim.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from attention import AttentionOutput, Backend, attention, get_backend
from attention.mask import visible_keys
from conformance.properties import Cell, verify_backend


def sigmoid(q: Tensor, k: Tensor, v: Tensor, *, scale: float, **mask) -> AttentionOutput:
    wide = torch.promote_types(q.dtype, torch.float32)
    weights = (q.to(wide) @ k.to(wide).mT * scale).sigmoid() * visible_keys(q, k, **mask).mask()
    return AttentionOutput((weights @ v.to(wide)).to(q.dtype))


FEATURES = frozenset({"non_causal", "cross_length", "document_ids"})
SIGMOID = Backend("sigmoid", sigmoid, exact=False, features=FEATURES)


def cells(backend: Backend, *properties: str) -> dict[str, Cell]:
    found = verify_backend(backend, quick=True, random_cases=1, properties=properties or None)
    return {cell.property: cell for cell in found}


def test_a_right_one_is_green_in_all_that_is_not_of_softmax_alone():
    """A regression test: sigmoid attention was wrongly red in eight properties."""
    found = cells(SIGMOID)
    assert {name: cell.note for name, cell in found.items() if cell.status == "red"} == {}
    of_softmax = {"lse", "key permutation", "rows sum to one", "logits + 100", "logits - 120"}
    of_softmax |= {"float32 statistics", "rows of one key"}
    assert {name for name, cell in found.items() if "exact=False" in cell.note} == of_softmax
    for name in ("forward", "gradients", "no leak (outputs)", "mask positions", "prefill = decode"):
        assert found[name].status == "green"


def leaks(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **arguments) -> AttentionOutput:
    return sigmoid(q, k, v, causal=False, **arguments)


def centres_queries(q: Tensor, k: Tensor, v: Tensor, **arguments) -> AttentionOutput:
    return sigmoid(q - q.mean(2, keepdim=True), k, v, **arguments)


def mixes_sequences(q: Tensor, k: Tensor, v: Tensor, **arguments) -> AttentionOutput:
    return sigmoid(q, k, v + v.mean(0), **arguments)


def divides_by_the_length(q: Tensor, k: Tensor, v: Tensor, **arguments) -> AttentionOutput:
    return AttentionOutput(sigmoid(q, k, v, **arguments).out / k.shape[2])


def forgets_a_gradient(q: Tensor, k: Tensor, v: Tensor, **arguments) -> AttentionOutput:
    return AttentionOutput(
        sigmoid(q, k, v, **arguments).out + sigmoid(q, k.detach(), v, **arguments).out
    )


def ignores_documents(q: Tensor, k: Tensor, v: Tensor, *, document_ids, **arguments):
    return sigmoid(q, k, v, **arguments)


def overflows(q: Tensor, k: Tensor, v: Tensor, *, scale: float, **mask) -> AttentionOutput:
    weights = (q @ k.mT * scale).exp()  # no maximum is subtracted
    return AttentionOutput((weights * visible_keys(q, k, **mask).mask()) @ v)


@pytest.mark.parametrize(
    ("fn", "properties"),
    [
        (leaks, ("no leak (outputs)", "no leak (gradients)", "mask positions")),
        (centres_queries, ("no leak (outputs)",)),
        (mixes_sequences, ("no leak (outputs)",)),
        (divides_by_the_length, ("prefill = decode",)),
        (forgets_a_gradient, ("gradients",)),
        (ignores_documents, ("mask positions",)),
        (overflows, ("large logits",)),
    ],
)
def test_a_broken_one_is_red(fn, properties):
    found = cells(replace(SIGMOID, fn=fn), *properties)
    assert all((cell.status, cell.ok) == ("red", False) for cell in found.values()), found


def test_a_reference_is_the_oracle():
    def scaled(q: Tensor, k: Tensor, v: Tensor, *, scale: float, **mask) -> AttentionOutput:
        return sigmoid(q, k, v, scale=1.001 * scale, **mask)

    # it need not take the dtype of its oracle
    narrow = replace(SIGMOID, dtypes=(torch.float32,), reference=sigmoid)
    right = cells(narrow, "forward", "gradients")
    assert all(cell.status == "green" for cell in right.values())
    wrong = cells(replace(narrow, fn=scaled), "forward", "gradients")
    assert all(cell.status == "red" for cell in wrong.values())
    # without one there is nothing to compare with
    alone = cells(replace(narrow, reference=None, fn=scaled), "forward")["forward"]
    assert alone.status == "n/a" and "reference=" in alone.note


class Gated(nn.Module):
    """The gate leaks the future, but it is closed at the start."""

    def __init__(self, *, num_heads: int, **_: int):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(num_heads, 1, 1))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **arguments) -> AttentionOutput:
        out = attention(q, k, v, backend=get_backend("naive"), **arguments).out
        return AttentionOutput(out + (self.gate * v.mean(2, keepdim=True)).to(q.dtype))


def test_parameters_do_not_stand_where_they_start():
    gated = Backend("gated", module=Gated, exact=False)
    assert cells(gated, "no leak (outputs)")["no leak (outputs)"].status == "red"
