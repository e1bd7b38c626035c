"""The GPT: pre-norm transformer blocks over a residual stream, with the attention chosen from
outside.

    tokens -> embedding (+ learned position) -> [ x + attention(norm(x)); x + mlp(norm(x)) ] *
    num_layers -> norm -> output layer

With `model=gpt2` this is GPT-2 (Radford et al. 2019) to the last bias. `model=modern` switches on
what came since: RoPE, RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467), QK-norm (Henry et al.
2020, arXiv:2010.04245), grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) and SwiGLU
(Shazeer 2020, arXiv:2002.05202). Either way the attention itself is one call of `attention()`.

Dimensions: B batch, N tokens of this call, M tokens so far (N without a cache), C hidden_size, H
query heads, H_kv key/value heads, D head dim.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import Backend, attention
from config import ModelConfig
from model.checkpointing import Result, elementwise_recomputed, in_chunks, kept_on_host, recomputed
from model.gpt2_weights import from_gpt2
from model.kv_cache import KVCache, LayerCache
from model.loss import linear_cross_entropy
from model.norm import NORM_EPS, add_norm, add_norm_product, build_norm
from model.rope import apply_rope, rope_tables


class ModelOutput(NamedTuple):
    """What GPT returns: logits without targets, the loss with them. Never both: the loss is
    computed without the whole of the logits.
    """

    logits: Tensor | None  # (B, N, vocab_size)
    loss: Tensor | None  # scalar float32, mean over targets != -100


class CausalSelfAttention(nn.Module):
    """From what qkv gives back to q, k and v, and attend; Block calls qkv before and proj after."""

    def __init__(self, config: ModelConfig, backend: Backend):
        super().__init__()
        self.backend = backend
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_heads,
            config.kv_heads,
            config.head_dim,
        )
        self.qk_norm = config.qk_norm
        self.qkv = nn.Linear(
            config.hidden_size,
            (self.num_heads + 2 * self.num_kv_heads) * self.head_dim,
            bias=config.bias,
        )
        self.qkv.rows = tuple(
            heads * self.head_dim
            for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        )  # for Muon
        self.proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.bias)

    def heads(
        self, qkv: Tensor, rope: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, N, H, D) and k, v (B, N, H_kv, D), normalised and turned."""
        heads = qkv.unflatten(-1, (-1, self.head_dim))  # (B, N, H + 2 H_kv, D)
        # views of one tensor, (B, H or H_kv, N, D): a backend that needs contiguous memory copies
        # for itself
        q, k, v = (
            t.transpose(1, 2)
            for t in heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=2)
        )
        if self.qk_norm:
            # no gain: every row of q and k has length sqrt(D), so no scaled score exceeds sqrt(D)
            q, k = (F.rms_norm(t, (self.head_dim,), eps=NORM_EPS) for t in (q, k))
        if rope is not None:
            q, k = (apply_rope(t, *rope) for t in (q, k))
        # under autocast only the projection is narrow, and the steps above may widen
        return q.to(v.dtype).transpose(1, 2), k.to(v.dtype).transpose(1, 2), v.transpose(1, 2)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        document_ids: Tensor | None,
        cache: LayerCache | None,
    ) -> Tensor:
        """The heads' outputs side by side, (B, N, C), from what heads() gives."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, N, D)
        if cache is not None:
            k, v = cache.extend(k, v)  # (B, H_kv, M, D)
        # causal is aligned bottom-right: right for N = M and for new tokens after a cache alike
        out = attention(
            q, k, v, backend=self.backend, causal=True, document_ids=document_ids
        ).out  # (B, H, N, D)
        return out.transpose(1, 2).flatten(2)


def gelu(x: Tensor) -> Tensor:
    """GELU in the tanh form (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""
    return (
        gelu_by_sigmoid(x)
        if torch.compiler.is_compiling() and x.device.type == "cuda"
        else F.gelu(x, approximate="tanh")
    )


def gelu_by_sigmoid(x: Tensor) -> Tensor:
    """The same: x (1 + tanh(u)) / 2 = x sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3).

    For torch.compile: the tanh that it has on a GPU takes so many instructions, forward and
    backward, that memory waits for it.
    """
    twice = 2 * math.sqrt(2 / math.pi)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.sigmoid(wide * (twice + twice * 0.044715 * wide.square()))).to(x.dtype)


class MLP(nn.Module):
    """gelu: the tanh form at 4 C, as GPT-2. swiglu: silu(gate) * up at 8/3 C, which costs as many
    parameters.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gated = config.activation == "swiglu"
        # 8/3 C rounded up to a multiple of 64, so that the matrices divide into whole tiles
        width = (
            64 * -(-8 * config.hidden_size // (3 * 64)) if self.gated else 4 * config.hidden_size
        )
        self.up = nn.Linear(
            config.hidden_size, 2 * width if self.gated else width, bias=config.bias
        )
        if self.gated:
            self.up.rows = (width, width)  # for Muon
        self.down = nn.Linear(width, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.contract(self.up(x))

    def contract(self, hidden: Tensor) -> Tensor:
        """From what `up` gave back to C."""
        if not self.gated:
            return self.down(gelu(hidden))
        gate, up = hidden.chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: ModelConfig, backend: Backend):
        super().__init__()
        self.attention_norm = build_norm(config)
        self.attention = CausalSelfAttention(config, backend)
        self.mlp_norm = build_norm(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)
        self.checkpoint, self.chunk_tokens, self.offload = (
            config.checkpoint,
            config.chunk_tokens,
            config.offload,
        )

    def forward(
        self,
        x: Tensor,
        branch: Tensor | None,
        *,
        rope: tuple[Tensor, Tensor] | None,
        document_ids: Tensor | None,
        cache: LayerCache | None,
    ) -> tuple[Tensor, Tensor | None]:
        """x (B, N, C) and the branch that is still to be added to it, in and out: a sum and the
        norm after it are one step on a GPU.
        """
        attend = partial(self.attention.attend, document_ids=document_ids, cache=cache)
        if self.checkpoint in ("attention", "block"):
            return self.recomputing(x if branch is None else x + branch, rope, attend), None
        x, qkv = self.before(x, branch, rope)
        return self.after(x, attend(*qkv))

    def before(
        self, x: Tensor, branch: Tensor | None, rope: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The whole of x, and from it q, k and v, (B, N, H or H_kv, D)."""
        x, qkv = self.normed(x, branch, self.attention_norm, self.attention.qkv)
        return x, self.again(partial(self.attention.heads, rope=rope))(qkv)

    def after(self, x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """x with what attention (out) adds to it, and what the MLP is to add."""
        x, hidden = self.normed(
            x, self.dropout(self.attention.proj(out)), self.mlp_norm, self.mlp.up
        )
        return x, self.dropout(self.again(self.mlp.contract)(hidden))

    def normed(
        self, x: Tensor, branch: Tensor | None, norm: nn.Module, product: nn.Linear
    ) -> tuple[Tensor, Tensor]:
        """x + branch, and the product of its norm."""
        if self.elementwise:
            return add_norm_product(x, branch, norm, product)
        x, y = add_norm(x, branch, norm)
        return x, product(y)

    def again(self, function: Callable[[Tensor], Result]) -> Callable[[Tensor], Result]:
        return elementwise_recomputed(function) if self.elementwise else function

    @property
    def elementwise(self) -> bool:
        return self.checkpoint == "elementwise" and torch.is_grad_enabled()

    def recomputing(
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None, attend: Callable[..., Tensor]
    ) -> Tensor:
        """From the whole of x to the whole of x, for checkpoint=attention and block. What autograd
        keeps, and where, is theirs to say.
        """
        keep = self.checkpoint if torch.is_grad_enabled() else "none"

        def before(x: Tensor, *rope: Tensor) -> tuple[Tensor, ...]:
            return self.before(x, None, rope or None)[1]

        def after(x: Tensor, out: Tensor) -> Tensor:
            x, branch = self.after(x, out)
            return x + branch

        def run(x: Tensor) -> Tensor:
            parts = before, after
            # the parts in which a token meets no other; with chunks, recomputing the whole block
            # would hold all of them at once again
            if keep == "attention" or (keep == "block" and self.chunk_tokens is not None):
                parts = [recomputed(part, dropout=self.dropout.p) for part in parts]
            qkv = in_chunks(
                parts[0], x, *(table.unsqueeze(0) for table in rope or ()), size=self.chunk_tokens
            )
            return in_chunks(parts[1], x, attend(*qkv), size=self.chunk_tokens)

        with kept_on_host(x) if self.offload and keep != "none" else nullcontext():
            return recomputed(run, dropout=self.dropout.p)(x) if keep == "block" else run(x)


class GPT(nn.Module):
    """A decoder-only language model; see the module's docstring."""

    def __init__(self, config: ModelConfig, *, vocab_size: int, backend: Backend):
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
        self.blocks = nn.ModuleList(Block(config, backend) for _ in range(config.num_layers))
        self.final_norm = build_norm(config)
        # tied, it is the token embedding itself and no second entry in the state dict
        self.output_layer = (
            None if config.tie_embeddings else nn.Linear(config.hidden_size, vocab_size, bias=False)
        )
        self._initialise()

    def _initialise(self) -> None:
        """GPT-2's: weights N(0, init_std), the last layer of each residual branch divided by sqrt(2
        num_layers), biases 0.
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
        """The attention of every layer."""
        return self.blocks[0].attention.backend

    @backend.setter
    def backend(self, backend: Backend) -> None:
        for block in self.blocks:
            block.attention.backend = backend

    @contextmanager
    def use_backend(self, backend: Backend) -> Iterator[None]:
        """Another attention for a block of code: the same weights under exact attention, or with a
        probe around it.
        """
        previous, self.backend = self.backend, backend
        try:
            yield
        finally:
            self.backend = previous

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        cache: KVCache | None = None,
    ) -> ModelOutput:
        """tokens, targets (B, N) int64. With a cache, the tokens follow those it holds, and it
        holds them afterwards.

        document_ids (B, N) integers: a run of equal ids is a document, and attention stays inside
        it. Positions do not start again with a document: learned ones count through the sequence,
        and to rotary ones only distances matter.

        Raises ValueError for more tokens than the learned positions or the cache hold.
        """
        past = 0 if cache is None else cache.length
        total = past + tokens.shape[1]
        if self.position_embedding is not None and total > self.config.max_seq_len:
            raise ValueError(
                f"{total} tokens are more than the {self.config.max_seq_len} learned positions "
                "(model.max_seq_len) of this model; "
                "shorten the sequence, or train with a longer seq_len or model.positions=rope"
            )
        if cache is not None and total > cache.max_len:
            raise ValueError(
                f"{past} cached and {tokens.shape[1]} new tokens are more than the KVCache's "
                f"max_len={cache.max_len}"
            )

        positions = torch.arange(past, total, device=tokens.device)
        x = self.token_embedding(tokens)  # (B, N, C)
        rope = None
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions)
        else:
            rope = rope_tables(
                positions, head_dim=self.config.head_dim, theta=self.config.rope_theta
            )
        x, branch = self.dropout(x), None  # what is to be added to x waits for the next norm
        for i, block in enumerate(self.blocks):
            x, branch = block(
                x,
                branch,
                rope=rope,
                document_ids=document_ids,
                cache=None if cache is None else cache.layers[i],
            )
        x = add_norm(x, branch, self.final_norm)[1]
        del branch  # the loss needs the room
        if targets is not None:
            return ModelOutput(None, linear_cross_entropy(x, self._output_weight, targets))
        return ModelOutput(F.linear(x, self._output_weight), None)  # (B, N, vocab_size)

    @property
    def _output_weight(self) -> Tensor:
        return (
            self.token_embedding.weight if self.output_layer is None else self.output_layer.weight
        )

    def flops_per_token(self, seq_len: int, *, causal: bool = False) -> int:
        """Matrix-product FLOPs of one token's forward and backward pass: 6 N + 12 L H Q T (PaLM,
        arXiv:2204.02311, appendix B).

        N counts every parameter except the position and token embeddings, which are looked up, not
        multiplied; the output layer's vocab_size * C counts, also where it is tied to the token
        embedding. L, H and Q are num_layers, num_heads and head_dim, T is seq_len: each query meets
        T keys, though a causal mask hides half of them. With causal=True only the keys that it may
        see count, (T + 1) / 2 in the mean. Either way recomputation is no work, and documents
        packed into one sequence count as one.
        """
        embeddings = sum(
            table.weight.numel()
            for table in (self.token_embedding, self.position_embedding)
            if table is not None
        )
        multiplied = count_parameters(self) - embeddings
        if self.output_layer is None:
            multiplied += self.token_embedding.weight.numel()
        keys_twice = seq_len + 1 if causal else 2 * seq_len
        return 6 * multiplied + 6 * self.config.num_layers * self.config.hidden_size * keys_twice

    def load_gpt2_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take over GPT-2 weights in Hugging Face's naming, as `GPT2LMHeadModel` and `GPT2Model`
        save them.

        Raises one ValueError that names every missing, unexpected or wrong-shape tensor; the model
        is unchanged then.
        """
        self.load_state_dict(from_gpt2(state_dict, self.state_dict(), self.config))


def count_parameters(model: nn.Module) -> int:
    """Every parameter once, shared ones too."""
    return sum(parameter.numel() for parameter in model.parameters())
