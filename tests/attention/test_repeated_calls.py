"""Calls one after the other: each has its own checks, masks and numbers, whatever passed before.

Dimensions: B batch, H query heads, N queries, M keys, S sequences.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention import Backend, attention, attention_varlen, get_backend

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tensors of the interpreter")
PORTABLE = get_backend("triton", kernel="portable")


def inputs() -> list[Tensor]:
    """q, k, v (1, 2, 40, 16), float32."""
    return [torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(3)]


@torch.no_grad()
def check(tensors: list[Tensor], **optional: Tensor) -> None:
    out, expected = (attention(*tensors, backend=x, **optional).out for x in (PORTABLE, "naive"))
    torch.testing.assert_close(out, expected)


def test_masks_may_change_in_place():
    """Their values are read anew in each call, whether PyTorch notices a change or not."""
    tensors, ids = inputs(), (torch.arange(40) // 13)[None].contiguous()
    lengths = torch.tensor([30])
    for change in (lambda: None, lambda: ids.fill_(1), lambda: ids.numpy()[:, 20:].fill(7)):
        change()
        check(tensors, document_ids=ids)
    for change in (lambda: None, lambda: lengths.fill_(9), lambda: lengths.numpy().fill(40)):
        change()
        check(tensors, key_lengths=lengths)
    lengths.numpy().fill(41)
    with pytest.raises(ValueError, match="key_lengths .* 40"):
        attention(*tensors, backend=PORTABLE, key_lengths=lengths)


REFUSED = [
    ({"causal": 1}, "causal=1"),
    ({"scale": True}, "scale=True"),
    ({"window": True}, "window=True"),
    ({"window": (True, 1)}, r"window=\(True, 1\)"),
    ({"window": [1, 2]}, r"window=\[1, 2\]"),
    ({"softcap": True}, "softcap=True"),
    ({"document_ids": torch.zeros(1, 40)}, "document_ids .* int64"),
    ({"document_ids": [0] * 40}, "document_ids .* list"),
    ({"alibi_slopes": torch.ones(2, requires_grad=True)}, "alibi_slopes .* gradient"),
]


def test_what_passed_once_does_not_let_others_pass():
    """In Python True equals 1."""
    tensors, backend = inputs(), get_backend("naive")
    for passing in (
        *({"scale": 1.0}, {"window": 1}, {"window": (1, 1)}, {"softcap": 1.0}),
        {"document_ids": torch.zeros(1, 40, dtype=torch.int64)},
        {"alibi_slopes": torch.ones(2)},
    ):
        attention(*tensors, backend=backend, **passing)
    for refused, named in 2 * REFUSED:
        with pytest.raises(ValueError, match=named):
            attention(*tensors, backend=backend, **refused)


def test_what_a_backend_needs_is_asked_for_each_kind_of_call():
    q, k, v = inputs()
    naive = get_backend("naive")
    forward_only = Backend("forward_only", naive.fn, features=naive.features, backward=False)
    with torch.no_grad():
        attention(q, k, v, backend=forward_only)
    with pytest.raises(ValueError, match="forward_only .* backward"):
        attention(q, k, v, backend=forward_only)

    def contiguous(q, k, v, **_) -> list[str]:
        return [] if q.is_contiguous() else ["q must be contiguous"]

    picky = replace(naive, name="picky", requirements=contiguous)
    for _ in range(2):
        attention(q, k, v, backend=picky)
        with pytest.raises(ValueError, match="picky .* contiguous"):
            attention(q.mT.contiguous().mT, k, v, backend=picky)


def test_packed_sequences_are_no_padding():
    """attention_varlen() hands a backend a tensor (2, S + 1), which is no key_lengths."""
    q, k, v = (x.detach()[0].transpose(0, 1) for x in inputs())
    ends = torch.tensor([0, 10, 40])
    attention_varlen(q, k, v, ends, ends, backend=PORTABLE)
    with pytest.raises(ValueError, match="key_lengths"):
        attention(*inputs(), backend=PORTABLE, key_lengths=torch.stack((ends, ends)).int())


def test_a_second_derivative_is_refused():
    """Autograd would take that of a launch for zero."""
    q, k, v = inputs()
    out = attention(q, k, v, backend=PORTABLE).out
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        dq.sum().backward()
