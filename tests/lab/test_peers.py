"""Kernels of others beside ours. FlashAttention-4 itself needs a GPU; a function with its arguments
stands in for it.
"""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from attention import Backend, attention
from attention.naive import naive_attention
from lab import peers
from lab.peers import SHAPES, Shape, summary
from lab.results.peers import tables
from scripts import benchmark
from scripts.attention_call import Measurement

NAME, HERE = "lab.peers:FLASH_ATTENTION_4", "tests.lab.test_peers"
FEATURES = frozenset({"gqa"})


def wrong(q, k, v, *, causal, scale):
    return naive_attention(q, k, v, causal=causal, scale=2 * scale)


def raising(q, k, v, *, causal, scale):
    raise RuntimeError("no kernel image\nsecond line")


def not_finite(q, k, v, *, causal, scale):
    return naive_attention(q * torch.nan, k, v, causal=causal, scale=scale)


WRONG, RAISING, NOT_FINITE = (
    Backend(fn.__name__, fn, features=FEATURES) for fn in (wrong, raising, not_finite)
)
pointers = []


def flash_attn_func(
    q, k, v, softmax_scale=None, causal=False, window_size=(None, None), return_lse=False
):
    left, right = window_size
    assert right in (None, 0) and causal and return_lse
    pointers[:] = (x.data_ptr() for x in (q, k, v))
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    window = None if left is None else left + 1
    out, lse = attention(*heads_first, scale=softmax_scale, window=window, backend="naive")
    return out.transpose(1, 2), lse


def flash_attn_varlen_func(
    q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None,
    causal=False, window_size=(None, None), return_lse=False,
):  # fmt: skip
    assert q.dim() == 3 and cu_seqlens_q.dtype == torch.int32
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert max_seqlen_q == max_seqlen_k == cu_seqlens_q.diff().max()
    pointers[:] = (x.data_ptr() for x in (q, k, v))
    bounds = cu_seqlens_q.tolist()
    outs, lses = [], []
    for first, last in zip(bounds, bounds[1:], strict=False):
        heads_first = (x[None, first:last].transpose(1, 2) for x in (q, k, v))
        out, lse = attention(*heads_first, scale=softmax_scale, causal=causal, backend="naive")
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def test_flash_attention_4_is_called_as_it_is_written(monkeypatch):
    package, module = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    module.flash_attn_func = flash_attn_func
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    peer = peers.FLASH_ATTENTION_4
    q, k = (torch.randn(2, heads, 40, 64, dtype=torch.bfloat16) for heads in (4, 2))
    for mask in ({}, {"window": 9}):
        found, expected = (attention(q, k, k, backend=each, **mask) for each in (peer, "naive"))
        torch.testing.assert_close(found.out, expected.out)
        torch.testing.assert_close(found.lse, expected.lse)
    ids = torch.tensor([[0] * 7 + [5] * 20 + [0] * 13, [0] * 40])
    found, expected = (
        attention(q, k, k, backend=each, document_ids=ids) for each in (peer, "naive")
    )
    torch.testing.assert_close(found.out, expected.out)
    torch.testing.assert_close(found.lse, expected.lse)
    attention(q, k, k, backend=peer)
    assert pointers == [x.data_ptr() for x in (q, k, k)], "a copy would be timed too"
    one, ids = [x[:1] for x in (q, k, k)], ids[:1]
    attention(*one, backend=peer, document_ids=ids)
    assert pointers == [x.data_ptr() for x in one], "a copy would be timed too"
    misses = peers.packed_documents.cache_info().misses
    attention(*one, backend=peer, document_ids=ids)
    assert peers.packed_documents.cache_info().misses == misses, "the bounds are found once"
    with pytest.raises(ValueError, match="head_dim"):
        attention(q[..., :32], k[..., :32], k[..., :32], backend=peer)


def test_without_its_package_it_says_so():
    for command in (benchmark, peers):
        with pytest.raises(SystemExit, match="'flash_attn'; pip install flash-attn-4"):
            command.main([f"attention=naive,{NAME}", "device=cpu"])


@pytest.fixture
def rows_of(monkeypatch, tmp_path):
    """rows_of("key=value", ...): the rows of the command, on small shapes and a CPU."""
    monkeypatch.setattr(peers, "WINDOWS", 2)
    monkeypatch.setitem(SHAPES, "512", Shape(2, 2, 2, 48, 16))
    monkeypatch.setitem(SHAPES, "GQA-32:8-4k", Shape(1, 4, 2, 32, 16))
    monkeypatch.setitem(SHAPES, "documents-1000", Shape(1, 2, 2, 32, 16, documents=10))
    out = tmp_path / "peers.json"

    def run(*arguments: str) -> dict[tuple[str, str], dict]:
        peers.main([*arguments, "device=cpu", "dtype=fp32", "repeats=4", f"out={out}"])
        return {
            (row["shape"], row["attention"]): row for row in json.loads(out.read_text())["rows"]
        }

    return run


def test_each_shape_has_a_row_for_each_attention(rows_of, capsys):
    mine = ",".join(f"{HERE}:{name}" for name in ("WRONG", "RAISING", "NOT_FINITE"))
    rows = rows_of(f"attention=naive,tiled,{mine}", "shapes=512,GQA-32:8-4k,documents-1000")
    assert len(rows) == 15
    for shape, kind in (("512", "MHA"), ("GQA-32:8-4k", "GQA")):
        ours, tiled, bad, failed, nan = (row for key, row in rows.items() if key[0] == shape)
        assert ours["apart"] == 0 and 0 <= tiled["apart"] < 1e-5 and tiled["kind"] == kind
        for row in (ours, tiled):
            assert row["forward_repeats"] == row["backward_repeats"] == 4
            assert row["forward_p20"] <= row["forward_seconds"] <= row["forward_p80"]
        assert bad["apart"] > 0.02 and "wrong" in bad and nan["wrong"] == "inf apart"
        assert failed["failed"] == "RuntimeError: no kernel image"
        assert not any("forward_tflops" in row for row in (bad, failed, nan))
        # of short shapes also the eager time
        assert ("eager_backward_seconds" in tiled) == (shape == "512")
    eager = rows["512", "tiled"]
    low, middle, high = (eager[f"eager_forward_{key}"] for key in ("least", "seconds", "most"))
    assert 0 < low <= middle <= high
    refused = rows["documents-1000", f"{HERE}:WRONG"]["refused"]
    assert "document_ids" in refused and rows["documents-1000", "tiled"]["backward_tflops"] > 0
    said = capsys.readouterr().out
    assert said.count("not timed, wrong: ") == 4 and "not timed, failed: RuntimeError" in said
    assert "naive over" in said


def test_an_error_of_the_first_attention_ends_the_command(rows_of):
    with pytest.raises(RuntimeError, match="no kernel image"):
        rows_of(f"attention={HERE}:RAISING,naive", "shapes=512")


def test_a_peer_may_run_out_of_memory_while_it_is_timed(rows_of, monkeypatch):
    turn = Measurement.turn

    def watched(self):
        if self.make().backend.name == "tiled":
            raise MemoryError("can't allocate memory")
        turn(self)

    monkeypatch.setattr(Measurement, "turn", watched)
    rows = rows_of("attention=naive,tiled", "shapes=GQA-32:8-4k")
    assert "memory" in rows["GQA-32:8-4k", "tiled"]["oom"]["message"]
    assert rows["GQA-32:8-4k", "naive"]["forward_tflops"] > 0


def test_no_shape_begins_after_the_time(rows_of, capsys, monkeypatch):
    monkeypatch.setattr(peers, "time", SimpleNamespace(monotonic=iter([0, 1, 11]).__next__))
    rows = rows_of("attention=naive", "shapes=512,GQA-32:8-4k,4k", "eager=64k", "seconds=10")
    assert list(rows) == [("512", "naive")]
    assert "GQA-32:8-4k: left out, as is every later shape" in capsys.readouterr().out


def speed(shape: str, kind: str, attention: str, forward: float | None = None, **more) -> dict:
    sizes = {"batch": 1, "heads": 8, "kv_heads": 8, "seq_len": 4096, "head_dim": 128}
    row = {"shape": shape, "kind": kind, "attention": attention, "dtype": "bfloat16", **sizes}
    if forward:
        row |= {"forward_tflops": forward, "backward_tflops": forward / 2, "forward_repeats": 16}
    return row | more


FA4, CUDNN = "lab.peers:FLASH_ATTENTION_4", "sdpa:backend=cudnn"
ROWS = [
    speed("a", "MHA", "triton", 800.0, eager_forward_seconds=6e-5, eager_forward_least=5e-5,
          eager_forward_most=7e-5),
    speed("a", "MHA", FA4, 400.0),
    speed("a", "MHA", CUDNN, wrong="0.5 apart"),
    speed("b", "MHA", "triton", 300.0),
    speed("b", "MHA", FA4, 600.0),
    speed("b", "MHA", CUDNN, oom={"message": "out of memory"}),
    speed("c", "masks", "triton", 500.0),
    speed("c", "masks", FA4, refused="no documents"),
    speed("c", "masks", CUDNN, 250.0),
]  # fmt: skip


def test_means_of_each_kind_of_shape():
    assert summary(ROWS) == [
        ["shapes", "triton over", "forward", "backward"],
        ["MHA", FA4, "1.00 (0.50), n=2", "1.00 (0.50), n=2"],
        ["MHA", CUDNN, "-", "-"],
        ["masks", FA4, "-", "-"],
        ["masks", CUDNN, "2.00 (2.00), n=1", "2.00 (2.00), n=1"],
        ["all", FA4, "1.00 (0.50), n=2", "1.00 (0.50), n=2"],
        ["all", CUDNN, "2.00 (2.00), n=1", "2.00 (2.00), n=1"],
    ]


def test_the_section_of_the_results():
    versions = {"torch": "2.11.0", "flash-attn-4": "4.0.0"}
    environment = {"hardware": {"gpu": "NVIDIA H200"}, "versions": versions, "commit": "1234567"}
    text = tables({"environment": environment, "rows": ROWS})
    forward, backward = text.split("Backward:")
    assert "NVIDIA H200" in forward and "| triton | FlashAttention-4 | sdpa cudnn |" in forward
    assert "| a | 1 | 8:8 | 4,096 | 128 | **800** | 400 | wrong |" in forward
    assert "| b | 1 | 8:8 | 4,096 | 128 | 300 | **600** | oom |" in forward
    assert "| c | 1 | 8:8 | 4,096 | 128 | **250** | refused | 125 |" in backward
    assert "| MHA | FlashAttention-4 | 1.00 (0.50), n=2 | 1.00 (0.50), n=2 |" in backward
    assert "| a | triton | 60 (50 to 70) | - |" in backward
