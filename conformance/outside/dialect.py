"""How to call an attention, as data: names of arguments, layout, conventions.

A dialect becomes the text of one call. The adapter evaluates that text, and the script of a failure
contains it, so both make the same call.

Dimensions: B batch, H heads, N queries, M keys, D head dim, T = B * N tokens of a packed batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Any

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
}
# how to pass the visible keys left and right of a query; only pairs pass the right side
WINDOWS = {
    "count": "{left} + 1",  # includes the query's own key
    "left": "{left}",
    "pair": "({left}, {right})",
    "pair_or_none": "tuple(None if x < 0 else x for x in ({left}, {right}))",
    # as for a Backend: a number under a causal mask, else a pair
    "either": "({left} + 1 if {causal} else ({left}, {right}))",
}
ONE_SIDED = ("count", "left")
MASKS = {
    "bool": "seen",  # true where the query sees the key
    "hidden": "~seen",
    "additive": "q.new_zeros(seen.shape).masked_fill(~seen, torch.finfo(q.dtype).min)",
    "float32": "torch.where(seen, 0.0, -torch.inf)",  # additive, whatever the dtype of q is
    "block": "create_block_mask(lambda b, h, i, j: seen[b % len(seen), 0, i, j], q.shape[0], None"
    ", *seen.shape[-2:], q.device)",
}
# how a mask may lie in memory
MASK_VIEWS = {
    "": "{}",
    "for_each_head": "({}).expand(-1, q.shape[1], -1, -1)",
    "written_out": "({}).repeat(1, q.shape[1], 1, 1)",
    "part_of_larger": "torch.nn.functional.pad({}, (0, 9, 0, 9))[..., :-9, :-9]",
    "of_one_row": "({})[:, :, :1].clone().expand(-1, -1, q.shape[2], -1)",  # if rows are equal
}
# arguments of a packed batch: where the sequences begin, (B + 1,), and the largest lengths
BOUNDS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
# the values that a field may have
CHOICES = {
    "layout": LAYOUTS,
    "out_layout": ("", "BHND", "BNHD"),
    "corner": ("bottom_right", "top_left"),
    "window_form": WINDOWS,
    "mask_form": MASKS,
    "more_mask_forms": MASKS,
    "mask_view": MASK_VIEWS,
    "lse": LSE_LAYOUTS,
    "lse_base": ("e", "2"),
    "empty_rows": ("zero", "nan", "mean"),
    "dtypes": tuple(SHORT.values()),
}
LISTS = ("more_mask_forms", "dtypes")  # several choices with commas between


@dataclass(frozen=True)
class Dialect:
    """One way of calling an attention. An argument is a name, or a position counted from q = 0;
    "" means none. Names joined by | are alternatives: the first that the function has is used.
    """

    layout: str = "BHND"
    out_layout: str = ""  # as layout
    causal: str = "causal"  # an argument, always or never
    corner: str = "bottom_right"  # the corner that the causal mask and the window are aligned to
    scale: str = "scale"  # without the argument it is D**-0.5
    window: str = ""
    window_form: str = "pair"
    softcap: str = ""
    alibi: str = ""  # slopes (H,)
    sinks: str = ""  # (H,); without the argument they are merged using lse
    documents: str = ""  # ids (B, N); a packed batch passes documents as sequences instead
    mask: str = ""  # (B or 1, 1, N, M), for masks that the arguments above cannot express
    mask_form: str = "bool"
    more_mask_forms: str = ""  # further ones that it takes, such as additive,float32
    mask_view: str = ""  # how a mask lies in memory; "" as it was made
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
    constants: str = ""  # further arguments, such as dropout_p=0.0,deterministic=True

    def __post_init__(self) -> None:
        for name, valid in CHOICES.items():
            text = getattr(self, name)
            for value in filter(None, text.split(",")) if name in LISTS else [text]:
                if value not in valid:
                    raise ValueError(
                        f"{name}={text}: {value or 'nothing'} is not one of: "
                        f"{', '.join(filter(None, valid))}"
                    )
        if "out" not in self.parts:
            raise ValueError(f"returns={self.returns} must name out, such as out,lse or _,out")
        if self.multiple < 1:
            raise ValueError(f"multiple={self.multiple} must be at least 1")
        if {*filter(None, self.head_dims.split(","))} - {*map(str, range(1, 513))}:
            raise ValueError(f"head_dims={self.head_dims} must be from 1 to 512, such as 64,128")

    @property
    def parts(self) -> list[str]:
        return self.returns.split(",")

    @property
    def packed(self) -> bool:
        """Whether sequences of any lengths are concatenated into one batch."""
        return self.layout == "THD"

    @property
    def two_sided(self) -> bool:
        """Whether its own window has a side for later keys."""
        return bool(self.window) and self.window_form not in ONE_SIDED

    def aligned(self, num_queries: int, num_keys: int) -> bool:
        """Whether its causal mask and its window are aligned to the last query and key. Packed
        sequences have the same lengths for queries and keys if N = M.
        """
        return self.corner == "bottom_right" or num_queries == num_keys

    def needs_mask(
        self, num_queries: int, num_keys: int, *, causal: bool, given: Mapping[str, Any]
    ) -> str:
        """The mask that the call needs: a "tensor", a "formula" of positions, or "" if none. given:
        the arguments of attention.mask.MASKS that are not None.
        """
        by_position = causal or "window" in given
        aligned = self.aligned(num_queries, num_keys)
        hides_later = not causal or self.causal != "never"
        is_pair = isinstance(given.get("window"), tuple)
        says = {  # what it can express without a mask
            "window": self.two_sided if is_pair else self.window,
            "document_ids": self.documents or self.packed,
            "cu_seqlens": self.packed,
        }
        if hides_later and (aligned or not by_position) and all(says.get(x) for x in given):
            return ""
        return "formula" if self.mask_form == "block" and given.keys() <= {"window"} else "tensor"

    def call(self, tensors: str, values: Mapping[str, str], *, masked: str) -> str:
        """The call of `function` as an expression. tensors: the text of its first arguments.
        values: the text of each value that is given, see conformance.outside.adapter.values_of().
        masked: the mask of needs_mask(), which alone decides which keys are hidden.
        """
        given = {}
        if self.causal not in ("always", "never"):
            given[self.causal] = "False" if masked else values["causal"]
        given[self.scale] = values["scale"]
        if "left" in values and not masked:
            given[self.window] = WINDOWS[self.window_form].format(**values)
        tensor = MASK_VIEWS[self.mask_view].format(MASKS[self.mask_form])
        masks = {"": "None", "tensor": tensor, "formula": block_mask(values)}
        given[self.mask] = masks[masked]
        if not masked:
            given[self.documents] = values.get("documents")
        given[self.softcap] = values.get("softcap")
        given[self.alibi] = values.get("slopes")
        given[self.sinks] = values.get("sinks")
        if values.keys() & {"softcap", "slopes"}:
            given[self.score_mod] = score_mod(values)
        if self.packed:
            given |= {name: values[name] for name in BOUNDS}
        for flag in (self.gqa, self.lse_flag):
            given[flag] = "True"
        given = {x: y for x, y in given.items() if x not in ("", "yes", "no") and y is not None}
        positions = sorted((int(name), value) for name, value in given.items() if name.isdigit())
        words = [tensors, *(value for _, value in positions)]
        words += [f"{name}={value}" for name, value in given.items() if not name.isdigit()]
        return f"function({', '.join(filter(None, [*words, self.constants]))})"

    def part(self, name: str, *, batch: str) -> str:
        """out (B, H, N, D), or lse (B, H, N) to base e, as an expression of `result`."""
        base = "" if self.lse_base == "e" else f" * {log(2)}"
        back = {
            "out": LAYOUTS[self.out_layout or self.layout][1],
            "lse": LSE_LAYOUTS[self.lse] + base,
        }
        item = f"result[{self.parts.index(name)}]" if len(self.parts) > 1 else "result"
        return back[name].format(batch=batch).replace("y", item)


# the lambdas take numbers from the variables around them. If they read q.shape, torch.compile adds
# None to the gradient of q. If the numbers are defaults of parameters, torch 2.11 keeps the first
# ones and the result is wrong: pytorch#178365
def score_mod(values: Mapping[str, str]) -> str:
    softcap = values.get("softcap")
    score = f"{softcap} * torch.tanh(s / {softcap})" if softcap else "s"
    if "slopes" in values:  # i - j, with the last query aligned to the last key
        score += f" - {values['slopes']}[h] * (i - j + {values['past']})".replace("+ -", "- ")
    return f"lambda s, b, h, i, j: {score}"


def block_mask(values: Mapping[str, str]) -> str:
    """The block mask by positions, without a tensor (N, M)."""
    bounds = {"low": "(j >= i + {})", "high": "(j <= i + {})"}
    seen = [text.format(values[name]) for name, text in bounds.items() if name in values]
    if not seen:
        return "None"
    sizes = "None, None, q.shape[2], k.shape[2], q.device"
    formula = " & ".join(seen).replace("+ -", "- ")
    return f"create_block_mask(lambda b, h, i, j: {formula}, {sizes})"
