"""A backend under test: the cases it takes, and its results. See conformance.properties.

Dimensions: N queries, M keys.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from attention import Backend, build_module
from attention.interface import Output
from conformance.cases import Case, Check, Expected, attend, distance, expect, run
from conformance.other_functions import expect_function, widest

# small tiles on a CPU: every case spans several, and the last one is ragged
TILES = {"block_q": 32, "block_kv": 16}

# size of the noise added to every parameter of a module
PARAMETER_NOISE = 0.1

TENSORS = ("out", "lse", "dq", "dk", "dv", "dsinks")

# several properties compare with the same results; those of softmax are the same for every backend
expected_of = lru_cache(maxsize=512)(expect)
expected_of_function = lru_cache(maxsize=512)(expect_function)


def standalone(backend: Backend, *, noise: float = 0.0) -> Backend:
    """The backend as a function of q, k and v, for calls outside a model. It makes a module for
    each new shape, always with the same random numbers.

    noise: standard deviation of the noise added to every parameter. A parameter that starts at zero
    may hide what it multiplies.
    """
    if backend.module is None:
        return backend

    @cache
    def module_for(dtype: torch.dtype | None, device: torch.device, **shape: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            module = build_module(backend, **shape, max_seq_len=1024, layer=0)
            for x in module.parameters():
                x.add_(torch.randn(x.shape), alpha=noise)
        return module.to(device, dtype)

    def bound(fn: Callable[..., Output]) -> Callable[..., Output]:
        def attend(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Output:
            # parameters stay as they were made, unless the inputs are wider
            dtype = torch.float64 if q.dtype == torch.float64 else None
            shape = {"num_heads": q.shape[1], "num_kv_heads": k.shape[1], "head_dim": q.shape[3]}
            module = module_for(dtype, q.device, **shape)
            return fn(q, k, v, module=module, **arguments)

        return attend

    reference = backend.reference and bound(backend.reference)
    return replace(backend, fn=bound(backend.fn), reference=reference, module=None)


@dataclass(frozen=True)
class Limits:
    """What a Backend cannot declare, and its fn may as `limits`: the conventions of a function that
    it adapts.
    """

    multiple: int = 1  # N and M must be multiples of it
    lse_gradient: bool = True  # whether a gradient flows through the lse
    # reasons(q, k, **arguments) against a call
    reasons: Callable[..., list[str]] = lambda *_, **__: []


@dataclass
class Subject:
    """A backend under test, on one device and in one dtype."""

    backend: Backend
    device: str
    dtype: torch.dtype
    random_cases: int = 0
    seed: int = 0
    rows: dict[Case, dict[str, Check]] = field(default_factory=dict)
    # of the current property
    tried: list[Case] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.given = self.backend = standalone(self.backend, noise=PARAMETER_NOISE)
        self.limits: Limits = getattr(self.backend.fn, "limits", Limits())
        self.lse_gradient = "lse" in self.backend.features and self.limits.lse_gradient
        self.has_blocks = TILES.keys() <= self.backend.options.keys()
        if self.has_blocks and self.device == "cpu":
            self.backend = self.backend.configured(**TILES)
        takes, on_cpu = self.backend.head_dims, self.device == "cpu"
        wanted = (16, 64, 32, 128, 8) if on_cpu else (64, 32, 128, 16)
        every = (*wanted, *range(1, 513))
        # 16 for a backend that takes only wider heads: then every case tells its reason
        self.head_dims = [size for size in every if takes is None or size in takes] or [16]
        # GPU kernels have tiles of up to 128: three of them, the last one ragged
        self.length = self.rounded(70 if on_cpu else 330)

    def begin(self) -> None:
        """Start another property."""
        self.tried.clear()
        self.refusals.clear()

    def rounded(self, length: int) -> int:
        """The length, rounded up to a multiple of what the backend takes."""
        return length + -length % self.limits.multiple

    def case(
        self, num_queries: int | None = None, num_keys: int | None = None, **fields: Any
    ) -> Case:
        """A case. `fields` are fields of Case, or what its `optional` holds, such as window=9."""
        num_queries = self.rounded(num_queries or self.length)
        num_keys = self.rounded(num_keys or num_queries)
        optional = {
            name: fields.pop(name) for name in list(fields) if name not in Case.__dataclass_fields__
        }
        fields = {"head_dim": self.head_dims[0]} | fields
        return Case(num_queries=num_queries, num_keys=num_keys, optional=optional, **fields)

    def takes(self, case: Case, *, backward: bool = False) -> bool:
        """Whether the backend takes the case. `refusals` collects the reasons if it does not."""
        self.tried.append(case)
        tensors, arguments, *_ = case.make(self.dtype, self.device)
        reasons = self.backend.unsupported_reasons(
            *(x.requires_grad_(backward) for x in tensors), **arguments
        )
        reasons += self.limits.reasons(*tensors[:2], **arguments)
        merged = "sinks" in case.optional and "sinks" not in self.backend.features
        if backward and merged and not self.lse_gradient:
            reasons.append("no gradient flows through its lse, which sinks need")
        self.refusals += reasons
        return not reasons

    def run(
        self, case: Case, tensors: list[Tensor] | None = None, *, backward: bool = True
    ) -> dict[str, Tensor]:
        """The backend's results for a case that it takes. `tensors` replace q, k and v."""
        given, arguments, d_out, d_lse = self.expected(case).inputs
        backward = backward and self.takes(case, backward=True)
        found = run(self.backend, tensors or given, arguments, d_out, d_lse, backward=backward)
        # for a function other than softmax the oracle may return no lse
        return {name: x for name, x in found.items() if name in self.expected(case).reference}

    def compared(self, cases: Iterable[Case], tensors: Iterable[str] = TENSORS) -> Iterator[Check]:
        """Check against softmax attention in float64; for another function, against its oracle."""
        backend = self.backend
        if not backend.claims_softmax and widest(backend) == self.dtype and not backend.reference:
            self.refusals.append(f"it takes no wider dtype than {self.dtype}: add reference=")
            return
        for case in cases:
            found = self.compare(case)
            yield from (found[name] for name in tensors if name in found)

    def exactly(self, case: Case, what: str, found: dict[str, Tensor]) -> Iterator[Check]:
        """Compare results with the exact ones."""
        yield from self.expected(case).checks(case, found, what).values()

    def same(
        self,
        case: Case,
        what: str,
        found: dict[str, Tensor],
        plain: dict[str, Tensor],
        *,
        bits: bool = False,
    ) -> Iterator[Check]:
        """Compare two results that should be equal. Each may be a budget off the exact one.
        Elements that are NaN in `plain` are left to other properties.

        bits: no bit may differ, but on a GPU, where sums may run in any order.
        """
        for name, x in found.items():
            unknown = plain[name].isnan()
            x, y = (each.double().masked_fill(unknown, 0.0) for each in (x, plain[name]))
            budget = 0.0 if bits and self.device == "cpu" else 2 * self.expected(case).budget(name)
            yield Check(f"{name} of {case}, {what}", distance(x, y), budget)

    def expected(self, case: Case) -> Expected:
        if self.backend.claims_softmax:
            return expected_of(case, self.dtype, self.device, with_lse=self.lse_gradient)
        return expected_of_function(self.backend, case, self.dtype, self.device)

    def compare(self, case: Case) -> dict[str, Check]:
        """A check for each tensor. Without a backward pass there are those of the forward, and none
        if the backend refuses the inputs. Several properties share it.
        """
        self.takes(case, backward=True)  # for its reasons, where gradients are missing
        if self.takes(case) and case not in self.rows:
            self.rows[case] = self.expected(case).checks(case, self.run(case))
        return self.rows.get(case, {})

    def in_dtype(self, dtype: torch.dtype) -> "Subject":
        """The same in another dtype, for a part of the current property."""
        shared = {"tried": self.tried, "refusals": self.refusals}
        return Subject(self.given, self.device, dtype, **shared)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
        return attend(q, k, v, backend=self.backend, **arguments).out

    def random(self) -> Iterator[Case]:
        """Cases of random shape that the backend takes, with ordinary logits."""
        draw, features = random.Random(self.seed), self.backend.features
        # on a GPU every head dim compiles another kernel
        common = (8, 16, 24, 40, 64) if self.device == "cpu" else (40, 64, 128)
        head_dims = self.head_dims_of(common)
        for i in range(self.random_cases):
            num_kv_heads, num_queries = draw.choice((1, 2)), draw.randint(1, 2 * self.length)
            more = draw.choice((0, 1, draw.randint(2, self.length)))
            yield self.case(
                num_queries,
                num_queries + more * ("cross_length" in features),
                batch=draw.choice((1, 2)),
                num_heads=num_kv_heads * (draw.choice((1, 2, 3)) if "gqa" in features else 1),
                num_kv_heads=num_kv_heads,
                head_dim=draw.choice(head_dims),
                causal="non_causal" not in features or draw.random() < 0.7,
                seed=1000 * self.seed + i + 1,
            )

    def head_dims_of(self, common: tuple[int, ...]) -> list[int]:
        """The `common` head dims that the backend takes; if it takes none, any that it takes."""
        return [size for size in self.head_dims if size in common] or self.head_dims
