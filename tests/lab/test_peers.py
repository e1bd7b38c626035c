"""Kernels of others as backends. FlashAttention-4 itself needs a GPU; a function with its arguments
stands in for it.
"""

import importlib
import sys
from types import ModuleType

import pytest
import torch

from attention import attention
from scripts import benchmark

NAME = "lab.peers"


@pytest.fixture(autouse=True)
def forgotten():
    sys.modules.pop(NAME, None)
    yield
    sys.modules.pop(NAME, None)


def flash_attn_func(
    q, k, v, softmax_scale=None, causal=False, window_size=(None, None), return_lse=False
):
    left, right = window_size
    assert right in (None, 0) and causal
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    window = None if left is None else left + 1
    out, lse = attention(*heads_first, scale=softmax_scale, window=window, backend="naive")
    return out.transpose(1, 2), lse


def test_flash_attention_4_is_called_as_it_is_written(monkeypatch):
    package, module = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    module.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    peer = importlib.import_module(NAME).FLASH_ATTENTION_4
    q, k = (torch.randn(2, heads, 40, 64, dtype=torch.bfloat16) for heads in (4, 2))
    for mask in ({}, {"window": 9}):
        found, expected = (attention(q, k, k, backend=each, **mask) for each in (peer, "naive"))
        torch.testing.assert_close(found.out, expected.out)
    with pytest.raises(ValueError, match="head_dim"):
        attention(q[..., :32], k[..., :32], k[..., :32], backend=peer)


def test_without_its_package_it_says_so():
    with pytest.raises(SystemExit, match="No module named 'flash_attn'"):
        benchmark.main([f"attention={NAME}:FLASH_ATTENTION_4", "seq_len=64"])
