"""Find out how an attention is called, by calling it.

    for line in probe("my_package:attend", "cpu", [torch.float32]): print(line)

Each convention is a field of a Dialect. The probe tries the values of each field on small random
inputs until the result equals float64 attention.

Dimensions: B batch, H heads, N queries, M keys, D head dim.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from attention import AttentionOutput, Backend, attention
from conformance.cases import SHORT, Case, distance, run
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

    def case(
        self, *, causal: bool, num_keys: int | None = None, groups: int = 1, **optional: Any
    ) -> Case:
        return Case(
            batch=2,
            num_heads=2 * groups,
            num_queries=self.length,
            num_keys=num_keys or self.length,
            head_dim=self.head_dim,
            causal=causal,
            optional=optional,
        )

    def call(
        self, dialect: Dialect, tensors: list[Tensor], *, scale: float | None = None, **given: Any
    ) -> AttentionOutput | None:
        """The output; None if the call raises or returns no output."""
        scale = scale or self.head_dim**-0.5
        try:
            return Adapter(self.function, dialect)(*tensors, scale=scale, **given)
        except Exception as error:  # a user's function may raise anything
            self.error = in_one_line(error)
            return None

    def agrees(
        self,
        dialect: Dialect,
        *,
        tensor: str = "out",
        causal: bool | None = None,
        scale: float | None = None,
        dtype: torch.dtype | None = None,
        top_left: bool = False,
        **fields: Any,
    ) -> bool:
        """Whether the call equals float64 attention. Without causal= it is causal only if the
        function always is. top_left: such a mask shows only the first N of M keys.
        """
        causal = dialect.causal == "always" if causal is None else causal
        case = self.case(causal=causal, **fields)
        (q, k, v), arguments, *_ = case.make(dtype or self.dtype, self.device)
        found = getattr(self.call(dialect, [q, k, v], scale=scale, **arguments), tensor, None)
        shown = slice(self.length if top_left else None)
        wide = [x.double() for x in (q, k[:, :, shown], v[:, :, shown])]
        scale = self.true_scale or scale
        exact = getattr(attention(*wide, backend="naive", scale=scale, **arguments), tensor)
        return isinstance(found, Tensor) and close(found, exact)

    def adopt(
        self, dialect: Dialect, candidates: Iterable[dict[Any, str]], **call: Any
    ) -> Dialect | None:
        """The dialect with the first of these changes with which the call agrees."""
        changed = (replace(dialect, **changes) for changes in candidates)
        return next((found for found in changed if self.agrees(found, **call)), None)

    def gradients_agree(self, dialect: Dialect, tensor: str) -> bool:
        """Whether the gradient of `tensor` with respect to q equals that of float64 attention."""
        case = self.case(causal=dialect.causal != "never")
        tensors, arguments, d_out, d_lse = case.make(self.dtype, self.device)
        arguments["scale"] = self.true_scale
        gradients = (d_out, None) if tensor == "out" else (0 * d_out, d_lse)
        backend = Adapter(self.function, dialect).backend("probed")
        try:
            found = run(backend, tensors, arguments, *gradients)["dq"]
        except Exception as error:  # a user's function may raise anything
            self.error = in_one_line(error)
            return False
        wide = [x.double() for x in tensors]
        return close(found, run("naive", wide, arguments, *gradients)["dq"])


def close(x: Tensor, exact: Tensor) -> bool:
    limit = TOLERANCE * exact.abs().max().item()
    return x.shape == exact.shape and distance(x.detach().double(), exact) < limit


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
    for step in (corner, mask, changes, heads, log_sum_exp, gradients, empty_rows, kinds):
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
    else:
        known = f"{dialect.scale}=" if dialect.scale else "D**-0.5, no argument changes it"
        said.append(f"scale         {known}")
    return said


def corner(trial: Trial, dialect: Dialect) -> Found:
    """Whether there may be more keys than queries, and the corner of the causal mask then."""
    n, flag = trial.length, dialect.causal
    if flag != "always" and not trial.agrees(dialect, num_keys=2 * n):
        return replace(dialect, cross_length=False), ["N != M        not taken"]
    if flag == "never":
        return dialect, ["causal        by no argument of its own"]
    for value, top_left in (("bottom_right", False), ("top_left", True)):
        if trial.agrees(dialect, causal=True, num_keys=2 * n, top_left=top_left):
            return replace(dialect, corner=value), [f"causal        {flag}=, {value} for N != M"]
    return dialect, [f"causal        {flag}=, could not tell: no causal mask in either corner"]


def mask(trial: Trial, dialect: Dialect) -> Found:
    forms = product(trial.names("mask"), MASKS)
    candidates = ({"causal": "never", "mask": name, "mask_form": form} for name, form in forms)
    found = trial.adopt(dialect, candidates, causal=True)
    if found is None:
        return dialect, []
    more = [
        form
        for form in ("bool", "additive", "float32")
        if form != found.mask_form and trial.agrees(replace(found, mask_form=form), causal=True)
    ]
    said = f"mask          {found.mask}=, {', '.join([found.mask_form, *more])}"
    return replace(found, causal=dialect.causal, more_mask_forms=",".join(more)), [said]


def changes(trial: Trial, dialect: Dialect) -> Found:
    """A window, arguments that change the scores, sinks and documents."""
    causal = dialect.causal != "never" or bool(dialect.mask)
    said: list[str] = []
    calls: dict[str, dict[str, Any]] = {
        "window": {"window": 3},
        "softcap": {"softcap": 0.5},
        "alibi": {"alibi_slopes": True},
        "sinks": {"sinks": True},
        "documents": {"document_ids": True},
        "score_mod": {"softcap": 0.5},
    }
    for field, call in calls.items():
        names = trial.names(field)
        forms = [{"window_form": form} for form in WINDOWS] if field == "window" else [{}]
        candidates = ({field: name} | form for name, form in product(names, forms))
        found = trial.adopt(dialect, candidates, causal=causal, **call)
        if found is not None:
            dialect = found
            form = f", {found.window_form}" if field == "window" else ""
            said.append(f"{field:<14}{getattr(found, field)}={form}")
        elif names and trial.known.names:
            said.append(f"{field:<14}{names[0]}=, could not tell what it does")
    return dialect, said


def heads(trial: Trial, dialect: Dialect) -> Found:
    flags = ({"gqa": flag} for flag in ("yes", *trial.names("gqa")))
    found = trial.adopt(dialect, flags, groups=2) or replace(dialect, gqa="no")
    return found, [f"grouped heads {found.gqa}"]


def log_sum_exp(trial: Trial, dialect: Dialect) -> Found:
    fields = ("lse_flag", "returns", "lse_base", "lse")
    flags, returned = [*trial.names("lse_flag"), ""], ("out,lse", "out,_,lse", "lse,out")
    candidates = (
        dict(zip(fields, x, strict=True)) for x in product(flags, returned, "e2", LSE_LAYOUTS)
    )
    found = trial.adopt(dialect, candidates, tensor="lse")
    if found is None:
        return dialect, ["lse           none that could be told"]
    gradient = trial.gradients_agree(found, "lse")
    said = f"lse           {found.lse}, base {found.lse_base}, {'' if gradient else 'no '}gradient"
    return replace(found, lse_gradient=gradient), [said]


def gradients(trial: Trial, dialect: Dialect) -> Found:
    trial.error = ""
    case = trial.case(causal=dialect.causal == "always")
    tensors, arguments, *_ = case.make(trial.dtype, trial.device)
    output = trial.call(dialect, [x.requires_grad_() for x in tensors], **arguments)
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
    case = replace(trial.case(causal=True), num_queries=2 * n)
    (q, k, v), arguments, *_ = case.make(trial.dtype, trial.device)
    output = trial.call(dialect, [q, k, v], **arguments)
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


def words(text: str, function: Callable[..., Any], dialect: Dialect) -> str:
    """The command with the nearest dialect and the fields that differ from it."""
    unused = {"value_dim"}  # no step probes it
    if not dialect.window:
        unused |= {"window_form"}
    if not dialect.mask:
        unused |= {"mask_form", "more_mask_forms"}
    if "lse" not in dialect.parts:
        unused |= {"lse", "lse_base", "lse_gradient"}
    if dialect.causal in ("always", "never"):
        unused |= {"corner"}
    changes = {
        name: fields_of(dialect).items() - fields_of(fitted(each, function)).items()
        for name, each in DIALECTS.items()
    }
    changed = {
        name: sorted(x for x in found if x[0] not in unused) for name, found in changes.items()
    }
    nearest = min(changed, key=lambda name: len(changed[name]))
    pairs = [f"{key}={value}" for key, value in changed[nearest]]
    return " ".join(["attn-conform run", text, f"dialect={nearest}", *pairs])


def fields_of(dialect: Dialect) -> dict[str, str]:
    """The text of each field, in one form where several mean the same."""
    parts = dialect.parts
    while len(parts) > 2 and parts[-1] == "_":
        parts = parts[:-1]
    one_form = {"returns": ",".join(parts), "out_layout": dialect.out_layout or dialect.layout}
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in (asdict(dialect) | one_form).items()
    }
