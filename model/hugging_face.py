"""Convert weights to and from Hugging Face's form; a table describes each architecture.

    gpt2    model=gpt2, tiny and small
    llama   RoPE in halves as ours, RMSNorm, SwiGLU, grouped heads: model=modern model.qk_norm=false
    qwen3   the same with QK-norm: model=modern. Its QK-norm has gains, which are 1 for ours
    mistral, ministral
            llama with one window in every layer, or in some: attention.window, attention.pattern.
            qwen3 can have either

    ours                                           Hugging Face's
    blocks.3.attention.qkv.weight (3C, C)          transformer.h.3.attn.c_attn.weight (C, 3C)
    blocks.3.mlp.up.weight (2F, C)                 model.layers.3.mlp.gate_proj.weight (F, C)
                                                   model.layers.3.mlp.up_proj.weight (F, C)

Dimensions: C hidden_size, F width of the MLP.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attention import dtype_name
from config import ModelConfig
from model.gpt import NORM_EPS

if TYPE_CHECKING:
    from model.gpt import GPT


class Architecture(NamedTuple):
    """How one of transformers' model types describes a GPT."""

    model_type: str
    class_name: str
    prefix: str  # of every tensor except the output layer
    # {part of our names: part of theirs}, applied in this order; several of theirs are rows of one
    # of our matrices
    names: dict[str, str]
    # the values of ModelConfig that it implies; num_kv_heads None means as many as query heads
    fixed: dict[str, Any]
    # (field of ModelConfig, key of config.json, the value if config.json lacks the key)
    shape: tuple[tuple[str, str, Any], ...]
    # {key of config.json: (its required value, the value if config.json lacks the key)}
    constants: dict[str, tuple[Any, Any]]
    # further entries of the config.json that we write
    more: Callable[["GPT"], dict[str, Any]]
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
    },
    fixed=dict(
        positions="learned",
        norm="layernorm",
        qk_norm=False,
        activation="gelu",
        bias=True,
        tie_embeddings=True,
        num_kv_heads=None,
    ),
    shape=(
        ("num_layers", "n_layer", 12),
        ("num_heads", "n_head", 12),
        ("hidden_size", "n_embd", 768),
    ),
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
    fixed=dict(positions="rope", norm="rmsnorm", qk_norm=False, activation="swiglu"),
    shape=(
        ("num_layers", "num_hidden_layers", 32),
        ("num_heads", "num_attention_heads", 32),
        ("num_kv_heads", "num_key_value_heads", None),
        ("hidden_size", "hidden_size", 4096),
        ("rope_theta", "rope_theta", 10000.0),
        ("tie_embeddings", "tie_word_embeddings", False),
        ("bias", "attention_bias", False),
        ("bias", "mlp_bias", False),
    ),
    constants={
        "rms_norm_eps": (NORM_EPS, 1e-6),
        "hidden_act": ("silu", "silu"),
    },
    more=lambda model: {
        "max_position_embeddings": model.config.max_seq_len,
        "head_dim": model.config.head_dim,
        "intermediate_size": model.blocks[0].mlp.down.in_features,
    },
)

MISTRAL = LLAMA._replace(
    model_type="mistral",
    class_name="MistralForCausalLM",
    fixed=LLAMA.fixed | {"bias": False},
    shape=tuple(row for row in LLAMA.shape if row[0] != "bias"),
    more=lambda model: LLAMA.more(model) | {"sliding_window": max(filter(None, windows(model)))},
)
MINISTRAL = MISTRAL._replace(
    model_type="ministral",
    class_name="MinistralForCausalLM",
    more=lambda model: (
        MISTRAL.more(model)
        | {"layer_types": [SLIDING if window else "full_attention" for window in windows(model)]}
    ),
)
QWEN3 = MISTRAL._replace(
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    fixed=MISTRAL.fixed | {"qk_norm": True},
    constants=LLAMA.constants | {"attention_bias": (False, False)},
    more=lambda model: (
        (MINISTRAL if any(windows(model)) else LLAMA).more(model)
        | {"use_sliding_window": any(windows(model))}
    ),
    ones=("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
)
ARCHITECTURES = (GPT2, LLAMA, QWEN3, MISTRAL, MINISTRAL)
SLIDING = "sliding_attention"

# tensors in older files that are not weights
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
OUTPUT_LAYER = "lm_head.weight"


def to_hugging_face(model: "GPT") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config.json of a model, and its weights in Hugging Face's form.

    Raises ValueError with every reason if no architecture fits the model.
    """
    config, own = model.config, windows(model)
    candidates = (GPT2, LLAMA, QWEN3)
    if any(own):
        candidates = (MISTRAL if all(own) else MINISTRAL, QWEN3)
    reasons = [misfits(config, each.fixed) for each in candidates]
    if all(reasons):
        why = (
            f"{each.model_type} would need {in_words(wanted)}"
            for each, wanted in zip(candidates, reasons, strict=True)
        )
        like = "no windows in a model" if any(own) else "no model"
        raise ValueError(f"transformers has {like} like this one: {'; '.join(why)}")
    layers = [block.attention for block in model.blocks]
    changes = sorted({name for layer in layers for name in layer.function} - {"window"})
    # a module that holds nothing is not in the weights either
    if any(".attention.own." in name for name in model.state_dict()):
        changes.append("parameters of their own")
    if changes:
        raise ValueError(
            "these models of transformers have windows and else plain attention, and the layers of "
            f"this one have {', '.join(changes)}"
        )
    if len(widths := set(own) - {None}) > 1:
        raise ValueError(
            "these models of transformers have one width for all their windows, and this one has "
            f"{', '.join(map(str, sorted(widths)))}"
        )
    architecture = candidates[reasons.index({})]
    settings = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": model.vocab_size,
        **{key: value for key, (value, _) in architecture.constants.items()},
        **{key: value_of(config, ours) for ours, key, _ in architecture.shape},
        **architecture.more(model),
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
        "dtype": "float32",
    }
    weights = {
        f"layers.{i}.{gain}": torch.ones(config.head_dim)
        for gain in architecture.ones
        for i in range(config.num_layers)
    }
    for _, tensor, names, rows in correspondence(model, architecture):
        weights |= zip(names, tensor.split(rows), strict=True)
    return settings, {
        name if name == OUTPUT_LAYER else architecture.prefix + name: (
            tensor.T if name.endswith(architecture.transposed) else tensor
        ).contiguous()
        for name, tensor in weights.items()
    }


def load_hugging_face(
    model: "GPT", tensors: Mapping[str, Tensor], settings: Mapping[str, Any] | None = None
) -> None:
    """Load weights that a model of transformers has saved, with or without its output layer.

    settings is its config.json. Without it, the number of heads and the constants cannot be
    checked, because tensors do not show them. If the tensors have more learned positions than the
    model, it takes the first ones.

    Raises one ValueError that names every field of the model's config that differs, or every
    tensor that is missing, unexpected, of another shape, or not of finite numbers in floating
    point. The model is unchanged then.
    """
    theirs = {
        name.removeprefix("transformer.").removeprefix("model."): tensor
        for name, tensor in tensors.items()
        if not name.endswith(BUFFERS)
    }
    architecture = architecture_of(theirs, settings)
    check_settings(model.config, architecture, settings)
    check_windows(model, architecture, settings)
    parts, problems = {}, []
    for name, tensor, names, rows in correspondence(model, architecture):
        parts[name] = []
        for their, count in zip(names, rows, strict=True):
            found, transposed = theirs.pop(their, None), their.endswith(architecture.transposed)
            if found is None:
                problems.append(f"missing {their}")
                continue
            if name == "position_embedding.weight":
                found = found[:count]
            shape = (count, *tensor.shape[1:])
            shape = shape[::-1] if transposed else shape
            if found.shape != shape:
                problems.append(f"{their} has shape {tuple(found.shape)} instead of {shape}")
            if not found.is_floating_point():
                problems.append(f"{their} is {dtype_name(found.dtype)}")
            elif not found.isfinite().all():
                problems.append(f"{their} has NaN or inf")
            parts[name].append(found.T if transposed else found)
    output_layer = theirs.pop(OUTPUT_LAYER, None)  # theirs may be separate where ours is tied
    gains = [name for name in theirs if name.endswith(architecture.ones)]
    for name in gains:
        if (theirs.pop(name) != 1).any():
            problems.append(f"{name} is not 1, and QK-norm has no gain here")
    problems += [f"unexpected {name}" for name in theirs]
    if problems:
        raise ValueError(
            f"these are not the weights of a {architecture.model_type} of this shape: "
            f"{'; '.join(problems)}"
        )
    embedding = parts["token_embedding.weight"][0]
    if output_layer is not None and not torch.equal(output_layer, embedding):
        raise ValueError(
            f"{OUTPUT_LAYER} differs from {architecture.their_names('token_embedding.weight')[0]}, "
            "but the output layer of this model is its token embedding"
        )
    found = {name: torch.cat(tensors) for name, tensors in parts.items()}
    model.load_state_dict(model.state_dict() | found)


def correspondence(
    model: "GPT", architecture: Architecture
) -> Iterator[tuple[str, Tensor, list[str], list[int]]]:
    """For each of our tensors: its name, itself, the names of their tensors that hold it, and the
    rows in each. Sinks and the parameters of an attention's own module are left out: their models
    lack them, so ours keeps the values that it has.
    """
    for name, tensor in model.state_dict().items():
        if ".attention.own." in name or name.endswith(".attention.sinks"):
            continue
        names = architecture.their_names(name)
        layer = model.get_submodule(name.rpartition(".")[0])
        yield name, tensor, names, list(layer.rows) if len(names) > 1 else [len(tensor)]


def architecture_of(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any] | None
) -> Architecture:
    """Find the architecture by the settings, else by tensor names. Raises ValueError for an unknown
    one.
    """
    if settings is None:
        if "wte.weight" in tensors:
            return GPT2
        if "embed_tokens.weight" in tensors:
            return QWEN3 if any(name.endswith(QWEN3.ones) for name in tensors) else LLAMA
    model_type = (settings or {}).get("model_type")
    for each in ARCHITECTURES:
        if each.model_type == model_type:
            return each
    if "token_embedding.weight" in tensors:
        raise ValueError("these are weights of a run; python -m scripts.export makes them readable")
    what = f"of model type {model_type}" if model_type else f"such as {min(tensors, default=None)}"
    known = ", ".join(each.model_type for each in ARCHITECTURES)
    raise ValueError(f"weights {what} cannot be loaded; those of {known} can")


def check_settings(
    config: ModelConfig, architecture: Architecture, settings: Mapping[str, Any] | None
) -> None:
    """Raise ValueError if a model with this config.json would compute something else."""
    required, problems = dict(architecture.fixed), []
    if settings is not None:
        # transformers 5 has everything in rope_parameters; older releases keep theta outside, the
        # rest in rope_scaling
        rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
        theirs = {**settings, **rope}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            problems.append(f"rope_type={kind}, and here it is default")
        required |= {ours: theirs.get(key, default) for ours, key, default in architecture.shape}
        for key, (value, default) in architecture.constants.items():
            if theirs.get(key, default) != value:
                problems.append(f"{key}={theirs.get(key, default)}, and here it is {value}")
    if problems:
        raise ValueError(
            f"these {architecture.model_type} weights were trained with {'; '.join(problems)}"
        )
    if wanted := misfits(config, required):
        actual = ", ".join(f"{key}={value_of(config, key)}" for key in wanted)
        raise ValueError(
            f"{architecture.model_type} weights do not fit this model, which has {actual}; add "
            f"{in_words(wanted)}"
        )


def windows(model: "GPT") -> list[int | None]:
    """The window of each layer; None is no window."""
    return [block.attention.function.get("window") for block in model.blocks]


def check_windows(
    model: "GPT", architecture: Architecture, settings: Mapping[str, Any] | None
) -> None:
    """Raise ValueError if the weights were trained with windows and the model has different ones.

    Weights trained without windows may continue with windows.
    """
    settings = settings or {}
    width, kinds, first = settings.get("sliding_window"), settings.get("layer_types"), 0
    if architecture is QWEN3:
        width = width if settings.get("use_sliding_window") else None
        first = settings.get("max_window_layers", 28)
    if width is None or architecture in (GPT2, LLAMA) or width >= model.config.max_seq_len:
        return
    count = model.config.num_layers
    kinds = kinds or ["" if layer < first else SLIDING for layer in range(count)]
    theirs = [width if kind == SLIDING else None for kind in kinds]
    if any(theirs) and theirs != windows(model):
        asked = ",".join("null" if window is None else str(window) for window in theirs)
        asked = f"window={width}" if all(theirs) else f"windows=[{asked}]"
        raise ValueError(
            f"these {architecture.model_type} weights were trained with windows; add "
            f"attention.{asked}"
        )


def misfits(config: ModelConfig, required: Mapping[str, Any]) -> dict[str, Any]:
    """The required values that this config does not have."""
    wanted = dict(required)
    if wanted.get("num_kv_heads", 0) is None:
        wanted["num_kv_heads"] = wanted.get("num_heads", config.num_heads)
        if config.num_kv_heads is None:  # it follows num_heads
            del wanted["num_kv_heads"]
    return {key: value for key, value in wanted.items() if value_of(config, key) != value}


def value_of(config: ModelConfig, key: str) -> Any:
    return config.kv_heads if key == "num_kv_heads" else getattr(config, key)


def in_words(values: Mapping[str, Any]) -> str:
    """The values as written on a command line."""
    return " ".join(
        f"model.{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in values.items()
    )
