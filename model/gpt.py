"""The GPT: pre-norm transformer blocks with an attention that the caller chooses.

    tokens -> embedding (+ learned position)
           -> num_layers * [ x = x + attention(norm(x)); x = x + mlp(norm(x)) ]
           -> norm -> output layer

`model=gpt2` is exactly GPT-2 (Radford et al. 2019). `model=modern` has RoPE, RMSNorm
(arXiv:1910.07467), QK-norm (arXiv:2010.04245), grouped-query attention (arXiv:2305.13245) and
SwiGLU (arXiv:2002.05202). This file is the specification; model/fast.py is its form for training.

B batch, N tokens of this call, C hidden_size, H query heads, H_kv key/value heads, D head dim.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import Backend
from config import AttentionConfig, ModelConfig
from model.kv_cache import KVCache, LayerCache
from model.layer_function import LayerFunction, layer_functions, own_module
from model.loss import linear_cross_entropy
from model.rope import apply_rope, rope_tables
from model.seam import Seam, SeamedModel

Rope = tuple[Tensor, Tensor]  # the cosines and sines of rope_tables()
NORM_EPS = 1e-5
INIT_STD = 0.02  # of the first weights


class ModelOutput(NamedTuple):
    """The logits; or, with targets, the loss, which never computes all logits at once."""

    logits: Tensor | None  # (B, N, vocab_size)
    loss: Tensor | None  # scalar float32, mean over targets != -100


class CausalSelfAttention(LayerFunction):
    """Project to q, k, v, attend, project back."""

    def __init__(self, config: ModelConfig, seam: Seam, function: dict[str, Any]):
        super().__init__(function, config.num_heads)
        self.seam, self.head_dim, self.qk_norm = seam, config.head_dim, config.qk_norm
        self.heads_of_qkv = (config.num_heads, config.kv_heads, config.kv_heads)
        rows = tuple(heads * self.head_dim for heads in self.heads_of_qkv)
        self.qkv = nn.Linear(config.hidden_size, sum(rows), bias=config.bias)
        self.qkv.rows = rows  # Muon treats q, k and v as three matrices
        self.proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.bias)
        self.max_score: Tensor | None = None  # (B, H) of the last call
        # the module of a backend that brings one, used only under that backend
        self.own, self.brought_by = None, seam.backend.module

    def forward(
        self, x: Tensor, rope: Rope | None, document_ids: Tensor | None, cache: LayerCache | None
    ) -> Tensor:
        q, k, v = self.heads(self.qkv(x), rope)
        out, self.max_score = self.attend(q, k, v, document_ids, cache)
        return self.proj(out)

    def heads(self, qkv: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, H, N, D), k and v (B, H_kv, N, D), with QK-norm and RoPE applied."""
        heads = qkv.unflatten(-1, (-1, self.head_dim))  # (B, N, H + 2 H_kv, D)
        # views of one tensor: a backend that needs contiguous memory makes its own copies
        q, k, v = (t.transpose(1, 2) for t in heads.split(self.heads_of_qkv, dim=2))
        if self.qk_norm:  # without gains: every row has length sqrt(D), no scaled score is larger
            q, k = (F.rms_norm(t, (self.head_dim,), eps=NORM_EPS) for t in (q, k))
        if rope is not None:
            q, k = (apply_rope(t, *rope) for t in (q, k))
        # autocast narrows only the projection; QK-norm and RoPE may widen q and k
        return q.to(v.dtype), k.to(v.dtype), v

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor | None, cache: LayerCache | None
    ) -> tuple[Tensor, Tensor | None]:
        """The concatenated outputs of all heads, (B, N, C), and each head's largest score."""
        backend = self.seam.backend
        call = self.seam.call if cache is None else cache.attend
        settings = {"document_ids": document_ids, "return_max_score": self.seam.look}
        if self.own is not None and backend.module is self.brought_by:
            settings["module"] = self.own
        # the causal mask is aligned bottom-right: right for N = M and for new tokens after a cache
        output = call(q, k, v, backend=backend, **settings, **self.function)  # out (B, H, N, D)
        return output.out.transpose(1, 2).flatten(2), getattr(output, "max_score", None)


def mlp_width(config: ModelConfig) -> int:
    """Number of input features of the MLP's second matrix."""
    if config.activation == "swiglu":
        # 8/3 C rounded up to a multiple of 64, so that the matrices divide into whole tiles
        return 64 * -(-8 * config.hidden_size // (3 * 64))
    return 4 * config.hidden_size


class MLP(nn.Module):
    """gelu: the tanh form (arXiv:1606.08415); swiglu: silu(gate) * up, as many parameters."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gated = config.activation == "swiglu"
        width = mlp_width(config)
        self.up = nn.Linear(config.hidden_size, width * (1 + self.gated), bias=config.bias)
        if self.gated:
            self.up.rows = (width, width)  # Muon treats gate and up as two matrices
        self.down = nn.Linear(width, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if not self.gated:
            return self.down(F.gelu(hidden, approximate="tanh"))
        gate, up = hidden.chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


def build_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "layernorm":
        return nn.LayerNorm(config.hidden_size, eps=NORM_EPS, bias=config.bias)
    return nn.RMSNorm(config.hidden_size, eps=NORM_EPS)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, seam: Seam, function: dict[str, Any]):
        super().__init__()
        self.attention_norm = build_norm(config)
        self.attention = CausalSelfAttention(config, seam, function)
        self.mlp_norm = build_norm(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        """From x (B, N, C) to (B, N, C). context: what attention takes besides x."""
        x = x + self.dropout(self.attention(self.attention_norm(x), *context))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(SeamedModel):
    """A decoder-only language model. It takes windows, softcap, score_mod and sinks from
    `attention`; they are the same under any backend.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocab_size: int,
        backend: Backend,
        attention: AttentionConfig | None = None,
    ):
        super().__init__()
        self.config, self.vocab_size, self.seam = config, vocab_size, Seam(backend)
        width, learned = config.hidden_size, config.positions == "learned"
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.position_embedding = nn.Embedding(config.max_seq_len, width) if learned else None
        self.dropout = nn.Dropout(config.dropout)
        functions = layer_functions(attention or AttentionConfig(), config)
        self.blocks = nn.ModuleList(Block(config, self.seam, function) for function in functions)
        self.final_norm = build_norm(config)
        tied = config.tie_embeddings  # then the token embedding is the output layer
        self.output_layer = None if tied else nn.Linear(width, vocab_size, bias=False)
        self._initialise()
        # last, so that the other weights start as with any other attention of the same seed
        for layer, block in enumerate(self.blocks):
            block.attention.own = own_module(backend, config, layer)

    def _initialise(self) -> None:
        """As in GPT-2: from N(0, INIT_STD), divided by sqrt(2 num_layers) where a branch ends."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                ends_branch = name.endswith(("attention.proj", "mlp.down"))
                depth = 2 * self.config.num_layers if ends_branch else 1
                nn.init.normal_(module.weight, std=INIT_STD * depth**-0.5)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> ModelOutput:
        """tokens, targets (B, N) int64. With a cache, the tokens follow those in the cache, which
        stores them too. positions (N,) are those of tokens that are a part of longer sequences.

        document_ids (B, N) integers: a run of equal ids is a document, and attention stays inside
        it; positions count through the sequence.

        Raises ValueError for more tokens than the learned positions or the cache hold.
        """
        x, rope = self.embed(tokens, positions, cache)
        for layer, block in enumerate(self.blocks):
            x = block(x, rope, document_ids, None if cache is None else cache.layers[layer])
        x = self.final_norm(x)
        if targets is None:
            return ModelOutput(F.linear(x, self.output_weight), None)  # (B, N, vocab_size)
        return ModelOutput(None, linear_cross_entropy(x, self.output_weight, targets))

    def embed(
        self, tokens: Tensor, positions: Tensor | None = None, cache: KVCache | None = None
    ) -> tuple[Tensor, Rope | None]:
        """Tokens (B, N) to (B, N, C) with learned positions; and the tables of rotary ones."""
        config, (_, count) = self.config, tokens.shape
        total = count if cache is None else cache.length + count
        if self.position_embedding is not None and total > config.max_seq_len:
            raise ValueError(
                f"{total} tokens are more than the {config.max_seq_len} learned positions of this "
                "model (model.max_seq_len); train with a longer seq_len or model.positions=rope"
            )
        if cache is not None:
            positions = cache.positions(count, tokens.device)
        elif positions is None:
            positions = torch.arange(count, device=tokens.device)
        x = self.token_embedding(tokens)
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions)
        rope = None
        if config.positions == "rope":
            rope = rope_tables(positions, head_dim=config.head_dim, theta=config.rope_theta)
        return self.dropout(x), rope

    @property
    def output_weight(self) -> Tensor:
        """(vocab_size, C)"""
        return (self.token_embedding if self.output_layer is None else self.output_layer).weight
