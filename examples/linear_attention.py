"""Linear attention (Katharopoulos et al. 2020, "Transformers are RNNs", arXiv:2006.16236).

    python train.py -m attention=tiled,examples.linear_attention:BACKEND seed=0,1

With features phi(x) = elu(x) + 1 in place of exp, the sum over keys does not depend on the query:

    out_i = phi(q_i) S_i / (phi(q_i) . z_i)      S_i = sum_j phi(k_j) v_j^T, z_i = sum_j phi(k_j)

Time and memory are linear in N: weights are computed only within a chunk of queries, and S and z
sum up the keys before it. The paper scales nothing, so `scale` is not used.

Dimensions: B batch, H query heads, H_kv key/value heads, N queries, M keys, D head dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from attention import AttentionOutput, Backend


def features(x: Tensor) -> Tensor:
    """phi, in the dtype of the sums."""
    return F.elu(x.to(torch.promote_types(x.dtype, torch.float32))) + 1


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, chunk: int
) -> AttentionOutput:
    groups = q.shape[1] // k.shape[1]
    keys = features(k).repeat_interleave(groups, 1)  # (B, H, M, D)
    # append a value of one, so that the last column of S is z
    values = F.pad(v.to(keys.dtype), (0, 1), value=1.0).repeat_interleave(groups, 1)
    queries = features(q)
    # the number of keys before that of the first query, and of queries that see no key
    past = k.shape[2] - q.shape[2] if causal else k.shape[2]
    past, blind = max(0, past), max(0, -past)
    state = keys[:, :, :past].mT @ values[:, :, :past]  # (B, H, D, D + 1)
    if causal:
        parts = [values.new_zeros(*queries.shape[:2], blind, values.shape[3])]
        rest = (queries[:, :, blind:], keys[:, :, past:], values[:, :, past:])
        for a, b, c in zip(*(x.split(chunk, 2) for x in rest), strict=True):
            parts.append(a @ state + (a @ b.mT).tril() @ c)
            state = state + b.mT @ c
        sums = torch.cat(parts, 2)
    else:
        sums = queries @ state
    out, norm = sums[..., :-1], sums[..., -1:]
    # a query that sees no key gives 0
    return AttentionOutput((out / norm.masked_fill(norm == 0, 1)).to(q.dtype))


def weighted_sum(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, chunk: int
) -> AttentionOutput:
    """The same with all weights at once: the float64 reference of `scripts.verify`."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    weights = features(q) @ features(k).mT
    if causal:
        weights = weights.tril(k.shape[2] - q.shape[2])
    norm = weights.sum(-1, keepdim=True)
    return AttentionOutput(
        (weights @ v.to(weights.dtype) / norm.masked_fill(norm == 0, 1)).to(q.dtype)
    )


BACKEND = Backend(
    "linear_attention",
    linear_attention,
    reference=weighted_sum,
    exact=False,
    traceable=False,  # torch.compile would unroll the loop over chunks
    features=frozenset({"gqa", "non_causal", "cross_length"}),
    options={"chunk": 64},
)
