"""How to call an attention, as data: names of arguments, layout, conventions.

    backend_of("torch.nn.functional:scaled_dot_product_attention", "sdpa").backend

A dialect becomes the text of one call. The adapter evaluates that text, and the script of a failure
contains it, so both make the same call.

Classes that plan before they run (FlashInfer's wrappers) and kernels that write to an argument
(vLLM's unified_attention) are not plain functions: wrap them in one.

Dimensions: B batch, H heads, N queries, M keys, D head dim, T = B * N tokens of a packed batch; P
pages.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from math import log
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attention import BACKENDS, AttentionOutput, Backend
from attention.backends import import_object
from attention.interface import ALL_DTYPES
from attention.mask import MASKS as MASK_ARGUMENTS
from attention.mask import Window, sides, visible_keys
from conformance.cases import SHORT

# how to convert an input x (B, H, N, D) to the layout, and an output y back
LAYOUTS = {
    "BHND": ("x", "y"),
    "BNHD": ("x.transpose(1, 2)", "y.transpose(1, 2)"),
    "BND": ("x.flatten(0, 1)", "y.unflatten(0, ({batch}, -1))"),  # heads are sequences
    "THD": ("x.transpose(1, 2).flatten(0, 1)", "y.unflatten(0, ({batch}, -1)).transpose(1, 2)"),
}
# how to convert lse y back to (B, H, N)
LSE_LAYOUTS = {
    "BHN": "y",
    "BNH": "y.transpose(1, 2)",
    "BN": "y.unflatten(0, ({batch}, -1))",
    "HT": "y.unflatten(1, ({batch}, -1)).transpose(0, 1)",
    "TH": "y.unflatten(0, ({batch}, -1)).transpose(1, 2)",
}
# keys or values in pages (P, page size, H, D); slots without a token hold FILLER
FILLER = 100.0
PAGES = (
    "torch.nn.functional.pad(x.transpose(1, 2).flatten(0, 1), (0, 0, 0, 0, 0, 1), "
    f"value={FILLER})[slots]"
)
# how to pass the visible keys left and right of a query; only pairs pass the right side
WINDOWS = {
    "count": "{left} + 1",  # includes the query's own key
    "left": "{left}",
    "pair": "({left}, {right})",
    "pair_or_none": "tuple(None if x < 0 else x for x in ({left}, {right}))",
    "count_pair": "({left} + 1, {right})",
    # as for a Backend: a number under a causal mask, else a pair
    "either": "({left} + 1 if {causal} else ({left}, {right}))",
}
TWO_SIDED = ("pair", "pair_or_none", "either")
MASKS = {
    "bool": "seen",  # true where the query sees the key
    "matrix": "seen[0, 0]",  # (N, M), of one sequence
    "hidden": "~seen",
    "additive": "q.new_zeros(seen.shape).masked_fill(~seen, torch.finfo(q.dtype).min)",
    "float32": "torch.where(seen, 0.0, -torch.inf)",  # additive, whatever the dtype of q is
    "block": "create_block_mask(lambda b, h, i, j: seen[b % len(seen), 0, i, j], q.shape[0], None"
    ", *seen.shape[-2:], q.device)",
}


# the values that a field may have
CHOICES = {
    "layout": tuple(LAYOUTS),
    "out_layout": ("", "BHND", "BNHD"),
    "corner": ("bottom_right", "top_left"),
    "window_form": tuple(WINDOWS),
    "mask_form": tuple(MASKS),
    "lse": tuple(LSE_LAYOUTS),
    "lse_base": ("e", "2"),
    "empty_rows": ("zero", "nan", "mean"),
}


@dataclass(frozen=True)
class Dialect:
    """One way of calling an attention. An argument is a name, or a position counted from q = 0;
    "" means none. Names joined by | are alternatives: the first that the function has is used.
    """

    layout: str = "BHND"
    out_layout: str = ""  # as layout
    causal: str = "causal"  # an argument, always or never
    corner: str = "bottom_right"  # the corner that the causal mask is aligned to
    scale: str = "scale"  # without the argument it is D**-0.5
    window: str = ""
    window_form: str = "pair"
    softcap: str = ""
    alibi: str = ""  # slopes (H,)
    sinks: str = ""  # (H,), or module: an attribute of it; without it they are merged using lse
    documents: str = ""  # ids (B, N); a packed batch passes documents as sequences instead
    # for a packed batch, layout=THD: where the sequences of q and k begin, (B + 1,), and the
    # largest lengths. With bounds="" the function takes one sequence
    bounds: str = "cu_seqlens_q,cu_seqlens_k,max_seqlen_q,max_seqlen_k"
    pages: int = 0  # tokens of a page, if k and v lie in pages (P, pages, H, D); else 0
    block_table: str = ""  # the pages of each sequence, (B, most pages)
    used: str = ""  # the number of keys that each sequence has in its pages, (B,)
    mask: str = ""  # (B or 1, 1, N, M), for masks that the arguments above cannot express
    mask_form: str = "bool"
    more_mask_forms: str = ""  # further ones that it takes, such as additive,float32
    score_mod: str = ""  # FlexAttention's, for softcap and ALiBi
    gqa: str = "yes"  # yes, no, or the name of the flag that turns it on
    returns: str = "out"  # the items of a returned tuple, such as out,lse,_
    lse_flag: str = ""  # the argument that makes it return lse
    lse: str = "BHN"
    lse_base: str = "e"
    lse_gradient: bool = True  # whether a gradient flows through lse
    empty_rows: str = "zero"  # what a query without a key gets
    backward: bool = True
    cross_length: bool = True  # whether N and M may differ
    value_dim: bool = False  # whether the width of v may differ from that of q and k
    multiple: int = 1  # N and M must be multiples of it
    dtypes: str = "fp64,fp32,bf16,fp16"
    head_dims: str = ""  # such as 64,128; "" takes any
    module: bool = False  # whether a module is passed before q, as transformers does
    constants: str = ""  # further arguments, such as dropout_p=0.0,deterministic=True

    def __post_init__(self) -> None:
        for name, valid in CHOICES.items():
            if getattr(self, name) not in valid:
                found = f"{name}={getattr(self, name)}"
                raise ValueError(f"{found} is not one of: {', '.join(filter(None, valid))}")
        if "out" not in self.parts:
            raise ValueError(f"returns={self.returns} must name out, such as out,lse or _,out")
        if self.multiple < 1:
            raise ValueError(f"multiple={self.multiple} must be at least 1")
        if self.pages < 0:
            raise ValueError(f"pages={self.pages} must be the tokens of a page, or 0 for no pages")
        if len(self.names_of_bounds) != 4:
            raise ValueError(f"bounds={self.bounds} must be four names, such as {Dialect.bounds}")
        for name in filter(None, self.more_mask_forms.split(",")):
            if name not in MASKS:
                found = f"more_mask_forms={self.more_mask_forms}: {name}"
                raise ValueError(f"{found} is not one of: {', '.join(MASKS)}")
        for name in self.dtypes.split(","):
            if name not in SHORT.values():
                raise ValueError(f"dtypes={self.dtypes}: {name} is not one of: fp64,fp32,bf16,fp16")

    @property
    def parts(self) -> list[str]:
        return self.returns.split(",")

    @property
    def names_of_bounds(self) -> list[str]:
        return self.bounds.split(",") if self.bounds else [""] * 4

    @property
    def packed(self) -> bool:
        """Whether sequences of any lengths are concatenated into one batch."""
        return self.layout == "THD" and bool(self.bounds)

    def says_causal(self, num_queries: int, num_keys: int) -> bool:
        """Whether the function's own causal mask is aligned to the last query and key."""
        return self.causal != "never" and (self.corner == "bottom_right" or num_queries == num_keys)

    def says(self, name: str, value: Any) -> bool:
        """Whether the function can express `name` (window, document_ids, ...) without a mask."""
        if name == "window":
            one_sided = self.window_form not in TWO_SIDED
            return bool(self.window) and not (one_sided and isinstance(value, tuple))
        own = {"document_ids": self.documents, "key_lengths": self.used, "cu_seqlens": ""}[name]
        return bool(own) or (self.packed and name != "key_lengths")

    def needs_mask(
        self, num_queries: int, num_keys: int, *, causal: bool, given: Mapping[str, Any]
    ) -> str:
        """The mask that the call needs: a "tensor", a "formula" of positions, or "" if none. given:
        the arguments of attention.mask.MASKS that are not None.
        """
        corner = "cu_seqlens" in given or self.says_causal(num_queries, num_keys)
        if (not causal or corner) and all(self.says(*item) for item in given.items()):
            return ""
        by_position = self.mask_form == "block" and given.keys() <= {"window"}
        return "formula" if by_position else "tensor"

    def call(self, tensors: str, values: Mapping[str, str | None], *, masked: str) -> str:
        """The call of `function` as an expression. tensors: the text of its first arguments.
        values: text of causal, scale, past (M - N), left and right of a window, low and high (see
        limits), softcap, slopes, sinks, documents, and of max_q and max_k of a packed batch; None
        if not given. masked: the mask of needs_mask(), which alone decides which keys are hidden.
        """
        given = {}
        if self.causal not in ("always", "never"):
            given[self.causal] = "False" if masked else values["causal"]
        if self.scale:
            given[self.scale] = values["scale"]
        if values["left"] and not masked:
            given[self.window] = WINDOWS[self.window_form].format(**values)
        if self.mask:
            masks = {"": "None", "tensor": MASKS[self.mask_form], "formula": _formula(**values)}
            given[self.mask] = masks[masked]
        if self.documents and values["documents"] and not masked:
            given[self.documents] = values["documents"]
        texts = {"softcap": values["softcap"], "alibi": values["slopes"], "sinks": values["sinks"]}
        for name, value in texts.items():
            argument = getattr(self, name)
            if argument not in ("", "module") and value:
                given[argument] = value
        if self.score_mod and (values["softcap"] or values["slopes"]):
            given[self.score_mod] = _score_mod(**values)
        if self.layout == "THD":
            texts = ("cu_q", "cu_k", values["max_q"], values["max_k"])
            given |= zip(self.names_of_bounds, texts, strict=True)
        if self.pages:
            given |= {self.block_table: "table", self.used: "used"}
        given.pop("", None)
        for flag in (self.gqa, self.lse_flag):
            if flag not in ("yes", "no", ""):
                given[flag] = "True"
        positions = sorted((int(name), value) for name, value in given.items() if name.isdigit())
        words = ["module"] * self.module + [tensors] + [value for _, value in positions]
        words += [f"{name}={value}" for name, value in given.items() if not name.isdigit()]
        return f"function({', '.join(filter(None, [*words, self.constants]))})"

    def output(self, batch: str) -> str:
        """out (B, H, N, D) as an expression of `result`."""
        back = LAYOUTS[self.out_layout or self.layout][1].format(batch=batch)
        return back.replace("y", self._part("out"))

    def output_lse(self, batch: str) -> str:
        """lse (B, H, N), to base e, as an expression of `result`."""
        text = LSE_LAYOUTS[self.lse].format(batch=batch).replace("y", self._part("lse"))
        return text if self.lse_base == "e" else f"{text} * {log(2)}"

    def _part(self, name: str) -> str:
        return f"result[{self.parts.index(name)}]" if len(self.parts) > 1 else "result"


# the lambdas take numbers from the variables around them. If they read q.shape, torch.compile adds
# None to the gradient of q. If the numbers are defaults of parameters, torch 2.11 keeps the first
# ones and the result is wrong: pytorch#178365
def _score_mod(
    *, softcap: str | None, slopes: str | None, past: str | None, **_: str | None
) -> str:
    score = f"{softcap} * torch.tanh(s / {softcap})" if softcap else "s"
    if slopes:  # i - j, with the last query aligned to the last key
        score += f" - {slopes}[h] * (i - j + {past})".replace("+ -", "- ")
    return f"lambda s, b, h, i, j: {score}"


def _formula(*, low: str | None, high: str | None, **_: str | None) -> str:
    """The block mask of limits(), without a tensor (N, M)."""
    bounds = [f"(j >= i + {low})"] * bool(low) + [f"(j <= i + {high})"] * bool(high)
    if not bounds:
        return "None"
    seen = " & ".join(bounds).replace("+ -", "- ")
    sizes = "None, None, q.shape[2], k.shape[2], q.device"
    return f"create_block_mask(lambda b, h, i, j: {seen}, {sizes})"


def limits(
    num_queries: int, num_keys: int, window: Window, *, causal: bool
) -> tuple[int | None, int | None]:
    """low and high, or None without a limit. Query i sees the keys i + low <= j <= i + high."""
    past = num_keys - num_queries
    left, right = sides(window, causal=causal)
    return None if left is None else past - left, None if right is None else past + right


_FA = Dialect(
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
_FLASHINFER = Dialect(
    "THD",
    scale="sm_scale",
    window="window_left",
    window_form="left",
    softcap="logits_soft_cap",
    bounds="",
    returns="out,lse",
    lse_flag="return_lse",
    lse="TH",
    lse_base="2",
    backward=False,
    dtypes="bf16,fp16",
    head_dims="64,128,256",
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
    "fa": _FA,
    # flash_attn_varlen_func of the same
    "fa-varlen": replace(_FA, layout="THD", lse="HT"),
    # flash_attn_with_kvcache of the same, over pages; version 2 takes pages of 256 n tokens
    "fa-paged": replace(
        _FA,
        pages=16,
        block_table="block_table|page_table",
        used="cache_seqlens",
        lse_flag="return_softmax_lse",
        backward=False,
        dtypes="bf16,fp16",
    ),
    # flash_attn_varlen_func of vLLM (vllm.vllm_flash_attn), with keys in pages
    "vllm": replace(
        _FA,
        layout="THD",
        sinks="s_aux|sinks",
        bounds="cu_seqlens_q,,max_seqlen_q,max_seqlen_k",
        pages=16,
        block_table="block_table",
        used="seqused_k",
        returns="out,lse",
        lse_flag="return_softmax_lse",
        lse="HT",
        backward=False,
        dtypes="bf16,fp16",
    ),
    # flashinfer.single_prefill_with_kv_cache, which takes one sequence
    "flashinfer": replace(_FLASHINFER, mask="custom_mask", mask_form="matrix"),
    # a function that plans and runs its BatchPrefillWithRaggedKVCacheWrapper
    "flashinfer-ragged": replace(_FLASHINFER, bounds="qo_indptr,kv_indptr,,"),
    # torch.nn.functional.scaled_dot_product_attention
    "sdpa": Dialect(
        causal="is_causal",
        corner="top_left",
        mask="attn_mask",
        more_mask_forms="additive,float32",
        gqa="enable_gqa",
        returns="out",
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
    # a function of transformers' AttentionInterface that takes masks as (B, 1, N, M), such as
    # eager and sdpa; sinks=module for gpt-oss's eager
    "hf": Dialect(
        out_layout="BNHD",
        causal="never",
        scale="scaling",
        sinks="s_aux",
        mask="attention_mask",
        mask_form="additive",
        returns="out,_",
        empty_rows="mean",
        value_dim=True,
        module=True,
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
ARGUMENTS = (
    *("causal", "scale", "window", "softcap", "alibi", "sinks", "documents", "mask", "score_mod"),
    *("block_table", "used"),
)


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


def fitted(dialect: Dialect, function: Callable[..., Any]) -> Dialect:
    """The dialect without the arguments that the function lacks, and with one name for each set of
    alternatives.
    """
    known = parameters(function)

    def choose(text: str) -> str:
        names = text.split("|") if text else []
        taken = [name for name in names if known.take(name)]
        return next((name for name in taken if name in known.names), (taken or [""])[0])

    changes = {name: choose(getattr(dialect, name)) for name in (*ARGUMENTS, "lse_flag")}
    if changes["sinks"] not in known.names:  # **kwargs may take sinks and do nothing with them
        changes["sinks"] = "module" if dialect.sinks == "module" else ""
    changes["causal"] = changes["causal"] or "never"
    if dialect.causal in ("always", "never"):
        changes["causal"] = dialect.causal
    if dialect.gqa not in ("yes", "no"):
        changes["gqa"] = choose(dialect.gqa) or "no"
    return replace(dialect, **changes)


class Misfit(ValueError):
    """A function returned something else than its dialect says."""


class Adapter:
    """`function`, called in its dialect, as the fn of a Backend."""

    def __init__(self, function: Callable[..., Any], dialect: Dialect) -> None:
        self.function, self.dialect = function, dialect
        self.laid_out = eval(f"lambda x: {LAYOUTS[dialect.layout][0]}")
        self.out = eval(f"lambda result, batch: {dialect.output('batch')}")
        if "lse" in dialect.parts:
            self.lse = eval(f"lambda result, batch: {dialect.output_lse('batch')}")
        if dialect.pages:
            self.paged = eval(f"lambda x, slots: {PAGES}", {"torch": torch})
        # compiled calls by given arguments. Those of a plain call are compiled now, because
        # torch.compile cannot trace eval
        self.calls: dict[tuple[tuple[str, ...], str], Callable[..., Any]] = {}
        plain = ("causal", "scale", "past")
        plain += ("max_q", "max_k") if dialect.layout == "THD" else ()
        masks = ("", "tensor", "formula")[: 1 + bool(dialect.mask) + (dialect.mask_form == "block")]
        for masked in masks:
            given = (*plain, "high") if masked == "formula" else plain
            self.calls[given, masked] = compiled_call(dialect, given, masked)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        scale: float,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        **mask: Any,
    ) -> AttentionOutput:
        dialect, num_queries, num_keys = self.dialect, q.shape[2], k.shape[2]
        mask = {name: x for name, x in mask.items() if x is not None}
        masked = dialect.needs_mask(num_queries, num_keys, causal=causal, given=mask)
        values = {
            "causal": causal,
            "scale": scale,
            "past": num_keys - num_queries,
            "softcap": softcap,
            "slopes": alibi_slopes,
            "sinks": sinks,
            "documents": mask.get("document_ids"),
        }
        if "window" in mask:
            left, right = sides(mask["window"], causal=causal)
            values["left"] = -1 if left is None else left
            values["right"] = -1 if right is None else right
        variables: dict[str, Any] = {"q": q, "k": k, "v": v, "function": self.function}
        if masked == "tensor":
            variables["seen"] = visible_keys(q, k, causal=causal, **mask).mask()
        if dialect.layout == "THD" or dialect.pages:
            bounds, longest = self.sequences(q, k, mask)
            values |= longest
            variables |= bounds
        if masked == "formula":
            window = mask.get("window")
            values["low"], values["high"] = limits(num_queries, num_keys, window, causal=causal)
        if dialect.module:
            variables["module"] = caller(q.shape[1] // k.shape[1])
            if dialect.sinks == "module":
                vars(variables["module"])["sinks"] = sinks
        given = tuple(name for name, value in values.items() if value is not None)
        if (given, masked) not in self.calls:
            self.calls[given, masked] = compiled_call(dialect, given, masked)
        variables["tensors"] = [as_given(self.laid_out(x), x) for x in (q, k, v)]
        if dialect.pages:
            variables["tensors"][1:] = [self.paged(x, variables["slots"]) for x in (k, v)]
        result = self.calls[given, masked](**values | variables)
        return AttentionOutput(*self.parts_of(result, q.shape[0]))

    def sequences(
        self, q: Tensor, k: Tensor, mask: dict[str, Any]
    ) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Bounds and pages of the sequences, and the largest lengths (empty if not packed)."""
        found, longest = {}, {"max_q": q.shape[2], "max_k": k.shape[2]}
        counts = [k.shape[2]] * q.shape[0]  # keys of each sequence
        if self.dialect.packed:
            for i, (name, x) in enumerate((("q", q), ("k", k))):
                bounds = sequence_bounds(x.shape[0], x.shape[2], mask.get("document_ids"), x.device)
                if "cu_seqlens" in mask:
                    bounds = mask["cu_seqlens"][i]
                found[f"cu_{name}"] = bounds
                if mask.keys() & {"document_ids", "cu_seqlens"}:
                    counts = bounds.diff().tolist()
                    longest[f"max_{name}"] = max(counts)
        if self.dialect.pages:
            found |= pages_of(tuple(counts), self.dialect.pages, q.device)._asdict()
            found["used"] = mask.get("key_lengths", found["used"]).int()
        return found, longest if self.dialect.layout == "THD" else {}

    def parts_of(self, result: Any, batch: int) -> tuple[Tensor, Tensor | None]:
        """out and lse from what the function returned. Raises Misfit if that contradicts the
        dialect.
        """
        dialect = self.dialect
        needed = 1 + max(dialect.parts.index(x) for x in ("out", "lse") if x in dialect.parts)
        is_tuple = isinstance(result, (tuple, list))
        if is_tuple != (len(dialect.parts) > 1) or (is_tuple and len(result) < needed):
            what = f"a tuple of {len(result)}" if is_tuple else f"a {type(result).__name__}"
            raise Misfit(f"it returned {what}, and the dialect says returns={dialect.returns}")
        if "lse" not in dialect.parts:
            return self.out(result, batch), None
        if is_tuple and result[dialect.parts.index("lse")] is None:
            without = ",".join("_" if x == "lse" else x for x in dialect.parts)
            raise Misfit(f"its lse is None; if it has none to return, add returns={without}")
        lse = self.lse(result, batch)
        return self.out(result, batch), lse

    def requirements(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **_: Any) -> list[str]:
        """Reasons why it cannot take these shapes; see Backend.requirements."""
        dialect, num_queries, num_keys = self.dialect, q.shape[2], k.shape[2]
        reasons = []
        if causal and not dialect.mask and not dialect.says_causal(num_queries, num_keys):
            reasons.append(
                "it takes no causal mask"
                if dialect.causal == "never"
                else "its causal mask begins top-left, which is another one where N != M"
            )
        if causal and num_queries > num_keys and dialect.empty_rows != "zero":
            reasons.append(f"a row without a key gives {dialect.empty_rows} by its convention")
        if num_queries % dialect.multiple or num_keys % dialect.multiple:
            reasons.append(f"it takes lengths that are multiples of {dialect.multiple}")
        if q.shape[0] > 1 and dialect.layout == "THD" and not dialect.packed:
            reasons.append("it takes one sequence")
        return reasons

    def reasons_by_value(self, q: Tensor, k: Tensor, *, causal: bool, **optional: Any) -> list[str]:
        """Reasons against these arguments that depend on the values of tensors."""
        dialect = self.dialect
        mask = {name: x for name, x in optional.items() if name in MASK_ARGUMENTS and x is not None}
        masked = dialect.needs_mask(q.shape[2], k.shape[2], causal=causal, given=mask)
        reasons = []
        if dialect.empty_rows != "zero":
            visible = visible_keys(q, k, causal=causal, **mask)
            if bool((visible.lo >= visible.hi).any()):
                reasons.append(f"a row without a key gives {dialect.empty_rows} by its convention")
        if "cu_seqlens" in mask and causal and dialect.corner == "top_left" and not masked:
            reasons.append("its causal mask begins top-left in each sequence")
        if "key_lengths" in mask and not masked and (causal or "window" in mask):
            reasons.append("with fewer keys its queries stand elsewhere")
        return reasons

    def backend(self, name: str) -> Backend:
        """The function as a Backend with the features that the dialect can express."""
        dialect = self.dialect
        declared = {
            "window": dialect.window or dialect.mask,
            "two_sided_window": dialect.mask
            or (dialect.window and dialect.window_form in TWO_SIDED),
            "document_ids": dialect.documents or dialect.mask or dialect.packed,
            "key_lengths": dialect.used or dialect.mask,
            "cu_seqlens": dialect.mask or dialect.packed,
            "sinks": dialect.sinks,
            "value_dim": dialect.value_dim,
            "softcap": dialect.softcap or dialect.score_mod,
            "alibi_slopes": dialect.alibi or dialect.score_mod,
            "gqa": dialect.gqa != "no",
            "non_causal": dialect.causal != "always",
            "cross_length": dialect.cross_length,
            "lse": "lse" in dialect.parts,
        }
        wanted = dialect.dtypes.split(",")
        head_dims = [int(size) for size in dialect.head_dims.split(",") if size]
        return Backend(
            name,
            self,
            dtypes=tuple(dtype for dtype in ALL_DTYPES if SHORT[dtype] in wanted),
            head_dims=head_dims or None,
            features=frozenset(feature for feature, there in declared.items() if there),
            backward=dialect.backward,
            requirements=self.requirements,
        )


def dialect_of(backend: Backend) -> Dialect | None:
    """The dialect of the backend's function; None if it needs none."""
    return backend.fn.dialect if isinstance(backend.fn, Adapter) else None


def as_given(changed: Tensor, x: Tensor) -> Tensor:
    """`changed`, made contiguous if `x` is contiguous; a view stays a view."""
    return changed.contiguous() if x.is_contiguous() else changed


def compiled_call(dialect: Dialect, given: tuple[str, ...], masked: str) -> Callable[..., Any]:
    """The call as a function; its variables are keyword arguments."""
    names = ("causal", "scale", "past", "left", "right", "softcap", "slopes", "sinks", "documents")
    names += ("max_q", "max_k", "low", "high")
    values = {name: name if name in given else None for name in names}
    text = dialect.call("*tensors", values, masked=masked)
    variables = (*names, "function", "tensors", "q", "k", "v", "seen", "module")
    variables += ("cu_q", "cu_k", "slots", "table", "used")
    known: dict[str, Any] = {"torch": torch}
    if "create_block_mask" in text:
        from torch.nn.attention.flex_attention import create_block_mask

        known["create_block_mask"] = create_block_mask
    try:
        return eval(f"lambda {', '.join(f'{name}=None' for name in variables)}: {text}", known)
    except SyntaxError as error:
        raise ValueError(f"the dialect calls {text}, which is no Python: {error.msg}") from None


@cache
def caller(groups: int) -> torch.nn.Module:
    """A module with the attributes that transformers' functions read."""
    module = torch.nn.Module()
    vars(module).update(num_key_value_groups=groups, is_causal=False)
    return module.eval()


def sequence_bounds(
    batch: int, length: int, document_ids: Tensor | None, device: torch.device
) -> Tensor:
    """Where each sequence of a packed batch begins and where the last one ends, int32. Each
    document is a sequence.
    """
    if document_ids is None:
        return torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device)
    begins = F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True).flatten()
    return F.pad(begins.nonzero()[:, 0], (0, 1), value=batch * length).int()


class Pages(NamedTuple):
    """The token in each slot of the pages, and the pages of each sequence."""

    slots: Tensor  # (P, page size) int64: index of a token, or of the row of FILLER
    table: Tensor  # (B, most pages) int32; unused entries name a page of FILLER
    used: Tensor  # (B,) int32: number of tokens of each sequence


@cache
def pages_of(counts: tuple[int, ...], size: int, device: torch.device) -> Pages:
    """Pages for sequences of `counts` tokens. In memory the last page comes first."""
    own, slots, tokens = [], [[sum(counts)] * size], sum(counts)
    for count in reversed(counts):
        first = tokens = tokens - count
        pages = [
            [first + i if i < count else sum(counts) for i in range(start, start + size)]
            for start in range(0, count, size)
        ]
        own.insert(0, [len(slots) + i for i in reversed(range(len(pages)))])
        slots += reversed(pages)
    most = max(1, *map(len, own))
    table = [pages + [0] * (most - len(pages)) for pages in own]
    ints = partial(torch.tensor, dtype=torch.int32, device=device)
    return Pages(torch.tensor(slots, device=device), ints(table), ints(counts))


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
    dialect = fitted(DIALECTS[name] if name else Dialect(), found)
    dialect = replace(dialect, **(changes or {}))
    known = parameters(found)
    for key in (*ARGUMENTS, "lse_flag"):
        value = (changes or {}).get(key, "")
        if value not in ("", "always", "never", "module") and not known.take(value):
            raise ValueError(f"{key}={value}: {text} takes {', '.join(known.names)}")
    return Target(Adapter(found, dialect).backend(text), dialect, imports, function)
