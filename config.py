"""The typed schema of a run: one dataclass per config group, one sentence per field.

`conf/` holds the choices (YAML); this file holds the types. `python train.py --help` shows the
comment above each field, and the first line of each class. `register()` gives the schema to Hydra.
Hydra then refuses a misspelt key or a value of the wrong type before anything is built. Each
`__post_init__` checks the rest. Nothing here imports torch, so `python train.py --help` is fast.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import yaml

# fields of AttentionConfig that are options of backends, with defaults; each backend has some
BACKEND_OPTIONS = {
    "kernel": "auto",
    "block_q": 128,
    "block_kv": 64,
    "softmax_dtype": "float32",
    "backend": "auto",
}
# fields of AttentionConfig that say which function the layers compute, under any backend
FUNCTION_SETTINGS = ("window", "pattern", "softcap", "score_mod", "sinks")
# sources of data that need a tokenizer
TEXT_SOURCES = ("stdlib", "torch_source", "text", "hub")
# sources that draw sequences of a task (data/synthetic.py)
SYNTHETIC_SOURCES = ("last_write", "recall", "needle")
# NAME or pkg.module:BACKEND, and after a colon options
ATTENTION = re.compile(r"([\w./-]+(?::\w+)?)(?::(\w+=[^,]*(?:,\w+=[^,]*)*))?")


def _check_choice(config: Any, key: str, *valid: str) -> None:
    value = getattr(config, key.rpartition(".")[2])
    if value is not None and value not in valid:
        raise ValueError(f"{key}={value} is not one of: {', '.join(valid)}")


def _check_at_least(config: Any, minimum: int, *keys: str, below: int = 2**63) -> None:
    for key in keys:
        value = getattr(config, key.rpartition(".")[2])
        # numpy and torch hold no larger integer; a NaN fails too
        if value is not None and not minimum <= value < below:
            raise ValueError(f"{key}={value} must be at least {minimum} and below {below}")


def parse_attention(text: str, key: str = "attention") -> tuple[str, dict[str, Any]]:
    """The name and the options in tiled, tiled:block_q=128,block_kv=8 or pkg.module:BACKEND:cap=2.

    Raises ValueError, which names `key`, for any other text.
    """
    found = ATTENTION.fullmatch(text)
    if found is None:
        raise ValueError(f"{key}={text} is not NAME, NAME:option=value or pkg.module:BACKEND")
    name, options = found.groups(default="")
    try:
        return name, yaml.safe_load("{" + options.replace("=", ": ") + "}")
    except yaml.YAMLError:
        raise ValueError(f"{key}={text}: {options} cannot be read") from None


@dataclass
class AttentionConfig:
    """Which attention runs, and the options of the backends that have any.

    conf/attention/NAME.yaml shows the options of NAME with their defaults; None is the default too.
    """

    # a name in attention.BACKENDS, or pkg.module:NAME of your own Backend
    name: str = "tiled"
    # your own Backend: options that are passed to its function
    options: dict[str, Any] = field(default_factory=dict)
    # query rows of a tile; exact tile loops take 128 on a CPU and 4096 on a GPU
    block_q: int | None = None
    # keys of a tile
    block_kv: int | None = None
    # tile loops: dtype of the statistics, "float32" or "input" (q's dtype)
    softmax_dtype: str | None = None
    # triton: portable, hopper (Gluon kernels for sm_90) or auto
    kernel: str | None = None
    # sdpa: auto, flash, efficient, cudnn or math
    backend: str | None = None
    # a query sees this many of the most recent keys, its own included; null is all
    window: int | None = None
    # which layers have the window, repeated over the layers: S has it, L sees all keys, as in SSSL
    pattern: str | None = None
    # scores become softcap * tanh(score / softcap)
    softcap: float | None = None
    # any other change of the scores: an attention.ScoreMod, as pkg.module:NAME
    score_mod: str | None = None
    # a logit per head in the denominator, so that a query may attend to nothing: true learns it,
    # zero keeps it at 0, which is softmax plus one
    sinks: str | None = None
    # step after which another attention takes over; null is never
    switch_at: int | None = None
    # the attention that takes over, with its options: tiled, tiled:block_q=128,block_kv=8
    switch_to: str | None = None

    def __post_init__(self) -> None:
        _check_at_least(self, 1, "attention.block_q", "attention.block_kv")
        _check_choice(self, "attention.kernel", "auto", "portable", "hopper")
        if self.switch_at is not None and self.switch_to is None:
            raise ValueError(
                f"attention.switch_at={self.switch_at} needs attention.switch_to=NAME, such as "
                "attention.switch_to=tiled"
            )
        if self.switch_to is not None:
            parse_attention(self.switch_to, "attention.switch_to")
        self._check_function()

    def _check_function(self) -> None:
        sinks = str(self.sinks).lower()
        self.sinks = None if sinks in ("none", "false") else sinks
        _check_choice(self, "attention.sinks", "true", "zero", "false")
        _check_at_least(self, 1, "attention.window")
        pattern = self.pattern
        if pattern is not None and (self.window is None or not re.fullmatch("[SL]+", pattern)):
            raise ValueError(
                f"attention.pattern={self.pattern} needs attention.window=N, and is made of S (a "
                "layer with that window) and L (a layer that sees all keys), such as SSSL"
            )
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ValueError(
                f"attention.softcap={self.softcap} must be a positive number; null is no cap"
            )
        if self.score_mod is not None and self.softcap is not None:
            raise ValueError(
                f"attention.score_mod={self.score_mod} takes the place of attention.softcap: write "
                "all of the change into it"
            )

    def layer_windows(self, num_layers: int) -> list[int | None]:
        """The window of each layer. Raises ValueError for a window that no layer has."""
        pattern = self.pattern or "S"
        letters = [pattern[layer % len(pattern)] for layer in range(num_layers)]
        if self.window is not None and "S" not in letters:
            raise ValueError(
                f"attention.window={self.window} is used by no layer: attention.pattern="
                f"{pattern} has no S among the {num_layers} layers"
            )
        return [self.window if letter == "S" else None for letter in letters]

    def function(self) -> dict[str, Any]:
        """The settings of the layers' function that are set."""
        return self._set(FUNCTION_SETTINGS)

    def backend_options(self) -> dict[str, Any]:
        """The options that were set, for get_backend()."""
        return self.options | self._set(BACKEND_OPTIONS)

    def _set(self, names: Iterable[str]) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


@dataclass
class ModelConfig:
    """The shape of the GPT."""

    # the choice's own name, for logs
    name: str = "tiny"
    # transformer blocks
    num_layers: int = 4
    # query heads
    num_heads: int = 4
    # key/value heads (GQA, MQA); null is num_heads
    num_kv_heads: int | None = None
    # width of the residual stream, C
    hidden_size: int = 128
    # longest sequence for the learned positions; follows seq_len unless set
    max_seq_len: int = 256
    # learned, rope, or alibi (a penalty that grows with the distance of query and key)
    positions: str = "learned"
    # layernorm or rmsnorm
    norm: str = "layernorm"
    # RMS-normalise q and k per head, which keeps the scores bounded
    qk_norm: bool = False
    # gelu (the tanh form, as GPT-2) or swiglu
    activation: str = "gelu"
    # biases in linear and normalisation layers
    bias: bool = True
    # the output layer shares the token embedding
    tie_embeddings: bool = True
    # dropout rate on embeddings and residual branches, never on attention weights
    dropout: float = 0.0
    # base of the rotary frequencies
    rope_theta: float = 10000.0
    # what a block keeps for its backward pass in training: none (everything), attention (its input
    # and q, k, v and the output of attention) or block (only its input)
    checkpoint: str = "none"

    def __post_init__(self) -> None:
        _check_at_least(self, 1, "model.num_heads", "model.hidden_size", "model.num_kv_heads")
        # what loops over the layers, such as a plan, takes minutes with more
        _check_at_least(self, 1, "model.num_layers", below=10_001)
        _check_at_least(self, 1, "model.rope_theta")
        _check_at_least(self, 0, "model.dropout", below=1)
        _check_choice(self, "model.positions", "learned", "rope", "alibi")
        _check_choice(self, "model.norm", "layernorm", "rmsnorm")
        _check_choice(self, "model.activation", "gelu", "swiglu")
        _check_choice(self, "model.checkpoint", "none", "attention", "block")
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"model.hidden_size={self.hidden_size} is not a multiple of "
                f"model.num_heads={self.num_heads}"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"model.num_heads={self.num_heads} is not a multiple of "
                f"model.num_kv_heads={self.num_kv_heads}"
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(f"model.positions=rope needs an even head_dim, got {self.head_dim}")

    @property
    def kv_heads(self) -> int:
        """The number of key/value heads."""
        # not written into the field, because Hydra uses this instance's values as defaults of every
        # other choice
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def attention_sizes(self) -> dict[str, int]:
        """The sizes of this model's attention, as Backend.check_model() takes them."""
        return {
            "num_heads": self.num_heads,
            "num_kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
        }


@dataclass
class DataConfig:
    """What the model reads: random windows of the training half.

    They are drawn with replacement, so there are no epochs.
    """

    # stdlib, torch_source, text, hub, last_write, recall or needle
    source: str = "stdlib"
    # text: a file, folder or glob; .jsonl, .json, .csv, .tsv and .parquet are tables, others text
    path: str | None = None
    # hub: the dataset, as org/name
    name: str | None = None
    # hub: the dataset's configuration, if it has several
    subset: str | None = None
    # hub: the split
    split: str = "train"
    # hub, and tables of data=text: the column that holds the text
    field: str = "text"
    # share of documents that are held out whole, chosen by a hash of their path
    val_fraction: float = 0.05
    # attention stays inside a document if a sequence packs several; positions count on across them
    documents: bool = False
    # last_write, recall, needle: distinct keys
    num_keys: int = 8
    # last_write, recall, needle: distinct values; chance accuracy is 1 / num_values
    num_values: int = 8
    # recall: pairs of a sequence; null is as many as zoology has for seq_len
    num_pairs: int | None = None

    def __post_init__(self) -> None:
        _check_choice(self, "data.source", *TEXT_SOURCES, *SYNTHETIC_SOURCES)
        if self.source == "text" and not self.path:
            raise ValueError(
                "data=text needs data.path=FILE, a folder, or a glob such as "
                "'data.path=books/*.txt'"
            )
        if self.source == "hub" and not self.name:
            raise ValueError(
                "data=hub needs data.name=org/name (and data.split, data.field where they differ "
                "from train, text)"
            )
        if self.documents and self.source in SYNTHETIC_SOURCES:
            raise ValueError(
                f"data.documents=true needs a source with documents; in data={self.source} every "
                "sequence is a document of its own"
            )
        if not 0.0 < self.val_fraction < 1.0:
            raise ValueError(f"data.val_fraction={self.val_fraction} must be between 0 and 1")
        _check_at_least(self, 1, "data.num_keys", "data.num_pairs")
        _check_at_least(self, 2, "data.num_values")
        if self.source == "needle":
            _check_at_least(self, 2, "data.num_keys")

    def pairs(self, seq_len: int) -> int:
        """recall: pairs of a sequence. Zoology has 4 for 64 tokens, 8 for 128, 16 for 256, and 64
        for 512.
        """
        return self.num_pairs or (64 if seq_len == 512 else max(1, seq_len // 16))

    def check_length(self, seq_len: int) -> None:
        """Raise ValueError if no sequence of this length has a question with an answer."""
        if self.source not in SYNTHETIC_SOURCES:
            return
        pairs = self.pairs(seq_len) if self.source == "recall" else 1
        shortest = 4 * pairs if self.source == "recall" else 2
        if seq_len < shortest:
            raise ValueError(
                f"data={self.source} with seq_len={seq_len} has no room for its questions; use "
                f"seq_len={max(32, shortest)} or more"
            )
        if self.source == "recall" and pairs > (most := min(self.num_keys, self.num_values)):
            raise ValueError(
                f"data=recall with {pairs} pairs needs as many keys and values, and "
                f"data.num_keys={self.num_keys}, data.num_values={self.num_values}; use "
                f"data.num_pairs={most} or less"
            )


@dataclass
class TokenizerConfig:
    """How text becomes tokens."""

    # byte (256 + end of text), bpe (8,192 ranks shipped with the project) or gpt2 (tiktoken)
    name: str = "byte"
    # rows of the model's embedding; null is the tokenizer's own number; nanoGPT uses 50304 for gpt2
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        _check_choice(self, "tokenizer.name", "byte", "bpe", "gpt2")


@dataclass
class OptimConfig:
    """The optimizer and its schedule."""

    # adamw, or muon for the matrices inside the blocks and adamw for the rest
    name: str = "adamw"
    # peak learning rate; null is 0.384 / model.hidden_size (tiny 3e-3, small 1e-3, gpt2 5e-4)
    lr: float | None = None
    # learning rate at the end of the cosine; null is a tenth of lr
    min_lr: float | None = None
    # cosine, or constant after the warm-up
    schedule: str = "cosine"
    # steps of the linear warm-up from 0, at most a tenth of the run
    warmup_steps: int = 100
    # weight decay, on matrices only
    weight_decay: float = 0.1
    # adamw: decay of the mean gradient
    beta1: float = 0.9
    # adamw: decay of the mean squared gradient
    beta2: float = 0.95
    # largest global gradient norm; 0 switches clipping off
    grad_clip: float = 1.0

    def __post_init__(self) -> None:
        _check_choice(self, "optim.name", "adamw", "muon")
        _check_choice(self, "optim.schedule", "cosine", "constant")
        _check_at_least(self, 0, "optim.lr", "optim.min_lr", "optim.warmup_steps")
        _check_at_least(self, 0, "optim.weight_decay", "optim.grad_clip")
        _check_at_least(self, 0, "optim.beta1", "optim.beta2", below=1)


@dataclass
class LoggerConfig:
    """Where metrics go besides metrics.jsonl, which is always written."""

    # wandb, tensorboard or none
    name: str = "wandb"
    # wandb: the project that the run belongs to
    project: str = "tilegpt"

    def __post_init__(self) -> None:
        _check_choice(self, "logger.name", "wandb", "tensorboard", "none")


@dataclass
class ParallelConfig:
    """How the ranks of torchrun share a run."""

    # ranks that share each sequence: each attends for its share of the heads
    context: int = 1

    def __post_init__(self) -> None:
        _check_at_least(self, 1, "parallel.context")


@dataclass
class RunConfig:
    """One training run."""

    attention: AttentionConfig = field(default_factory=AttentionConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    # tokens of one training sequence
    seq_len: int = 256
    # optimizer steps
    steps: int = 500
    # sequences of a forward and backward pass
    batch_size: int = 16
    # tokens of one optimizer step, by gradient accumulation; null is one pass
    tokens_per_step: int | None = None
    # seed of the initial weights and of the order of the data
    seed: int = 0
    # auto (a GPU if there is one), cpu or cuda
    device: str = "auto"
    # dtype of the matrix products: auto (bf16 on a GPU that has it, else fp32), fp32, bf16 or fp16
    dtype: str = "auto"
    # torch.compile: auto (on a GPU), true or false
    compile: str = "auto"
    # launch a compiled step on a GPU as one CUDA graph: auto (where it can), true or false
    cuda_graph: str = "auto"
    # ask PyTorch for deterministic kernels
    deterministic: bool = False
    # a run directory to continue, under its own settings and the ones given now
    resume: str | None = None
    # weights to begin with: a folder, a .safetensors file or a name on the Hugging Face hub
    init_from: str | None = None
    # steps between evaluations, besides the first state and the last step; 0 is no evaluation
    eval_every: int = 100
    # steps between comparisons with exact attention in float64; null is eval_every, 0 is never
    diagnose_every: int | None = None
    # held-out sequences of one evaluation
    eval_sequences: int = 64
    # steps between rows of metrics
    log_every: int = 10
    # steps between checkpoints, besides the last step and each new best evaluation
    checkpoint_every: int = 200
    # tokens of the sample printed at the end; 0 is no sample
    sample_tokens: int = 256

    def __post_init__(self) -> None:
        self.compile, self.cuda_graph = (str(x).lower() for x in (self.compile, self.cuda_graph))
        _check_choice(self, "device", "auto", "cpu", "cuda")
        _check_choice(self, "dtype", "auto", "fp32", "bf16", "fp16")
        _check_choice(self, "compile", "auto", "true", "false")
        _check_choice(self, "cuda_graph", "auto", "true", "false")
        if self.init_from == "":  # such as that of an unset shell variable
            raise ValueError("init_from= is empty: name a folder, a file or a model on the hub")
        _check_at_least(self, 1, "seq_len", "steps", "eval_sequences", "log_every")
        _check_at_least(self, 1, "batch_size", "checkpoint_every")
        _check_at_least(self, 0, "seed", "eval_every", "sample_tokens", "diagnose_every")
        if self.attention.switch_at is not None and not 0 < self.attention.switch_at < self.steps:
            raise ValueError(
                f"attention.switch_at={self.attention.switch_at} must lie between 0 and "
                f"steps={self.steps}: it is the last step under attention={self.attention.name}"
            )
        self.attention.layer_windows(self.model.num_layers)
        if self.model.positions == "alibi" and self.attention.score_mod is not None:
            raise ValueError(
                f"attention.score_mod={self.attention.score_mod} takes the place of "
                "model.positions=alibi: write all of the change into it"
            )
        if self.seq_len > self.model.max_seq_len:
            raise ValueError(
                f"seq_len={self.seq_len} is longer than "
                f"model.max_seq_len={self.model.max_seq_len} allows; "
                "leave model.max_seq_len unset (it follows seq_len) or shorten seq_len"
            )
        self.data.check_length(self.seq_len)
        self.optimizer()  # raises for a schedule that would rise
        tokens_per_pass = self.batch_size * self.seq_len
        if self.tokens_per_step is not None and (
            self.tokens_per_step < 1 or self.tokens_per_step % tokens_per_pass
        ):
            raise ValueError(
                f"tokens_per_step={self.tokens_per_step} is not a positive multiple of "
                f"batch_size * seq_len = {self.batch_size} * {self.seq_len} = {tokens_per_pass}"
            )

    def optimizer(self) -> OptimConfig:
        """The optimizer's settings with its learning rates as numbers. Raises ValueError for a
        cosine that would rise.
        """
        lr = 0.384 / self.model.hidden_size if self.optim.lr is None else self.optim.lr
        min_lr = lr / 10 if self.optim.min_lr is None else self.optim.min_lr
        if self.optim.schedule == "cosine" and min_lr > lr:
            raise ValueError(
                f"optim.min_lr={min_lr} is above optim.lr={lr}, and the cosine ends there: lower "
                "it, or leave it out for a tenth of optim.lr"
            )
        return replace(self.optim, lr=lr, min_lr=min_lr)

    def due(self, step: int, *, diverged: bool = False) -> "Due":
        """What to do after this many steps. A run ends at its last step, or when it diverged."""
        end = diverged or step == self.steps
        switch = step == self.attention.switch_at and not diverged
        compare_every = self.eval_every if self.diagnose_every is None else self.diagnose_every

        def each(interval: int) -> bool:
            return interval > 0 and (end or step % interval == 0)

        return Due(
            log=each(self.log_every),
            compare=each(compare_every) and not diverged,
            evaluate=each(self.eval_every) or (switch and self.eval_every > 0),
            switch=switch,
            save=each(self.checkpoint_every),
        )

    @property
    def sequences_per_step(self) -> int:
        if self.tokens_per_step is None:
            return self.batch_size
        return self.tokens_per_step // self.seq_len


class Due(NamedTuple):
    """What to do after a step."""

    log: bool  # write a row of metrics
    compare: bool  # compare the attention with exact attention in float64
    evaluate: bool  # evaluate on the held-out sequences
    switch: bool  # switch to the attention of attention.switch_to
    save: bool  # save a checkpoint


def register() -> None:
    """Hand the schema to Hydra: conf/config.yaml starts from `schema`."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import MISSING, OmegaConf

    schema = OmegaConf.structured(RunConfig)
    schema.attention.name = MISSING  # else a yaml file without one would train the default
    ConfigStore.instance().store(name="schema", node=schema)
