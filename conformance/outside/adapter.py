"""A function of anybody's, called in its dialect, as an attention.Backend.

Dimensions: B batch, H heads, N queries, M keys, D head dim.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from attention import AttentionOutput, Backend
from attention.interface import ALL_DTYPES
from attention.mask import MASKS as MASK_ARGUMENTS
from attention.mask import pair, sides, visible_keys
from conformance.backend_under_test import Limits
from conformance.cases import SHORT
from conformance.outside.dialect import LAYOUTS, Dialect


class Adapter:
    """`function`, called in its dialect, as the fn of a Backend."""

    def __init__(self, function: Callable[..., Any], dialect: Dialect) -> None:
        self.function, self.dialect = function, dialect
        self.limits = Limits(dialect.multiple, dialect.lse_gradient, self.reasons)
        self.laid_out = eval(f"lambda x: {LAYOUTS[dialect.layout][0]}")
        self.readers = {
            name: eval(f"lambda result, batch: {dialect.part(name, batch='batch')}")
            for name in ("out", "lse")
            if name in dialect.parts
        }
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
            variables = (*given, "function", "tensors", "q", "k", "v", "seen")
            parameters = ", ".join(f"{name}=None" for name in variables)
            known = {"torch": torch, "create_block_mask": create_block_mask}
            try:
                self.calls[given, masked] = eval(f"lambda {parameters}: {text}", known)
            except SyntaxError as error:
                raise ValueError(
                    f"the dialect calls {text}, which is no Python: {error.msg}"
                ) from None
        return self.calls[given, masked]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> AttentionOutput:
        return self.read(self.result(q, k, v, **arguments), q.shape[0])

    def result(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Any:
        """What the function returns."""
        values, masked = values_of(self.dialect, q, k, **arguments)
        call = self.compiled(tuple(values), masked)
        variables: dict[str, Any] = {"q": q, "k": k, "v": v, "function": self.function}
        if masked == "tensor":
            mask = {name: x for name, x in arguments.items() if name in MASK_ARGUMENTS}
            variables["seen"] = visible_keys(q, k, causal=arguments["causal"], **mask).mask()
        laid_out = [(self.laid_out(x), x.is_contiguous()) for x in (q, k, v)]
        # a view stays a view
        variables["tensors"] = [x.contiguous() if whole else x for x, whole in laid_out]
        return call(**values, **variables)

    def read(self, result: Any, batch: int) -> AttentionOutput:
        """out and lse of a result. Raises TypeError if the dialect says that it holds others."""
        names, several = self.dialect.parts, isinstance(result, (tuple, list))
        parts = dict(zip(names, result if several else [result], strict=False))
        fits = all(isinstance(parts.get(name), Tensor) for name in self.readers)
        if several != (len(names) > 1) or not fits:
            returns = self.dialect.returns
            raise TypeError(f"it returned {described(result)}, and the dialect says {returns=!s}")
        return AttentionOutput(**{name: read(result, batch) for name, read in self.readers.items()})

    def reasons(self, q: Tensor, k: Tensor, *, causal: bool, **optional: Any) -> list[str]:
        """Why its conventions exclude these arguments."""
        dialect, reasons = self.dialect, []
        mask = {name: x for name, x in optional.items() if name in MASK_ARGUMENTS}
        by_position = causal or "window" in mask
        if causal and dialect.causal == "never" and not dialect.mask:
            reasons.append("it takes no causal mask")
        elif by_position and not dialect.mask and not dialect.aligned(q.shape[2], k.shape[2]):
            reasons.append("its causal mask and window begin top-left: others where N != M")
        visible = visible_keys(q, k, causal=causal, **mask)
        if dialect.empty_rows != "zero" and bool((visible.lo >= visible.hi).any()):
            reasons.append(f"a row without a key gives {dialect.empty_rows} by its convention")
        return reasons

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


def described(result: Any) -> str:
    """What a function returned, in a few words."""
    if isinstance(result, (tuple, list)):
        return f"({', '.join(map(described, result))})"
    if isinstance(result, Tensor):
        return f"a {result.dtype} Tensor {tuple(result.shape)}"
    return f"a {type(result).__name__}"


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
        values["left"], values["right"] = pair(mask["window"])
    if masked == "formula":
        values["low"] = None if left is None else past - left
        values["high"] = None if right is None else past + right
    if dialect.packed:
        for i, (name, x) in enumerate((("q", q), ("k", k))):
            bounds = sequence_bounds(x.shape[0], x.shape[2], values["documents"], x.device)
            if "cu_seqlens" in mask:
                bounds = mask["cu_seqlens"][i]
            apart = mask.keys() & {"document_ids", "cu_seqlens"}
            values[f"cu_seqlens_{name}"] = bounds
            values[f"max_seqlen_{name}"] = max(bounds.diff().tolist()) if apart else x.shape[2]
    return {name: value for name, value in values.items() if value is not None}, masked


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
