"""Attention by tiles, forward and backward, in PyTorch: the algorithm of FlashAttention-2.

Dimensions: B batch, H = K * G query heads of which G share each of the K key/value heads, N
queries, M keys, D head dim. A tile is R queries by T keys.
"""

import torch


def tiles(length, block):
    """Slices of at most `block` that together are 0:length."""
    return [slice(i, min(i + block, length)) for i in range(0, length, block)]


def positions(rows, num_queries, num_keys):
    """Where the queries of a tile stand among the keys, (R, 1): the last query at the last key."""
    return torch.arange(rows.start, rows.stop)[:, None] + num_keys - num_queries


def visible(rows, keys, num_queries, num_keys, causal, window):
    """Which keys of a tile each of its queries sees, (R, T): with causal those up to its own
    position, of them with a window the last so many.
    """
    i = positions(rows, num_queries, num_keys)
    j = torch.arange(keys.start, keys.stop)
    seen = torch.ones(len(i), len(j), dtype=torch.bool)
    if causal:
        seen &= j <= i
    if window is not None:
        seen &= j > i - window
    return seen


def key_tiles(rows, num_queries, num_keys, causal, window, block):
    """The tiles of keys that some query of a tile sees."""
    i = positions(rows, num_queries, num_keys)
    first, last = 0, num_keys
    if causal:
        last = int(i[-1]) + 1
    if window is not None:
        first = max(0, int(i[0]) + 1 - window)
    return [keys for keys in tiles(num_keys, block) if keys.start < last and keys.stop > first]


def tile_scores(q_rows, k_keys, seen, scale, softcap):
    """Scores (B, K, G, R, T), -inf where hidden, and their derivative by the scaled scores."""
    scores = q_rows @ k_keys.mT * scale
    derivative = torch.ones_like(scores)
    if softcap is not None:
        capped = torch.tanh(scores / softcap)
        scores = softcap * capped
        derivative = 1 - capped**2
    return scores.masked_fill(~seen, -torch.inf), derivative


class FlashAttention(torch.autograd.Function):
    """q (B, K, G, N, D), k and v (B, K, 1, M, D) -> out (B, K, G, N, D) and lse (B, K, G, N)."""

    @staticmethod
    def forward(ctx, q, k, v, causal, scale, window, softcap, block_q, block_kv):
        num_queries, num_keys = q.shape[-2], k.shape[-2]
        dtype = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros_like(q)
        lse = torch.zeros(q.shape[:-1], dtype=dtype)
        for rows in tiles(num_queries, block_q):
            q_rows = q[..., rows, :].to(dtype)
            row_max = torch.full((*q_rows.shape[:-1], 1), -torch.inf, dtype=dtype)
            row_sum = torch.zeros_like(row_max)
            acc = torch.zeros_like(q_rows)
            for keys in key_tiles(rows, num_queries, num_keys, causal, window, block_kv):
                k_keys, v_keys = k[..., keys, :].to(dtype), v[..., keys, :].to(dtype)
                seen = visible(rows, keys, num_queries, num_keys, causal, window)
                scores, _ = tile_scores(q_rows, k_keys, seen, scale, softcap)
                next_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
                # a row that has seen no key yet has -inf, and -inf - -inf is NaN
                shift = torch.where(next_max == -torch.inf, 0.0, next_max)
                alpha = torch.exp(row_max - shift)
                p = torch.exp(scores - shift)
                row_sum = alpha * row_sum + p.sum(-1, keepdim=True)
                acc = alpha * acc + p.to(v.dtype).to(dtype) @ v_keys
                row_max = next_max
            # a row without a key: 0 / 1
            row_sum = torch.where(row_max == -torch.inf, 1.0, row_sum)
            out[..., rows, :] = (acc / row_sum).to(q.dtype)
            lse[..., rows] = (row_max + torch.log(row_sum)).squeeze(-1)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = causal, scale, window, softcap, block_q, block_kv
        return out, lse

    @staticmethod
    def backward(ctx, *grad_outputs):
        d_out, d_lse = grad_outputs
        q, k, v, out, lse = ctx.saved_tensors
        causal, scale, window, softcap, block_q, block_kv = ctx.settings
        num_queries, num_keys = q.shape[-2], k.shape[-2]
        dtype = lse.dtype
        dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (q, k, v))
        for rows in tiles(num_queries, block_q):
            q_rows, do_rows = q[..., rows, :].to(dtype), d_out[..., rows, :].to(dtype)
            # a row without a key has lse = -inf: exp(score - inf) = 0 keeps it out
            lse_rows = lse[..., rows, None]
            lse_rows = torch.where(lse_rows == -torch.inf, torch.inf, lse_rows)
            delta = (do_rows * out[..., rows, :].to(dtype)).sum(-1, keepdim=True)
            delta = delta - d_lse[..., rows, None]
            for keys in key_tiles(rows, num_queries, num_keys, causal, window, block_kv):
                k_keys, v_keys = k[..., keys, :].to(dtype), v[..., keys, :].to(dtype)
                seen = visible(rows, keys, num_queries, num_keys, causal, window)
                scores, derivative = tile_scores(q_rows, k_keys, seen, scale, softcap)
                p = torch.exp(scores - lse_rows)
                ds = p * (do_rows @ v_keys.mT - delta) * derivative * scale
                dq[..., rows, :] += ds @ k_keys
                dk[..., keys, :] += (ds.mT @ q_rows).sum(2, keepdim=True)
                dv[..., keys, :] += (p.mT @ do_rows).sum(2, keepdim=True)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *[None] * 6


def attend(q, k, v, *, causal, scale, window=None, softcap=None, block_q=32, block_kv=16):
    """q (B, H, N, D), k and v (B, K, M, D) -> out (B, H, N, D) and lse (B, H, N), the log of the
    sum of the exponentials of a row's scores.
    """
    q = q.unflatten(1, (k.shape[1], -1))
    settings = causal, scale, window, softcap, block_q, block_kv
    out, lse = FlashAttention.apply(q, k.unsqueeze(2), v.unsqueeze(2), *settings)
    return out.flatten(1, 2), lse.flatten(1, 2)
