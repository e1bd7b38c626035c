"""A function of anybody's, called in its dialect, as an attention.Backend.

Dimensions: B batch, H heads, N queries, M keys, D head dim.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attention import AttentionOutput, Backend
from attention.interface import ALL_DTYPES
from attention.mask import MASKS as MASK_ARGUMENTS
from attention.mask import sides, visible_keys
from conformance.backend_under_test import Limits
from conformance.cases import SHORT
from conformance.outside.dialect import LAYOUTS, Dialect


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
        # compiled calls by given arguments. Those of a plain call are compiled now, because
        # torch.compile cannot trace eval
        self.calls: dict[tuple[tuple[str, ...], str], Callable[..., Any]] = {}
        q = torch.zeros(1, 1, 2, 1)
        for causal in (True, False):
            values, masked = values_of(dialect, q, q, causal=causal, scale=1.0)
            self.compiled(tuple(values), masked)

    def compiled(self, given: tuple[str, ...], masked: str) -> Callable[..., Any]:
        """The call as a function; its variables are keyword arguments."""
        if (given, masked) not in self.calls:
            values = {name: name for name in given}
            text = self.dialect.call("*tensors", values, masked=masked)
            variables = (*given, "function", "tensors", "q", "k", "v", "seen", "module")
            known: dict[str, Any] = {"torch": torch}
            if "create_block_mask" in text:
                from torch.nn.attention.flex_attention import create_block_mask

                known["create_block_mask"] = create_block_mask
            parameters = ", ".join(f"{name}=None" for name in variables)
            try:
                self.calls[given, masked] = eval(f"lambda {parameters}: {text}", known)
            except SyntaxError as error:
                raise ValueError(
                    f"the dialect calls {text}, which is no Python: {error.msg}"
                ) from None
        return self.calls[given, masked]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> AttentionOutput:
        values, masked = values_of(self.dialect, q, k, **arguments)
        call = self.compiled(tuple(values), masked)
        variables: dict[str, Any] = {"q": q, "k": k, "v": v, "function": self.function}
        if masked == "tensor":
            mask = {name: x for name, x in arguments.items() if name in MASK_ARGUMENTS}
            variables["seen"] = visible_keys(q, k, causal=arguments["causal"], **mask).mask()
        if self.dialect.module:
            variables["module"] = caller(q.shape[1] // k.shape[1])
        variables["tensors"] = [as_given(self.laid_out(x), x) for x in (q, k, v)]
        return self.parts_of(call(**values, **variables), q.shape[0])

    def parts_of(self, result: Any, batch: int) -> AttentionOutput:
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
            return AttentionOutput(self.out(result, batch))
        if is_tuple and result[dialect.parts.index("lse")] is None:
            without = ",".join("_" if x == "lse" else x for x in dialect.parts)
            raise Misfit(f"its lse is None; if it has none to return, add returns={without}")
        return AttentionOutput(self.out(result, batch), self.lse(result, batch))

    def reasons(self, q: Tensor, k: Tensor, *, causal: bool, **optional: Any) -> list[str]:
        """Why its conventions exclude these arguments."""
        dialect = self.dialect
        mask = {name: x for name, x in optional.items() if name in MASK_ARGUMENTS and x is not None}
        masked = dialect.needs_mask(q.shape[2], k.shape[2], causal=causal, given=mask)
        reasons = []
        if causal and not dialect.mask and not dialect.says_causal(q.shape[2], k.shape[2]):
            reasons.append(
                "it takes no causal mask"
                if dialect.causal == "never"
                else "its causal mask begins top-left, which is another one where N != M"
            )
        if "cu_seqlens" in mask and causal and dialect.corner == "top_left" and not masked:
            reasons.append("its causal mask begins top-left in each sequence")
        visible = visible_keys(q, k, causal=causal, **mask)
        if dialect.empty_rows != "zero" and bool((visible.lo >= visible.hi).any()):
            reasons.append(f"a row without a key gives {dialect.empty_rows} by its convention")
        return reasons

    @property
    def limits(self) -> Limits:
        return Limits(self.dialect.multiple, self.dialect.lse_gradient, self.reasons)

    def backend(self, name: str) -> Backend:
        """The function as a Backend with the features that the dialect can express."""
        dialect = self.dialect
        declared = {
            "window": dialect.window or dialect.mask,
            "two_sided_window": dialect.two_sided or dialect.mask,
            "document_ids": dialect.documents or dialect.mask or dialect.packed,
            "key_lengths": dialect.mask,
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
        )


def dialect_of(backend: Backend) -> Dialect | None:
    """The dialect of the backend's function; None if it needs none."""
    return backend.fn.dialect if isinstance(backend.fn, Adapter) else None


def values_of(
    dialect: Dialect,
    q: Tensor,
    k: Tensor,
    *,
    causal: bool,
    scale: Any,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    **mask: Any,
) -> tuple[dict[str, Any], str]:
    """The values that the text of a call may name, and the mask that the call needs. A query sees
    `left` keys before its own and `right` after it, -1 for all; by positions, i + low <= j <= i +
    high. past is M - N.
    """
    num_queries, num_keys = q.shape[2], k.shape[2]
    mask = {name: x for name, x in mask.items() if x is not None}
    masked = dialect.needs_mask(num_queries, num_keys, causal=causal, given=mask)
    left, right = sides(mask.get("window"), causal=causal)
    past = num_keys - num_queries
    values: dict[str, Any] = {
        "causal": causal,
        "scale": scale,
        "past": past,
        "softcap": softcap,
        "slopes": alibi_slopes,
        "sinks": sinks,
        "documents": mask.get("document_ids"),
    }
    if "window" in mask:
        values["left"] = -1 if left is None else left
        values["right"] = -1 if right is None else right
    if masked == "formula":
        values["low"] = None if left is None else past - left
        values["high"] = None if right is None else past + right
    if dialect.packed:
        for i, (name, x) in enumerate((("q", q), ("k", k))):
            bounds = sequence_bounds(x.shape[0], x.shape[2], values["documents"], x.device)
            if "cu_seqlens" in mask:
                bounds = mask["cu_seqlens"][i]
            apart = mask.keys() & {"document_ids", "cu_seqlens"}
            values[f"cu_{name}"] = bounds
            values[f"max_{name}"] = max(bounds.diff().tolist()) if apart else x.shape[2]
    return {name: value for name, value in values.items() if value is not None}, masked


def as_given(changed: Tensor, x: Tensor) -> Tensor:
    """`changed`, made contiguous if `x` is contiguous; a view stays a view."""
    return changed.contiguous() if x.is_contiguous() else changed


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
