"""Convert weights to and from Hugging Face's form; a table describes each architecture.

    gpt2    model=gpt2, tiny and small
    llama   RoPE in halves as ours, RMSNorm, SwiGLU, grouped heads: model=modern model.qk_norm=false
    qwen3   the same with QK-norm: model=modern. Its QK-norm has gains, which are 1 for ours
    mistral, ministral
            llama with one window in every layer, or in some: attention.window, attention.pattern.
            qwen3 can have either
    nanogpt gpt2 with nn.Linear's matrices, and with or without biases. It is only read

    ours                                           Hugging Face's
    blocks.3.attention.qkv.weight (3C, C)          transformer.h.3.attn.c_attn.weight (C, 3C)
    blocks.3.mlp.up.weight (2F, C)                 model.layers.3.mlp.gate_proj.weight (F, C)
                                                   model.layers.3.mlp.up_proj.weight (F, C)

Dimensions: C hidden_size, F width of the MLP.
"""

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attention import dtype_name
from config import ModelConfig
from model.gpt import NORM_EPS

if TYPE_CHECKING:
    from model.gpt import GPT

log = logging.getLogger("tilegpt")

FIRST_NORM = "blocks.0.attention_norm.weight"
OUTPUT_LAYER = "lm_head.weight"
SLIDING, FULL = "sliding_attention", "full_attention"
# parts of names that torch.compile, DDP, FSDP and recomputation add
WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# tensors in older files that are not weights
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
# other names of one function
SYNONYMS = {"gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new", "swish": "silu"}


class Architecture(NamedTuple):
    """How one of transformers' model types describes a GPT."""

    model_type: str
    class_name: str
    prefix: str  # of every tensor except the output layer
    # {part of our names: part of theirs}, applied in this order; several of theirs are rows of one
    # of our matrices
    names: dict[str, str]
    # the values of ModelConfig that it implies; num_kv_heads None means as many as query heads
    implied: dict[str, Any]
    # {key of config.json: (field of ModelConfig, the value if config.json lacks the key)}
    fields: dict[str, tuple[str, Any]]
    # {key of config.json: (its required value, the value if config.json lacks the key)}
    constants: dict[str, tuple[Any, Any]]
    # further entries of the config.json that we write
    more: Callable[["GPT"], dict[str, Any]]
    # {key of config.json that tells its windows: the value if config.json lacks the key}
    windows: dict[str, Any] = {}
    transposed: tuple[str, ...] = ()  # name endings of tensors stored as (in, out)
    ones: tuple[str, ...] = ()  # gains (head_dim,) in each layer that our model lacks

    def their_names(self, name: str) -> list[str]:
        """The names, without the prefix, of the tensors that make up one of ours."""
        names = [name]
        for ours, theirs in self.names.items():
            if ours in name:
                names = [each.replace(ours, part) for part in theirs.split() for each in names]
        return names


GPT2 = Architecture(
    "gpt2",
    "GPT2LMHeadModel",
    "transformer.",
    names={
        "token_embedding.": "wte.",
        "position_embedding.": "wpe.",
        "blocks.": "h.",
        "attention_norm.": "ln_1.",
        "attention.qkv.": "attn.c_attn.",
        "attention.proj.": "attn.c_proj.",
        "mlp_norm.": "ln_2.",
        "mlp.up.": "mlp.c_fc.",
        "mlp.down.": "mlp.c_proj.",
        "final_norm.": "ln_f.",
        "output_layer.": "lm_head.",
    },
    implied=dict(
        positions="learned",
        norm="layernorm",
        qk_norm=False,
        activation="gelu",
        bias=True,
        num_kv_heads=None,
    ),
    fields={
        "n_layer": ("num_layers", 12),
        "n_head": ("num_heads", 12),
        "n_embd": ("hidden_size", 768),
        "tie_word_embeddings": ("tie_embeddings", True),
    },
    constants={
        "layer_norm_epsilon": (NORM_EPS, 1e-5),
        "activation_function": ("gelu_new", "gelu_new"),
        "scale_attn_weights": (True, True),
        "scale_attn_by_inverse_layer_idx": (False, False),
    },
    more=lambda model: {
        "n_positions": model.config.max_seq_len,
        "resid_pdrop": model.config.dropout,
        "embd_pdrop": model.config.dropout,
        "attn_pdrop": 0.0,
    },
    # Conv1D, where nn.Linear has (out, in)
    transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight"),
)
NANOGPT = GPT2._replace(
    model_type="nanogpt",
    implied={field: value for field, value in GPT2.implied.items() if field != "bias"},
    fields=GPT2.fields | {"bias": ("bias", True)},
    constants={},
    transposed=(),
)

LLAMA = Architecture(
    "llama",
    "LlamaForCausalLM",
    "model.",
    names={
        "token_embedding.": "embed_tokens.",
        "blocks.": "layers.",
        "attention_norm.": "input_layernorm.",
        "attention.qkv.": "self_attn.q_proj. self_attn.k_proj. self_attn.v_proj.",
        "attention.proj.": "self_attn.o_proj.",
        "mlp_norm.": "post_attention_layernorm.",
        "mlp.up.": "mlp.gate_proj. mlp.up_proj.",
        "mlp.down.": "mlp.down_proj.",
        "final_norm.": "norm.",
        "output_layer.": "lm_head.",
    },
    implied=dict(positions="rope", norm="rmsnorm", qk_norm=False, activation="swiglu"),
    fields={
        "num_hidden_layers": ("num_layers", 32),
        "num_attention_heads": ("num_heads", 32),
        "num_key_value_heads": ("num_kv_heads", None),
        "hidden_size": ("hidden_size", 4096),
        "rope_theta": ("rope_theta", 10000.0),
        "tie_word_embeddings": ("tie_embeddings", False),
        "attention_bias": ("bias", False),
        "mlp_bias": ("bias", False),
    },
    constants={"rms_norm_eps": (NORM_EPS, 1e-6), "hidden_act": ("silu", "silu")},
    more=lambda model: {
        "max_position_embeddings": model.config.max_seq_len,
        "head_dim": model.config.head_dim,
        "intermediate_size": model.blocks[0].mlp.down.in_features,
    },
)
MISTRAL = LLAMA._replace(
    model_type="mistral",
    class_name="MistralForCausalLM",
    implied=LLAMA.implied | {"bias": False},
    fields=LLAMA.fields | {"num_key_value_heads": ("num_kv_heads", 8)},
    windows={"sliding_window": 4096},
)
MINISTRAL = MISTRAL._replace(
    model_type="ministral",
    class_name="MinistralForCausalLM",
    windows=MISTRAL.windows | {"layer_types": None},
)
QWEN3 = MINISTRAL._replace(
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    implied=MISTRAL.implied | {"qk_norm": True},
    fields=MISTRAL.fields | {"num_key_value_heads": ("num_kv_heads", 32)},
    windows=MINISTRAL.windows | {"use_sliding_window": False, "max_window_layers": 28},
    ones=("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
)
ARCHITECTURES = {
    each.model_type: each for each in (GPT2, LLAMA, QWEN3, MISTRAL, MINISTRAL, NANOGPT)
}
# {ending of a name: what it tells where no config.json does}; the first that is there counts
RUN = "a run's"
MARKS = {
    "h.0.ln_1.weight": "gpt2",
    "layers.0.self_attn.q_norm.weight": "qwen3",
    "layers.0.input_layernorm.weight": "llama",
    FIRST_NORM: RUN,
}


def to_hugging_face(model: "GPT") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config.json of a model, and its weights in Hugging Face's form.

    Raises ValueError with every reason if no architecture fits the model.
    """
    config, widths = model.config, windows(model)
    sizes = sorted(set(widths) - {None})
    candidates = (GPT2, LLAMA, QWEN3)
    if sizes:
        candidates = (MISTRAL if all(widths) else MINISTRAL, QWEN3)
    fitting = [each for each in candidates if not misfits(config, each.implied)]
    if not fitting:
        why = "; ".join(
            f"{each.model_type} would need {in_words(misfits(config, each.implied))}"
            for each in candidates
        )
        raise ValueError(f"transformers has no model with these settings and windows: {why}")
    layers = [block.attention for block in model.blocks]
    changes = sorted({name for layer in layers for name in layer.function} - {"window"})
    # a module that holds nothing is not in the weights either
    if any(".attention.own." in name for name in model.state_dict()):
        changes.append("parameters of their own")
    if len(sizes) > 1:
        changes.append(f"windows of {', '.join(map(str, sizes))} tokens")
    if changes:
        raise ValueError(
            "these models of transformers have windows of one width and else plain attention, and "
            f"the layers of this one have {', '.join(changes)}"
        )
    architecture, fields = fitting[0], fields_of(config)
    of_windows = {
        "sliding_window": max(sizes, default=None),
        "layer_types": [SLIDING if width else FULL for width in widths],
        "use_sliding_window": bool(sizes),
    }
    settings = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": model.vocab_size,
        **{key: value for key, (value, _) in architecture.constants.items()},
        **{key: fields[field] for key, (field, _) in architecture.fields.items()},
        **{key: value for key, value in of_windows.items() if key in architecture.windows},
        **architecture.more(model),
        "initializer_range": config.init_std,
        "dtype": "float32",
    }
    weights = their_tensors(model, architecture) | {
        f"layers.{i}.{gain}": torch.ones(config.head_dim)
        for gain in architecture.ones
        for i in range(config.num_layers)
    }
    return settings, {
        name if name == OUTPUT_LAYER else architecture.prefix + name: tensor.contiguous()
        for name, tensor in weights.items()
    }


def load_hugging_face(
    model: "GPT", tensors: Mapping[str, Tensor], settings: Mapping[str, Any] | None = None
) -> None:
    """Load weights that transformers, nanoGPT or a training tool has saved, under any prefix.

    settings is the config.json. Without it, the number of heads and the constants cannot be
    checked, because tensors do not show them. If the tensors have more learned positions than the
    model, it takes the first ones. Tensors beside the GPT, such as a classifier's, are left out.

    Raises one ValueError that names every field of the model's config that differs, or every
    tensor that is missing, unexpected, of another shape, or not of finite numbers in floating
    point. The model is unchanged then.
    """
    architecture, theirs = recognise(tensors, settings)
    embedding = architecture.names["token_embedding."] + "weight"
    # a tied matrix may be in the file under either name, or twice
    ends = [theirs[name] for name in (embedding, OUTPUT_LAYER) if name in theirs]
    one = len(ends) < 2 or (ends[0].shape == ends[1].shape and bool((ends[0] == ends[1]).all()))
    check_settings(model.config, architecture, settings, one_matrix=one)
    check_windows(model, architecture, settings or {})
    if model.config.tie_embeddings and ends:
        theirs.pop(OUTPUT_LAYER, None)
        theirs[embedding] = ends[0]

    copies, problems = [], []
    for name, ours in their_tensors(model, architecture).items():
        found = theirs.pop(name, None)
        if found is None:
            problems.append(f"missing {name}")
            continue
        if name == "wpe.weight" and found.shape[1:] == ours.shape[1:]:
            found = found[: len(ours)]
        if found.shape != ours.shape:
            shape = f"shape {tuple(found.shape)} instead of {tuple(ours.shape)}"
            hint = f", as of tokenizer.vocab_size={found.shape[:1].numel()}"
            problems.append(f"{name} has {shape}{hint if name == embedding else ''}")
        if not found.is_floating_point():
            problems.append(f"{name} is {dtype_name(found.dtype)}")
        elif not found.to(ours.dtype).isfinite().all():
            problems.append(f"{name} has NaN or inf")
        copies.append((ours, found))
    for name, gain in theirs.items():
        if not name.endswith(architecture.ones):
            problems.append(f"unexpected {name}")
        elif (gain != 1).any():
            problems.append(f"{name} is not 1, and QK-norm has no gain here")
    if problems:
        raise ValueError(
            f"these are not the weights of a {architecture.model_type} of this shape: "
            f"{'; '.join(problems)}"
        )
    for ours, found in copies:
        ours.copy_(found)


def their_tensors(model: "GPT", architecture: Architecture) -> dict[str, Tensor]:
    """Our weights as views with the shapes and names, without the prefix, of their tensors.

    Sinks and the parameters of an attention's own module are left out: their models lack them, so
    ours keeps the values that it has.
    """
    tensors = {}
    for name, tensor in model.state_dict().items():
        if ".attention.own." in name or name.endswith(".attention.sinks"):
            continue
        names = architecture.their_names(name)
        layer = model.get_submodule(name.rpartition(".")[0])
        rows = list(layer.rows) if len(names) > 1 else [len(tensor)]
        for their, part in zip(names, tensor.split(rows), strict=True):
            tensors[their] = part.T if their.endswith(architecture.transposed) else part
    return tensors


def recognise(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any] | None
) -> tuple[Architecture, dict[str, Tensor]]:
    """The architecture, by the settings or else by the names; and the tensors without prefix.

    The prefix is what stands before the name of the first norm. Raises ValueError for an unknown
    architecture.
    """
    theirs = {
        ".".join(part for part in name.split(".") if part not in WRAPPERS): tensor
        for name, tensor in tensors.items()
        if not name.endswith(BUFFERS)
    }
    model_type = (settings or {}).get("model_type")
    if model_type is None:
        marked = (kind for mark, kind in MARKS.items() if any(x.endswith(mark) for x in theirs))
        model_type = next(marked, None)
    if model_type == RUN:
        raise ValueError("these are weights of a run; python -m scripts.export makes them readable")
    architecture = ARCHITECTURES.get(str(model_type))
    if architecture is None:
        what = f"of model type {model_type}" if model_type else f"such as {min(theirs, default='')}"
        raise ValueError(
            f"weights {what} cannot be loaded; those of {', '.join(ARCHITECTURES)} can"
        )
    first = architecture.their_names(FIRST_NORM)[0]
    prefixes = [name.removesuffix(first) for name in theirs if f".{name}".endswith(f".{first}")]
    if len(prefixes) > 1:
        raise ValueError(f"these are the weights of several models: {', '.join(prefixes)}")
    prefix, beside, unprefixed = "".join(prefixes), [], {}
    for name, tensor in theirs.items():
        if f".{name}".endswith(f".{OUTPUT_LAYER}"):
            unprefixed[OUTPUT_LAYER] = tensor
        elif name.startswith(prefix):
            unprefixed[name.removeprefix(prefix)] = tensor
        else:
            beside.append(name)
    if beside:
        log.warning(f"left out, because a GPT has no such tensors: {', '.join(beside)}")
    return architecture, unprefixed


def check_settings(
    config: ModelConfig,
    architecture: Architecture,
    settings: Mapping[str, Any] | None,
    *,
    one_matrix: bool,
) -> None:
    """Raise ValueError if a model with this config.json would compute something else.

    As in transformers, embedding and output layer are not tied where their weights differ, whatever
    the config.json says.
    """
    required = dict(architecture.implied)
    if settings is not None:
        # transformers 5 has everything in rope_parameters; older releases keep theta outside, the
        # rest in rope_scaling
        rope = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
        if not isinstance(rope, dict):
            rope = {"type": rope}
        theirs = {**settings, "rope_type": rope.get("type", "default"), **rope}
        constants = architecture.constants | {"rope_type": ("default", "default")}
        problems = []
        for key, (value, default) in constants.items():
            found = theirs.get(key, default)
            if SYNONYMS.get(str(found), found) != value:
                problems.append(f"{key}={found}, and here it is {value}")
        if problems:
            raise ValueError(
                f"these {architecture.model_type} weights were trained with {'; '.join(problems)}"
            )
        for key, (field, default) in architecture.fields.items():
            required[field] = theirs.get(key, default)
    required["tie_embeddings"] = required.get("tie_embeddings", True) and one_matrix
    if wanted := misfits(config, required):
        actual = ", ".join(f"{field}={fields_of(config)[field]}" for field in wanted)
        raise ValueError(
            f"{architecture.model_type} weights do not fit this model, which has {actual}; add "
            f"{in_words(wanted)}"
        )


def windows(model: "GPT") -> list[int | None]:
    """The window of each layer; None is no window."""
    return [block.attention.function.get("window") for block in model.blocks]


def check_windows(model: "GPT", architecture: Architecture, settings: Mapping[str, Any]) -> None:
    """Raise ValueError if the weights were trained with windows and the model has different ones.

    Weights trained without windows may continue with windows.
    """
    theirs = {key: settings.get(key, default) for key, default in architecture.windows.items()}
    width, kinds = theirs.get("sliding_window"), theirs.get("layer_types")
    first = theirs.get("max_window_layers", 0)
    if not (
        isinstance(width, int | None) and isinstance(kinds, list | None) and isinstance(first, int)
    ):
        raise ValueError(f"these windows cannot be read: {theirs}")
    if not theirs.get("use_sliding_window", True) or not width or width >= model.config.max_seq_len:
        return
    slides = [layer >= first for layer in range(len(model.blocks))]
    if kinds:
        slides = [kind == SLIDING for kind in kinds]
    if any(slides) and windows(model) != [width if slide else None for slide in slides]:
        letters = "".join("S" if slide else "L" for slide in slides)
        pattern = "" if all(slides) else f" attention.pattern={letters}"
        raise ValueError(
            f"these {architecture.model_type} weights were trained with windows; add "
            f"attention.window={width}{pattern}"
        )


def fields_of(config: ModelConfig) -> dict[str, Any]:
    """The fields of the config, with the number of key and value heads in any case."""
    return vars(config) | {"num_kv_heads": config.kv_heads}


def misfits(config: ModelConfig, required: Mapping[str, Any]) -> dict[str, Any]:
    """The required values that this config does not have."""
    wanted = dict(required)
    if wanted.get("num_kv_heads", 0) is None:
        wanted["num_kv_heads"] = wanted.get("num_heads", config.num_heads)
    return {field: value for field, value in wanted.items() if fields_of(config)[field] != value}


def in_words(values: Mapping[str, Any]) -> str:
    """The values as written on a command line."""
    return " ".join(f"model.{field}={str(value).lower()}" for field, value in values.items())
