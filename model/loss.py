"""The training loss, without the logits of all tokens at once.

The logits of a language model are its largest tensor: tokens x vocabulary, 3.1 GiB in 16 bits for
the 32,768 tokens of a GPT-2 step. Softmax and its gradient need as much again in float32.
linear_cross_entropy() takes a chunk of tokens at a time. The gradient of a chunk's logits is known
at once: p, less 1 at the target. The forward pass computes both products with that gradient and
frees the chunk. That is three products in all, as many as with all logits kept, and the backward
pass only scales the results. The idea comes from Liger Kernel's fused linear cross-entropy (Hsu et
al., 2024, arXiv:2410.10989). On a GPU one kernel computes a chunk's softmax, loss and gradient
(model/kernels/loss.py).

Dimensions: B batch, N tokens of a sequence, T = B N tokens of a pass, R tokens of a chunk, C
hidden_size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.device import TRITON, product_dtype

IGNORED = torch.nn.CrossEntropyLoss().ignore_index  # the target without a loss: -100
# number of logits in a chunk. On a GPU 512 MiB in 16 bits: 4,736 tokens at GPT-2's vocabulary. Half
# of that made a step of GPT-2 4% slower on an H200; twice as much is no faster. A CPU needs less:
# chunks of 16 MiB in float32 take no longer than all logits at once
CHUNK_LOGITS = {"cuda": 2**28, "cpu": 2**22}
ROW_GRANULE = 128  # chunks are multiples of it, so that the products divide into whole tiles


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean of -log p(target) in nats over the targets that are not ignored; 0 if all are.

    logits (B, N, vocab_size) of any floating dtype, targets (B, N) int64, -100 to ignore one.
    Returns a float32 scalar.
    """
    total = F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total / (targets != IGNORED).sum().clamp(min=1)


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """cross_entropy(F.linear(x, weight), targets), with the logits of one chunk at a time; once
    differentiable.

    x (B, N, C), weight (vocab_size, C), targets (B, N) int64, -100 to ignore one. Returns a float32
    scalar. The products run in autocast's dtype. Softmax and the sum of weight's gradient over
    chunks are float32 (float64 for float64).
    """
    dtype = product_dtype(x, torch.promote_types(x.dtype, weight.dtype))
    with_gradients = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    total = LinearCrossEntropy.apply(
        x.flatten(0, 1), weight, targets.flatten(), dtype, with_gradients
    )
    return total.float() / (targets != IGNORED).sum().clamp(min=1)


def chunk_rows(tokens: int, vocab_size: int, width: int, device: str) -> int:
    """Tokens of a chunk, R. Chunks are equal and have at most about CHUNK_LOGITS logits, or as many
    as x has elements if that is more.

    So torch.compile, which unrolls the chunks, never sees more than vocab_size / width of them.
    """
    chunks = min(-(-tokens * vocab_size // CHUNK_LOGITS[device]), -(-vocab_size // width))
    return ROW_GRANULE * -(-tokens // (ROW_GRANULE * max(chunks, 1)))


def padded_vocab(vocab_size: int, device: str) -> int:
    """Columns of the logits: on a GPU a multiple of 64. The products lose most of their speed if
    rows do not start at multiples of 16 bytes.
    """
    return -(-vocab_size // 64) * 64 if device == "cuda" else vocab_size


def has_kernel(logits: Tensor) -> bool:
    """Whether model/kernels/loss.py takes these logits."""
    return TRITON and logits.is_cuda and logits.dtype != torch.float64


def loss_and_gradient(
    x: Tensor,
    w: Tensor,
    targets: Tensor,
    vocab_size: int,
    dtype: torch.dtype,
    with_gradients: bool,
) -> tuple[Tensor, Tensor | None]:
    """The sum of -log p(target) of R tokens, and its gradient with respect to their logits,
    (R, vocab_size and padding).

    x (R, C), w (vocab_size and padding, C), targets (R,); dtype: of the softmax.
    """
    logits = x @ w.mT
    if has_kernel(logits):
        from model.kernels.loss import cross_entropy_in_place

        loss = cross_entropy_in_place(logits, targets, vocab_size, IGNORED, with_gradients)
        return loss.sum(), logits if with_gradients else None
    if logits.shape[1] > vocab_size:
        logits[:, vocab_size:] = -torch.inf
    logits = logits.to(dtype)  # frees the narrow ones
    log_p = torch.log_softmax(logits, -1)
    counts = (targets != IGNORED).unsqueeze(1)
    target = targets.unsqueeze(1).where(counts, 0)  # any index will do for an ignored token
    log_p_target = log_p.gather(1, target)
    loss = -log_p_target.masked_fill(~counts, 0.0).sum()
    del logits
    if not with_gradients:
        return loss, None
    p, at_target = log_p.exp_(), log_p_target.expm1()
    d_logits = p.to(x.dtype).scatter_(1, target, at_target.to(x.dtype))
    return loss, d_logits.mul_(counts)


def add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """total + a b (M, N) in dtype, for a (M, K) and b (K, N); overwrites total. None stands for 0.

    On a GPU a product of 16-bit matrices is summed in float32 at once, and neither stored nor
    rounded. torch.compile cannot do that.
    """
    if a.is_cuda and a.dtype != dtype and not torch.compiler.is_compiling():
        if total is None:
            return torch.mm(a, b, out_dtype=dtype)
        return torch.addmm(total, a, b, out_dtype=dtype, out=total)
    product = a @ b
    return product.to(dtype) if total is None else total.add_(product)


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """factor x in dtype, for a factor of one number. x * factor would round a float32 factor to x's
    dtype first.
    """
    return torch.mul(x, factor.expand(1), out=x.new_empty(x.shape, dtype=dtype))


class LinearCrossEntropy(torch.autograd.Function):
    """The sum of -log p(target), with its gradients computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        dtype: torch.dtype,
        with_gradients: bool,
    ) -> Tensor:
        """x (T, C), weight (vocab_size, C), targets (T,); dtype: of the products."""
        (tokens, width), vocab_size = x.shape, weight.shape[0]
        rows = chunk_rows(tokens, vocab_size, width, x.device.type)
        padding = padded_vocab(vocab_size, x.device.type) - vocab_size
        w = weight.to(dtype)
        w = F.pad(w, (0, 0, 0, padding)) if padding else w
        # float16 ends at 65,504, and the weights' gradient sums over the chunk's tokens, so x
        # enters it scaled down by a power of two. The logits' gradient stays between -1 and 1;
        # dividing it by the number of tokens here would underflow, so that comes later
        shrink = 2.0 ** -max(0, rows.bit_length() - 10) if dtype == torch.float16 else 1.0
        total = x.new_zeros((), dtype=torch.promote_types(dtype, torch.float32))
        d_weight, d_x = None, []
        for x_rows, targets_rows in zip(x.to(dtype).split(rows), targets.split(rows), strict=True):
            loss, d_logits = loss_and_gradient(
                x_rows, w, targets_rows, vocab_size, total.dtype, with_gradients
            )
            total = total + loss
            if d_logits is not None:
                d_x.append(d_logits @ w)
                x_rows = x_rows * shrink if shrink < 1 else x_rows
                d_weight = add_product(d_weight, d_logits.mT, x_rows, total.dtype)
                del d_logits  # frees it before the next chunk
        if with_gradients:
            ctx.shrink, ctx.dtypes = shrink, (x.dtype, weight.dtype)
            ctx.save_for_backward(torch.cat(d_x) if len(d_x) > 1 else d_x[0], d_weight[:vocab_size])
        return total

    @staticmethod
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "linear_cross_entropy is only once differentiable: cross_entropy of the logits "
                "takes create_graph=True"
            )
        # not in place, because retain_graph=True may run this twice
        factors = d_total, d_total / ctx.shrink
        d_x, d_weight = (
            scaled(x, factor, dtype)
            for x, factor, dtype in zip(ctx.saved_tensors, factors, ctx.dtypes, strict=True)
        )
        return d_x, d_weight, None, None, None, None
