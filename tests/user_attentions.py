"""Attentions that know nothing of this project, in the shapes that others write them in: right
ones, and wrong ones.
"""

import math
from functools import partial

import torch
from torch import Tensor


def scores_of(
    q: Tensor,
    k: Tensor,
    causal: bool,
    scale: float,
    left: int = -1,
    right: int = -1,
    *,
    corner: str = "bottom",
) -> Tensor:
    """Masked scores (B, H, N, M) of q (B, H, N, D) and k (B, H, M, D)."""
    n, m = q.shape[2], k.shape[2]
    own = torch.arange(n)[:, None] + (m - n if corner == "bottom" else 0)
    distance = own - torch.arange(m)
    hidden = distance < 0 if causal else torch.zeros(n, m, dtype=torch.bool)
    if left >= 0:
        hidden = hidden | (distance > left)
    if right >= 0:
        hidden = hidden | (-distance > right)
    return (q.float() @ k.float().mT * scale).masked_fill(hidden, -torch.inf)


def attend(scores: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """sinks (H,): a logit a head, of a key whose value is zero."""
    if sinks is not None:
        sinks = sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), -1)
        v = torch.nn.functional.pad(v, (0, 0, 0, 1))
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    p = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return p.to(v.dtype) @ v, scores.logsumexp(-1)


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
    *,
    corner: str = "bottom",
):
    """As flash-attention's: (B, N, H, D), and lse (B, H, N) without a gradient."""
    groups, scale = q.shape[2] // k.shape[2], softmax_scale or q.shape[-1] ** -0.5
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = scores_of(q, k, causal, scale, *window_size, corner=corner)
    out, lse = attend(scores, v, learnable_sink)
    return out.transpose(1, 2), lse.detach()


def flash_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool = False,
    return_attn_probs: bool = False,
):
    """The same for a packed batch (T, H, D), with lse (H, T)."""
    outs, lses = [], []
    bounds = [x.tolist() for x in (cu_seqlens_q, cu_seqlens_k)]
    for i in range(len(cu_seqlens_q) - 1):
        (a, b), (c, d) = (x[i : i + 2] for x in bounds)
        assert b - a <= max_seqlen_q and d - c <= max_seqlen_k
        out, lse = flash(q[None, a:b], k[None, c:d], v[None, c:d], softmax_scale, causal)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1), None


def one_sided(q, k, v, softmax_scale, causal, window_size=(-1, -1), return_lse=False):
    """Of a window it reads the keys before a query alone."""
    return flash(q, k, v, softmax_scale, causal, (window_size[0], -1))


def unshifted_sink(q, k, v, softmax_scale, causal, learnable_sink=None, return_lse=False):
    """The sink's exponential is not divided by that of the largest score, as the others are."""
    if learnable_sink is None:
        return flash(q, k, v, softmax_scale, causal)
    groups = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = scores_of(q, k, causal, softmax_scale)
    largest = scores.amax(-1, keepdim=True).clamp(min=-1e30)
    p = (scores - largest).exp()
    total = p.sum(-1, keepdim=True) + learnable_sink.exp()[:, None, None]
    out, lse = (p / total).to(v.dtype) @ v, (largest + total.log()).squeeze(-1)
    return out.transpose(1, 2), lse.detach()


def in_order(pages: Tensor, table: Tensor) -> Tensor:
    """(B, M, H, D) of the pages (P, page size, H, D)."""
    return pages[table.long()].flatten(1, 2)


def with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    page_table: Tensor,
    softmax_scale: float,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    return_softmax_lse: bool = False,
    *,
    read=in_order,
):
    """As flash_attn_with_kvcache: q (B, N, H, D) against pages (P, page size, H, D)."""
    k, v = (read(pages, page_table) for pages in (k_cache, v_cache))
    outs, lses = [], []
    for i, n in enumerate(cache_seqlens.tolist()):
        one = [x[i : i + 1] for x in (q, k[:, :n], v[:, :n])]
        out, lse = flash(*one, softmax_scale, causal, window_size)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def as_they_lie(pages: Tensor, table: Tensor) -> Tensor:
    """A sequence's first page is the table's, and the others those behind it in memory."""
    return in_order(pages, (table[:, :1] + torch.arange(table.shape[1])) % len(pages))


pages_as_they_lie = partial(with_cache, read=as_they_lie)


def vllm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    seqused_k: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    block_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    s_aux: Tensor | None = None,
    *,
    more: int = 0,
):
    """As vLLM's flash_attn_varlen_func: packed q (T, H, D), keys in pages, lse (H, T)."""
    k, v = (in_order(pages, block_table) for pages in (k, v))
    outs, lses = [q.new_empty(0, *q.shape[1:])], [torch.empty(q.shape[1], 0)]
    for i, n in enumerate(seqused_k.tolist()):
        rows = slice(*cu_seqlens_q[i : i + 2].tolist())
        assert rows.stop - rows.start <= max_seqlen_q and n <= max_seqlen_k
        one = [q[None, rows], k[i : i + 1, : n + more], v[i : i + 1, : n + more]]
        out, lse = flash(*one, softmax_scale, causal, window_size, s_aux)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


one_key_too_many = partial(vllm, more=1)


def single_prefill(
    q, k, v, custom_mask=None, causal=False, sm_scale=None, window_left=-1, return_lse=False
):
    """As FlashInfer's single_prefill_with_kv_cache: (N, H, D), and lse (N, H) to base 2."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = scores_of(q, k, causal, sm_scale, window_left)
    if custom_mask is not None:
        scores = scores.masked_fill(~custom_mask, -torch.inf)
    out, lse = attend(scores, v)
    return out[0].transpose(0, 1), lse[0].T / math.log(2)


def ragged_prefill(q, k, v, qo_indptr, kv_indptr, causal, sm_scale, return_lse=False):
    """As a function around FlashInfer's BatchPrefillWithRaggedKVCacheWrapper."""
    bounds = (qo_indptr, kv_indptr, len(q), len(k))
    out, lse, _ = flash_varlen(q, k, v, *bounds, sm_scale, causal)
    return out, lse.T / math.log(2)


def top_left(q, k, v, softmax_scale=None, causal=False, return_lse=False):
    return flash(q, k, v, softmax_scale, causal, corner="top")


def base_2(q, k, v, softmax_scale=None, causal=False, return_lse=False):
    out, lse = flash(q, k, v, softmax_scale, causal)
    return out, lse / math.log(2)


def out_alone(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
    """As flash-attention's without its flag: no lse, and no grouped heads."""
    assert q.shape == k.shape or q.shape[2] == k.shape[2]
    return flash(q, k, v, softmax_scale, causal, window_size, corner="top")[0]


def lse_is_none(q, k, v, *, causal, scale):
    """As a Backend's fn, but without its lse."""
    return attend(scores_of(q, k, causal, scale), v)[0], None


def masked(q, k, v, mask=None, causal=False):
    """(B, H, N, D); the mask is true where a query sees a key, and of no other form."""
    scores = scores_of(q, k, causal, q.shape[-1] ** -0.5)
    return attend(scores if mask is None else scores.masked_fill(~mask, -torch.inf), v)[0]


def mean_of_nothing(q, k, v, attn_mask=None, is_causal=False, scale=None):
    """A query without a key gets the mean of the values."""
    scores = scores_of(q, k, is_causal, scale or q.shape[-1] ** -0.5)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    return scores.clamp(min=-1e30).softmax(-1).to(v.dtype) @ v


def in_tiles(q, k, v, mask, causal, q_tile, k_tile):
    """It has no default for the size of its tiles."""
    return masked(q, k, v, mask, causal)


def contiguous_assumed(q, k, v, softmax_scale=None, causal=False, return_lse=False):
    """It reads the memory of q as if q had no gaps."""
    lies = q.as_strided(q.shape, torch.empty(q.shape).stride(), q.storage_offset())
    return flash(lies, k, v, softmax_scale, causal)


def only_aligned(q, k, v, softmax_scale=None, causal=False, return_lse=False):
    if q.data_ptr() % 16:
        raise RuntimeError(f"misaligned address: {q.stride()}")
    return flash(q, k, v, softmax_scale, causal, return_lse=return_lse)


class WrongOnceWarm(torch.autograd.Function):
    """Its backward pass takes d_out to lie as in the first call of the same shape."""

    strides: dict = {}

    @staticmethod
    def forward(ctx, q, k, v, softmax_scale, causal):
        ctx.save_for_backward(q, k, v)
        ctx.arguments = softmax_scale, causal
        return flash(q, k, v, *ctx.arguments)[0]

    @staticmethod
    def backward(ctx, d_out):
        q, k, v = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        strides = WrongOnceWarm.strides.setdefault(d_out.shape, d_out.stride())
        d_out = d_out.as_strided(d_out.shape, strides)
        with torch.enable_grad():
            out, _ = flash(q, k, v, *ctx.arguments)
        return *torch.autograd.grad(out, (q, k, v), d_out), None, None


def float32_alone(q, k, v, softmax_scale=None, causal=False, return_lse=False):
    if q.dtype != torch.float32:
        raise NotImplementedError(f"no kernel for {q.dtype}")
    return flash(q, k, v, softmax_scale, causal)


def no_scale(q, k, v, softmax_scale=None, causal=False, return_lse=False):
    return flash(q, k, v, 1.0, causal)


def leaks(q, k, v, causal=True):
    """(B, H, N, D); each query sees one key too many."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:]).triu(2 + k.shape[2] - q.shape[2]).bool()
    return scores.masked_fill(hidden & causal, -torch.inf).softmax(-1) @ v


def tensor_cores(q, k, v, is_causal, sm_scale):
    """(B, H, N, D) as a kernel for whole tiles takes it: bfloat16, D = 64, N and M multiples of 64;
    no gradient, and lse (B, H, N) to base 2.
    """
    if q.dtype != torch.bfloat16 or q.shape[-1] != 64 or q.shape[2] % 64 or k.shape[2] % 64:
        raise RuntimeError("unsupported")
    with torch.no_grad():
        out, lse = attend(scores_of(q, k, is_causal, sm_scale), v)
        return out, lse / math.log(2)


class Student(torch.autograd.Function):
    """As CS336 asks for: (B, N, D), is_causal by position, and a backward pass by hand."""

    @staticmethod
    def forward(ctx, Q, K, V, is_causal=False):
        scores = Q.float() @ K.float().mT * Q.shape[-1] ** -0.5
        if is_causal:
            hidden = torch.ones(scores.shape[-2:]).triu(1).bool()
            scores = scores.masked_fill(hidden, -torch.inf)
        p = Student.softmax(scores)
        ctx.save_for_backward(Q, K, V, p)
        return p.to(V.dtype) @ V

    @staticmethod
    def softmax(scores):
        return scores.softmax(-1)

    @staticmethod
    def backward(ctx, d_out):
        Q, K, V, p = ctx.saved_tensors
        dp = d_out.float() @ V.float().mT
        ds = (p * (dp - (dp * p).sum(-1, keepdim=True)) * Q.shape[-1] ** -0.5).to(Q.dtype)
        return ds @ K, ds.mT @ Q, p.to(d_out.dtype).mT @ d_out, None
