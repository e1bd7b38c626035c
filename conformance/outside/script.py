"""The script of one call, which does not import this project: torch, the attention, and softmax
attention in float64.
"""

from collections.abc import Iterator
from inspect import getsource
from typing import NamedTuple

import torch
from torch import Tensor

from attention.mask import sides
from conformance import views
from conformance.adversarial import ADVERSARIAL
from conformance.cases import SHORT, Case
from conformance.outside.adapter import values_of
from conformance.outside.dialect import LAYOUTS
from conformance.outside.dialects import Target

# the optional arguments of a case that a script can write
OPTIONAL = {"window", "softcap", "alibi_slopes", "document_ids", "key_lengths"}


class Call(NamedTuple):
    """One call, and its tensor that is compared."""

    case: Case
    tensor: str
    dtype: torch.dtype
    raises: str = ""  # the exception that is the failure, in one line
    layout: str = ""  # a key of conformance.views.LAYOUTS, else contiguous


def write(target: Target, call: Call, device: str, budget: float) -> str:
    """The script. Its last two lines print the error and compare it."""
    case, dialect = call.case, target.dialect
    text, tensors = told(target, call)
    result = "lse" if call.tensor == "lse" else "out"
    lines = ["import torch"]
    if "create_block_mask" in text:
        lines.append("from torch.nn.attention.flex_attention import create_block_mask")
    lines += [target.imports, "", *(f"{source}\n" for source in functions(call))]
    lines += [*input_lines(call, device), *mask_lines(case, tensors)]
    lines.append(f"result = {text.replace('function', target.function, 1)}")
    if call.raises and device != "cpu":
        lines.append("torch.cuda.synchronize()")
    lines += [
        f"found = {dialect.part(result, batch=str(case.batch))}",
        *exact_lines(call),
        "difference = torch.where(found == exact, 0.0, (found - exact).abs())",
        "error = difference.nan_to_num(nan=torch.inf).max().item()",
        f'print(f"{call.tensor}: error {{error:.3g}}, allowed {budget:.3g}")',
        f"assert error <= {budget!r}",
    ]
    named = ", ".join(filter(None, [f"{call.tensor} of {case}", call.layout, SHORT[call.dtype]]))
    return "\n".join([f'"""{named}: written by attn-conform."""', "", *lines, ""])


def functions(call: Call) -> list[str]:
    """The sources of the functions that change and lay out q, k and v, and of those they call."""
    every = ADVERSARIAL | views.LAYOUTS
    used = [every[name] for name in (call.case.inputs, call.layout) if name not in ("normal", "")]
    called = {name for each in used for name in each.__code__.co_names}
    return [getsource(x) for x in every.values() if x in used or x.__name__ in called]


def told(target: Target, call: Call) -> tuple[str, dict[str, Tensor]]:
    """The text of the call, and the tensors that it and the masks name besides q, k and v."""
    case, dialect = call.case, target.dialect
    (q, k, _), arguments, *_ = case.make(torch.float32, "cpu")
    if "document_ids" in arguments:  # ids may repeat, the number of a document does not
        ids = arguments["document_ids"]
        arguments["document_ids"] = torch.nn.functional.pad(
            (ids[:, 1:] != ids[:, :-1]).cumsum(1), (1, 0)
        )
    values, masked = values_of(dialect, q, k, scale=f"{case.head_dim}**-0.5", **arguments)
    tensors = {name: x for name, x in values.items() if isinstance(x, Tensor)}
    if "key_lengths" in arguments:
        tensors["lengths"] = arguments["key_lengths"]
    texts = {name: name if name in tensors else str(x) for name, x in values.items()}
    change = LAYOUTS[dialect.layout][0]
    contiguous = "" if call.layout else ".contiguous()"  # a view stays one
    laid_out = "q, k, v" if change == "x" else f"*({change}{contiguous} for x in (q, k, v))"
    return dialect.call(laid_out, texts, masked=masked), tensors


def input_lines(call: Call, device: str) -> Iterator[str]:
    """Lines that draw q, k, v and the gradient of out, and lay them out in memory."""
    case, gradient = call.case, call.tensor.startswith("d")
    of_keys = f"{case.batch}, {case.num_kv_heads}, {case.num_keys}"
    of_queries = f"{case.batch}, {case.num_heads}, {case.num_queries}"
    width = case.value_dim or case.head_dim
    shapes = {
        "q": f"{of_queries}, {case.head_dim}",
        "k": f"{of_keys}, {case.head_dim}",
        "v": f"{of_keys}, {width}",
    }
    if gradient:
        shapes["d_out"] = f"{of_queries}, {width}"
    yield f"torch.manual_seed({case.seed})"
    for name, shape in shapes.items():
        yield f"{name} = torch.randn({shape}, dtype=torch.float64)"
    if case.inputs != "normal":
        yield f"q, k, v = {ADVERSARIAL[case.inputs].__name__}(q, k, v)"
    if device != "cpu":
        yield f"torch.set_default_device({device!r})"
    yield f"q, k, v = (x.to({device!r}, {call.dtype}) for x in (q, k, v))"
    if call.layout:
        yield f"q, k, v = {views.LAYOUTS[call.layout].__name__}(q, k, v)"
    if gradient:
        yield f"d_out = d_out.to({device!r})"
        yield "q, k, v = (x.requires_grad_() for x in (q, k, v))"


def hides(case: Case) -> bool:
    """Whether there is a mask."""
    return case.causal or bool(case.optional.keys() & {"window", "document_ids", "key_lengths"})


def mask_lines(case: Case, tensors: dict[str, Tensor]) -> Iterator[str]:
    """Lines that define the tensors, and `seen` if something hides keys."""
    for name, x in tensors.items():
        dtype = ", dtype=torch.int32" if x.dtype == torch.int32 else ""
        yield f"{name} = torch.tensor({x.tolist()}{dtype})"
    if not hides(case):
        return
    left, right = sides(case.optional.get("window"), causal=case.causal)
    past = case.num_keys - case.num_queries
    seen = f"torch.ones(1, 1, {case.num_queries}, {case.num_keys}, dtype=torch.bool)"
    if right is not None:
        seen += f".tril({past + right})"
    if left is not None:
        seen += f".triu({past - left})"
    yield f"seen = {seen}"
    if "documents" in tensors:
        yield "seen = seen & (documents[:, None, :, None] == documents[:, None, None])"
    if "lengths" in tensors:
        yield f"seen = seen & (torch.arange({case.num_keys}) < lengths[:, None, None, None])"


def exact_lines(call: Call) -> Iterator[str]:
    """Lines that compute softmax attention in float64, or its gradient."""
    case, masks = call.case, hides(call.case)
    groups = case.num_heads // case.num_kv_heads
    k, v = (
        f"{x}.double().repeat_interleave({groups}, 1)" if groups > 1 else f"{x}.double()"
        for x in "kv"
    )
    yield f"scores = q.double() @ {k}.mT * {case.head_dim}**-0.5"
    if softcap := case.optional.get("softcap"):
        yield f"scores = {softcap} * torch.tanh(scores / {softcap})"
    if "alibi_slopes" in case.optional:
        past = case.num_keys - case.num_queries
        yield f"i = torch.arange({case.num_queries})[:, None] + {past}"
        yield f"j = torch.arange({case.num_keys})"
        yield "scores = scores - slopes[:, None, None] * (i - j)"
    if call.tensor == "lse":
        hidden = ".masked_fill(~seen, -torch.inf)" if masks else ""
        yield f"exact = scores{hidden}.logsumexp(-1)"
        return
    p = "(scores.masked_fill(~seen, -1e30).softmax(-1) * seen)" if masks else "scores.softmax(-1)"
    yield f"exact = {p} @ {v}"
    if call.tensor != "out":
        yield "losses = [(x.double() * d_out).sum() for x in (found, exact)]"
        yield f"found, exact = (torch.autograd.grad(x, {call.tensor[1]})[0] for x in losses)"
