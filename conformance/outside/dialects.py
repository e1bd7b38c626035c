"""The dialects by name, and the attention that a user names.

    target("torch.nn.functional:scaled_dot_product_attention", "sdpa").backend

Classes that plan before they run, kernels that read their keys from pages and kernels that write to
an argument are not plain functions of q, k and v: wrap them in one.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attention import BACKENDS, Backend
from attention.backends import import_object
from conformance.outside.adapter import Adapter
from conformance.outside.dialect import Dialect

FLASH = Dialect(
    "BNHD",
    scale="softmax_scale",
    window="window_size",
    softcap="softcap",
    alibi="alibi_slopes",
    sinks="learnable_sink|s_aux",
    returns="out,lse,_",
    lse_flag="return_attn_probs|return_lse",
    lse_gradient=False,
)
DIALECTS = {
    # a function with the signature of Backend.fn
    "backend": Dialect(
        window="window",
        window_form="either",
        softcap="softcap",
        alibi="alibi_slopes",
        documents="document_ids",
        returns="out,lse",
    ),
    # flash_attn_func of flash-attention 2 to 4
    "fa": FLASH,
    # flash_attn_varlen_func of the same
    "fa-varlen": replace(FLASH, layout="THD", lse="HT"),
    # torch.nn.functional.scaled_dot_product_attention
    "sdpa": Dialect(
        causal="is_causal",
        corner="top_left",
        mask="attn_mask",
        more_mask_forms="additive,float32",
        gqa="enable_gqa",
        value_dim=True,
    ),
    # torch.nn.attention.flex_attention.flex_attention
    "flex": Dialect(
        causal="never",
        mask="block_mask",
        mask_form="block",
        score_mod="score_mod",
        gqa="enable_gqa",
        returns="out,lse",
        lse_flag="return_lse",
        value_dim=True,
    ),
    # the autograd.Function of Stanford's CS336, assignment 2; its lengths are powers of two
    "cs336": Dialect(
        "BND",
        causal="3",
        corner="top_left",
        scale="",
        gqa="no",
        multiple=128,
        head_dims="16,32,64,128",
    ),
    # the autograd.Function of Triton's tutorial 06; its lengths are multiples of a tile
    "triton-tutorial": Dialect(
        causal="3",
        scale="4",
        gqa="no",
        cross_length=False,
        multiple=128,
        head_dims="16,32,64,128,256",
    ),
}
# the fields that name an argument, and their value if the function has none
ARGUMENTS = {
    **dict.fromkeys(("scale", "window", "softcap", "alibi", "sinks", "documents", "mask"), ""),
    **{"score_mod": "", "lse_flag": "", "causal": "never", "gqa": "no"},
}


class Parameters(NamedTuple):
    """Names of a function's parameters in order, and whether it accepts others too."""

    names: list[str]
    others: bool

    def take(self, name: str) -> bool:
        """Whether the function accepts an argument of this name, or at this position."""
        known = int(name) < len(self.names) if name.isdigit() else name in self.names
        return known or self.others


def parameters(function: Callable[..., Any]) -> Parameters:
    owner = getattr(function, "__self__", None)
    if inspect.isclass(owner) and issubclass(owner, torch.autograd.Function):
        return Parameters(list(inspect.signature(owner.forward).parameters)[1:], False)  # no ctx
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):  # built in
        return Parameters([], True)
    open_ended = [x.name for x in found.values() if x.kind in (x.VAR_KEYWORD, x.VAR_POSITIONAL)]
    return Parameters([name for name in found if name not in open_ended], bool(open_ended))


def fitted(dialect: Dialect, function: Callable[..., Any], changes: Mapping[str, Any]) -> Dialect:
    """The dialect with the changes, without arguments that the function lacks, and with one name
    for each set of alternatives. Raises ValueError if a change names an argument that it lacks.
    """
    known, fields = parameters(function), {**vars(dialect), **changes}
    for field, absent in ARGUMENTS.items():
        text = fields[field]
        if text in ("always", "never", "yes", "no"):
            continue
        taken = [name for name in text.split("|") if name and known.take(name)]
        named = [name for name in taken if name in known.names]
        if field in changes and text and not taken:
            raise ValueError(f"{field}={text}: the function takes {', '.join(known.names)}")
        if field == "sinks" and field not in changes:
            taken = named  # **others may take sinks and do nothing with them
        fields[field] = [*named, *taken, absent][0]
    return Dialect(**fields)


class Target(NamedTuple):
    """The attention that the user named, and the code with which a script imports it."""

    backend: Backend
    dialect: Dialect
    imports: str  # the line that imports `function`
    function: str


def load(text: str) -> tuple[Any, str, str]:
    """The object at pkg.module:NAME, the line that imports it, and its name after that line. For an
    autograd.Function it is `apply`. Raises ValueError if there is no such object.
    """
    if text in BACKENDS:
        return BACKENDS[text], "from attention import BACKENDS", f"BACKENDS[{text!r}]"
    module, _, path = text.partition(":")
    if not module or not path:
        raise ValueError(
            f"{text} is not known: write pkg.module:NAME, or one of {', '.join(BACKENDS)}"
        )
    file = Path(f"{module}.py")
    spec = find_spec(module) if file.is_file() else None  # without the current folder
    if spec is not None and Path(spec.origin or "").resolve() != file.resolve():
        raise ValueError(f"{text}: {module} is already {spec.origin}; give {file} another name")
    found = import_object(module, path, called=text, find=lambda x, name: attrgetter(name)(x))
    if inspect.isclass(found) and issubclass(found, torch.autograd.Function):
        found, path = found.apply, f"{path}.apply"
    what = "class: name an object of it" if inspect.isclass(found) else type(found).__name__
    if inspect.isclass(found) or not (isinstance(found, Backend) or callable(found)):
        raise ValueError(f"{text} must be a function or a Backend; it is a {what}")
    return found, f"from {module} import {path.partition('.')[0]}", path


def target(text: str, name: str | None = None, changes: Mapping[str, Any] | None = None) -> Target:
    """The attention that `text` names, in dialect `name` with some fields changed. Raises
    ValueError if the dialect is missing, unknown or does not fit.
    """
    found, imports, function = load(text)
    if isinstance(found, Backend):
        if name or changes:
            raise ValueError(f"{text} is a Backend, which says itself how it is called")
        return Target(replace(found, name=text), DIALECTS["backend"], imports, f"{function}.fn")
    if name is None and not changes:
        raise ValueError(
            f"say how {text} is called: `attn-conform probe {text}` finds out, or dialect= one of "
            f"{', '.join(DIALECTS)}"
        )
    if name is not None and name not in DIALECTS:
        raise ValueError(f"dialect={name} is not known; valid: {', '.join(DIALECTS)}")
    dialect = fitted(DIALECTS[name] if name else Dialect(), found, changes or {})
    return Target(Adapter(found, dialect).backend(text), dialect, imports, function)
