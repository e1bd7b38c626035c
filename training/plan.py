"""How much memory a training step takes, before it runs: counted from what the model keeps for its
backward pass.

predict_peak_gib(config, vocab_size, backend, dtype, device)    # one figure for a run
predict_step(...)                                               # the same, part by part

Bytes a token of one block, eager or compiled, C hidden_size, e bytes of an element of the matrix
products (2 under 16-bit autocast):

    residual stream, twice   4 C + 4 C     float32, the inputs of the two norms
    inputs of the products   e (C + C)     of qkv and of the MLP; proj reads the attention's own
                             output
    attention                e (3 C + C)   q, k, v and out, with 4 bytes a row of lse; naive keeps
                             (4 + e) N a head and row instead of lse
    MLP                      e (4 C + 4 C) before and after the gelu

With model.checkpoint=attention a block keeps its input, 4 C, and the attention's line, of which a
compiled graph keeps out and lse alone; with checkpoint=block its input alone, and with offload=true
that is on the host. What it computes again is there for one block at a time, or for chunk_tokens of
one block.

Beside them the float32 parameters, their gradients and AdamW's two moments (16 bytes a parameter),
the 16-bit copies of the matrices that autocast makes, the gradients that the loss has ready, and
what the step that needs most of it at once works with: the logits of a chunk, the backward pass of
an MLP or of an attention, or the optimizer.

The formulas are held to PyTorch's own count of saved bytes and of live tensors by
tests/training/test_plan_bytes.py. Not modelled: gaps in the allocator's blocks, that torch.compile
may keep or recompute other tensors than in the version these formulas were read from, and
optim=muon, whose matrices have one moment where AdamW's have two.

Dimensions: B batch, N tokens of a sequence, T = B N tokens of a pass, C hidden_size, H query heads,
H_kv key/value heads, D head dim, S = B H N N scores.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from attention import Backend
from config import ModelConfig
from model.loss import chunk_rows, padded_vocab
from training.memory import GIB
from training.schedule import will_compile

# cuBLAS and cuBLASLt take one each, at the CUBLAS_WORKSPACE_CONFIG=:4096:8 that training sets
CUDA_WORKSPACES = 2 * 8 * 4096 * 1024

MATERIALISED, FUSED, LIBRARY, TILE_LOOP, RECOMPUTED = (
    "materialised",
    "fused",
    "fused by PyTorch",
    "tile loop",
    "recomputed tile loop",
)


def kind_of(backend: Backend, device: str) -> str:
    """How a backend uses memory. A user's own that is none of ours is taken for one that keeps q,
    k, v, out and lse.
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
    # a defect has no closed backward, and statistics in the inputs' dtype are too coarse for one
    return TILE_LOOP if backend.exact and options.get("softmax_dtype") != "input" else RECOMPUTED


@dataclass(frozen=True)
class AttentionBytes:
    """One attention call, above its inputs."""

    forward: int  # peak without gradients
    saved: int  # kept for the backward pass, its output included, q, k and v not
    forward_peak: int  # peak with gradients, the saved included
    backward_peak: int  # peak of the backward pass, the saved included
    scores: int = 0  # the part of the saved that grows with N x N

    @property
    def training(self) -> int:
        return max(self.forward_peak, self.backward_peak)


def attention_bytes(
    kind: str,
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    seq_len: int,
    head_dim: int,
    element: int,
    device: str = "cuda",
    block_q: int = 128,
    block_kv: int = 64,
    compiled: bool = False,
) -> AttentionBytes:
    """What one causal call allocates, counted from the code of each kind. element: bytes of an
    element of q.

    A compiled graph leaves out the masks and float32 copies of q and k that naive keeps when it
    runs operator by operator.
    """
    rows = batch * heads * seq_len
    size, kv_size = (
        rows * head_dim,
        batch * kv_heads * seq_len * head_dim,
    )  # elements of q and out; of k and v
    scores, mask = rows * seq_len, seq_len**2
    wide = element if element > 4 else 4
    if kind == MATERIALISED:
        # p, and p in v's dtype; what is cast for nothing is the same tensor
        narrow = element if element < 4 else 0
        kept = scores * (wide + (narrow or wide))
        # k and v repeated for the query heads, q and k in float32
        operands = size * (2 * element if compiled or not narrow else 2 * wide + element) + (
            0 if compiled else mask
        )
        saved = kept + operands
        forward = 3 * wide * scores + mask + 2 * element * size
        # softmax's backward: p, its gradient, the result, and on a GPU the product of the first two
        during = (3 if device == "cpu" else 4) * wide * scores
        return AttentionBytes(
            forward,
            saved,
            (3 * wide + narrow) * scores + mask + operands,
            during + operands + 2 * element * size,
            kept,
        )
    if kind in (FUSED, LIBRARY):
        saved = element * size + 4 * rows
        # rowsum(d_out * out), dq, dk, dv
        work = element * (size + 2 * kv_size) + 4 * rows
        if device != "cpu" and kind == LIBRARY:
            work += (
                8 * size
                # PyTorch's flash kernel adds dq up in float32, and copies out and d_out into its
                # own layout
            )
        elif device != "cpu" and element == 2 and head_dim in (64, 128):
            work += (
                4 * size + 4 * rows
            )  # Triton's kernels for Hopper add dq up in float32 too; planned alike on every GPU
        return AttentionBytes(saved, saved, saved, saved + work)
    tile_rows = min(block_q, seq_len)
    tile = batch * heads * tile_rows * min(block_kv, seq_len)
    row_tile = batch * heads * tile_rows * head_dim
    saved = element * size + 4 * rows
    forward = max(14 * tile + element * size + 12 * row_tile, 2 * element * size) + 4 * rows
    # while it runs, and at its end, when gradients are put together and cast while the last tile is
    # still there
    results = element * size + 2 * element * kv_size * (element < 4)
    end = 12 * tile + 12 * row_tile + 8 * kv_size + element * size + results
    if kind == TILE_LOOP:
        return AttentionBytes(
            forward,
            saved,
            forward,
            saved + max(20 * tile + 12 * row_tile + 8 * kv_size + element * size, end),
        )
    # plain autograd inside one tile of queries keeps every tile of its keys, and an accumulator a
    # tile
    graph = (
        batch
        * heads
        * tile_rows
        * seq_len
        * ((9 if element >= 4 else 14) + 5 * head_dim / block_kv)
    )
    return AttentionBytes(
        forward,
        4 * rows,
        forward,
        4 * rows + round(graph) + max(8 * kv_size + 2 * element * size, end - 24 * tile),
    )


def parameter_counts(config: ModelConfig, vocab_size: int) -> dict[str, int]:
    """Parameters by what they are for; their sum is count_parameters(model)."""
    width, kv_width, bias = config.hidden_size, config.kv_heads * config.head_dim, int(config.bias)
    qkv = width + 2 * kv_width
    norm = width * (2 if config.norm == "layernorm" and config.bias else 1)
    up, down = mlp_widths(config)
    return {
        "embedding": vocab_size * width
        + (config.max_seq_len * width if config.positions == "learned" else 0),
        "attention": config.num_layers * (width * qkv + width * width + bias * (qkv + width)),
        "mlp": config.num_layers * (width * up + down * width + bias * (up + width)),
        "norms": (2 * config.num_layers + 1) * norm,
        "output": 0 if config.tie_embeddings else vocab_size * width,
    }


def mlp_widths(config: ModelConfig) -> tuple[int, int]:
    """Features out of the first matrix and into the second."""
    if config.activation == "swiglu":
        width = 64 * -(-8 * config.hidden_size // (3 * 64))
        return 2 * width, width
    return 4 * config.hidden_size, 4 * config.hidden_size


@dataclass(frozen=True)
class StepBytes:
    """One training step."""

    parameters: int
    gradients: int
    optimizer: int  # AdamW's two moments
    weight_copies: int  # the matrices in the dtype of the products
    blocks: int  # activations kept by the blocks and the last norm, without the attention's
    attention: (
        int  # what the attention calls keep: q, k, v, out and lse, or the N x N probabilities
    )
    scores: int  # the part of that which grows with N x N
    loss: int  # kept by the loss: the gradients of its input and of the output layer
    working: int  # the rest of the peak: gradients of activations, temporaries, libraries
    peak: int  # of the whole step
    host: int  # block inputs in the host's memory, not part of the peak

    @property
    def saved(self) -> int:
        """What a forward pass keeps for its backward pass."""
        return self.weight_copies + self.blocks + self.attention + self.loss


def predict_step(
    config: ModelConfig,
    *,
    vocab_size: int,
    batch_size: int,
    seq_len: int,
    backend: Backend,
    dtype: torch.dtype,
    device: str = "cuda",
    compiled: bool = False,
    accumulates: bool = False,
) -> StepBytes:
    """Bytes of one step: forward, backward and AdamW, of batch_size sequences of seq_len tokens.

    dtype: of the matrix products (float32, bfloat16 or float16; parameters stay float32).
    accumulates: whether gradients of earlier passes are there already. The peak is the largest of:
    the loss, forward and backward, the last block's MLP and its attention, forward and backward,
    and the optimizer. Memory of the Python process and of the CUDA context is not in it.
    """
    count = sum(parameter_counts(config, vocab_size).values())
    tokens, width, layers = batch_size * seq_len, config.hidden_size, config.num_layers
    e = dtype.itemsize
    narrow = e < 4
    kv_width = config.kv_heads * config.head_dim
    up, down = mlp_widths(config)
    turned = (
        config.positions == "rope" or config.qk_norm
    )  # q and k are then tensors of their own beside the packed qkv
    kind = kind_of(backend, device)
    tiles = {
        name: backend.options[name] for name in ("block_q", "block_kv") if backend.options.get(name)
    }
    call = attention_bytes(
        kind,
        batch=batch_size,
        heads=config.num_heads,
        kv_heads=config.kv_heads,
        seq_len=seq_len,
        head_dim=config.head_dim,
        element=e,
        device=device,
        compiled=compiled,
        **tiles,
    )

    part = (
        1 if config.chunk_tokens is None else min(1, config.chunk_tokens / seq_len)
    )  # of a sequence, in one chunk
    # q, k, v, per token, and what makes them
    if kind == MATERIALISED:
        inputs = (
            e * width if compiled or not narrow else 0
        )  # q; the call repeats k and v, and makes float32 copies of narrow q and k
    else:
        inputs = e * (width + 2 * kv_width) + (
            e * (width + kv_width) if turned and part == 1 else 0
        )
    makers = 0
    if config.qk_norm:
        makers += 4 * (config.num_heads + config.kv_heads)
        if narrow and not compiled:
            makers += 4 * (width + kv_width)
        elif kind == MATERIALISED:
            makers += e * (width + 2 * kv_width)
    # heads are merged without a copy where the kernel writes (B, N, H, D): Triton's does, PyTorch's
    # follow the layout of q
    follows = kind in (FUSED, LIBRARY) and turned and backend.name != "triton" and part == 1
    merged = config.num_heads > 1 and (kind == TILE_LOOP or follows)
    # these two keep no output of their own: proj does
    merged = merged or kind in (MATERIALISED, RECOMPUTED)
    attention = tokens * inputs + call.saved + tokens * e * width * merged

    # the CPU's rms_norm is several operators, which keep the normalised input too
    unfused = config.norm == "rmsnorm" and not compiled and device == "cpu"
    # a compiled graph on the CPU keeps no mean; on a GPU the norm is our own kernel, compiled or
    # not
    statistics = 8 if config.norm == "layernorm" and not (compiled and device == "cpu") else 4
    norm = tokens * (4 * width + statistics + (4 * width if unfused else 0))
    in_bits = compiled or device != "cpu"  # the CPU's dropout keeps its mask as numbers
    mask, first_mask = (0 if not config.dropout else 1 if in_bits else x for x in (e, 4))
    hidden = e * (up + down) + (e * down if config.activation == "swiglu" and not compiled else 0)
    before = norm + tokens * (e * width + makers)
    mlp = norm + tokens * (e * width + hidden + mask * width)
    block = before + attention + tokens * mask * width + mlp
    matrices = (
        width * (width + 2 * kv_width) + width * width + width * up + down * width
    )  # of a block
    copies = e * matrices if narrow else 0
    start = (
        tokens * (8 + first_mask * width)
        + 8 * seq_len
        + (4 * seq_len * config.head_dim if config.positions == "rope" else 0)
    )
    start += 4 * seq_len * width if compiled and config.positions == "learned" else 0
    ends = start + norm

    # the loss: a chunk's logits and their softmax in float32, then their gradient, which stands in
    # their place in a compiled graph. On a GPU one kernel makes it of the logits in place, and a
    # compiled graph adds up float32's gradients of the weights at the end
    rows = min(chunk_rows(tokens, vocab_size, width, device), tokens)
    padded = padded_vocab(vocab_size, device)
    chunked_loss = rows < tokens
    output_gradient = 4 * vocab_size * width
    loss = tokens * e * width + (4 if chunked_loss or not compiled else e) * padded * width
    loss_forward = tokens * (4 + e * narrow) * width + e * padded * width * (
        narrow or padded > vocab_size
    )
    loss_forward += (e * tokens * width + 4 * padded * width) * chunked_loss
    if device == "cuda":
        softmax = e * rows * padded + (
            e * (-(-tokens // rows) - 1) * padded * width if compiled and not narrow else 0
        )
    else:
        softmax = rows * padded * (2 * e if compiled else 8)
    loss_forward += max(
        softmax,
        e * rows * (padded + 2 * width) + (e + 4 * (narrow and not chunked_loss)) * padded * width,
    )
    loss_backward = loss + tokens * 4 * width + output_gradient

    # what the blocks keep, and what one of them has beside that once it has computed the rest again
    residual = tokens * 4 * width
    in_parts = config.checkpoint == "attention" or (
        config.checkpoint == "block" and config.chunk_tokens is not None
    )
    kept_attention = 0 if config.checkpoint == "block" else attention
    if compiled and config.checkpoint == "attention":
        kept_attention -= (
            tokens * inputs
        )  # a graph computes the part that makes q, k and v again to its end
    # all but the norms' outputs and statistics and what the activation made of `up`, which is back
    # while the MLP's gradients are made
    back = copies + tokens * (hidden - e * up) if config.checkpoint == "elementwise" else 0
    slim = 2 * residual + attention + tokens * (e * up + 2 * mask * width)
    kept = {
        "none": block,
        "elementwise": slim,
        "attention": residual + kept_attention,
        "block": residual,
    }[config.checkpoint]
    kept -= kept_attention
    elsewhere = config.offload and device != "cpu"
    host = layers * residual if elsewhere else 0
    kept -= residual if elsewhere else 0
    restored = part * residual if elsewhere else 0
    copied = layers * copies if config.checkpoint == "none" else 0

    state = 4 * count + 8 * count + (4 * count if accumulates else 0)
    saved = copied + layers * (kept + kept_attention) + ends + loss
    library = CUDA_WORKSPACES if device == "cuda" else 0
    # the gradient of the residual stream, its copy for the product or by dropout's mask, those on
    # both sides of the activation; and that of the down matrix
    cast = e if narrow or config.dropout else 0
    mlp_backward = tokens * (
        4 * width
        + max(cast * width + e * down, e * up if config.activation == "swiglu" else e * down)
    )
    down_gradient = 4 * down * width
    # variables of the functions around the call: the normalised input, and qkv where it is not kept
    # anyway
    around = (
        0
        if compiled
        else tokens * (4 * width + (e * (width + 2 * kv_width) if kind == MATERIALISED else 0))
    )
    until_block = state + saved - loss - norm + output_gradient
    phases = {
        # the copies of weights that autocast made are there until its end
        "loss forward": state
        + saved
        - loss
        + (layers * copies if config.checkpoint != "none" and part == 1 else 0)
        + loss_forward,
        "loss backward": state + saved - loss + loss_backward,
        "optimizer": 16 * count,
    }
    if in_parts:
        until_block += attention - kept_attention
        # the chunks' gradients of x and of out gather beside the incoming one
        lists = tokens * (8 * width + e * width) if part < 1 else 0
        d_qkv = tokens * e * (width + 2 * kv_width)
        unpacked = d_qkv if kind == MATERIALISED else 0  # q, k and v, which it does not keep
        phases |= {
            "mlp": until_block
            + restored
            + copies
            + part * (mlp + mlp_backward + tokens * mask * width)
            + lists
            + down_gradient,
            "attention forward": until_block + residual + call.forward_peak - call.saved + unpacked,
            "attention backward": until_block
            + tokens * (4 * width + e * width)
            + call.backward_peak
            - call.saved,
            "projection": until_block
            - attention
            + restored
            + d_qkv
            + residual * (1 + 2 * (part < 1))
            + part * (before + residual),
        }
    else:
        again = config.checkpoint == "block"  # its forward pass runs beside the incoming gradient
        until_block += (block - residual + restored + copies) if again else 0
        until_attention = until_block - mlp - call.saved
        phases |= {
            "mlp": until_block + mlp_backward + down_gradient + back,
            "attention forward": until_attention
            + (residual if again else -output_gradient)
            + call.forward_peak
            + around,
            "attention backward": until_attention
            + tokens * (4 * width + cast * width)
            + call.backward_peak,
        }
    peak = round(max(phases.values())) + library
    return StepBytes(
        parameters=4 * count,
        gradients=4 * count,
        optimizer=8 * count,
        weight_copies=copied,
        blocks=layers * kept + ends,
        attention=layers * kept_attention,
        scores=layers * call.scores if kept_attention else 0,
        loss=loss,
        working=peak - 12 * count - saved,
        peak=peak,
        host=host,
    )


def predict_peak_bytes(
    config: Any, vocab_size: int, backend: Backend, dtype: torch.dtype, device: torch.device | str
) -> StepBytes:
    """predict_step() of a run: config is a RunConfig, dtype and device those it was resolved to."""
    device = torch.device(device).type
    compiled = will_compile(config.model, backend, device, compile_mode=config.compile)
    return predict_step(
        config.model,
        vocab_size=vocab_size,
        batch_size=config.batch_size,
        seq_len=config.seq_len,
        backend=backend,
        dtype=dtype,
        device=device,
        compiled=compiled,
        accumulates=config.accumulation_steps > 1,
    )


def largest_peak_bytes(
    config: Any,
    vocab_size: int,
    backends: Iterable[Backend],
    dtype: torch.dtype,
    device: torch.device | str,
) -> int:  # fmt: skip
    """The peak of a run that trains with one backend after the other."""
    return max(
        predict_peak_bytes(config, vocab_size, backend, dtype, device).peak for backend in backends
    )


def predict_peak_gib(
    config: Any, vocab_size: int, backend: Backend, dtype: torch.dtype, device: torch.device | str
) -> float:
    """The peak of a training step of this run in GiB, as torch.cuda.max_memory_allocated() will
    call it.

    config is a RunConfig. On a CPU the measured peak is the resident memory of the whole process,
    which holds Python and PyTorch too (0.3 to 0.7 GiB): there the prediction, tensors alone, is a
    lower bound.
    """
    return predict_peak_bytes(config, vocab_size, backend, dtype, device).peak / GIB
