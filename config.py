"""The typed schema of a run: one dataclass a config group, one sentence a field.

`conf/` holds the choices (YAML), this file holds the types. `register()` hands the schema to Hydra,
so a misspelt key or a value of the wrong type is refused before anything is built;
`RunConfig.__post_init__` checks what one field alone cannot. Nothing here imports torch: `python
train.py --help` stays fast.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, NamedTuple

DTYPES = ("auto", "fp32", "bf16", "fp16")
DEVICES = ("auto", "cpu", "cuda")
# fields of AttentionConfig that are options of backends; each backend has some of them
BACKEND_OPTIONS = (
    "kernel",
    "impl",
    "block_q",
    "block_kv",
    "softmax_dtype",
    "detach_max",
    "backend",
)
# settings that only some choices read: {setting: (the setting that decides, its values under which
# it is read)}
READ_UNDER = {
    "attention.target": ("attention.name", ("custom",)),
    "model.rope_theta": ("model.positions", ("rope",)),
    "data.path": ("data.source", ("text",)),
    "data.name": ("data.source", ("hub",)),
    "data.subset": ("data.source", ("hub",)),
    "data.split": ("data.source", ("hub",)),
    "data.field": ("data.source", ("text", "hub")),
    "data.streaming": ("data.source", ("hub",)),
    "data.max_documents": ("data.source", ("stdlib", "torch_source", "text", "hub")),
    "data.val_fraction": ("data.source", ("stdlib", "torch_source", "text", "hub")),
    "data.num_keys": ("data.source", ("last_write",)),
    "data.num_values": ("data.source", ("last_write",)),
    "tokenizer.name": ("data.source", ("stdlib", "torch_source", "text", "hub")),
    "optim.momentum": ("optim.name", ("muon",)),
    "optim.min_lr": ("optim.schedule", ("cosine",)),
    "logger.mode": ("logger.name", ("wandb",)),
    "logger.entity": ("logger.name", ("wandb",)),
    "logger.project": ("logger.name", ("wandb", "trackio")),
}


def _choice(key: str, value: Any, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ValueError(f"{key}={value} is not one of: {', '.join(valid)}")


def _at_least(key: str, value: float, minimum: float) -> None:
    if not minimum <= value < float("inf"):  # a NaN fails too
        raise ValueError(
            f"{key}={value} must be at least {minimum}"
            + (" and finite" if value == float("inf") else "")
        )


def check_int64(key: str, value: Any) -> None:
    """Raise ValueError for a whole number that numpy and torch cannot hold. Values of other types
    pass.
    """
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(
            f"{key}={value} is no 64-bit integer: it must be less than 2**63 = {2**63}"
        )


@dataclass
class AttentionConfig:
    """Which attention runs, and the options of the backends that have any.

    conf/attention/NAME.yaml holds the options of NAME with their defaults; None is the default too.
    """

    # a name in attention.BACKENDS, pkg.module:NAME of a Backend of your own, or custom with a
    # target
    name: str = "tiled"
    # attention=custom: where your Backend is, as pkg.module:NAME
    target: str | None = None
    # passed to the function of a Backend of your own
    options: dict[str, Any] = field(default_factory=dict)
    block_q: int | None = None  # query rows of a tile
    block_kv: int | None = None  # keys of a tile
    # tile loops: "float32" statistics, or "input" to keep them in q's dtype
    softmax_dtype: str | None = None
    kernel: str | None = None  # triton: portable, hopper (Gluon kernels for sm_90) or auto
    # no_max, no_rescale: "tiled" in plain PyTorch, or "triton" at the speed of the kernels
    impl: str | None = None
    # defects: treat the subtracted maximum as a constant in the backward pass
    detach_max: bool | None = None
    backend: str | None = None  # sdpa: auto, flash, efficient, cudnn or math
    switch_at: int | None = None  # step after which another attention takes over; None means never
    switch_to: str | None = None  # its name in attention.BACKENDS, or pkg.module:NAME
    # its options, as +attention.switch_options.block_kv=16
    switch_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in ("block_q", "block_kv"):
            if getattr(self, key) is not None:
                _at_least(f"attention.{key}", getattr(self, key), 1)
        if self.kernel is not None:
            _choice("attention.kernel", self.kernel, ("auto", "portable", "hopper"))
        if self.name == "custom" and self.target is None:
            raise ValueError(
                "attention=custom needs attention.target=pkg.module:BACKEND; "
                "attention=pkg.module:BACKEND says both"
            )
        if self.switch_at is not None and self.switch_to is None:
            raise ValueError(
                f"attention.switch_at={self.switch_at} needs attention.switch_to=NAME, such as "
                "attention.switch_to=tiled"
            )
        if self.switch_options and self.switch_to is None:
            raise ValueError(
                f"attention.switch_options={self.switch_options} needs attention.switch_to=NAME, "
                "whose options they are"
            )

    @property
    def backend_name(self) -> str:
        """What get_backend() takes: the target where there is one, else the name."""
        return self.target if self.name == "custom" else self.name

    def backend_options(self) -> dict[str, Any]:
        """The options that were set, as get_backend() takes them."""
        return self.options | {
            name: getattr(self, name) for name in BACKEND_OPTIONS if getattr(self, name) is not None
        }


@dataclass
class ModelConfig:
    """The shape of the GPT."""

    name: str = "tiny"  # the choice's own name, for logs
    num_layers: int = 4  # transformer blocks
    num_heads: int = 4  # query heads
    num_kv_heads: int | None = None  # key/value heads (GQA, MQA); None means num_heads
    hidden_size: int = 128  # width of the residual stream, C
    max_seq_len: int = (
        256  # longest sequence the learned positions hold; follows seq_len unless set
    )
    positions: str = "learned"  # learned or rope
    norm: str = "layernorm"  # layernorm or rmsnorm
    qk_norm: bool = False  # RMS-normalise q and k per head: keeps the scores bounded
    activation: str = "gelu"  # gelu (the tanh form, as GPT-2) or swiglu
    bias: bool = True  # biases in linear and normalisation layers
    tie_embeddings: bool = True  # the output layer shares the token embedding
    dropout: float = 0.0  # on embeddings and residual branches; attention weights are never dropped
    init_std: float = 0.02  # standard deviation of the initial weights
    rope_theta: float = 10000.0  # base of the rotary frequencies
    # what a block keeps for its backward pass: none (everything), elementwise (all but norms and
    # activations), attention (its q, k, v and output) or block (its input alone)
    checkpoint: str = "none"
    chunk_tokens: int | None = (
        # norms, projections and MLP over this many tokens of a sequence at a time; None takes it
        # whole
        None
    )
    # what checkpointing keeps of a block's input waits in the host's memory (not with
    # torch.compile)
    offload: bool = False

    def __post_init__(self) -> None:
        for key in ("num_layers", "num_heads", "hidden_size"):
            _at_least(f"model.{key}", getattr(self, key), 1)
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"model.hidden_size={self.hidden_size} is not a multiple of "
                f"model.num_heads={self.num_heads}"
            )
        _at_least("model.num_kv_heads", self.kv_heads, 1)
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"model.num_heads={self.num_heads} is not a multiple of "
                f"model.num_kv_heads={self.num_kv_heads}"
            )
        _at_least("model.init_std", self.init_std, 0)
        _at_least("model.rope_theta", self.rope_theta, 1)
        _choice("model.positions", self.positions, ("learned", "rope"))
        _choice("model.norm", self.norm, ("layernorm", "rmsnorm"))
        _choice("model.activation", self.activation, ("gelu", "swiglu"))
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(f"model.positions=rope needs an even head_dim, got {self.head_dim}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"model.dropout={self.dropout} must be in [0, 1)")
        _choice("model.checkpoint", self.checkpoint, ("none", "elementwise", "attention", "block"))
        if self.chunk_tokens is not None:
            _at_least("model.chunk_tokens", self.chunk_tokens, 1)
        if self.checkpoint in ("none", "elementwise") and (
            self.chunk_tokens is not None or self.offload
        ):
            what = (
                "model.offload=true" if self.offload else f"model.chunk_tokens={self.chunk_tokens}"
            )
            raise ValueError(
                f"{what} saves nothing under model.checkpoint={self.checkpoint}: add "
                "model.checkpoint=block or attention"
            )

    @property
    def kv_heads(self) -> int:
        """Key/value heads, spelled out."""
        # not written into the field: Hydra takes this class's instance for the defaults of every
        # other choice
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass
class DataConfig:
    """What the model reads: random windows of the training half, drawn with replacement, so there
    are no epochs.
    """

    source: str = "stdlib"  # stdlib, torch_source, text, hub or last_write
    path: str | None = (
        # text: a file, folder or glob of .txt, .jsonl or .parquet (other files are read as text)
        None
    )
    name: str | None = None  # hub: the dataset, as org/name
    subset: str | None = None  # hub: the dataset's configuration, where it has several
    split: str = "train"  # hub: the split
    field: str = "text"  # hub, JSONL and parquet: the column that holds the text
    streaming: bool = (
        False  # hub: read over the network while building, without storing the raw files
    )
    max_documents: int | None = None  # stop after this many documents
    val_fraction: float = 0.05  # share of documents held out whole, chosen by a hash of their path
    # attention stays inside a document, where several are packed into one sequence; positions go on
    # counting
    documents: bool = False
    fingerprint: str | None = (
        None  # refuse any other data than these; a run's env.json has its own as data_fingerprint
    )
    cache_dir: str | None = (
        None  # where token stores are kept; None means ~/.cache/tilegpt (or TILEGPT_CACHE)
    )
    num_keys: int = 8  # last_write: distinct keys
    num_values: int = 8  # last_write: distinct values; chance accuracy is 1 / num_values

    def __post_init__(self) -> None:
        _choice("data.source", self.source, ("stdlib", "torch_source", "text", "hub", "last_write"))
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
        if self.documents and self.source == "last_write":
            raise ValueError(
                "data.documents=true needs a source with documents; in data=last_write every "
                "sequence is one of its own"
            )
        if not 0.0 < self.val_fraction < 1.0:
            raise ValueError(f"data.val_fraction={self.val_fraction} must be between 0 and 1")
        if self.max_documents is not None:
            _at_least("data.max_documents", self.max_documents, 1)
        _at_least("data.num_keys", self.num_keys, 1)
        _at_least("data.num_values", self.num_values, 2)


@dataclass
class TokenizerConfig:
    """How text becomes tokens."""

    # byte (256 + end of text), bpe (8,192 ranks shipped with the project) or gpt2 (tiktoken)
    name: str = "byte"
    vocab_size: int | None = (
        # rows of the model's embedding; None: the tokenizer's own number; 50304 is nanoGPT's for
        # gpt2
        None
    )

    def __post_init__(self) -> None:
        _choice("tokenizer.name", self.name, ("byte", "bpe", "gpt2"))


@dataclass
class OptimConfig:
    """The optimizer and its schedule."""

    name: str = "adamw"  # adamw, or muon for the matrices inside the blocks and adamw for the rest
    lr: float | None = (
        # peak learning rate; None is 0.384 / model.hidden_size (tiny 3e-3, small 1e-3, gpt2 5e-4)
        None
    )
    min_lr: float | None = None  # where the cosine ends; None is a tenth of lr
    schedule: str = "cosine"  # cosine, or constant after the warm-up
    warmup_steps: int = 100  # linear warm-up from 0, at most a tenth of the run
    weight_decay: float = 0.1  # on matrices only
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.95  # muon: of its matrices, which have no beta1, beta2 and eps
    grad_clip: float = 1.0  # largest global gradient norm; 0 switches clipping off

    def __post_init__(self) -> None:
        _choice("optim.name", self.name, ("adamw", "muon"))
        _choice("optim.schedule", self.schedule, ("cosine", "constant"))
        for key in ("lr", "min_lr", "warmup_steps", "weight_decay", "eps", "grad_clip"):
            if getattr(self, key) is not None:
                _at_least(f"optim.{key}", getattr(self, key), 0)
        for key in ("beta1", "beta2", "momentum"):
            if not 0.0 <= getattr(self, key) < 1.0:
                raise ValueError(f"optim.{key}={getattr(self, key)} must be in [0, 1)")


@dataclass
class LoggerConfig:
    """Where metrics go besides metrics.jsonl, which is always written."""

    name: str = "wandb"  # wandb, tensorboard, trackio or none
    # wandb: online where a key is configured, offline otherwise; or online, offline, disabled
    mode: str = "auto"
    project: str = "tilegpt"
    entity: str | None = None  # wandb: user or team; None means the account's default

    def __post_init__(self) -> None:
        _choice("logger.name", self.name, ("wandb", "tensorboard", "trackio", "none"))
        _choice("logger.mode", self.mode, ("auto", "online", "offline", "disabled"))


@dataclass
class RunConfig:
    """One training run."""

    attention: AttentionConfig = field(default_factory=AttentionConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    seq_len: int = 256  # tokens of one training sequence
    steps: int = 500  # optimizer steps
    batch_size: int | str = (
        # sequences of one forward and backward pass; auto: as many as fit in memory (needs
        # tokens_per_step)
        16
    )
    tokens_per_step: int | None = (
        None  # tokens of one optimizer step (gradient accumulation); None means one pass
    )
    seed: int = 0  # initial weights and order of the data
    device: str = "auto"  # auto (a GPU where there is one), cpu or cuda
    # of the matrix products: auto (bf16 on a GPU that has it, else fp32), fp32, bf16 or fp16
    dtype: str = "auto"
    compile: str = "auto"  # torch.compile: auto (on a GPU), true or false
    deterministic: bool = False  # ask PyTorch for deterministic kernels
    resume: str | None = (
        None  # a run directory to go on with, under its own settings and the ones given now
    )
    # steps between evaluations; the first state and the last step are always evaluated; 0: none at
    # all
    eval_every: int = 100
    diagnose_every: int | None = (
        # steps between comparisons with exact attention in float64; None: as eval_every, 0: never
        None
    )
    eval_sequences: int = 64  # held-out sequences of one evaluation
    log_every: int = 10  # steps between rows of metrics
    # steps between checkpoints; saved are also the last step and each evaluation that is the best
    # so far
    checkpoint_every: int = 200
    keep: int = 2  # the latest checkpoints that stay, beside the one with the lowest val/loss
    sample_tokens: int = 256  # length of the sample printed at the end; 0 for none
    left_out: list[str] = field(
        default_factory=list
    )  # settings that may be given though nothing reads them; a sweep fills it

    def __post_init__(self) -> None:
        self.compile = str(self.compile).lower()
        for key in setting_keys(RunConfig):
            check_int64(key, _get(self, key))
        _choice("device", self.device, DEVICES)
        _choice("dtype", self.dtype, DTYPES)
        _choice("compile", self.compile, ("auto", "true", "false"))
        if isinstance(self.batch_size, str) and self.batch_size != "auto":
            raise ValueError(
                f"batch_size={self.batch_size} is neither a number of sequences nor auto"
            )
        if self.batch_size == "auto" and self.tokens_per_step is None:
            raise ValueError(
                "batch_size=auto needs tokens_per_step=N: what a step learns from must not depend "
                "on the memory that is free"
            )
        for key in ("seq_len", "steps", "eval_sequences", "log_every", "checkpoint_every", "keep"):
            _at_least(key, getattr(self, key), 1)
        for key in ("seed", "eval_every", "sample_tokens", "diagnose_every"):
            if getattr(self, key) is not None:
                _at_least(key, getattr(self, key), 0)
        if self.attention.switch_at is not None and not 0 < self.attention.switch_at < self.steps:
            raise ValueError(
                f"attention.switch_at={self.attention.switch_at} must lie between 0 and "
                f"steps={self.steps}: "
                f"it is the last step under attention={self.attention.name}"
            )
        if self.seq_len > self.model.max_seq_len:
            raise ValueError(
                f"seq_len={self.seq_len} is longer than "
                f"model.max_seq_len={self.model.max_seq_len} allows; "
                "leave model.max_seq_len unset (it follows seq_len) or shorten seq_len"
            )
        if self.data.source == "last_write" and self.seq_len < 2:
            raise ValueError(
                f"data=last_write with seq_len={self.seq_len} has no question with an answer; use "
                "seq_len=32 or more"
            )
        if self.batch_size != "auto":
            _at_least("batch_size", self.batch_size, 1)
        sequences = 1 if self.batch_size == "auto" else self.batch_size
        tokens_per_pass = sequences * self.seq_len
        if self.tokens_per_step is not None and (
            self.tokens_per_step < 1 or self.tokens_per_step % tokens_per_pass
        ):
            raise ValueError(
                f"tokens_per_step={self.tokens_per_step} is not a positive multiple of "
                f"batch_size * seq_len = {sequences} * {self.seq_len} = {tokens_per_pass}"
            )

    def optimizer(self) -> OptimConfig:
        """The optimizer's settings with the learning rates spelled out."""
        lr = 0.384 / self.model.hidden_size if self.optim.lr is None else self.optim.lr
        return replace(
            self.optim, lr=lr, min_lr=lr / 10 if self.optim.min_lr is None else self.optim.min_lr
        )

    @property
    def diagnose_steps(self) -> int:
        """Steps between comparisons with exact attention, spelled out; 0 for none."""
        return self.eval_every if self.diagnose_every is None else self.diagnose_every

    def conditional_settings(self) -> dict[str, "Unread | None"]:
        """The settings of READ_UNDER that were changed: None where this run reads it, else why
        not.
        """
        told: dict[str, Unread | None] = {}
        for key, (decider, readers) in READ_UNDER.items():
            if self.value_of(key) == _get(RunConfig, key):
                continue
            chosen, choice = (
                self.value_of(decider),
                decider.removesuffix(".name").removesuffix(".source"),
            )
            instead = "add " + " or ".join(f"{choice}={value}" for value in readers)
            told[key] = (
                None
                if chosen in readers
                else Unread(f"{choice}={chosen} does not read it", instead)
            )
        return told

    def value_of(self, key: str) -> Any:
        """The value of a setting, by its dotted key."""
        group, _, name = key.rpartition(".")
        return self.attention.options[name] if group == "attention.options" else _get(self, key)

    def leave_out(self, key: str) -> None:
        """Put a setting back to its default."""
        group, _, name = key.rpartition(".")
        if group == "attention.options":
            del self.attention.options[name]
        else:
            setattr(_get(self, group) if group else self, name, _get(RunConfig, key))

    def due(self, step: int, *, diverged: bool = False) -> "Due":
        """What is to be done after this many steps; a run ends at the last one, or diverged."""
        end = diverged or step == self.steps
        switch = step == self.attention.switch_at and not diverged

        def each(interval: int) -> bool:
            return interval > 0 and (end or step % interval == 0)

        return Due(
            log=each(self.log_every),
            compare=each(self.diagnose_steps) and not diverged,
            evaluate=each(self.eval_every) or (switch and self.eval_every > 0),
            switch=switch,
            save=each(self.checkpoint_every),
        )

    @property
    def accumulation_steps(self) -> int:
        """Forward and backward passes of one optimizer step."""
        return self.sequences_per_step // self.batch_size

    @property
    def sequences_per_step(self) -> int:
        return (
            self.batch_size
            if self.tokens_per_step is None
            else self.tokens_per_step // self.seq_len
        )


class Due(NamedTuple):
    """What is to be done after a step."""

    log: bool  # a row of metrics
    compare: bool  # the attention with exact attention in float64
    evaluate: bool  # on the held-out sequences
    switch: bool  # to the attention of attention.switch_to
    save: bool  # a checkpoint


class Unread(NamedTuple):
    """A setting that nothing in a run reads."""

    why: str  # attention=naive has no option block_kv (it has no options)
    instead: str  # choose an attention that has it: tiled, no_max


def _get(config: Any, key: str) -> Any:
    """The value at a dotted key of a dataclass; of the class RunConfig, its default."""
    for name in key.split("."):
        if isinstance(config, type):
            (each,) = (each for each in fields(config) if each.name == name)
            config = each.type if is_dataclass(each.type) else each.default
        else:
            config = getattr(config, name)
    return config


def register() -> None:
    """Hand the schema to Hydra: conf/config.yaml starts from `schema`."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=RunConfig)


def setting_keys(schema: type, prefix: str = "") -> Iterator[str]:
    for each in fields(schema):
        yield prefix + each.name
        if is_dataclass(each.type):
            yield from setting_keys(each.type, f"{prefix}{each.name}.")
