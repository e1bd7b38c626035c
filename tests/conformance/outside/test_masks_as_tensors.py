"""Masks given as tensors. Two of these attentions are wrong if a mask has another dtype or another
layout than they expect, and only "mask positions" shows it.
"""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from conformance.backend_under_test import Subject
from conformance.outside.dialects import target
from conformance.outside.properties import properties_of
from conformance.properties import SLOW, Cell, examine

FUNCTIONS = f"{__name__}:"
SDPA = {"is_causal": False, "scale": None, "enable_gqa": False}


def right(q, k, v, attn_mask=None, **others):
    return scaled_dot_product_attention(q, k, v, attn_mask, **SDPA | others)


def float32_mask_misread(q, k, v, attn_mask=None, **others):
    """pytorch#191612: the bits of a float32 mask are read as numbers of q's dtype."""
    if attn_mask is not None and attn_mask.dtype == torch.float32 != q.dtype:
        attn_mask = attn_mask.contiguous().view(q.dtype)[..., : attn_mask.shape[-1]]
    return right(q, k, v, attn_mask, **others)


def mask_contiguous_assumed(q, k, v, attn_mask=None, **others):
    """The strides of a mask are those that its shape would have."""
    if attn_mask is not None:
        whole = attn_mask.untyped_storage().nbytes() // attn_mask.element_size()
        flat = attn_mask.as_strided((whole,), (1,), 0)
        places = torch.arange(attn_mask.numel()).clamp(max=whole - 1)
        attn_mask = flat[places].view(attn_mask.shape)
    return right(q, k, v, attn_mask, **others)


def float32_mask_refused(q, k, v, attn_mask=None, **others):
    if attn_mask is not None and attn_mask.dtype == torch.float32 != q.dtype:
        raise RuntimeError("a mask must have the dtype of q")
    return right(q, k, v, attn_mask, **others)


def subject_of(name: str, dtype: torch.dtype = torch.bfloat16) -> Subject:
    changes = {"gqa": "enable_gqa", "mask": "attn_mask", "causal": "is_causal", "scale": "scale"}
    return target(FUNCTIONS + name, "sdpa", changes).subject("cpu", dtype, 1)


def examined(subject: Subject, name: str) -> Cell:
    return examine(subject, name, properties_of(subject.backend)[name])


@pytest.mark.parametrize("name", ["right", "float32_mask_misread", "mask_contiguous_assumed"])
def test_mask_positions_alone_is_red(name):
    subject = subject_of(name)
    quick = properties_of(subject.backend).keys() - SLOW
    cells = [examined(subject, each) for each in quick]
    red = {cell.property: cell.note for cell in cells if cell.status == "red"}
    assert red.keys() == ({"mask positions"} if name != "right" else set()), red
    assert all("mask" in note for note in red.values())


def test_a_refusal_of_a_further_form_is_no_mistake():
    subject = subject_of("float32_mask_refused")
    assert examined(subject, "mask positions").status == "green"
    assert any("float32" in refusal and "RuntimeError" in refusal for refusal in subject.refusals)
