"""Every exact backend of the table, over shapes, masks, dtypes and adversarial inputs, within the
budget.

A new backend gets these tests by being in the table.
"""

from dataclasses import replace

import pytest
import torch

from attention import BACKENDS, Backend
from attention.kernels.select import HEAD_DIMS
from conformance.backend_under_test import expected_of
from conformance.cases import SHORT, Case, run

# the tile loops run with tiles small enough that every case crosses several, ragged at the end
TILES = {"block_q": 32, "block_kv": 16}
HALVES = (torch.bfloat16, torch.float16)

CASES = [
    Case(batch=2),
    Case(causal=False),
    Case(batch=2, num_heads=4, num_kv_heads=2, num_queries=33, num_keys=33, head_dim=24),
    Case(num_heads=3, num_kv_heads=1, num_queries=65, num_keys=65, head_dim=64, causal=False),
    Case(num_queries=33, num_keys=70),
    Case(num_queries=33, num_keys=70, causal=False),
    Case(num_queries=70, num_keys=33),  # the first 37 rows see no key
    Case(num_queries=1, num_keys=50),
    Case(num_queries=1, num_keys=1),
    Case(num_queries=17, num_keys=17, head_dim=40),
    *(Case(inputs=name) for name in ("large", "growing", "spike", "negative", "ties")),
    Case(
        optional={"window": 9}
    ),  # whole tiles to the left are out of sight, a row's first visible tile is partly masked
    Case(num_queries=33, num_keys=70, optional={"window": 40}),
    Case(num_queries=70, num_keys=33, optional={"window": 5}),
    Case(optional={"softcap": 2.0}, inputs="large"),
    # scores far below the cap: tanh as 1 - 2 / (1 + e) lost what is left of them
    *(
        Case(
            num_heads=3,
            num_kv_heads=3,
            num_queries=16,
            num_keys=16,
            head_dim=32,
            optional={"softcap": softcap, "window": 64},
        )
        for softcap in (20.0, 100.0)
    ),
    Case(num_heads=4, num_kv_heads=2, optional={"alibi_slopes": True}),
    Case(causal=False, optional={"alibi_slopes": True}),
    Case(batch=2, optional={"document_ids": True}),
    Case(batch=2, causal=False, optional={"document_ids": True}),
    Case(batch=2, num_kv_heads=1, optional={"score_mod": True}),
    Case(causal=False, optional={"score_mod": True}),
    Case(optional={"document_ids": True, "window": 6, "softcap": 5.0, "alibi_slopes": True}),
    Case(num_queries=33, num_keys=70, causal=False, optional={"window": (9, 4)}),
    Case(batch=3, num_queries=33, optional={"key_lengths": True}),
    Case(num_kv_heads=1, num_keys=60, optional={"cu_seqlens": True}),
    Case(batch=2, value_dim=24, causal=False),
    Case(num_queries=5, num_keys=33, num_kv_heads=1, value_dim=8, optional={"window": 20}),
]

GPU_CASES = [
    Case(
        batch=2,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        num_queries=n,
        num_keys=m,
        head_dim=d,
        causal=causal,
        inputs=inputs,
    )
    for num_heads, num_kv_heads in ((4, 4), (8, 2))
    for n, m in ((257, 257), (1024, 1024), (129, 600), (600, 129), (1, 777))
    for d in (16, 40, 64, 128, 256)
    for causal in (True, False)
    for inputs in ("normal", "spike")
] + [
    Case(num_queries=513, num_keys=513, head_dim=64, inputs=inputs)
    for inputs in ("large", "growing", "negative", "ties")
]


def configured(backend: Backend) -> Backend:
    return backend.configured(
        **{name: size for name, size in TILES.items() if name in backend.options}
    )


def table(*names: str) -> list[Backend]:
    return [BACKENDS[name] for name in names]


def parameters(cases: list[Case], backends: list[Backend]) -> list:
    """(backend, case, dtype) for everything a backend declares that it takes."""
    found = []
    for backend in map(configured, backends):
        for number, case in enumerate(cases):
            for dtype in backend.dtypes:
                # interpreted, a case takes seconds: each in one of the two half precisions
                slow = not torch.cuda.is_available() and (
                    (backend.name, dtype) == ("triton", HALVES[number % 2])
                )
                in_reach = case.features() <= backend.features and (
                    backend.head_dims is None or case.head_dim in backend.head_dims
                )
                # tiles, masks and tails are the same code for every dtype: the half-precision runs
                # keep to the plain cases
                if in_reach and (dtype in (torch.float64, torch.float32) or not case.optional):
                    found.append(
                        pytest.param(
                            backend,
                            case,
                            dtype,
                            id=f"{backend.name}-{case}-{SHORT[dtype]}",
                            marks=pytest.mark.slow if slow else (),
                        )
                    )
    return found


EXACT = [name for name, backend in BACKENDS.items() if backend.exact and name != "naive"]
# PyTorch's FlexAttention has no backward on the CPU
ON_CPU = [name for name in EXACT if name != "flex"]
# on a Hopper GPU `triton` is other kernels for the dtypes and head dims that these can take
PORTABLE = replace(
    BACKENDS["triton"].configured(kernel="portable"),
    name="triton (portable)",
    dtypes=(torch.bfloat16, torch.float16),
)


def check(backend, case, dtype, device, record=lambda row: None) -> None:
    expected = expected_of(case, dtype, device, with_lse="lse" in backend.features)
    checks = expected.checks(case, run(backend, *expected.inputs)).values()
    record(
        {
            "backend": backend.name,
            "device": device,
            "case": f"{case}-{SHORT[dtype]}",
            "worst_share_of_budget": max(each.share for each in checks),
            "worst_multiple_of_naive": max(each.multiple for each in checks),
        }
    )
    assert all(each.share <= 1 for each in checks), "\n".join(map(str, checks))


@pytest.mark.parametrize(("backend", "case", "dtype"), parameters(CASES, table(*ON_CPU)))
def test_cpu(backend, case, dtype, conformance_record):
    if torch.cuda.is_available() and backend.name == "triton":
        pytest.skip("with a GPU the Triton kernels are compiled, not interpreted")
    check(backend, case, dtype, "cpu", conformance_record)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "case", "dtype"),
    [
        *parameters(CASES + GPU_CASES, table("triton")),
        *parameters([case for case in CASES + GPU_CASES if case.head_dim in HEAD_DIMS], [PORTABLE]),
        *parameters(CASES, table("tiled", "sdpa", "flex")),
    ],
)
def test_gpu(backend, case, dtype, conformance_record):
    if backend.name == "flex":
        torch._dynamo.reset()  # it compiles for every case, and PyTorch stops after a few
    check(backend, case, dtype, "cuda", conformance_record)
