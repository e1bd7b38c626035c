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

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attention import dtype_name
from model.gpt import INIT_STD, NORM_EPS, mlp_width

if TYPE_CHECKING:
    from model.gpt import GPT

log = logging.getLogger("tilegpt")

Settings = dict[str, Any]

OUTPUT_LAYER, POSITIONS = "lm_head.weight", "wpe.weight"
SLIDING, FULL = "sliding_attention", "full_attention"
# parts of names that torch.compile, DDP, FSDP and recomputation add
WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# a name of theirs below any prefix
NAME = re.compile(
    r"(?:.*?\.)?((?:h|layers)\.\d+\..+|(?:wte|wpe|ln_f|embed_tokens|norm|lm_head)\.\w+)"
)
# tensors in older files that are not weights
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
# other names of one function
SYNONYMS = {"gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new", "swish": "silu"}
# {our setting of windows: the key of config.json without which an architecture lacks it}
WINDOW_KEYS = {"attention.window": "sliding_window", "attention.pattern": "layer_types"}
# what our model always has, under the key of config.json
CONSTANTS = {
    "layer_norm_epsilon": NORM_EPS,
    "rms_norm_eps": NORM_EPS,
    "activation_function": "gelu_new",
    "hidden_act": "silu",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "rope_type": "default",
}
# what a config.json means that lacks the key
DEFAULTS = {"rope_theta": 10000.0, "attention_bias": False, "mlp_bias": False, "bias": True}


class Architecture(NamedTuple):
    """How one of transformers' model types describes a GPT."""

    model_type: str
    class_name: str
    prefix: str  # of every tensor except the output layer
    # {part of our names: part of theirs}, applied in this order; several of theirs are rows of one
    # of our matrices
    names: dict[str, str]
    # settings that it implies; model.num_kv_heads None means as many as query heads
    implied: Settings
    fields: dict[str, str]  # {key of config.json: our setting, which must have the same value}
    written: dict[str, str]  # {further key that we write: our setting}
    # {key of config.json that tells its windows: the value if config.json lacks the key}
    windows: Settings = {}
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
    implied={
        "model.positions": "learned",
        "model.norm": "layernorm",
        "model.qk_norm": False,
        "model.activation": "gelu",
        "model.bias": True,
        "model.num_kv_heads": None,
    },
    fields={
        "vocab_size": "tokenizer.vocab_size",
        "n_layer": "model.num_layers",
        "n_head": "model.num_heads",
        "n_embd": "model.hidden_size",
    },
    written={
        "n_positions": "model.max_seq_len",
        "resid_pdrop": "model.dropout",
        "embd_pdrop": "model.dropout",
        "attn_pdrop": "attention dropout",
    },
    # Conv1D, where nn.Linear has (out, in)
    transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight"),
)
NANOGPT = GPT2._replace(
    model_type="nanogpt",
    fields=GPT2.fields | {"bias": "model.bias"},
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
    implied={
        "model.positions": "rope",
        "model.norm": "rmsnorm",
        "model.qk_norm": False,
        "model.activation": "swiglu",
    },
    fields={
        "vocab_size": "tokenizer.vocab_size",
        "num_hidden_layers": "model.num_layers",
        "num_attention_heads": "model.num_heads",
        "num_key_value_heads": "model.num_kv_heads",
        "hidden_size": "model.hidden_size",
        "rope_theta": "model.rope_theta",
        "attention_bias": "model.bias",
        "mlp_bias": "model.bias",
        "rms_norm_eps": "rms_norm_eps",
    },
    written={
        "max_position_embeddings": "model.max_seq_len",
        "head_dim": "head_dim",
        "intermediate_size": "width of the MLP",
    },
)
MISTRAL = LLAMA._replace(
    model_type="mistral",
    class_name="MistralForCausalLM",
    implied=LLAMA.implied | {"model.bias": False},
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
    implied=MISTRAL.implied | {"model.qk_norm": True},
    windows=MINISTRAL.windows | {"use_sliding_window": False, "max_window_layers": 28},
    ones=("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
)
EXPORTED = (GPT2, LLAMA, QWEN3, MISTRAL, MINISTRAL)  # the first that fits a model is its form
ARCHITECTURES = {each.model_type: each for each in (*EXPORTED, NANOGPT)}
# {name: the architecture where no config.json tells it}; the first that is there counts
MARKS = {
    "h.0.ln_1.weight": "gpt2",
    "layers.0.self_attn.q_norm.weight": "qwen3",
    "layers.0.input_layernorm.weight": "llama",
}


def to_hugging_face(model: "GPT") -> tuple[Settings, dict[str, Tensor]]:
    """The config.json of a model, and its weights in Hugging Face's form.

    Raises ValueError with every reason if no architecture fits the model.
    """
    ours = settings_of(model)
    refusals = [refusal(each, ours, expressible(each, ours)) for each in EXPORTED]
    if all(refusals):
        raise ValueError(
            f"transformers has no model with these settings and windows: {'; '.join(refusals)}"
        )
    architecture = EXPORTED[refusals.index("")]
    settings = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "tie_word_embeddings": model.config.tie_embeddings,
        **{key: ours[name] for key, name in (architecture.fields | architecture.written).items()},
        **{key: ours[key] for key in architecture.windows if key in ours},
        "initializer_range": INIT_STD,
        "dtype": "float32",
    }
    return settings, {
        name if name == OUTPUT_LAYER else architecture.prefix + name: tensor.contiguous()
        for name, tensor in their_tensors(model, architecture).items()
    }


def load_hugging_face(
    model: "GPT", tensors: Mapping[str, Tensor], settings: Mapping[str, Any] | None = None
) -> None:
    """Load weights that transformers, nanoGPT or a training tool has saved, under any prefix.

    settings is the config.json. Without it, the number of heads and the constants cannot be
    checked, because tensors do not show them. If the tensors have more learned positions than the
    model, it takes the first ones. Tensors beside the GPT, such as a classifier's, are left out.

    Raises one ValueError that names every setting of the model that differs, or every tensor that
    is missing, unexpected, of another shape, or not of finite numbers in floating point. The model
    is unchanged then.
    """
    settings = settings or {}
    architecture, theirs = recognise(tensors, settings)
    (embedding,) = architecture.their_names("token_embedding.weight")
    # a tied matrix may be in the file under either name, or twice
    ends = [theirs[name] for name in (embedding, OUTPUT_LAYER) if name in theirs]
    one = len(ends) < 2 or torch.equal(*ends)
    try:
        required = required_settings(model, architecture, settings)
    except TypeError as error:
        raise ValueError(f"this config.json cannot be read: {error}") from error
    # as in transformers, which does not tie two different matrices, whatever the config.json says
    required["model.tie_embeddings"] = settings.get("tie_word_embeddings", True) and one
    if why := refusal(architecture, settings_of(model), required):
        raise ValueError(why)
    if model.config.tie_embeddings and ends:
        theirs.pop(OUTPUT_LAYER, None)
        theirs[embedding] = ends[0]

    wanted = their_tensors(model, architecture)
    if POSITIONS in wanted and POSITIONS in theirs:
        theirs[POSITIONS] = torch.atleast_1d(theirs[POSITIONS])[: model.config.max_seq_len]
    problems = [
        f"{name} is {found} and should be {needed}"
        for name in wanted | theirs
        if (found := described(theirs.get(name))) != (needed := described(wanted.get(name)))
    ]
    problems += [
        f"{name} is not 1, and QK-norm has no gain here"
        for name, gain in theirs.items()
        if name.endswith(architecture.ones) and (gain != 1).any()
    ]
    if problems:
        raise ValueError(
            f"these are not the weights of a {architecture.model_type} of this shape: "
            f"{'; '.join(problems)}"
        )
    for name, tensor in wanted.items():
        tensor.copy_(theirs[name])


def described(tensor: Tensor | None) -> str:
    """The shape of a tensor, or why it is no weight."""
    if tensor is None:
        return "absent"
    if not tensor.is_floating_point():
        return dtype_name(tensor.dtype)
    if not tensor.float().isfinite().all():
        return "NaN or infinite"
    return f"{tuple(tensor.shape)}"


def their_tensors(model: "GPT", architecture: Architecture) -> dict[str, Tensor]:
    """Our weights as views with the shapes and names, without the prefix, of their tensors.

    Sinks and the parameters of an attention's own module are left out: their models lack them, so
    ours keeps the values that it has. Gains that our model lacks are tensors of ones.
    """
    tensors = {
        f"layers.{i}.{gain}": torch.ones(model.config.head_dim)
        for gain in architecture.ones
        for i in range(model.config.num_layers)
    }
    for name, tensor in model.state_dict().items():
        names = architecture.their_names(name)
        if ".attention." in names[0]:  # no part of the table
            continue
        layer = model.get_submodule(name.rpartition(".")[0])
        rows = list(layer.rows) if len(names) > 1 else [len(tensor)]
        for their, part in zip(names, tensor.split(rows), strict=True):
            tensors[their] = part.T if their.endswith(architecture.transposed) else part
    return tensors


def recognise(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> tuple[Architecture, dict[str, Tensor]]:
    """The architecture, by the settings or else by the names; and the tensors without prefix.

    Raises ValueError for an unknown architecture, and for two tensors of one name.
    """
    theirs, beside = {}, []
    for name, tensor in tensors.items():
        plain = ".".join(part for part in name.split(".") if part not in WRAPPERS)
        if plain.endswith(BUFFERS):
            continue
        if not (match := NAME.fullmatch(plain)):
            beside.append(name)
        elif match[1] in theirs:
            raise ValueError(f"these are the weights of several models, as {name} shows")
        else:
            theirs[match[1]] = tensor
    marked = [kind for mark, kind in MARKS.items() if mark in theirs]
    model_type = settings.get("model_type") or next(iter(marked), None)
    architecture = ARCHITECTURES.get(str(model_type))
    if architecture is None:
        raise ValueError(
            f"weights of model type {model_type}, such as {min(tensors, default=None)}, cannot be "
            f"loaded; those of {', '.join(ARCHITECTURES)} can, and a run's after scripts.export"
        )
    if beside:
        log.warning(f"left out, because a GPT has no such tensors: {', '.join(beside)}")
    return architecture, theirs


def settings_of(model: "GPT") -> Settings:
    """What tells one model from another, mostly as written on a command line.

    An attention. beside its window and pattern is there only if it changes a layer's function.
    """
    config = model.config
    windows = [block.attention.function.get("window") for block in model.blocks]
    sizes = set(windows) - {None}
    changes = {name for block in model.blocks for name in block.attention.function} - {"window"}
    # a module that holds nothing is not in the weights either
    if any(".attention.own." in name for name in model.state_dict()):
        changes.add("parameters")
    settings = {f"model.{field}": value for field, value in vars(config).items()} | {
        "model.num_kv_heads": config.kv_heads,
        "tokenizer.vocab_size": model.vocab_size,
        "head_dim": config.head_dim,
        "width of the MLP": mlp_width(config),
        "attention dropout": 0.0,
        "attention.window": max(sizes, default=None),
        "attention.pattern": pattern(windows),
        "sliding_window": max(sizes, default=None),
        "layer_types": [SLIDING if width else FULL for width in windows],
        "use_sliding_window": bool(sizes),
        **{f"attention.{name}": True for name in sorted(changes)},
    }
    return CONSTANTS | settings


def pattern(slides: Sequence[Any]) -> str | None:
    """attention.pattern with a letter for each layer; None if all layers are alike."""
    letters = "".join("S" if each else "L" for each in slides)
    return letters if len(set(letters)) > 1 else None


def expressible(architecture: Architecture, ours: Settings) -> Settings:
    """The settings without which the architecture cannot express a model."""
    return architecture.implied | {
        key: None
        for key in ours
        if key.startswith("attention.") and WINDOW_KEYS.get(key) not in architecture.windows
    }


def required_settings(
    model: "GPT", architecture: Architecture, settings: Mapping[str, Any]
) -> Settings:
    """The settings with which a model computes what this config.json says, which may be empty.

    Weights trained without windows may continue with windows. Raises TypeError for values of
    another type.
    """
    if not settings:
        return architecture.implied.copy()
    # transformers 5 has everything in rope_parameters; older releases keep theta outside, the rest
    # in rope_scaling, whose kind was called type
    rope = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    theirs = {**DEFAULTS, **settings, **rope}
    theirs.setdefault("rope_type", theirs.get("type", "default"))
    required = (
        architecture.implied
        | {setting: theirs.get(key) for key, setting in architecture.fields.items()}
        | {key: SYNONYMS.get(str(theirs[key]), theirs[key]) for key in CONSTANTS if key in theirs}
    )
    windows = {key: theirs.get(key, default) for key, default in architecture.windows.items()}
    width, first = windows.get("sliding_window"), windows.get("max_window_layers", 0)
    if windows.get("use_sliding_window", True) and width and width < model.config.max_seq_len:
        slides = [layer >= first for layer in range(model.config.num_layers)]
        if kinds := windows.get("layer_types"):
            slides = [kind == SLIDING for kind in kinds]
        if any(slides):
            required |= {"attention.window": width, "attention.pattern": pattern(slides)}
    return required


def refusal(architecture: Architecture, ours: Settings, required: Settings) -> str:
    """A sentence with every setting of ours that is not as required; "" if there is none."""
    required = dict(required)
    if required.get("model.num_kv_heads", 0) is None:
        required["model.num_kv_heads"] = required.get("model.num_heads", ours["model.num_heads"])
    needs = {key: value for key, value in required.items() if ours.get(key) != value}
    has = {key: ours.get(key) for key in needs}
    if not needs:
        return ""
    return (
        f"this model has {in_words(has)}, and {architecture.model_type} weights need "
        f"{in_words(needs)}"
    )


def in_words(settings: Settings) -> str:
    """The settings as written on a command line."""
    words = {key: json.dumps(value, default=str).strip('"') for key, value in settings.items()}
    return " ".join(f"{key}={word}" for key, word in words.items())
