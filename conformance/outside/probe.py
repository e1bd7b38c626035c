"""Find out how an attention is called, by calling it.

    for line in probe("my_package:attend", "cpu", [torch.float32]): print(line)

Each convention is a field of a Dialect. The probe tries the values of each field on small random
inputs until the result equals float64 attention.

Dimensions: B batch, H heads, N queries, M keys, D head dim.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from attention import AttentionOutput, Backend, attention
from conformance.cases import SHORT, distance
from conformance.errors import in_one_line
from conformance.outside.adapter import Adapter
from conformance.outside.dialect import BOUNDS, LAYOUTS, LSE_LAYOUTS, MASKS, WINDOWS, Dialect
from conformance.outside.dialects import DIALECTS, fitted, load, parameters

NAMES = {
    "causal": ("causal", "is_causal"),
    "scale": ("scale", "softmax_scale", "sm_scale", "scaling"),
    "window": ("window", "window_size", "sliding_window", "window_left"),
    "softcap": ("softcap", "logit_softcap", "logits_soft_cap"),
    "alibi": ("alibi_slopes", "slopes"),
    "sinks": ("learnable_sink", "s_aux", "sinks"),
    "documents": ("document_ids", "segment_ids"),
    "mask": ("attn_mask", "attention_mask", "mask", "block_mask"),
    "score_mod": ("score_mod",),
    "lse_flag": ("return_lse", "return_attn_probs", "return_softmax_lse"),
    "gqa": ("enable_gqa",),
}
# length and head dim; a kernel may take only multiples of a tile
SIZES = ((6, 8), (16, 16), (64, 64), (128, 64))
# far above rounding in any dtype, far below the effect of a wrong convention
TOLERANCE = 0.03


class Trial:
    """Calls of one function, each compared with float64 attention."""

    def __init__(self, function: Callable[..., Any], device: str) -> None:
        self.function, self.device, self.dtype = function, device, torch.float32
        self.length, self.head_dim = SIZES[0]
        self.known = parameters(function)
        self.true_scale: float | None = None  # the scale of the scores if no argument sets it
        self.error = ""  # message of the last call that raised

    def names(self, field: str) -> list[str]:
        """Arguments that may match the field: names, or positions if it takes no names."""
        by_position = isinstance(getattr(self.function, "__self__", None), type)
        names = self.known.names
        found = [name for name in NAMES[field] if name in names or not names]
        return [str(names.index(name)) for name in found] if by_position and names else found

    def inputs(self, n: int, m: int, groups: int, dtype: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        shapes = [(2, 2 * groups, n), (2, 2, m), (2, 2, m)]
        drawn = [torch.randn(*shape, self.head_dim, generator=generator) for shape in shapes]
        return [x.to(self.device, dtype) for x in drawn]

    def call(
        self, dialect: Dialect, tensors: list[Tensor], causal: bool, **arguments: Any
    ) -> AttentionOutput | None:
        """The output; None if the call raises or returns no output."""
        scale = arguments.pop("scale", None) or tensors[0].shape[-1] ** -0.5
        try:
            return Adapter(self.function, dialect)(
                *tensors, causal=causal, scale=scale, **arguments
            )
        except Exception as error:  # a user's function may raise anything
            self.error = in_one_line(error)
            return None

    def agrees(
        self,
        dialect: Dialect,
        *,
        causal: bool | None = None,
        m: int | None = None,
        groups: int = 1,
        tensor: str = "out",
        dtype: torch.dtype | None = None,
        top_left: bool = False,
        **arguments: Any,
    ) -> bool:
        """Whether the call equals float64 attention. Without causal= it is causal only if the
        function always is.
        """
        n, causal = self.length, dialect.causal == "always" if causal is None else causal
        q, k, v = self.inputs(n, m or n, groups, dtype or self.dtype)
        found = self.call(dialect, [q, k, v], causal, **arguments)
        x = getattr(found, tensor, None)
        if top_left:  # such a mask shows only the first N of M keys
            k, v = k[:, :, :n], v[:, :, :n]
        scale = self.true_scale or arguments.pop("scale", None)
        exact = attention(
            *(x.double() for x in (q, k, v)),
            backend="naive",
            causal=causal,
            **{"scale": scale} | arguments,
        )
        exact = getattr(exact, tensor)
        if not isinstance(x, Tensor) or x.shape != exact.shape:
            return False
        return distance(x.detach().double(), exact) < TOLERANCE * exact.abs().max().item()

    def gradients_agree(self, dialect: Dialect, tensor: str) -> bool:
        """Whether the gradient of `tensor` with respect to q equals that of float64 attention."""
        tensors = self.inputs(self.length, self.length, 1, self.dtype)
        tensors = [x.requires_grad_() for x in tensors]
        causal = dialect.causal != "never"
        gradients = []
        exact = [x.detach().double().requires_grad_() for x in tensors]
        outputs = (
            (tensors, self.call(dialect, tensors, causal)),
            (exact, attention(*exact, backend="naive", causal=causal, scale=self.true_scale)),
        )
        for each, output in outputs:
            x = getattr(output, tensor, None)
            if x is None or not x.requires_grad:
                return False
            weights = torch.arange(x.numel(), device=x.device).view(x.shape).cos()
            try:
                gradients.append(torch.autograd.grad((x.double() * weights).sum(), each[0])[0])
            except Exception as error:  # a user's backward pass may raise anything
                self.error = in_one_line(error)
                return False
        largest = gradients[1].abs().max().item()
        return distance(gradients[0].double(), gradients[1]) < TOLERANCE * largest


Found = tuple[Dialect, list[str]]  # the dialect after a step, and the lines that it prints


def probe(text: str, device: str, dtypes: list[torch.dtype]) -> Iterator[str]:
    """A line for each convention, probed in the first dtype that works, then the command for
    `attn-conform run`. Raises ValueError if no way of calling it gives attention.
    """
    function, _, _ = load(text)
    if isinstance(function, Backend):
        raise ValueError(f"{text} is a Backend, which says itself how it is called: run it")
    trial = Trial(function, device)
    dialect, said = basis(trial, dtypes)
    yield from said
    for step in (corner, mask, window, changes, heads, log_sum_exp, gradients, empty_rows, kinds):
        dialect, said = step(trial, dialect)
        yield from said
    yield words(text, function, dialect)


def hypotheses(trial: Trial) -> Iterator[Dialect]:
    """Every way to call it with q, k, v, causal and scale."""
    known = trial.known.names
    causal = trial.names("causal") or ([] if known else ["3"])
    module = bool(known) and known[0] == "module"
    # transformers' functions require the mask argument, even if it is None
    mask = trial.names("mask")[0] if module else ""
    choices = (
        [*causal, "always", "never"],
        [*trial.names("scale"), ""],
        [layout for layout in LAYOUTS if layout != "THD" or {*BOUNDS} <= {*known}],
        ["", "BHND", "BNHD"],
        ["out", "out,_", "_,out"],
    )
    for causal, scale, layout, back, returns in product(*choices):
        dialect = Dialect(layout, back, causal, scale=scale, mask=mask, returns=returns)
        yield replace(dialect, module=module)


def basis(trial: Trial, dtypes: list[torch.dtype]) -> Found:
    """Layout, causal argument and scale."""
    # first look for a dialect that is right with and without a causal mask, then in only one case
    for complete, dtype, size in product((True, False), dtypes, SIZES):
        trial.dtype, (trial.length, trial.head_dim) = dtype, size
        scales = (None,) if complete else (None, 1.0)
        for dialect, scale in product(hypotheses(trial), scales):
            trial.true_scale = scale
            asked = {"always": [True], "never": [False]}.get(dialect.causal, [False, True])
            arguments: dict[str, Any] = {"scale": 0.3} if dialect.scale and not scale else {}
            asked = asked if complete else asked[:1]
            if all(trial.agrees(dialect, causal=causal, **arguments) for causal in asked):
                if size != SIZES[0]:
                    dialect = replace(dialect, multiple=size[0], head_dims=str(size[1]))
                return dialect, describe_basis(trial, dialect)
    hint = "; wrap it in a function that fills them in" if "missing" in trial.error else ""
    raise ValueError(
        f"no layout and no argument gives attention; the last call: {trial.error}{hint}"
    )


def describe_basis(trial: Trial, dialect: Dialect) -> list[str]:
    said = [f"layout        {dialect.layout}, returns {dialect.out_layout or dialect.layout}"]
    if dialect.multiple > 1:
        said.append(f"lengths       not {SIZES[0][0]}, but {dialect.multiple}")
    if trial.true_scale:
        said.append("scale         1, whatever it is given: the scores are not scaled")
    elif not dialect.scale:
        said.append("scale         D**-0.5, no argument changes it")
    else:
        trial.error = ""
        usual = trial.agrees(replace(dialect, scale=""))
        otherwise = "must be given" if trial.error else "not D**-0.5 by default"
        default = "D**-0.5 by default" if usual else otherwise
        said.append(f"scale         {dialect.scale}=, {default}")
    return said


def corner(trial: Trial, dialect: Dialect) -> Found:
    """Whether there may be more keys than queries, and the corner of the causal mask then."""
    n, flag = trial.length, dialect.causal
    if flag != "always" and not trial.agrees(dialect, m=2 * n):
        return replace(dialect, cross_length=False), ["N != M        not taken"]
    if flag == "never":
        return dialect, ["causal        by no argument of its own"]
    for value, top_left in (("bottom_right", False), ("top_left", True)):
        if trial.agrees(dialect, causal=True, m=2 * n, top_left=top_left):
            return replace(dialect, corner=value), [f"causal        {flag}=, {value} for N != M"]
    return dialect, [f"causal        {flag}=, could not tell: no causal mask in either corner"]


def mask(trial: Trial, dialect: Dialect) -> Found:
    for name, form in product(trial.names("mask"), MASKS):
        found = replace(dialect, causal="never", mask=name, mask_form=form)
        if trial.agrees(found, causal=True):
            more = [
                other
                for other in ("bool", "additive", "float32")
                if other != form and trial.agrees(replace(found, mask_form=other), causal=True)
            ]
            found = replace(found, causal=dialect.causal, more_mask_forms=",".join(more))
            return found, [f"mask          {name}=, {', '.join([form, *more])}"]
    return dialect, []


def window(trial: Trial, dialect: Dialect) -> Found:
    for name, form in product(trial.names("window"), WINDOWS):
        found = replace(dialect, window=name, window_form=form)
        if trial.agrees(found, causal=True, window=3):
            either = replace(found, window_form="either")
            if form == "count" and trial.agrees(either, causal=False, window=(2, 1)):
                return either, [f"window        {name}=w sees w keys, {name}=(left, right) too"]
            call = WINDOWS[form].format(left="w - 1", right=0)
            return found, [f"window        {name}={call} sees w keys, its own included"]
    said = [f"window        {x}=, could not tell its form" for x in trial.names("window")]
    return dialect, said if trial.known.names else []


def changes(trial: Trial, dialect: Dialect) -> Found:
    """Arguments that change the scores, sinks and documents."""
    n, causal = trial.length, dialect.causal != "never" or bool(dialect.mask)
    said: list[str] = []
    slopes = torch.tensor([0.5, 0.25], device=trial.device)
    ids = (torch.arange(n, device=trial.device) >= n // 2).int().expand(2, -1)
    arguments: dict[str, dict[str, Any]] = {
        "softcap": {"softcap": 0.5},
        "alibi": {"alibi_slopes": slopes},
        "sinks": {"sinks": 2 * slopes},
        "documents": {"document_ids": ids},
        "score_mod": {"softcap": 0.5},
    }
    for field, argument in arguments.items():
        for name in trial.names(field):
            found = replace(dialect, **{field: name})
            if trial.agrees(found, causal=causal, **argument):
                dialect = found
                said.append(f"{field:<14}{name}=")
            elif trial.known.names:
                said.append(f"{field:<14}{name}=, could not tell what it does")
            break
    return dialect, said


def heads(trial: Trial, dialect: Dialect) -> Found:
    flags = ["yes", *trial.names("gqa"), "no"]
    for flag in flags[:-1]:
        if trial.agrees(replace(dialect, gqa=flag), groups=2):
            return replace(dialect, gqa=flag), [f"grouped heads {flag}"]
    return replace(dialect, gqa="no"), ["grouped heads no"]


def log_sum_exp(trial: Trial, dialect: Dialect) -> Found:
    choices = ([*trial.names("lse_flag"), ""], ("out,lse", "out,_,lse", "lse,out"), "e2")
    for flag, returns, base in product(*choices):
        for layout in LSE_LAYOUTS:
            found = replace(dialect, lse_flag=flag, returns=returns, lse=layout, lse_base=base)
            if trial.agrees(found, tensor="lse"):
                gradient = trial.gradients_agree(found, "lse")
                say = f"lse           {layout}, base {base}, {'' if gradient else 'no '}gradient"
                return replace(found, lse_gradient=gradient), [say]
    return dialect, ["lse           none that could be told"]


def gradients(trial: Trial, dialect: Dialect) -> Found:
    tensors, trial.error = trial.inputs(trial.length, trial.length, 1, trial.dtype), ""
    output = trial.call(dialect, [x.requires_grad_() for x in tensors], dialect.causal == "always")
    backward = output is not None and output.out.requires_grad
    right = backward and trial.gradients_agree(dialect, "out")
    unknown = (
        f"could not tell: {trial.error or 'not those of attention'}; backward=false skips them"
    )
    says = "right" if right else unknown if backward else "none"
    return replace(dialect, backward=backward), [f"gradients     {says}"]


def empty_rows(trial: Trial, dialect: Dialect) -> Found:
    """The output of a query without a key, which exists if N > M and causal is bottom-right."""
    n = trial.length
    if not dialect.mask and (dialect.causal == "never" or dialect.corner == "top_left"):
        return dialect, []
    q, k, v = trial.inputs(2 * n, n, 1, trial.dtype)
    output = trial.call(dialect, [q, k, v], True)
    if output is None:
        return dialect, [f"empty rows    could not tell: {trial.error}"]
    rows = output.out[:, :, :n]
    values = {
        "zero": bool((rows == 0).all()),
        "nan": bool(rows.isnan().all()),
        "mean": distance(rows.double(), v.double().mean(2, keepdim=True).expand_as(rows)) < 0.01,
    }
    name = next((name for name, there in values.items() if there), None)
    if name is None:
        return dialect, ["empty rows    could not tell: neither zero, nor nan, nor the mean of v"]
    return replace(dialect, empty_rows=name), [f"empty rows    {name}"]


def kinds(trial: Trial, dialect: Dialect) -> Found:
    """The dtypes in which the result is right."""
    fine = [name for dtype, name in SHORT.items() if trial.agrees(dialect, dtype=dtype)]
    if not fine:
        return dialect, ["dtypes        could not tell: no call is right"]
    return replace(dialect, dtypes=",".join(fine)), [f"dtypes        {', '.join(fine)}"]


# fields without an effect where a dialect has no window, mask or lse
UNUSED = ("window_form", "mask_form", "more_mask_forms", "lse", "lse_base", "lse_gradient")


def words(text: str, function: Callable[..., Any], dialect: Dialect) -> str:
    """The command with the nearest dialect and the fields that differ from it."""
    differences = {
        name: {
            key: value
            for key, value in relevant(dialect).items()
            if relevant(fitted(each, function))[key] != value
            and not (value is None and key in UNUSED)
        }
        for name, each in DIALECTS.items()
    }
    name = min(differences, key=lambda name: len(differences[name]))
    values = asdict(dialect)
    values |= {key: str(x).lower() for key, x in values.items() if isinstance(x, bool)}
    changed = [f"{key}={values[key]}" for key in differences[name]]
    return " ".join(["attn-conform run", text, f"dialect={name}", *changed])


def relevant(dialect: Dialect) -> dict[str, Any]:
    """The fields, normalised so that equivalent dialects compare equal."""
    fields, parts = asdict(dialect), dialect.parts
    places = [parts.index(name) if name in parts else None for name in ("out", "lse")]
    fields["returns"] = (len(parts) > 1, *places)
    fields["out_layout"] = dialect.out_layout or dialect.layout
    without = {
        "window": ["window_form"],
        "mask": ["mask_form", "more_mask_forms"],
        "lse": ["lse", "lse_base", "lse_gradient", "lse_flag"],
    }
    for name, keys in without.items():
        if not (fields[name] if name != "lse" else "lse" in parts):
            fields |= dict.fromkeys(keys)
    if dialect.causal in ("always", "never"):
        fields["corner"] = None
    del fields["value_dim"]  # no step probes it
    return fields
