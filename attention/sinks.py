"""Sinks: a logit a head in the denominator of the softmax, so that a row may attend to nothing.

A sink is a key that every query sees, with a score of its own and a value of zero. The state of a
row that has seen the other keys is merged with the state of this one:

    keys   (lse, 1, out)                    what any backend with lse returns
    sink   (sink, 1, 0)
    both   out * exp(lse - lse'), lse'      with lse' = log(exp(lse) + exp(sink))

gpt-oss (2025) learns them; a sink of 0 is the softmax plus one of Miller, "Attention Is Off By One"
(2023); Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023,
arXiv:2309.17453) has the reason why models want one.

Dimensions: B batch, H query heads, N queries, D head dim.
"""

import torch
from torch import Tensor

from attention.online_softmax import finite


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """out (B, H, N, D) and lse (B, H, N) of attention, with sinks (H,) in its denominator.

    Gradients flow to all three. What OnlineSoftmax.merge() does for these two states, in the form
    that keeps least for its backward pass.
    """
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    share = torch.exp(lse - finite(total))  # of the keys; the sink has the rest
    return (out * share.unsqueeze(-1)).to(out.dtype), total
