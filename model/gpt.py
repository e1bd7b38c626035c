"""The GPT: pre-norm transformer blocks with an attention that the caller chooses.

    tokens -> embedding (+ learned position)
           -> num_layers * [ x = x + attention(norm(x)); x = x + mlp(norm(x)) ]
           -> norm -> output layer

With `model=gpt2` this is exactly GPT-2 (Radford et al. 2019). `model=modern` uses later inventions:
RoPE, RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467), QK-norm (Henry et al. 2020,
arXiv:2010.04245), grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) and SwiGLU
(Shazeer 2020, arXiv:2002.05202). Both compute attention with one call of `attention()`.

Dimensions: B batch, N tokens of this call, M tokens so far (N without a cache), C hidden_size, H
query heads, H_kv key/value heads, D head dim.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import Backend, Shards, attention, build_module
from config import AttentionConfig, ModelConfig
from model.device import TRITON
from model.fused_block import first_branch, fused_block, is_fused
from model.kernels import add_norm, gelu
from model.kv_cache import KVCache, LayerCache
from model.layer_function import layer_functions
from model.loss import linear_cross_entropy
from model.rope import apply_rope, rope_tables

NORM_EPS = 1e-5
Rope = tuple[Tensor, Tensor]  # the cosines and sines of rope_tables()
# values of CausalSelfAttention.look. They are on the CPU and read when a step runs, so one compiled
# graph serves both. Never write to them: a graph that reruns attention in the backward pass keeps
# the tensor of its forward pass
QUIET, LOOKING = torch.tensor(False), torch.tensor(True)


class ModelOutput(NamedTuple):
    """The logits; or, with targets, the loss, which never computes all logits at once."""

    logits: Tensor | None  # (B, N, vocab_size)
    loss: Tensor | None  # scalar float32, mean over targets != -100


class CausalSelfAttention(nn.Module):
    """Project to q, k, v, attend, project back.

    function: the arguments of attention() under any backend; see layer_functions().
    """

    def __init__(self, config: ModelConfig, backend: Backend, function: dict[str, Any]):
        super().__init__()
        self.backend = backend
        tensors = ("alibi_slopes", "sinks")
        self._function = {name: x for name, x in function.items() if name not in tensors}
        sinks = torch.zeros(config.num_heads) if "sinks" in function else None  # (H,)
        if function.get("sinks") == "true":
            self.sinks = nn.Parameter(sinks)
        else:
            # buffers move with the model's device, and are in no checkpoint
            self.register_buffer("sinks", sinks, persistent=False)
        self.register_buffer("alibi_slopes", function.get("alibi_slopes"), persistent=False)
        self.head_dim = config.head_dim
        self.heads_of_qkv = (config.num_heads, config.kv_heads, config.kv_heads)
        self.qk_norm = config.qk_norm
        rows = tuple(heads * self.head_dim for heads in self.heads_of_qkv)
        self.qkv = nn.Linear(config.hidden_size, sum(rows), bias=config.bias)
        self.qkv.rows = rows  # Muon treats q, k and v as three matrices
        self.proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.bias)
        self.look = QUIET
        self.max_score: Tensor | None = None  # (B, H) of the last call under GPT.looking()
        self.shards: Shards | None = None  # the ranks that share a sequence; see GPT.sharded()
        # the module of a backend that brings one, used only under that backend; see build_own()
        self.register_module("own", None)
        self.brought_by = backend.module

    def build_own(self, config: ModelConfig, layer: int) -> None:
        """Build the module of a backend that brings one; see Backend.module."""
        if self.brought_by is not None:
            self.own = build_module(
                self.backend,
                **config.attention_sizes,
                max_seq_len=config.max_seq_len,
                layer=layer,
            )

    def forward(
        self,
        x: Tensor,
        rope: Rope | None,
        document_ids: Tensor | None,
        cache: LayerCache | None,
    ) -> Tensor:
        """From x (B, N, C) to (B, N, C)."""
        q, k, v = self.heads(self.qkv(x), rope)
        out, self.max_score = self.attend(q, k, v, document_ids=document_ids, cache=cache)
        return self.proj(out)

    @property
    def function(self) -> dict[str, Any]:
        """The arguments of attention() under any backend; see layer_functions()."""
        tensors = {"alibi_slopes": self.alibi_slopes, "sinks": self.sinks}
        # not a | b: graphs of torch 2.11 do not check the keys of a dict that stands left of |. The
        # graph of a layer without a window would serve a layer with one too
        return {**self._function, **{name: x for name, x in tensors.items() if x is not None}}

    def heads(self, qkv: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, H, N, D), k and v (B, H_kv, N, D), with QK-norm and RoPE applied."""
        heads = qkv.unflatten(-1, (-1, self.head_dim))  # (B, N, H + 2 H_kv, D)
        # views of one tensor: a backend that needs contiguous memory makes its own copies
        q, k, v = (t.transpose(1, 2) for t in heads.split(self.heads_of_qkv, dim=2))
        if self.qk_norm:
            # without gains every row of q and k has length sqrt(D), so no scaled score exceeds
            # sqrt(D)
            q, k = (F.rms_norm(t, (self.head_dim,), eps=NORM_EPS) for t in (q, k))
        if rope is not None:
            q, k = (apply_rope(t, *rope) for t in (q, k))
        # autocast narrows only the projection; QK-norm and RoPE may widen q and k
        return q.to(v.dtype), k.to(v.dtype), v

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        document_ids: Tensor | None,
        cache: LayerCache | None,
        exchanged: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The concatenated outputs of all heads, (B, N, C), and each head's largest score. For
        exchanged, see Shards.attention(): then the outputs are those of this rank's heads.
        """
        call = attention if cache is None else cache.attend
        if self.shards is not None:
            call = partial(self.shards.attention, attention, exchanged=exchanged)
        brought = self.own is not None and self.backend.module is self.brought_by
        own = {"module": self.own} if brought else {}
        # the causal mask is aligned bottom-right: right for N = M and for new tokens after a cache
        output = call(
            q,
            k,
            v,
            backend=self.backend,
            causal=True,
            document_ids=document_ids,
            return_max_score=self.look,
            **self.function,
            **own,
        )  # out is (B, H, N, D)
        return output.out.transpose(1, 2).flatten(2), getattr(output, "max_score", None)


def mlp_width(config: ModelConfig) -> int:
    """Number of input features of the MLP's second matrix."""
    if config.activation == "swiglu":
        # 8/3 C rounded up to a multiple of 64, so that the matrices divide into whole tiles
        return 64 * -(-8 * config.hidden_size // (3 * 64))
    return 4 * config.hidden_size


class MLP(nn.Module):
    """gelu: the tanh form at width 4 C, as in GPT-2. swiglu: silu(gate) * up at 8/3 C, which has as
    many parameters.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gated = config.activation == "swiglu"
        width = mlp_width(config)
        self.up = nn.Linear(
            config.hidden_size, 2 * width if self.gated else width, bias=config.bias
        )
        if self.gated:
            self.up.rows = (width, width)  # Muon treats gate and up as two matrices
        self.down = nn.Linear(width, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activate(self.up(x)))

    def activate(self, hidden: Tensor) -> Tensor:
        if not self.gated:
            return gelu(hidden)
        gate, up = hidden.chunk(2, dim=-1)
        return F.silu(gate) * up


def build_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "layernorm":
        return nn.LayerNorm(config.hidden_size, eps=NORM_EPS, bias=config.bias)
    return nn.RMSNorm(config.hidden_size, eps=NORM_EPS)


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: ModelConfig, backend: Backend, function: dict[str, Any]):
        super().__init__()
        self.config = config
        self.attention_norm = build_norm(config)
        self.attention = CausalSelfAttention(config, backend, function)
        self.mlp_norm = build_norm(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        rope: Rope | None,
        document_ids: Tensor | None,
        cache: LayerCache | None,
    ) -> Tensor:
        """The specification of a block, from x (B, N, C) to (B, N, C); see fused_block()."""
        x = x + self.dropout(self.attention(self.attention_norm(x), rope, document_ids, cache))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


def run_block(
    block: Block,
    x: Tensor,
    branch: Tensor | None,
    rope: Rope | None,
    document_ids: Tensor | None,
    cache: LayerCache | None,
) -> tuple[Tensor, Tensor | None]:
    """block(x + branch), as two parts where fused_block() leaves their sum to the next norm.

    Block is the specification. fused_block gives the same result and is its fast form for training
    on a GPU and for checkpointing. Elsewhere it changes nothing.
    """
    if is_fused(block.config, x):
        return fused_block(block, x, branch, rope, document_ids, cache)
    return block(x, rope, document_ids, cache), None


class GPT(nn.Module):
    """A decoder-only language model; see the module's docstring.

    It takes windows, softcap and score_mod from `attention`; they are the same under any backend.
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
        self.config = config
        self.vocab_size = vocab_size
        self.token_embedding = nn.Embedding(vocab_size, config.hidden_size)
        self.position_embedding = (
            nn.Embedding(config.max_seq_len, config.hidden_size)
            if config.positions == "learned"
            else None
        )
        self.dropout = nn.Dropout(config.dropout)
        functions = layer_functions(attention or AttentionConfig(), config)
        self.blocks = nn.ModuleList(Block(config, backend, function) for function in functions)
        self.final_norm = build_norm(config)
        # None if tied: then the token embedding is the output layer
        self.output_layer = (
            None if config.tie_embeddings else nn.Linear(config.hidden_size, vocab_size, bias=False)
        )
        self._initialise()
        self._run_block, self._run_loss = run_block, linear_cross_entropy
        # last, so that the other weights start as with any other attention of the same seed
        for layer, block in enumerate(self.blocks):
            block.attention.build_own(config, layer)

    def _initialise(self) -> None:
        """As in GPT-2: weights from N(0, init_std), divided by sqrt(2 num_layers) in the last layer
        of each residual branch; biases 0.
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                ends_branch = name.endswith(("attention.proj", "mlp.down"))
                depth = 2 * self.config.num_layers if ends_branch else 1
                nn.init.normal_(module.weight, std=self.config.init_std * depth**-0.5)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    @property
    def backend(self) -> Backend:
        """How every layer computes its attention."""
        return self.blocks[0].attention.backend

    @backend.setter
    def backend(self, backend: Backend) -> None:
        for block in self.blocks:
            block.attention.backend = backend

    @property
    def attention_features(self) -> frozenset[str]:
        """The features that a backend needs for the functions of these layers."""
        asked = frozenset().union(*(block.attention.function for block in self.blocks))
        return asked - {"sinks"} | ({"lse"} if "sinks" in asked else set())

    @contextmanager
    def use_backend(self, backend: Backend) -> Iterator[None]:
        """Use another attention inside a `with`: exact attention with the same weights, or one
        wrapped in a probe.
        """
        previous, self.backend = self.backend, backend
        try:
            yield
        finally:
            self.backend = previous

    @contextmanager
    def sharded(self, shards: Shards | None) -> Iterator[None]:
        """Inside, the tokens of a forward pass are this rank's part of longer sequences.

        document_ids cover the whole sequences.
        """
        for block in self.blocks:
            block.attention.shards = shards
        try:
            yield
        finally:
            for block in self.blocks:
                block.attention.shards = None

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Inside, a forward pass also keeps the largest score of each head, for max_scores()."""
        for block in self.blocks:
            block.attention.look = LOOKING
        try:
            yield
        finally:
            for block in self.blocks:
                block.attention.look = QUIET

    def max_scores(self) -> Tensor:
        """The largest scores of the last forward pass under looking(), (num_layers, B, H). The
        model then forgets them.
        """
        scores = torch.stack([block.attention.max_score for block in self.blocks])
        self.forget_max_scores()
        return scores

    def forget_max_scores(self) -> None:
        """A compiled graph sets max_score even outside looking(), to undefined values."""
        for block in self.blocks:
            block.attention.max_score = None

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        cache: KVCache | None = None,
        z_loss: float = 0.0,
    ) -> ModelOutput:
        """tokens, targets (B, N) int64. With a cache, the tokens follow those in the cache, which
        stores them too.

        document_ids (B, N) integers: a run of equal ids is a document, and attention stays inside
        it. Positions do not restart with a document: learned ones count through the sequence, and
        rotary ones depend on distances only.

        z_loss is that of linear_cross_entropy(). Raises ValueError for more tokens than the learned
        positions or the cache hold.
        """
        x, rope = self.embed(tokens, cache)
        x = self.dropout(x)
        # fused_block leaves the last sum, x + branch, to the next norm
        branch = None if self._run_block is run_block else first_branch(self.blocks[0], x)
        caches = [None] * len(self.blocks) if cache is None else cache.layers
        for block, layer_cache in zip(self.blocks, caches, strict=True):
            x, branch = self._run_block(block, x, branch, rope, document_ids, layer_cache)
        x = add_norm(x, branch, self.final_norm)[1]
        del branch  # frees memory for the loss
        if targets is not None:
            loss = self._run_loss(x, self.output_weight, targets, z_loss=z_loss)
            return ModelOutput(None, loss)
        return ModelOutput(F.linear(x, self.output_weight), None)  # (B, N, vocab_size)

    def embed(self, tokens: Tensor, cache: KVCache | None) -> tuple[Tensor, Rope | None]:
        """Tokens (B, N) to (B, N, C) with learned positions; and the tables of rotary ones."""
        positions = self._positions(tokens, cache)
        x = self.token_embedding(tokens)
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions)
        if self.config.positions != "rope":
            return x, None
        sizes = {"head_dim": self.config.head_dim, "theta": self.config.rope_theta}
        return x, rope_tables(positions, **sizes)

    def compiled(self, **options: Any) -> "GPT":
        """The same model with compiled blocks; the options are those of torch.compile. Without
        kernels for the loss, it is compiled too.

        One compiled block serves all layers: compiling the whole model takes several times as long.
        """
        # graphs for each kind of layer, with and without gradients. Beyond the limit the rest would
        # silently run uncompiled
        limit = 4 * len(self.blocks) + 8
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)
        made = copy.copy(self)  # shares the parameters and blocks
        made._run_block = torch.compile(run_block, **options)
        if not (TRITON and next(self.parameters()).is_cuda):
            made._run_loss = torch.compile(linear_cross_entropy, **options)
        return made

    def _positions(self, tokens: Tensor, cache: KVCache | None) -> Tensor:
        """The positions of the tokens, (N,)."""
        if (shards := self.blocks[0].attention.shards) is not None:
            return shards.own_positions(tokens)
        past = 0 if cache is None else cache.length
        total, longest = past + tokens.shape[1], self.config.max_seq_len
        if self.position_embedding is not None and total > longest:
            raise ValueError(
                f"{total} tokens are more than the {longest} learned positions "
                "(model.max_seq_len) of this model; "
                "shorten the sequence, or train with a longer seq_len or model.positions=rope"
            )
        if cache is not None:
            return cache.positions(tokens.shape[1], tokens.device)
        return torch.arange(total, device=tokens.device)

    @property
    def output_weight(self) -> Tensor:
        """(vocab_size, C)"""
        return (
            self.token_embedding.weight if self.output_layer is None else self.output_layer.weight
        )

    def flops_per_token(self, seq_len: int, *, causal: bool = False) -> int:
        """Matrix-product FLOPs of one token's forward and backward pass: 6 N + 12 L H Q T (PaLM,
        arXiv:2204.02311, appendix B).

        N counts every parameter except the position and token embeddings, which are looked up, not
        multiplied. The output layer's vocab_size * C counts, even if it is tied to the token
        embedding. L, H and Q are num_layers, num_heads and head_dim, T is seq_len: each query meets
        T keys, though a causal mask hides half of them. With causal=True only the visible keys
        count, (T + 1) / 2 on average, or fewer under a window. Recomputation never counts, and
        documents packed into one sequence count as one.
        """
        multiplied = count_parameters(self)
        if self.position_embedding is not None:
            multiplied -= self.position_embedding.weight.numel()
        if self.output_layer is not None:  # otherwise the token embedding is also the output layer
            multiplied -= self.token_embedding.weight.numel()
        keys_twice = 2 * seq_len * self.config.num_layers
        if causal:
            windows = (block.attention.function.get("window") for block in self.blocks)
            keys_twice = sum(visible_keys_twice(seq_len, window) for window in windows)
        return round(6 * multiplied + 6 * self.config.hidden_size * keys_twice)


def visible_keys_twice(seq_len: int, window: int | None) -> float:
    """Twice the mean number of keys that a query sees under a causal mask: T + 1, or fewer in a
    window.

    The first `window` queries see 1, 2, ..., window keys, the others see window keys.
    """
    width = min(window or seq_len, seq_len)
    return width * (2 * seq_len - width + 1) / seq_len


def count_parameters(model: nn.Module) -> int:
    """The number of parameters; a shared one counts once."""
    return sum(parameter.numel() for parameter in model.parameters())
