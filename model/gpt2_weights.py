"""GPT-2's published weights: from Hugging Face's naming and layout to ours.

transformer.h.3.attn.c_attn.weight (C, 3C)   ->   blocks.3.attention.qkv.weight (3C, C)
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from config import ModelConfig

# a ModelConfig with these values and num_kv_heads equal to num_heads is GPT-2's architecture
ARCHITECTURE = dict(
    positions="learned",
    norm="layernorm",
    qk_norm=False,
    activation="gelu",
    bias=True,
    tie_embeddings=True,
)

# applied in this order to a parameter's name
RENAMES = (
    ("token_embedding.", "wte."),
    ("position_embedding.", "wpe."),
    ("blocks.", "h."),
    ("attention_norm.", "ln_1."),
    ("attention.qkv.", "attn.c_attn."),
    ("attention.proj.", "attn.c_proj."),
    ("mlp_norm.", "ln_2."),
    ("mlp.up.", "mlp.c_fc."),
    ("mlp.down.", "mlp.c_proj."),
    ("final_norm.", "ln_f."),
)
# the layers Hugging Face stores as Conv1D, (in, out) where nn.Linear has (out, in)
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
# causal masks in older files
BUFFERS = (".attn.bias", ".attn.masked_bias")


def gpt2_name(name: str) -> str:
    for ours, theirs in RENAMES:
        name = name.replace(ours, theirs)
    return name


def from_gpt2(
    state_dict: Mapping[str, Tensor], parameters: Mapping[str, Tensor], config: ModelConfig
) -> dict[str, Tensor]:
    """`state_dict` in our names and layout, for a model with these `parameters`.

    Raises one ValueError that names every missing, unexpected or wrong-shape tensor, or the fields
    of `config` that are not GPT-2's.
    """
    required = ARCHITECTURE | {"num_kv_heads": config.num_heads}
    actual = vars(config) | {"num_kv_heads": config.kv_heads}
    foreign = [
        f"{key}={actual[key]} (needs {value})"
        for key, value in required.items()
        if actual[key] != value
    ]
    if foreign:
        raise ValueError(
            f"GPT-2 weights need GPT-2's architecture, but this model has {', '.join(foreign)}; "
            "use model=gpt2"
        )

    theirs = {name.removeprefix("transformer."): tensor for name, tensor in state_dict.items()}
    theirs = {name: tensor for name, tensor in theirs.items() if not name.endswith(BUFFERS)}
    output_layer = theirs.pop("lm_head.weight", None)
    converted, problems = {}, []
    for name, parameter in parameters.items():
        transposed = gpt2_name(name).endswith(TRANSPOSED)
        tensor = theirs.pop(gpt2_name(name), None)
        shape = parameter.T.shape if transposed else parameter.shape
        if tensor is None:
            problems.append(f"missing {gpt2_name(name)}")
        elif tensor.shape != shape:
            problems.append(
                f"{gpt2_name(name)} has shape {tuple(tensor.shape)} instead of {tuple(shape)}"
            )
        else:
            converted[name] = tensor.T if transposed else tensor
    problems += [f"unexpected {name}" for name in theirs]
    if problems:
        raise ValueError(
            f"this is not the state dict of a GPT-2 of this shape: {'; '.join(problems)}"
        )
    if output_layer is not None and not torch.equal(
        output_layer, converted["token_embedding.weight"]
    ):
        raise ValueError(
            "lm_head.weight differs from wte.weight, but GPT-2's output layer is the "
            "token embedding"
        )
    return converted
