"""Which function the attention of each layer computes: its window, and what changes its scores.

The backend computes this function and can be exchanged. The function belongs to the model, like its
width: weights that were trained with a window need that window.

    attention.window=4096 attention.pattern=SSSL    layers 0 1 2 see 4,096 keys, 3 all, 4 5 6 ...
    attention.softcap=50                            Gemma 2, 2024, arXiv:2408.00118
    model.positions=alibi                           Press et al. 2021, arXiv:2108.12409
    attention.score_mod=pkg.module:NAME             any other change of a score
    attention.sinks=true                            gpt-oss, 2025; see attention.sinks
    attention.sinks=zero                            softmax plus one; Miller, 2023

Dimensions: H query heads.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from attention import Backend, build_module, get_score_mod
from config import AttentionConfig, ModelConfig


def layer_functions(chosen: AttentionConfig, model: ModelConfig) -> list[dict[str, Any]]:
    """The arguments of attention() in each layer, besides q, k, v and documents; {} is plain
    attention.
    """
    everywhere = {
        "softcap": chosen.softcap,
        "alibi_slopes": alibi_slopes(model.num_heads) if model.positions == "alibi" else None,
        "score_mod": None if chosen.score_mod is None else get_score_mod(chosen.score_mod),
        "sinks": chosen.sinks,  # the layer has the tensor
    }
    given = {name: value for name, value in everywhere.items() if value is not None}
    windows = chosen.layer_windows(model.num_layers)
    return [given if each is None else {"window": each} | given for each in windows]


class LayerFunction(nn.Module):
    """Holds what layer_functions() says of one layer: tensors move with the model's device. Only
    sinks that learn are in a checkpoint.
    """

    def __init__(self, function: dict[str, Any], num_heads: int):
        super().__init__()
        tensors = ("alibi_slopes", "sinks")
        self._function = {name: x for name, x in function.items() if name not in tensors}
        sinks = torch.zeros(num_heads) if "sinks" in function else None
        if function.get("sinks") == "true":
            self.sinks = nn.Parameter(sinks)
        else:
            self.register_buffer("sinks", sinks, persistent=False)
        self.register_buffer("alibi_slopes", function.get("alibi_slopes"), persistent=False)

    @property
    def function(self) -> dict[str, Any]:
        """The arguments of attention() under any backend, besides q, k, v and documents."""
        tensors = {"alibi_slopes": self.alibi_slopes, "sinks": self.sinks}
        # not a | b: graphs of torch 2.11 do not check the keys of a dict that stands left of |. The
        # graph of a layer without a window would serve a layer with one too
        return {**self._function, **{name: x for name, x in tensors.items() if x is not None}}


def own_module(backend: Backend, model: ModelConfig, layer: int) -> nn.Module | None:
    """The module that a backend brings for a layer; see Backend.module. None if it brings none."""
    if backend.module is None:
        return None
    sizes = model.attention_sizes | {"max_seq_len": model.max_seq_len}
    return build_module(backend, **sizes, layer=layer)


def alibi_slopes(num_heads: int) -> Tensor:
    """One slope a head, (H,) float32: 2^(-8/H), 2^(-16/H), ... for a power of two.

    Any other number of heads takes all slopes of the power of two below, and the rest from every
    second slope of the power above, as in the authors' code (footnote 8 of the paper).
    """
    power = 2 ** int(math.log2(num_heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    slopes += [2 ** (-4 * (head + 1) / power) for head in range(0, 2 * (num_heads - power), 2)]
    return torch.tensor(slopes)
