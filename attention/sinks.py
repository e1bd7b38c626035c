"""Sinks: an extra logit per head in the softmax's denominator, so that a row may attend to nothing.

A sink is a key that every query sees, with its own score and a value of zero. A row's state over
the other keys is merged with the state of the sink:

    keys   (lse, 1, out)                    what any backend with lse returns
    sink   (sink, 1, 0)
    both   out * exp(lse - lse'), lse'      with lse' = log(exp(lse) + exp(sink))

gpt-oss (2025) learns its sinks. A sink of 0 is the softmax-plus-one of Miller, "Attention Is Off By
One" (2023). Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023,
arXiv:2309.17453) explain why models want a sink.

Dimensions: B batch, H query heads, N queries, D head dim.
"""

import torch
from torch import Tensor

from attention.online_softmax import finite


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add sinks (H,) to the denominator of attention's out (B, H, N, D) and lse (B, H, N).

    Gradients flow to all three. The result is that of OnlineSoftmax.merge() on the two states, in
    the form that saves the least for its backward pass.
    """
    sinks = sinks.to(lse.dtype)[:, None]
    # neither keys nor a sink: the gradient of logaddexp(-inf, -inf) would be NaN
    nothing = (lse == -torch.inf) & (sinks == -torch.inf)
    total = torch.logaddexp(lse.masked_fill(nothing, 0.0), sinks)
    total = total.masked_fill(nothing, -torch.inf)
    share = torch.exp(lse - finite(total))  # of the keys; the sink has the rest
    return (out * share.unsqueeze(-1)).to(out.dtype), total
