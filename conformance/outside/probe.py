"""Find out how an attention is called, by calling it.

    print(*probe("my_package:attend", "cpu", [torch.float32]), sep="\n")

Each convention is a field of a Dialect. The probe tries the values of each field on small random
inputs until the result equals float64 attention.

Dimensions: B batch, H heads, N queries, M keys, D head dim.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from attention import Backend, attention
from conformance.cases import SHORT, Case, distance, run
from conformance.cases import call as call_backend
from conformance.errors import in_one_line
from conformance.outside.adapter import Adapter, described
from conformance.outside.dialect import BOUNDS, LAYOUTS, LSE_LAYOUTS, MASKS, WINDOWS, Dialect
from conformance.outside.dialects import load, parameters

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

Fields = dict[str, Any]  # some fields of a Dialect
AS_BEFORE: Fields = {}


class Trial:
    """Calls of one function, each compared with float64 attention."""

    def __init__(
        self, function: Callable[..., Any], device: str, dtypes: list[torch.dtype]
    ) -> None:
        self.function, self.device, self.dtypes = function, device, dtypes
        self.dtype = dtypes[0]
        self.length, self.head_dim = SIZES[0]
        self.known = parameters(function)
        self.outcome = ""  # of the last call
        self.remarks: dict[str, str] = {}  # by field

    def names(self, field: str) -> list[str]:
        """Arguments that may match the field: names, or positions if it takes no names."""
        by_position = isinstance(getattr(self.function, "__self__", None), type)
        names = self.known.names
        found = [name for name in NAMES[field] if self.known.others or name in names]
        return [str(names.index(name)) for name in found] if by_position and names else found

    def case(self, **fields: Any) -> Case:
        n, head_dim = self.length, self.head_dim
        return replace(Case(batch=2, num_queries=n, num_keys=n, head_dim=head_dim), **fields)

    def call(
        self, dialect: Dialect, tensors: list[Tensor], *, scale: float | None = None, **given: Any
    ) -> Any:
        """What the function returns; None if it raises an exception."""
        adapter = Adapter(self.function, dialect)
        q, k, v = (x.clone() for x in tensors)  # it may change them
        asked = f"for q {tuple(adapter.laid_out(q).shape)} it"
        try:
            result = adapter.result(q, k, v, scale=scale or self.head_dim**-0.5, **given)
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            self.outcome = f"{asked} raised {in_one_line(error)}"
            return None
        self.outcome = f"{asked} returned {described(result)}"
        return result

    def read(self, dialect: Dialect, result: Any, tensor: str = "out") -> Tensor | None:
        """out or lse of a result; None if the dialect finds none."""
        try:
            return getattr(Adapter(self.function, dialect).read(result, batch=2), tensor)
        except (TypeError, RuntimeError, IndexError):  # another shape, or no tensor
            return None

    def adopt(
        self,
        dialect: Dialect,
        calls: Iterable[Fields],
        readings: Iterable[Fields] = (AS_BEFORE,),
        *,
        tensor: str = "out",
        causal: bool | None = None,
        scale: float | None = None,
        dtype: torch.dtype | None = None,
        top_left: bool = False,
        **fields: Any,
    ) -> Fields | None:
        """The first changes of the dialect with which the tensor equals that of float64 attention.
        calls: changes of the call. readings: changes of what is read from its result. Without
        causal= the call is causal only if the function always is. top_left: such a mask shows only
        the first N of M keys.
        """
        causal = dialect.causal == "always" if causal is None else causal
        case = self.case(causal=causal, **fields)
        (q, k, v), arguments, *_ = case.make(dtype or self.dtype, self.device)
        shown = slice(self.length if top_left else None)
        wide = [x.double() for x in (q, k[:, :, shown], v[:, :, shown])]
        exact = getattr(attention(*wide, backend="naive", scale=scale, **arguments), tensor)
        for change in calls:
            changed = replace(dialect, **change)
            result = self.call(changed, [q, k, v], scale=scale, **arguments)
            for reading in readings:
                found = self.read(replace(changed, **reading), result, tensor)
                if found is not None and close(found, exact):
                    return change | reading
        return None

    def agrees(self, dialect: Dialect, **call: Any) -> bool:
        """Whether out equals that of float64 attention; see adopt()."""
        return self.adopt(dialect, [AS_BEFORE], **call) is not None

    def gradients_agree(self, dialect: Dialect, tensor: str) -> bool | None:
        """Whether the gradient of `tensor` with respect to q equals that of float64 attention; None
        if out has none.
        """
        case = self.case(causal=dialect.causal != "never")
        tensors, arguments, d_out, d_lse = case.make(self.dtype, self.device)
        gradients = (d_out, None) if tensor == "out" else (0 * d_out, d_lse)
        backend = Adapter(self.function, dialect).backend("probed")
        exact = run("naive", [x.double() for x in tensors], arguments, *gradients)["dq"]
        try:
            called = call_backend(backend, tensors, arguments)
            if not called.output.out.requires_grad:
                return None
            found = called.results(*gradients)["dq"]
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            self.outcome = f"it raised {in_one_line(error)}"
            return False
        self.outcome = "its gradients are not those of attention"
        return close(found, exact)


def close(x: Tensor, exact: Tensor) -> bool:
    if not x.is_floating_point() or (x.shape, x.device) != (exact.shape, exact.device):
        return False
    return distance(x.detach().double(), exact) < TOLERANCE * exact.abs().max().item()


def probe(text: str, device: str, dtypes: list[torch.dtype]) -> list[str]:
    """A line for each field that was found, probed in the first dtype that works, then the command
    for `attn-conform run`. Raises ValueError if no way of calling it gives attention.
    """
    function, _, _ = load(text)
    if isinstance(function, Backend):
        raise ValueError(f"{text} is a Backend, which says itself how it is called: run it")
    trial = Trial(function, device, dtypes)
    found: Fields = {}
    for step in (basis, corner, mask, changes, heads, log_sum_exp, gradients, empty_rows, kinds):
        found |= step(trial, Dialect(**found))
    lines = {name: written(value) or "none" for name, value in found.items()} | trial.remarks
    usual = vars(Dialect())
    pairs = [
        f"{name}={written(value)}"
        for name, value in found.items()
        if value != usual[name] or name == "layout"
    ]
    return [
        *(f"{name:<16}{line}" for name, line in lines.items()),
        " ".join(["attn-conform run", text, *pairs]),
    ]


def written(value: Any) -> str:
    """A value of a field as a user writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def hypotheses(trial: Trial) -> Iterator[Fields]:
    """Every way to call it with q, k, v, causal and scale."""
    known = trial.known.names
    causal = trial.names("causal") or ([] if known else ["3"])
    choices = (
        [layout for layout in LAYOUTS if layout != "THD" or {*BOUNDS} <= {*known}],
        [*causal, "always", "never"],
        [*trial.names("scale"), ""],
    )
    for choice in product(*choices):
        yield dict(zip(("layout", "causal", "scale"), choice, strict=True))


def basis(trial: Trial, dialect: Dialect) -> Fields:
    """Layout, causal argument, scale, and which item of a returned tuple is out."""
    layouts = (AS_BEFORE, {"out_layout": "BHND"}, {"out_layout": "BNHD"})
    returns = (AS_BEFORE, {"returns": "out,_"}, {"returns": "_,out"})
    readings = [x | y for x, y in product(layouts, returns)]
    outcomes = []
    # first look for a dialect that is right with and without a causal mask, then in only one case
    for complete, dtype, size in product((True, False), trial.dtypes, SIZES):
        trial.dtype, (trial.length, trial.head_dim) = dtype, size
        for way in hypotheses(trial):
            first, *more = {"always": [True], "never": [False]}.get(way["causal"], [False, True])
            scale = 0.3 if way["scale"] else None
            found = trial.adopt(dialect, [way], readings, causal=first, scale=scale)
            outcomes.append(trial.outcome)
            if found is None:
                continue
            as_found = replace(dialect, **found)
            if complete and not all(trial.agrees(as_found, causal=x, scale=scale) for x in more):
                continue
            if size != SIZES[0]:  # it takes no odd lengths
                found |= {"multiple": size[0], "head_dims": str(size[1])}
            return found
    # a result tells more than an error, and the first call is the most usual one
    outcome = min(outcomes, key=lambda outcome: " returned " not in outcome)
    hint = "; wrap it in a function that fills them in" if "missing" in outcome else ""
    raise ValueError(f"no layout and no argument gives the numbers of attention: {outcome}{hint}")


def corner(trial: Trial, dialect: Dialect) -> Fields:
    """Whether there may be more keys than queries, and the corner of the causal mask then."""
    twice = 2 * trial.length
    if dialect.causal != "always" and not trial.agrees(dialect, num_keys=twice):
        return {"cross_length": False}
    if dialect.causal == "never":
        return {}
    for value in ("bottom_right", "top_left"):
        if trial.agrees(dialect, causal=True, num_keys=twice, top_left=value == "top_left"):
            return {"corner": value}
    trial.remarks["corner"] = "could not tell: no causal mask in either corner where N != M"
    return {}


def mask(trial: Trial, dialect: Dialect) -> Fields:
    """The argument, and the forms that it takes."""
    unmasked = replace(dialect, causal="never")
    forms = product(trial.names("mask"), MASKS)
    candidates = ({"mask": name, "mask_form": form} for name, form in forms)
    found = trial.adopt(unmasked, candidates, causal=True)
    if found is None:
        return {}
    more = [
        form
        for form in ("bool", "additive", "float32")
        if form != found["mask_form"]
        and trial.agrees(replace(unmasked, **found | {"mask_form": form}), causal=True)
    ]
    return found | {"more_mask_forms": ",".join(more)}


def changes(trial: Trial, dialect: Dialect) -> Fields:
    """A window, arguments that change the scores, sinks and documents."""
    causal = dialect.causal != "never" or bool(dialect.mask)
    found: Fields = {}
    calls: dict[str, dict[str, Any]] = {
        "window": {"window": 3 if causal else (3, 3)},
        "softcap": {"softcap": 0.5},
        "alibi": {"alibi_slopes": True},
        "sinks": {"sinks": True},
        "documents": {"document_ids": True},
        "score_mod": {"softcap": 0.5},
    }
    for field, arguments in calls.items():
        names = trial.names(field)
        forms = [{"window_form": form} for form in WINDOWS] if field == "window" else [AS_BEFORE]
        candidates = ({field: name} | form for name, form in product(names, forms))
        tried = replace(dialect, **found)
        change = trial.adopt(tried, candidates, causal=causal, optional=arguments)
        if change is not None:
            found |= change
        elif {*names} & {*trial.known.names}:
            trial.remarks[field] = f"could not tell what {names[0]}= does"
    return found


def heads(trial: Trial, dialect: Dialect) -> Fields:
    """How it takes grouped heads."""
    flags = ({"gqa": flag} for flag in ("yes", *trial.names("gqa")))
    return trial.adopt(dialect, flags, num_heads=4) or {"gqa": "no"}


def log_sum_exp(trial: Trial, dialect: Dialect) -> Fields:
    choices = product(("out,lse", "out,_,lse", "lse,out"), "e2", LSE_LAYOUTS)
    readings = [
        {"returns": returns, "lse_base": base, "lse": layout} for returns, base, layout in choices
    ]
    flags = ({"lse_flag": flag} for flag in (*trial.names("lse_flag"), ""))
    found = trial.adopt(dialect, flags, readings, tensor="lse")
    if found is None:
        return {}
    return found | {"lse_gradient": bool(trial.gradients_agree(replace(dialect, **found), "lse"))}


def gradients(trial: Trial, dialect: Dialect) -> Fields:
    right = trial.gradients_agree(dialect, "out")
    if right is False:
        trial.remarks["backward"] = f"could not tell: {trial.outcome}; backward=false skips it"
    return {"backward": right is not None}


def empty_rows(trial: Trial, dialect: Dialect) -> Fields:
    """The output of a query without a key, which exists if N > M and causal is bottom-right."""
    if not dialect.mask and (dialect.causal == "never" or dialect.corner == "top_left"):
        return {}
    n = trial.length
    case = trial.case(num_queries=2 * n)
    tensors, arguments, *_ = case.make(trial.dtype, trial.device)
    out = trial.read(dialect, trial.call(dialect, tensors, **arguments))
    mean = tensors[2].double().mean(2, keepdim=True).expand(-1, -1, n, -1)
    near = {"atol": TOLERANCE, "equal_nan": True}
    for value, exact in {"zero": 0 * mean, "nan": mean * torch.nan, "mean": mean}.items():
        if out is not None and torch.allclose(out[:, :, :n].double(), exact, **near):
            return {"empty_rows": value}
    trial.remarks["empty_rows"] = f"could not tell zero, nan or the mean of v: {trial.outcome}"
    return {}


def kinds(trial: Trial, dialect: Dialect) -> Fields:
    """The dtypes in which the result is right."""
    right = [name for dtype, name in SHORT.items() if trial.agrees(dialect, dtype=dtype)]
    return {"dtypes": ",".join(right)}
