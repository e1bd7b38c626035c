"""Predicts how much memory a training step takes, counted from the code, part by part.

predict_peak_bytes(config, vocab_size, backend, dtype, device)    # a run, by its RunConfig
predict_step(model_config, vocab_size=..., batch_size=..., ...)   # a step of a model

For its backward pass a block keeps these bytes per token. C is hidden_size; e is the bytes of an
element of the matrix products, 2 under 16-bit autocast:

    residual stream, twice   4 C + 4 C     float32, the inputs of the two norms
    inputs of the products   e (C + C)     of qkv and of the MLP; proj reads the attention's own
                             output
    attention                e (3 C + C)   q, k, v and out, plus 4 bytes per head for lse; naive
                             keeps (4 + e) N per head instead of lse
    MLP                      e (4 C + 4 C) before and after the gelu

With model.checkpoint=attention a block keeps its input, 4 C, and the attention's line; a compiled
graph keeps only out and lse of that line. With checkpoint=block it keeps its input. Recomputed
tensors exist for one block at a time.

The float32 parameters, their gradients and AdamW's two moments add 16 bytes per parameter. Autocast
adds 16-bit copies of the matrices. The loss adds gradients, which it computes in its forward pass.
The rest is the working memory of the largest phase: the logits of a chunk, the backward pass of an
MLP or of an attention, or the optimizer.

tests/training/test_plan_bytes.py compares the formulas with PyTorch's own count of saved bytes and
of live tensors. Three things are not modelled: gaps in the allocator's blocks; other versions of
torch.compile, which may keep or recompute other tensors; and optim=muon, which has one moment per
matrix instead of AdamW's two.

Dimensions: B batch, N tokens of a sequence, C hidden_size, H query heads, H_kv key/value heads, D
head dim.
"""

from dataclasses import dataclass
from typing import Any

import torch

from attention import Backend
from attention.kernels.tiles import shares_of
from config import ModelConfig
from model.gpt import mlp_width
from model.layer_function import own_module
from model.loss import chunk_rows, padded_vocab
from training.loop.flops import count_parameters
from training.loop.schedule import run_compiles

# one for cuBLAS and one for cuBLASLt, with the CUBLAS_WORKSPACE_CONFIG=:4096:8 that training sets
CUDA_WORKSPACES = 2 * 8 * 4096 * 1024

MATERIALISED = "materialised"
FUSED = "fused"
LIBRARY = "fused by PyTorch"
TILE_LOOP = "tile loop"
RECOMPUTED = "recomputed tile loop"


def kind_of(backend: Backend, device: str) -> str:
    """How a backend uses memory. A user's own backend counts as one that keeps q, k, v, out and
    lse, unless it says otherwise.
    """
    options = backend.options
    if (
        backend.name == "naive"
        or options.get("backend") == "math"
        or (backend.name == "flex" and device == "cpu")
    ):
        return MATERIALISED
    if not backend.observable or options.get("impl") == "triton":
        return LIBRARY if backend.name == "sdpa" else FUSED
    # a defect has no closed-form backward; statistics in the inputs' dtype are too coarse for one
    return TILE_LOOP if backend.exact and options.get("softmax_dtype") != "input" else RECOMPUTED


def mlp_widths(config: ModelConfig) -> tuple[int, int]:
    """Output features of the MLP's first matrix, and input features of its second."""
    width = mlp_width(config)
    return 2 * width if config.activation == "swiglu" else width, width


def matrix_elements(config: ModelConfig) -> int:
    """Elements of the matrices of one block."""
    qkv_heads = config.num_heads + 2 * config.kv_heads
    up, down = mlp_widths(config)
    return config.hidden_size * (qkv_heads * config.head_dim + config.hidden_size + up + down)


def own_parameters(config: ModelConfig, backend: Backend) -> int:
    """Number of parameters that the attention modules of all layers have themselves."""
    if backend.module is None:
        return 0
    with torch.random.fork_rng(devices=[]):
        layers = (own_module(backend, config, layer) for layer in range(config.num_layers))
        return sum(count_parameters(layer) for layer in layers if layer is not None)


def parameter_count(config: ModelConfig, vocab_size: int) -> int:
    """count_parameters(model) without building the model, and without own_parameters()."""
    width, (up, _) = config.hidden_size, mlp_widths(config)
    norm = width * (2 if config.norm == "layernorm" and config.bias else 1)
    block = matrix_elements(config) + 2 * norm
    if config.bias:
        block += 3 * width + 2 * config.kv_heads * config.head_dim + up
    embedding = vocab_size * width * (1 if config.tie_embeddings else 2)
    if config.positions == "learned":
        embedding += config.max_seq_len * width
    return embedding + config.num_layers * block + norm


@dataclass
class StepShape:
    """A training step of batch_size sequences of seq_len tokens, and what decides its memory."""

    config: ModelConfig
    vocab_size: int
    batch_size: int
    seq_len: int
    backend: Backend
    dtype: torch.dtype  # of the matrix products: float32, bfloat16 or float16
    device: str = "cuda"
    compiled: bool = False
    accumulates: bool = False  # gradients of earlier passes exist already
    # ranks share the heads of a sequence (attention/ranks.py), and seq_len is a rank's part
    shares_heads: bool = False
    window: int | None = None  # the widest of the layers; None if one sees all keys
    softcap: float | None = None

    def __post_init__(self) -> None:
        config = self.config
        self.kind = kind_of(self.backend, self.device)
        self.on_cpu = self.device == "cpu"
        self.tokens = self.batch_size * self.seq_len
        self.width = config.hidden_size
        self.element = self.dtype.itemsize
        self.narrow = self.element < 4
        # whether q and k become separate tensors beside the packed qkv
        self.rotates = config.positions == "rope" or config.qk_norm
        # bytes of the residual stream, (B, N, C) in float32
        self.residual = 4 * self.tokens * self.width
        # bytes in the dtype of the products: q (and out), k (and v), q, k and v together, the
        # result of the MLP's first matrix, the input of its second
        self.q = self.element * self.tokens * self.width
        self.k = self.q * config.kv_heads // config.num_heads
        self.qkv = self.q + 2 * self.k
        up, down = mlp_widths(config)
        self.up = self.element * self.tokens * up
        self.down = self.element * self.tokens * down
        # bytes of one dropout mask in a block, and of autocast's copies of a block's matrices
        self.mask = dropout_mask(self, self.element)
        self.copies = self.element * matrix_elements(config) if self.narrow else 0
        # float32 gradients of the MLP's second matrix and of the output layer
        self.d_down = 4 * self.width * down
        self.d_output = 4 * self.width * self.vocab_size


@dataclass(frozen=True)
class PartBytes:
    """Bytes of one part of the model in a training step."""

    saved: int  # kept for the backward pass
    forward: int = 0  # peak of the forward pass, beside saved
    backward: int = 0  # peak of the backward pass, beside saved


def attention_call(step: StepShape) -> PartBytes:
    """One call of the attention, counted from the code of each kind. `saved` has the output, but
    not q, k and v.
    """
    if step.kind == MATERIALISED:
        return materialised_call(step)
    if step.kind in (FUSED, LIBRARY):
        return fused_call(step)
    return tile_loop_call(step)


def probabilities(step: StepShape) -> int:
    """Bytes of the N x N probabilities of all heads, once in float32 and once in v's dtype."""
    return step.tokens * step.config.num_heads * step.seq_len * (4 + step.element)


def materialised_call(step: StepShape) -> PartBytes:
    scores, mask = step.tokens * step.config.num_heads * step.seq_len, step.seq_len**2
    # the result of tanh; a compiled graph keeps it in half the bytes
    capped = (2 if step.compiled else 4) * scores if step.softcap else 0
    # k and v repeated for the query heads. A compiled graph leaves out the mask, and the float32
    # copies of narrow q and k
    operands = 2 * step.q
    if not step.compiled:
        operands = mask + (2 * step.residual + step.q if step.narrow else 2 * step.q)
    # softmax's backward: p (already in saved), its gradient, the result, and on a GPU the product
    # of the first two
    backward = (12 if step.on_cpu else 16) * scores - probabilities(step)
    return PartBytes(
        saved=probabilities(step) + capped + operands,
        forward=(8 if step.narrow else 4) * scores + mask,
        backward=backward + 2 * step.q,
    )


def fused_call(step: StepShape) -> PartBytes:
    lse = 4 * step.tokens * step.config.num_heads
    backward = lse + step.qkv  # rowsum(d_out * out), dq, dk, dv
    if step.kind == LIBRARY and not step.on_cpu:
        # PyTorch's flash kernel sums dq in float32, and copies out and d_out into its own layout
        backward += 2 * step.residual
    elif not step.on_cpu and step.element == 2 and step.config.head_dim in (64, 128):
        # Triton's kernels for Hopper sum dq in float32 too; the plan assumes them on every GPU
        backward += step.residual + lse + dk_dv_of_shares(step)
    return PartBytes(step.q + lse, backward=backward)


def dk_dv_of_shares(step: StepShape) -> int:
    """Bytes of partial dk and dv in Triton's kernels for Hopper, one part for each share of a
    group's query heads, before they are summed. An H200: 132 multiprocessors, 60 MiB of L2 cache.
    """
    heads, kv_heads = step.config.num_heads, step.config.kv_heads
    blocks = step.batch_size * kv_heads * -(-step.seq_len // 128)
    streamed, cache = 8 * step.seq_len * step.config.head_dim, 60 * 2**20
    shares = shares_of(
        heads // kv_heads,
        blocks,
        132,
        equal=step.window is not None,
        streamed=streamed,
        cache=cache,
    )
    return 0 if shares == 1 else 8 * shares * blocks * 128 * step.config.head_dim


def tile_loop_call(step: StepShape) -> PartBytes:
    heads, head_dim = step.config.num_heads, step.config.head_dim
    block_q = step.backend.options.get("block_q") or 128
    block_kv = step.backend.options.get("block_kv") or 64
    rows = step.batch_size * heads * min(block_q, step.seq_len)  # of one tile, in all heads
    tile = rows * min(block_kv, step.seq_len)
    row_tile = 12 * rows * head_dim
    lse = 4 * step.tokens * heads
    forward = max(14 * tile + step.q + row_tile, 2 * step.q) + lse
    d_kv = 8 * step.tokens * step.config.kv_heads * head_dim  # float32
    # at the end the gradients are joined and cast, while the last tile is still there
    end = 12 * tile + row_tile + d_kv + 2 * step.q + (2 * step.k if step.narrow else 0)
    if step.kind == TILE_LOOP:
        saved = step.q + lse
        return PartBytes(saved, forward - saved, max(20 * tile + row_tile + d_kv + step.q, end))
    # inside one tile of queries, plain autograd keeps every tile of keys and an accumulator for
    # each
    score = (14 if step.narrow else 9) + 5 * head_dim / block_kv + (4 if step.softcap else 0)
    keys = min(step.seq_len, (step.window or step.seq_len) + block_q)
    backward = round(rows * keys * score) + max(d_kv + 2 * step.q, end - 24 * tile)
    return PartBytes(lse, forward - lse, backward)


def dropout_mask(step: StepShape, element: int) -> int:
    """Bytes that one dropout of (B, N, C) keeps."""
    if not step.config.dropout:
        return 0
    # the CPU's dropout keeps its mask in the dtype of its input
    wide = step.on_cpu and not step.compiled
    return step.tokens * step.width * (element if wide else 1)


def embedding_saved(step: StepShape) -> int:
    """Tokens, positions, the dropout's mask, and RoPE's tables."""
    saved = 8 * step.tokens + 8 * step.seq_len + dropout_mask(step, 4)
    if step.config.positions == "rope":
        saved += 4 * step.seq_len * step.config.head_dim
    return saved


def norm_saved(step: StepShape) -> int:
    """The input of a norm and its statistics."""
    if step.config.norm == "layernorm":
        # a compiled graph on the CPU keeps no mean; on a GPU our own kernel keeps it, compiled or
        # not
        return step.residual + step.tokens * (4 if step.compiled and step.on_cpu else 8)
    # on the CPU rms_norm is several operators, which keep the normalised input too
    unfused = step.on_cpu and not step.compiled
    return step.residual * (2 if unfused else 1) + 4 * step.tokens


def qk_norm_saved(step: StepShape) -> int:
    if not step.config.qk_norm:
        return 0
    statistics = 4 * step.tokens * (step.config.num_heads + step.config.kv_heads)
    if step.narrow and not step.compiled:
        return statistics + (step.q + step.k) * 4 // step.element
    return statistics + (step.qkv if step.kind == MATERIALISED else 0)


def qkv_saved(step: StepShape) -> int:
    """The part of q, k and v that the attention keeps."""
    if step.kind == MATERIALISED:
        # it keeps repeated k and v instead, and float32 copies of narrow q and k
        return step.q if step.compiled or not step.narrow else 0
    # where ranks exchange heads, the exchanged q and k replace the rotated ones
    beside = step.rotates and not step.shares_heads
    return step.qkv + (step.q + step.k if beside else 0)


def merged_saved(step: StepShape) -> int:
    """The copy of the attention's output that proj keeps, if any."""
    merged = step.config.num_heads > 1
    if step.kind in (FUSED, LIBRARY):
        # no copy where the kernel writes (B, N, H, D): Triton's does, PyTorch's follows q's layout
        copied = step.rotates and step.backend.name != "triton"
        merged &= copied or step.shares_heads  # the exchanged output
    elif step.kind != TILE_LOOP:
        merged = True  # the other two kinds keep no output themselves
    return step.q if merged else 0


def attention_bytes(step: StepShape) -> PartBytes:
    call = attention_call(step)
    saved = qkv_saved(step) + call.saved + merged_saved(step)
    return PartBytes(saved, call.forward, call.backward)


def activation_saved(step: StepShape) -> int:
    """The input of `down`, and for swiglu silu(gate), which a compiled graph recomputes."""
    gated = step.config.activation == "swiglu" and not step.compiled
    return step.down * (2 if gated else 1)


def mlp_bytes(step: StepShape) -> PartBytes:
    """The MLP with its norm and its dropout."""
    inputs = norm_saved(step) + step.q
    if step.compiled and step.on_cpu and step.config.norm == "layernorm" and not step.mask:
        inputs -= step.residual - step.q  # the graph keeps the branch and adds it again
    # the product reads a copy of the residual stream's gradient: cast, or masked by dropout
    copy = step.q if step.narrow or step.config.dropout else 0
    # the gradient of the activation's input is as wide as `up`
    d_hidden = step.up if step.config.activation == "swiglu" else step.down
    return PartBytes(
        saved=inputs + step.up + activation_saved(step) + step.mask,
        backward=step.residual + max(copy + step.down, d_hidden),
    )


def loss_bytes(step: StepShape) -> PartBytes:
    """The loss, which computes its gradients in the forward pass, a chunk of logits at a time."""
    element, compiled_float32 = step.element, step.compiled and not step.narrow
    rows = min(chunk_rows(step.tokens, step.vocab_size, step.width, step.device), step.tokens)
    chunks = -(-step.tokens // rows)
    padded = padded_vocab(step.vocab_size, step.device)
    matrix = padded * step.width  # elements of the output layer
    # x in float32 and in the dtype of the product, and a copy of the output layer
    forward = step.residual + (step.q if step.narrow else 0)
    if step.narrow or padded > step.vocab_size:
        forward += element * matrix
    if chunks > 1:
        forward += step.q + 4 * matrix
    # a chunk's softmax, in float32
    softmax = rows * padded * (2 * element if step.compiled else 8)
    if not step.on_cpu:
        # one kernel writes the gradient over the logits; a compiled graph in float32 sums the
        # gradients of the weights at the end
        softmax = element * (rows * padded + (chunks - 1) * matrix * compiled_float32)
    # a chunk's gradients of its logits, of x and of the weights
    products = element * (rows * (padded + 2 * step.width) + matrix)
    if step.narrow and chunks == 1:
        products += 4 * matrix
    return PartBytes(
        saved=step.q + matrix * (4 if chunks > 1 or not step.compiled else element),
        forward=forward + max(softmax, products),
        backward=step.residual + step.d_output,
    )


def before_saved(step: StepShape) -> int:
    """The first norm of a block, the input of qkv, and QK-norm."""
    # without our kernel, a compiled graph keeps the branch beside the residual stream
    left = step.q if step.compiled and step.on_cpu and step.config.checkpoint == "none" else 0
    return norm_saved(step) + left + step.q + qk_norm_saved(step)


def block_saved(step: StepShape) -> int:
    """All that a block keeps without checkpointing."""
    return before_saved(step) + attention_bytes(step).saved + step.mask + mlp_bytes(step).saved


def kept_by_block(step: StepShape) -> tuple[int, int]:
    """Bytes that a block keeps on the device under model.checkpoint: outside of its attention, and
    in it.
    """
    checkpoint, attention = step.config.checkpoint, attention_bytes(step).saved
    if checkpoint == "none":
        return block_saved(step) - attention, attention
    if checkpoint == "block":
        attention = 0
    elif step.compiled:
        attention -= qkv_saved(step)  # a compiled graph computes q, k and v again
    return step.residual, attention


@dataclass(frozen=True)
class StepBytes:
    """One training step."""

    parameters: int
    gradients: int
    optimizer: int  # AdamW's two moments
    weight_copies: int  # the matrices in the dtype of the products
    blocks: int  # activations kept by the embedding, the blocks outside attention, the last norm
    # what the attention calls keep: q, k, v, out and lse, or the N x N probabilities
    attention: int
    scores: int  # the part of attention that grows with N x N
    loss: int  # kept by the loss: the gradients of its input and of the output layer
    working: int  # the rest of the peak: gradients of activations, temporaries, libraries
    peak: int  # of the whole step

    @property
    def saved(self) -> int:
        """What a forward pass keeps for its backward pass."""
        return self.weight_copies + self.blocks + self.attention + self.loss


def predict_step(config: ModelConfig, **sizes: Any) -> StepBytes:
    """Bytes of one step: forward, backward and AdamW. `sizes` are the other fields of StepShape.

    Parameters are float32. The peak is the largest of the phases below, and leaves out the Python
    process and the CUDA context.
    """
    step = StepShape(config, **sizes)
    count = parameter_count(config, step.vocab_size) + own_parameters(config, step.backend)
    layers, loss = config.num_layers, loss_bytes(step)
    kept, attention = kept_by_block(step)
    kept_copies = layers * step.copies if config.checkpoint == "none" else 0
    ends = embedding_saved(step) + norm_saved(step)
    before_loss = kept_copies + layers * (kept + attention) + ends

    state = (16 if step.accumulates else 12) * count + before_loss
    phases = {
        "loss forward": state + loss.forward,
        "loss backward": state + loss.saved + loss.backward,
        "optimizer": 16 * count,
    }
    if config.checkpoint != "none":
        # autocast keeps its copies of the matrices until the loss has run
        phases["loss forward"] += layers * step.copies
    # the last norm is done, and the output layer has its gradient
    state += step.d_output - norm_saved(step)
    if config.checkpoint == "attention":
        phases |= phases_of_halves(step, state - attention)
    else:
        phases |= phases_of_block(step, state)

    workspaces = CUDA_WORKSPACES if step.device == "cuda" else 0
    peak = round(max(phases.values())) + workspaces
    return StepBytes(
        parameters=4 * count,
        gradients=4 * count,
        optimizer=8 * count,
        weight_copies=kept_copies,
        blocks=layers * kept + ends,
        attention=layers * attention,
        scores=layers * probabilities(step) if attention and step.kind == MATERIALISED else 0,
        loss=loss.saved,
        working=peak - 12 * count - before_loss - loss.saved,
        peak=peak,
    )


def phases_of_block(step: StepShape, state: int) -> dict[str, float]:
    """Peaks while the last block runs backward, if it keeps its activations or is recomputed as a
    whole. `state` is what the step holds at that time.
    """
    attention, mlp = attention_bytes(step), mlp_bytes(step)
    mlp_work = mlp.backward + step.d_down
    # local variables of the functions around the call: the normalised input, and qkv if the call
    # does not keep it
    variables = step.residual + (step.qkv if step.kind == MATERIALISED else 0)
    forward = attention.forward + (0 if step.compiled else variables)
    d_out = step.residual + (step.q if step.narrow or step.config.dropout else 0)
    if step.config.checkpoint == "block":
        # the block's forward pass runs again beside the incoming gradient
        state += block_saved(step) - step.residual + step.copies
        forward += step.residual
    else:
        forward -= step.d_output
    return {
        "mlp": state + mlp_work,
        "attention forward": state - mlp.saved + forward,
        "attention backward": state - mlp.saved + d_out + attention.backward,
    }


def phases_of_halves(step: StepShape, state: int) -> dict[str, float]:
    """Peaks while the last block runs backward, if the parts before and after its attention are
    recomputed separately. `state` is what the step holds at that time, without the block's
    attention.
    """
    attention, mlp, residual = attention_bytes(step), mlp_bytes(step), step.residual
    mlp_work = mlp.saved + mlp.backward + step.mask + step.d_down
    before = step.qkv + residual + before_saved(step) + residual
    # q, k and v exist even if the call does not keep them
    forward = attention.forward + (step.qkv if step.kind == MATERIALISED else 0)
    held = state + attention.saved
    return {
        "mlp": held + step.copies + mlp_work,
        "attention forward": held + residual + forward,
        "attention backward": held + residual + step.q + attention.backward,
        "projection": state + before,
    }


def predict_peak_bytes(
    config: Any,
    vocab_size: int,
    backend: Backend,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    shares_heads: bool = False,
) -> StepBytes:
    """predict_step() of a run: config is its RunConfig; dtype and device are those it uses.

    The peak predicts memory/peak_gib, which counts only tensors, on a CPU as on a GPU. Python and
    its libraries, 0.3 to 0.7 GiB, are not included.
    """
    device = torch.device(device).type
    return predict_step(
        config.model,
        vocab_size=vocab_size,
        batch_size=config.batch_size,
        seq_len=config.seq_len,
        backend=backend,
        dtype=dtype,
        device=device,
        compiled=run_compiles(config, backend, device),
        accumulates=config.accumulation_steps > 1,
        shares_heads=shares_heads,
        **layer_sizes(config),
    )


def layer_sizes(config: Any) -> dict[str, Any]:
    """Settings of the layers' functions that decide memory, as fields of StepShape."""
    windows = config.attention.layer_windows(config.model.num_layers)
    widest = None if None in windows else max(windows)
    return {"window": widest, "softcap": config.attention.softcap}
