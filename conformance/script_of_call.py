"""The script of one call, which does not import this project: torch, the attention, and softmax
attention in float64.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from attention.mask import MASKS, sides
from conformance.cases import SHORT, Case
from conformance.dialects import (
    LAYOUTS,
    PAGES,
    Dialect,
    Target,
    limits,
    pages_of,
    sequence_bounds,
)
from conformance.views import HEADS_INSIDE

# what conformance.cases.ADVERSARIAL does, as a line of code each
INPUTS = {
    "normal": "",
    "large": "q, k = 4 * q, 2 * k",
    "growing": "q, k = q.abs(), 0.1 * k.abs() + torch.linspace(0, 3, k.shape[2])[:, None].double()",
    "spike": "k[:, :, -3] = 8 * q[:, : k.shape[1], -1]",
    "tower": "q[..., 0], k[..., 0], k[:, :, -3, 0] = 4, 0, 50 * q.shape[-1] ** 0.5",
    "huge": "q, k = 40 * q, 0.3 * k + q[:, : k.shape[1]]",
    "steep": "q, k = 4 * q, 4 * k\nq[:, :, q.shape[2] // 2] *= 8\nk[:, :, k.shape[2] // 2] *= 8",
    "negative": "q, k = q.abs() + 3, -(k.abs() + 3) * (40 / q.shape[-1] ** 0.5)",
    "up": "q[..., 0], k[..., 0] = 4, 25 * q.shape[-1] ** 0.5",
    "down": "q[..., 0], k[..., 0] = 4, -30 * q.shape[-1] ** 0.5",
    "up and down": "q[..., 0], k[..., 0] = 4, torch.tensor([25.0, -30.0]).double()["
    "torch.arange(k.shape[1]) % 2, None] * q.shape[-1] ** 0.5",
    "ties": "k = k[:, :, torch.arange(k.shape[2]) % 4]",
    "ones": "v = torch.ones_like(v)",
}
# what conformance.views.LAYOUTS does, as a line of code each
VIEWS = {
    "packed": "torch.stack((q, k, v)).permute(1, 3, 0, 2, 4).contiguous().permute(2, 0, 3, 1, 4)",
    "misaligned": "torch.nn.functional.pad(x, (1, 2), value=torch.nan)[..., 1:-2]",
    "transposed": "x.mT.contiguous().mT",
    "spread out": "x.new_full((*x.shape[:2], 2 * x.shape[2], 2 * x.shape[3]), torch.nan)"
    "[:, :, ::2, ::2].copy_(x)",
    "cached": "torch.nn.functional.pad(x, (0, 0, 0, x.shape[2]), value=torch.nan)"
    "[:, :, : x.shape[2]]",
}


class Call(NamedTuple):
    """One call, and its tensor that is compared."""

    case: Case
    tensor: str
    dtype: torch.dtype
    raises: str = ""  # the exception that is the failure, in one line
    # a key of VIEWS; HEADS_INSIDE, of d_out in a second backward pass; else contiguous
    layout: str = ""


def write(target: Target, call: Call, device: str, budget: float) -> str:
    """The script. Its last two lines print the error and compare it."""
    case, tensor, dtype = call.case, call.tensor, call.dtype
    gradient, dialect = tensor.startswith("d"), target.dialect
    there = f"{device!r}, " if device != "cpu" else ""
    given = {name: x for name, x in case.optional.items() if name in MASKS}
    masked = dialect.needs_mask(case.num_queries, case.num_keys, causal=case.causal, given=given)
    documents = counted_documents(case) if "document_ids" in case.optional else None
    tensors = tensors_of(dialect, views=call.layout in VIEWS)
    call_text = dialect.call(tensors, values_of(call, documents), masked=masked)
    output = dialect.output_lse if tensor == "lse" else dialect.output
    shape = f"{case.batch}, {case.num_kv_heads}, {case.num_keys}"
    value_dim = case.value_dim or case.head_dim
    of_out = f"{case.batch}, {case.num_heads}, {case.num_queries}, {value_dim}"
    lines = [
        "import torch",
        "from torch.nn.attention.flex_attention import create_block_mask"
        if "create_block_mask" in call_text
        else "",
        target.imports,
        "",
        f"torch.manual_seed({case.seed})",
        f"q = torch.randn({case.batch}, {case.num_heads}, {case.num_queries}, {case.head_dim}, "
        "dtype=torch.float64)",
        f"k = torch.randn({shape}, {case.head_dim}, dtype=torch.float64)",
        f"v = torch.randn({shape}, {value_dim}, dtype=torch.float64)",
        f"d_out = torch.randn({of_out}, dtype=torch.float64)" if gradient else "",
        INPUTS[case.inputs],
        f"torch.set_default_device({device!r})" if device != "cpu" else "",
        *input_lines(f"x.to({there}{dtype})", call.layout, gradient=gradient),
        f"d_out = d_out.to({device!r})" if gradient and there else "",
        *mask_lines(call, dialect, documents, call_text),
        f"result = {call_text.replace('function', target.function, 1)}",
        "torch.cuda.synchronize()" if call.raises and there else "",
        f"found = {output(str(case.batch))}",
        *exact_lines(call, masks=hides(case)),
        "difference = torch.where(found == exact, 0.0, (found - exact).abs())",
        "error = difference.nan_to_num(nan=torch.inf).max().item()",
        f'print(f"{tensor}: error {{error:.3g}}, allowed {budget:.3g}")',
        f"assert error <= {budget!r}",
    ]
    text = "\n".join(line for i, line in enumerate(lines) if line or i == 3)
    named = ", ".join(filter(None, [f"{tensor} of {case}", call.layout, SHORT[dtype]]))
    return f'"""{named}: written by attn-conform."""\n\n{text}\n'


def input_lines(convert: str, layout: str, *, gradient: bool) -> Iterator[str]:
    """Lines that convert q, k and v, and lay them out in memory."""
    leaf = ".requires_grad_()" * gradient
    if layout not in VIEWS:
        yield f"q, k, v = ({convert}{leaf} for x in (q, k, v))"
        return
    view = VIEWS[layout]
    yield f"q, k, v = ({convert} for x in (q, k, v))"
    yield f"q, k, v = {view}" if layout == "packed" else f"q, k, v = ({view} for x in (q, k, v))"
    if gradient:
        yield "q, k, v = (x.requires_grad_() for x in (q, k, v))"


def tensors_of(dialect: Dialect, *, views: bool) -> str:
    """q, k and v in the dialect's layout, as the first arguments of a call. views: they stay views
    of a larger tensor.
    """
    change = LAYOUTS[dialect.layout][0]
    if dialect.pages:
        return f"{change.replace('x', 'q', 1)}, *({PAGES} for x in (k, v))"
    if change == "x":
        return "q, k, v"
    return f"*({change}{'' if views else '.contiguous()'} for x in (q, k, v))"


def counted_documents(case: Case) -> torch.Tensor:
    """Documents of the tokens, (B, N), counted from 0. Ids may repeat, these numbers do not."""
    ids = case.make(torch.float32, "cpu")[1]["document_ids"]
    change = ids[:, 1:] != ids[:, :-1]
    return torch.nn.functional.pad(change.cumsum(1), (1, 0))


def values_of(call: Call, documents: torch.Tensor | None) -> Mapping[str, str | None]:
    """The text of each argument; see Dialect.call."""
    case, optional, window = call.case, call.case.optional, window_of(call.case)
    low, high = limits_of(case)
    longest = None
    if documents is not None:
        bounds = sequence_bounds(case.batch, case.num_keys, documents, documents.device)
        longest = int(bounds.diff().max())
    return {
        "causal": str(case.causal),
        "scale": f"{case.head_dim}**-0.5",
        "past": str(case.num_keys - case.num_queries),
        "left": None if window is None else str(window[0]),
        "right": None if window is None else str(window[1]),
        "low": None if low is None else str(low),
        "high": None if high is None else str(high),
        "softcap": str(optional["softcap"]) if "softcap" in optional else None,
        "slopes": "slopes" if "alibi_slopes" in optional else None,
        "sinks": None,
        "documents": "documents" if documents is not None else None,
        "max_q": str(longest or case.num_queries),
        "max_k": str(longest or case.num_keys),
    }


def window_of(case: Case) -> tuple[int, int] | None:
    """How many keys a query sees left and right of its own; -1 is all of them."""
    if "window" not in case.optional:
        return None
    left, right = sides(case.optional["window"], causal=case.causal)
    return -1 if left is None else left, -1 if right is None else right


def limits_of(case: Case) -> tuple[int | None, int | None]:
    window = case.optional.get("window")
    return limits(case.num_queries, case.num_keys, window, causal=case.causal)


def hides(case: Case) -> bool:
    """Whether there is a mask."""
    return case.causal or bool(case.optional.keys() & {"window", "document_ids", "key_lengths"})


def mask_lines(
    call: Call, dialect: Dialect, documents: torch.Tensor | None, call_text: str
) -> Iterator[str]:
    """Lines that define what the call and the reference need besides q, k and v."""
    case, optional = call.case, call.case.optional
    low, high = limits_of(case)
    if hides(case):
        seen = f"torch.ones(1, 1, {case.num_queries}, {case.num_keys}, dtype=torch.bool)"
        if high is not None:
            seen += f".tril({high})"
        if low is not None:
            seen += f".triu({low})"
        yield f"seen = {seen}"
    if documents is not None:
        yield f"documents = torch.tensor({documents.tolist()})"
        yield "seen = seen & (documents[:, None, :, None] == documents[:, None, None])"
    if "key_lengths" in optional:
        yield f"lengths = torch.tensor({case.make(call.dtype, 'cpu')[1]['key_lengths'].tolist()})"
        yield f"seen = seen & (torch.arange({case.num_keys}) < lengths[:, None, None, None])"
    if "alibi_slopes" in optional:
        yield f"slopes = torch.tensor({case.make(call.dtype, 'cpu')[1]['alibi_slopes'].tolist()})"
    if "cu_q" in call_text:
        for name, length in (("q", case.num_queries), ("k", case.num_keys)):
            bounds = sequence_bounds(case.batch, length, documents, torch.device("cpu"))
            yield f"cu_{name} = torch.tensor({bounds.tolist()}, dtype=torch.int32)"
    if "slots" in call_text:
        bounds = sequence_bounds(case.batch, case.num_keys, documents, torch.device("cpu"))
        counts = tuple(bounds.diff().tolist())
        pages = pages_of(counts, dialect.pages, torch.device("cpu"))
        yield f"slots = torch.tensor({pages.slots.tolist()})"
        yield f"table = torch.tensor({pages.table.tolist()}, dtype=torch.int32)"
        used = "lengths.int()" if "key_lengths" in optional else None
        yield f"used = {used or f'torch.tensor({pages.used.tolist()}, dtype=torch.int32)'}"
    if "(module, " in call_text:
        groups = case.num_heads // case.num_kv_heads
        yield "module = torch.nn.Module()"
        yield f"module.num_key_value_groups, module.is_causal = {groups}, False"


def exact_lines(call: Call, *, masks: bool) -> Iterator[str]:
    """Lines that compute softmax attention in float64, or its gradient."""
    case, optional = call.case, call.case.optional
    groups = case.num_heads // case.num_kv_heads
    k, v = (
        f"{x}.double().repeat_interleave({groups}, 1)" if groups > 1 else f"{x}.double()"
        for x in "kv"
    )
    yield f"scores = q.double() @ {k}.mT * {case.head_dim}**-0.5"
    if "softcap" in optional:
        yield f"scores = {optional['softcap']} * torch.tanh(scores / {optional['softcap']})"
    if "alibi_slopes" in optional:
        shift = case.num_keys - case.num_queries
        yield f"i = torch.arange({case.num_queries})[:, None] + {shift}"
        yield f"j = torch.arange({case.num_keys})"
        yield "scores = scores - slopes[:, None, None] * (i - j)"
    if call.tensor == "lse":
        hidden = ".masked_fill(~seen, -torch.inf)" if masks else ""
        yield f"exact = scores{hidden}.logsumexp(-1)"
        return
    p = "(scores.masked_fill(~seen, -1e30).softmax(-1) * seen)" if masks else "scores.softmax(-1)"
    yield f"exact = {p} @ {v}"
    if call.tensor != "out":
        x = call.tensor[1]
        if call.layout == HEADS_INSIDE:
            yield f"torch.autograd.grad((found.double() * d_out).sum(), {x}, retain_graph=True)"
            yield "d_out = d_out.transpose(1, 2).contiguous().transpose(1, 2)"
        yield "losses = [(x.double() * d_out).sum() for x in (found, exact)]"
        yield f"found, exact = (torch.autograd.grad(loss, {x})[0] for loss in losses)"
