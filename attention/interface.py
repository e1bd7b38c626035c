"""The interface of every attention backend: its inputs, its output, and what it declares about
itself.

Dimensions: B batch, H query heads, H_kv key/value heads, N queries, M keys, D head dim,
D_v head dim of the values.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attention.mask import sides

ALL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# arguments of attention() that a backend receives only if it declares the feature of that name
OPTIONAL_ARGUMENTS = (
    "window",
    "softcap",
    "alibi_slopes",
    "document_ids",
    "score_mod",
    "key_lengths",
    "cu_seqlens",
)
FEATURES = frozenset(OPTIONAL_ARGUMENTS) | {
    # kinds of input without an argument, which not every backend takes
    "gqa",
    "non_causal",
    "cross_length",
    "two_sided_window",
    "value_dim",
    # what else a fn may do: return lse, take return_max_score, take the sinks itself
    "lse",
    "max_score",
    "sinks",
}
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def statistics_dtype(x: Tensor) -> torch.dtype:
    """The dtype of scores, sums and every number that changes a score: float32, or float64 for
    float64 inputs.
    """
    return torch.promote_types(x.dtype, torch.float32)


def needs_gradient(*inputs: Tensor | None) -> bool:
    """Whether a call with these inputs needs a backward pass."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def flag(asked: bool | Tensor) -> Tensor | None:
    """`asked` in the form that a torch.library operator takes; None means no."""
    if isinstance(asked, Tensor):
        return asked
    return torch.ones((), dtype=torch.bool) if asked else None


def empty_heads(shape: Sequence[int], like: Tensor) -> Tensor:
    """Memory for (B, H, N, D) laid out as (B, N, H, D): merging the heads afterwards copies
    nothing.
    """
    _, num_heads, length, head_dim = shape
    row = num_heads * head_dim
    return like.new_empty_strided(shape, (length * row, head_dim, row, 1))


def operator(name: str, schema: str | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Register an operator that mutates nothing; the function's annotations give its schema.
    torch.library.custom_op would also check in every call whether results share memory with inputs.
    That check takes as long as the rest of a short call.
    """

    def declare(function: Callable[..., Any]) -> Any:
        takes = schema or torch.library.infer_schema(function, mutates_args=())
        torch.library.define(f"tilegpt::{name}", takes, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(f"tilegpt::{name}", "default", function)
        return getattr(torch.ops.tilegpt, name).default

    return declare


def dtype_name(dtype: torch.dtype) -> str:
    """float32 for torch.float32."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class ScoreMod:
    """A change of every score, after the scale and before the mask: a bias, a cap, a temperature.

    fn(score, b, h, i, j, params) -> (changed, derivative): elementwise, where derivative is
    d changed / d score. b, h: indices of sequence and query head. i: position of the query among
    the keys, query index + M - N; j: position of the key. All broadcast to score. A changed score
    of -inf hides the key. Its numbers are params or variables around it, not defaults of
    parameters: once compiled, torch 2.11 keeps the first ones (pytorch#178365).
    kernel: the same function for attention=triton: pkg.module:NAME of a @triton.jit function
    (score, b, h, i, j, params_ptr), as in attention/kernels/score_mods.py.
    params: numbers for fn, in float32 (float64 for float64 q) and on the device of q; params_ptr
    points at the first. No gradient flows to them.
    first_head: the h of the first head, for a call on only some of the heads.
    """

    fn: Callable[..., tuple[Tensor, Tensor]]
    kernel: str | None = None
    params: Tensor | None = None
    first_head: int = 0

    def __call__(
        self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.fn(score, b, h + self.first_head, i, j, self.params)


class Refusal(ValueError):
    """Raised for inputs that a backend cannot take."""


class AttentionOutput(NamedTuple):
    """What every backend returns."""

    # (B, H, N, D_v), dtype of q
    out: Tensor
    # (B, H, N) float32 (float64 for float64 q), natural log-sum-exp of the masked scores; -inf
    # for a query without a key
    lse: Tensor | None = None


class ScoredOutput(NamedTuple):
    """AttentionOutput with the largest score of each head: see return_max_score of attention()."""

    out: Tensor
    lse: Tensor | None
    # (B, H) float32 (float64 for float64 q); the scores are those that the backend used
    max_score: Tensor | None


Output = AttentionOutput | ScoredOutput


def call_module(q: Tensor, k: Tensor, v: Tensor, *, module: nn.Module, **arguments: Any) -> Output:
    """The fn of a Backend whose module computes the attention."""
    return module(q, k, v, **arguments)


@dataclass(frozen=True, eq=False)
class Backend:
    """One implementation of attention, with its capabilities as data.

    `fn(q, k, v, *, causal, scale, **declared, **options) -> AttentionOutput` is called with checked
    inputs. `declared` are the OPTIONAL_ARGUMENTS that are in `features`; `options` are the
    backend's own. window is a number under a causal mask. Without one it is (left, right), which
    also needs two_sided_window. cu_seqlens (2, S + 1) comes with B = 1. It says where each of S
    sequences begins and ends, among the queries and among the keys (attention_varlen()).

    An attention with parameters has `module` instead of fn: a class or function that makes the
    nn.Module of a layer; see attention.own. That module is called like fn. If both are given, fn
    gets the module as module=.
    """

    name: str
    fn: Callable[..., Output] = call_module
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[torch.dtype, ...] = ALL_DTYPES
    head_dims: Container[int] | None = None  # None takes any
    # subset of FEATURES. gqa: H_kv < H; non_causal: causal=False; cross_length: N != M; value_dim:
    # D_v != D; lse: fn returns it; max_score: fn takes return_max_score and returns a ScoredOutput
    # unless it is False; sinks: fn takes them, otherwise attention() merges them using lse
    features: frozenset[str] = frozenset()
    # keyword arguments of fn, with their current values
    options: Mapping[str, Any] = field(default_factory=dict)
    backward: bool = True  # whether gradients flow to q, k and v
    exact: bool = True  # whether it claims to compute softmax attention
    defect: str | None = None  # for a deliberately broken backend: what is wrong, how it shows
    breaks: frozenset[str] = frozenset()  # the properties of conformance that it is known to fail
    # whether torch.compile may trace fn; it must not unroll a Python loop over tiles
    traceable: bool = True
    # whether fn takes observer=, called after each tile; see attention.look.diagnose
    observable: bool = False
    # the same computation by kernels, which a run on a GPU takes; it has its own capabilities and
    # options
    on_gpu: "Backend | None" = None
    # decodes over a cache, with the signature of attention.decoding.decode(); None if it cannot
    decode: Callable[..., AttentionOutput] | None = None
    # module(num_heads=, num_kv_heads=, head_dim=, max_seq_len=, layer=) -> nn.Module
    module: Callable[..., nn.Module] | None = None
    # what an exact=False backend is meant to compute, called like fn: conformance compares with it
    # in float64
    reference: Callable[..., Output] | None = None
    # further reasons to refuse inputs, as sentences: requirements(q, k, v, causal=..., scale=...,
    # **options) -> list. It is asked once for inputs of the same shapes, strides and dtypes
    requirements: Callable[..., list[str]] | None = None
    # the kinds of call that the checks let pass: kept here, they go when the backend goes
    passed: set[Any] = field(default_factory=set, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if unknown := set(self.features) - FEATURES:
            raise ValueError(
                f"backend {self.name!r} declares unknown features {sorted(unknown)}; valid: "
                f"{', '.join(sorted(FEATURES))}"
            )
        if self.fn is call_module and self.module is None:
            raise ValueError(f"backend {self.name!r} has nothing to call: give it fn= or module=")
        for name in ("module", "reference"):
            if self.claims_softmax and getattr(self, name) is not None:
                raise ValueError(
                    f"backend {self.name!r} has {name}=, so it is another function than softmax "
                    "attention: declare exact=False, and no defect"
                )

    @property
    def can_decode(self) -> bool:
        """Whether attention_with_cache() takes this backend. A split's sums must be float32 or
        wider.
        """
        narrow = self.options.get("softmax_dtype", "float32") != "float32"
        return self.decode is not None and not narrow

    @property
    def claims_softmax(self) -> bool:
        """Whether it computes softmax attention, or a deliberately broken form of it."""
        return self.exact or self.defect is not None

    def configured(self, **options: Any) -> "Backend":
        """A copy with other options. Raises ValueError for an option that the backend does not
        have.
        """
        if not options:
            return self
        for name, value in options.items():
            if name not in self.options:
                raise ValueError(
                    f"attention={self.name} has no option {name!r} (got {name}={value}); it "
                    f"has {', '.join(self.options) or 'no options'}"
                )
            if name == "softmax_dtype" and value not in ("float32", "input"):
                raise ValueError(f"softmax_dtype={value} must be float32 or input")
            if name in ("block_q", "block_kv") and not (isinstance(value, int) and value >= 1):
                raise ValueError(f"{name}={value} must be a whole number, at least 1")
        return replace(self, options={**self.options, **options})

    def unsupported_reasons(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = True,
        scale: float | None = None,
        sinks: Tensor | None = None,
        **optional: Any,
    ) -> list[str]:
        """Why the backend refuses these inputs, one sentence each; empty if it takes them."""
        left, right = sides(optional.pop("window", None), causal=causal)
        windowed = left is not None or (right is not None and not causal)
        head_dim, value_dim = q.shape[-1], v.shape[-1]
        wanted = {
            "gqa": q.shape[1] != k.shape[1],
            "non_causal": not causal,
            "cross_length": q.shape[2] != k.shape[2],
            "two_sided_window": windowed and not causal,
            "value_dim": value_dim != head_dim,
            "window": windowed,
            **{name: x is not None for name, x in optional.items()},
        }
        reasons = [
            f"it does not support {name}"
            for name, needed in wanted.items()
            if needed and name not in self.features
        ]
        if sinks is not None and not self.features & {"lse", "sinks"}:
            reasons.append("it returns no lse, which sinks need")
        if q.device.type not in self.devices:
            devices = " and ".join(self.devices)
            reasons.append(f"it runs on {devices}, the inputs are on {q.device.type}")
        if q.dtype not in self.dtypes:
            dtypes = ", ".join(map(dtype_name, self.dtypes))
            reasons.append(f"it takes {dtypes}, the inputs are {dtype_name(q.dtype)}")
        head_dims = self.head_dims
        if head_dims is not None and not (head_dim in head_dims and value_dim in head_dims):
            widths = f"q and k have {head_dim}, v has {value_dim}"
            reasons.append(f"it takes head_dim in {head_dims}, {widths}")
        if not self.backward and needs_gradient(q, k, v):
            reasons.append("it has no backward pass and the inputs require gradients")
        if reasons or self.requirements is None:
            return reasons
        scale = head_dim**-0.5 if scale is None else scale
        return self.requirements(q, k, v, causal=causal, scale=scale, **self.options)

    def check_supported(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> None:
        """Raise one Refusal, a ValueError with the inputs and every reason, if the backend does not
        take them.
        """
        if reasons := self.unsupported_reasons(q, k, v, **arguments):
            inputs = f"q {tuple(q.shape)}, k {tuple(k.shape)}, {dtype_name(q.dtype)} on {q.device}"
            raise Refusal(f"attention={self.name} cannot take {inputs}: " + "; ".join(reasons))

    def check_model(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """check_supported() for a model with causal self-attention, before its first step."""
        # some kernels take no sequence of one token
        q, kv = (
            torch.zeros(1, heads, 128, head_dim, dtype=dtype, device=device, requires_grad=True)
            for heads in (num_heads, num_kv_heads)
        )
        self.check_supported(q, kv, kv)


def values_can_be_read() -> bool:
    """Whether the values of a tensor can be read here: not while torch.compile traces, and not
    while a CUDA graph is captured.
    """
    if torch.compiler.is_compiling():
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def without_padding(k: Tensor, v: Tensor, key_lengths: Tensor) -> tuple[Tensor, Tensor]:
    """k and v with zeros past key_lengths (B,): a weight of 0 times NaN would be NaN."""
    j = torch.arange(k.shape[2], device=k.device)
    padding = (j >= key_lengths[:, None])[:, None, :, None]  # (B, 1, M, 1)
    return k.masked_fill(padding, 0), v.masked_fill(padding, 0)
