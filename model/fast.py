"""GPT.forward for training, in few kernels and with what model.checkpoint keeps.

On a GPU one kernel adds a branch to the residual stream and computes the norm after it, and the
MLP's products compute GELU. A block leaves its last sum to the next norm. GPT.forward is the
specification; tests/model/test_fast.py compares the two.

Dimensions: B batch, N tokens, C hidden_size.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from model.device import TRITON, product_dtype
from model.gpt import GPT, Block, ModelOutput, Rope
from model.kernels import add_norm, gelu_mlp
from model.kv_cache import KVCache
from model.loss import linear_cross_entropy
from model.memory import recomputing_block


def fast_block(
    block: Block, x: Tensor, branch: Tensor | None, rope: Rope | None, document_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """block(x + branch) as two parts (B, N, C), whose sum is left to the next norm."""
    x, normed = add_norm(x, branch, block.attention_norm)
    branch = block.dropout(block.attention(normed, rope, document_ids, None))
    x, normed = add_norm(x, branch, block.mlp_norm)
    return x, block.dropout(fast_mlp(block, normed))


def fast_mlp(block: Block, x: Tensor) -> Tensor:
    return block.mlp(x) if block.mlp.gated else gelu_mlp(x, block.mlp.up, block.mlp.down)


class FastGPT(GPT):
    """Trains the parameters of a GPT, and follows its attention. Without targets or with a cache it
    runs as the GPT does.

    With compiled, torch.compile with these options compiles the blocks, and the loss if it has no
    kernels. One compiled block serves all layers: compiling the whole model takes several times as
    long.
    """

    def __init__(self, model: GPT, *, compiled: bool = False, **options: Any):
        vars(self).update(vars(model))
        self._block, self._loss, self._zeros = fast_block, linear_cross_entropy, compiled
        if (keep := self.config.checkpoint) != "none":
            self._block, self._zeros = partial(recomputing_block, keep=keep), False
        if not compiled:
            return
        # graphs for each kind of layer, with and without gradients. Beyond the limit the rest would
        # silently run uncompiled
        limit = 4 * len(self.blocks) + 8
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)
        self._block = torch.compile(self._block, **options)
        if not (TRITON and next(self.parameters()).is_cuda):
            self._loss = torch.compile(self._loss, **options)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> ModelOutput:
        if targets is None or cache is not None:
            how = {"positions": positions, "cache": cache}
            return super().forward(tokens, targets, document_ids, **how)
        x, rope = self.embed(tokens, positions)
        # a branch of zeros, because without one the first block would need another graph
        branch = zeros_like_a_branch(x) if self._zeros else None
        for block in self.blocks:
            x, branch = self._block(block, x, branch, rope, document_ids)
        _, x = add_norm(x, branch, self.final_norm)
        del branch  # frees memory for the loss
        return ModelOutput(None, self._loss(x, self.output_weight, targets))


def zeros_like_a_branch(x: Tensor) -> Tensor:
    """Zeros that require a gradient as x does, in the dtype of a branch."""
    return x.new_zeros(x.shape, dtype=product_dtype(x, x.dtype), requires_grad=x.requires_grad)
