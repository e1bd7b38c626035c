"""Attentions that know nothing of this project, in the shapes that others write them in: right
ones, and wrong ones.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def scores_of(q, k, causal, scale, left=-1, right=-1, *, corner="bottom") -> Tensor:
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


def heads_first(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """(B, N, H, D) as (B, H, N, D), with a key/value head for each query head."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return [q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)]


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
    q, k, v = heads_first(q, k, v)
    scale = softmax_scale or q.shape[-1] ** -0.5
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
    q, k, v = heads_first(q, k, v)
    scores = scores_of(q, k, causal, softmax_scale)
    largest = scores.amax(-1, keepdim=True).clamp(min=-1e30)
    p = (scores - largest).exp()
    total = p.sum(-1, keepdim=True) + learnable_sink.exp()[:, None, None]
    out, lse = (p / total).to(v.dtype) @ v, (largest + total.log()).squeeze(-1)
    return out.transpose(1, 2), lse.detach()


def top_left(q, k, v, softmax_scale=None, causal=False, return_lse=False):
    return flash(q, k, v, softmax_scale, causal, corner="top")


def base_2(q, k, v, softmax_scale=None, causal=False, return_lse=False):
    out, lse = flash(q, k, v, softmax_scale, causal)
    return out, lse / math.log(2)


def keywords(q, k, v, **others):
    """Its signature does not tell what it takes."""
    return base_2(q, k, v, **others)


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


def float32_mask_misread(q, k, v, attn_mask=None, **others):
    """pytorch#191612: the bits of a float32 mask are read as numbers of q's dtype."""
    if attn_mask is not None and attn_mask.dtype == torch.float32 != q.dtype:
        attn_mask = attn_mask.contiguous().view(q.dtype)[..., : attn_mask.shape[-1]]
    return scaled_dot_product_attention(q, k, v, attn_mask, **others)


def mask_contiguous_assumed(q, k, v, attn_mask=None, **others):
    """The strides of a mask are those that its shape would have."""
    if attn_mask is not None:
        whole = attn_mask.untyped_storage().nbytes() // attn_mask.element_size()
        flat = attn_mask.as_strided((whole,), (1,), 0)
        places = torch.arange(attn_mask.numel()).clamp(max=whole - 1)
        attn_mask = flat[places].view(attn_mask.shape)
    return scaled_dot_product_attention(q, k, v, attn_mask, **others)


def float32_mask_refused(q, k, v, attn_mask=None, **others):
    if attn_mask is not None and attn_mask.dtype == torch.float32 != q.dtype:
        raise RuntimeError("a mask must have the dtype of q")
    return scaled_dot_product_attention(q, k, v, attn_mask, **others)


def in_tiles(q, k, v, mask, causal, q_tile, k_tile):
    """It has no default for the size of its tiles."""
    return masked(q, k, v, mask, causal)


def gives_a_dict(q, k, v, causal=False, scale=None):
    return {"out": q}


def scales_in_place(q, k, v, causal=False, scale=None):
    """Right, but q is another tensor afterwards."""
    q *= scale or q.shape[-1] ** -0.5
    return attend(scores_of(q, k, causal, 1.0), v)[0]


def contiguous_assumed(q, k, v, softmax_scale=None, causal=False, return_lse=False):
    """It reads the memory of q as if q had no gaps."""
    lies = q.as_strided(q.shape, torch.empty(q.shape).stride(), q.storage_offset())
    return flash(lies, k, v, softmax_scale, causal)


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
