"""Kernels of others beside ours. FlashAttention-4 itself needs a GPU; functions with its arguments
stand in for it.
"""

import json
import sys
from types import ModuleType

import torch

from attention import Backend, attention
from attention.naive import naive_attention
from lab import peers


def flash_attn_func(q, k, v, *, softmax_scale, causal, window_size, return_lse):
    window = None if window_size[0] is None else window_size[0] + 1
    how = {"scale": softmax_scale, "causal": causal, "window": window, "backend": "naive"}
    out, lse = attention(*(x.transpose(1, 2) for x in (q, k, v)), **how)
    return out.transpose(1, 2), lse


def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q, max_seqlen_q, softmax_scale, **same):
    assert max_seqlen_q == cu_seqlens_q.diff().max()
    parts = zip(*(x.split(cu_seqlens_q.diff().tolist()) for x in (q, k, v)), strict=True)
    how = {"softmax_scale": softmax_scale, "causal": True, "window_size": (None, None)}
    found = [flash_attn_func(*(x[None] for x in part), **how, return_lse=True) for part in parts]
    return torch.cat([out[0] for out, _ in found]), torch.cat([lse[0] for _, lse in found], 1)


def test_flash_attention_4_is_called_as_it_is_written(monkeypatch):
    module = ModuleType("flash_attn.cute")
    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    q, k = (torch.randn(2, heads, 40, 64, dtype=torch.bfloat16) for heads in (4, 2))
    ids = torch.tensor([[0] * 7 + [5] * 20 + [0] * 13, [0] * 40])
    for mask in ({}, {"window": 9}, {"document_ids": ids}):
        each = (peers.FLASH_ATTENTION_4, "naive")
        found, expected = (attention(q, k, k, backend=backend, **mask) for backend in each)
        torch.testing.assert_close(found, expected)


def wrong(q, k, v, *, causal, scale):
    return naive_attention(q, k, v, causal=causal, scale=2 * scale)


WRONG = Backend("wrong", wrong)


def test_a_wrong_result_has_no_speed(monkeypatch, tmp_path):
    monkeypatch.setitem(peers.SHAPES, "512", peers.Shape(2, 2, 2, 48, 16))
    asked = ["attention=naive,tiled,tests.lab.test_peers:WRONG", "shapes=512", "dtype=fp32"]
    peers.main([*asked, "device=cpu", "repeats=4", f"out={tmp_path}/found.json"])
    ours, tiled, bad = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert ours["apart"] == 0 and tiled["apart"] < 1e-5 and tiled["backward_tflops"] > 0
    assert "wrong" in bad and "forward_tflops" not in bad
