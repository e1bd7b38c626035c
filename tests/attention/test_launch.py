"""attention=triton remembers how it launched a kind of call. Nothing remembered may be used for a
call of another kind, or for other values.

Dimensions: B batch, H query heads, N queries, M keys.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attention import (
    Backend,
    attention,
    attention_varlen,
    attention_with_cache,
    checks,
    get_backend,
)
from attention.kernels import decoding, intervals, op
from attention.kernels.tiles import Launch, layout

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tensors of the interpreter")
ROOT = Path(__file__).parents[2]
C_COMPILER = shutil.which("gcc") or shutil.which("cc")
POINTER = 16  # digits of an address in hex: an argument, or the beginning of a tensor map
PORTABLE = get_backend("triton", kernel="portable")


def inputs(*, length: int = 40, kv_heads: int = 2, packed: bool = False) -> list[Tensor]:
    """q (1, 2, N, 16) and k, v (1, H_kv, N, 16), float32."""
    x = torch.randn(1, length, 2 + 2 * kv_heads, 16)
    parts = [part.transpose(1, 2) for part in x.split((2, kv_heads, kv_heads), dim=2)]
    return [(x if packed else x.contiguous()).requires_grad_() for x in map(torch.detach, parts)]


def aside(x: Tensor) -> Tensor:
    """The same numbers at an address that is no multiple of 16 bytes."""
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


def check(tensors: list[Tensor], expected: Any = "naive", backend: Any = PORTABLE, **optional):
    """out and gradients equal those of `expected`."""
    results = []
    for each in (backend, expected):
        out = attention(*tensors, backend=each, **optional).out
        results.append((out, *torch.autograd.grad(out.square().sum(), tensors)))
    torch.testing.assert_close(*results, rtol=1e-2, atol=2e-3)


TENSORS = {
    "plain": inputs,
    "every-other-token": lambda: [
        x.detach()[:, :, ::2].requires_grad_() for x in inputs(length=80)
    ],
    "unaligned": lambda: [aside(x.detach()).requires_grad_() for x in inputs()],
    "grouped": lambda: inputs(kv_heads=1),
    "packed": lambda: inputs(packed=True),
    "fewer-queries": lambda: [
        x.detach()[:, :, 7 * (i == 0) :].requires_grad_() for i, x in enumerate(inputs())
    ],
    "fp16": lambda: [x.detach().half().requires_grad_() for x in inputs()],
}
SETTINGS = [
    {"scale": 0.5},
    {"causal": False},
    {"document_ids": (torch.arange(40) // 13)[None]},
    {"document_ids": (torch.arange(40) // 13)[None], "causal": False},
    {"window": 9},
    {"window": 10},
    {"window": (9, 4), "causal": False},
    {"window": (9, 5), "causal": False},
    {"softcap": 5.0},
    {"softcap": 5.0, "alibi_slopes": torch.tensor([0.5, 0.1])},
]
DEFECTS = [("no_rescale", 64), ("no_rescale", 16), ("no_max", 16)]


def test_a_call_of_another_kind_is_computed_anew():
    """Each call differs from the first in one thing, or few; after them the first is as before."""
    plain = inputs()
    for _ in range(2):
        check(plain)
        for make in TENSORS.values():
            check(make())
        for optional in SETTINGS:
            check(plain, **optional)
        for name, block_kv in DEFECTS:
            broken = (
                get_backend(name, impl=impl, block_q=32, block_kv=block_kv)
                for impl in ("tiled", "triton")
            )
            check(plain, *broken)


def test_so_is_a_step_of_decoding():
    q, k, v = torch.randn(2, 4, 1, 16), *torch.randn(2, 2, 2, 40, 16)
    pages, table = torch.randn(9, 8, 2, 16), torch.arange(10).view(2, 5).int() % 9
    lengths, several = torch.tensor([40, 9]), torch.randn(2, 4, 3, 16)
    spread = [x.repeat_interleave(2, dim=2)[:, :, ::2] for x in (k, v)]
    calls = [
        (q, k, v, lengths, {}),
        (q, *spread, lengths, {}),
        (q, k, aside(v), lengths, {}),
        (several, k, v, lengths, {}),
        (q, k, v, lengths.int(), {}),
        (q, k, v, lengths.repeat_interleave(2)[::2], {}),
        (q, pages, pages, lengths, {"block_table": table}),
        (q, pages, pages, lengths, {"block_table": table.long()}),
        (q, pages, pages, lengths, {"block_table": table.repeat(1, 2)[:, ::2] // 9}),
        *((q, k, v, lengths, {"splits": x}) for x in (1, 3, "fixed")),
        *((q, k, v, lengths, {"window": x}) for x in (9, 10)),
        (several, k, v, lengths, {"window": (9, 1), "causal": False}),
        (several, k, v, lengths, {"causal": False}),
        (q, k, v, lengths, {"scale": 0.5}),
        (q, k, v, lengths, {"softcap": 5.0}),
    ]
    for *tensors, optional in calls:
        found, exact = (
            attention_with_cache(*tensors, backend=each, **optional) for each in (PORTABLE, "tiled")
        )
        torch.testing.assert_close(found, exact)


def test_tensors_for_which_triton_compiles_anew_have_layouts_of_their_own():
    x = torch.zeros(2, 3, 4, 16)
    others = [x[:1], x.transpose(1, 2).contiguous().transpose(1, 2), x.half(), aside(x), None]
    assert len({layout(each) for each in (x, *others)}) == 6
    assert layout(torch.ones_like(x)) == layout(x)


@dataclass
class Descriptor:
    base: Tensor | None
    rows: int


class Kernel:
    """In place of a @triton.jit function and of the kernel that it compiles."""

    arg_names = ("x_desc", "y_ptr", "n", "SIZE")

    def __init__(self):
        self.started = []

    def __getitem__(self, grid):
        def start(x_desc, y_ptr, n, SIZE, **of_the_compiler):
            self.started.append((grid, x_desc.rows, x_desc.base, y_ptr, n, SIZE))
            return self

        return start


def test_every_launch_has_its_own_tensors():
    """The first goes through Triton's launcher. Later ones do not, and may come from threads."""
    kernel = Kernel()
    launch = Launch(
        kernel, (3,), (7,), describe=(lambda x: Descriptor(x, 4),), SIZE=16, num_warps=4
    )
    pairs = [(torch.zeros(4), torch.zeros(4)) for _ in range(8)]
    launch(*pairs[0])
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda pair: launch(*pair), pairs[1:]))
    for grid, rows, x, y, *numbers in kernel.started:
        assert (grid, rows, numbers) == ((3, 1, 1), 4, [7, 16])
        assert any(x is first and y is second for first, second in pairs)
    assert len({id(x) for _, _, x, *_ in kernel.started}) == len(pairs)


CACHES = {
    "checks": checks.passed,
    "forward": op.forward_plans,
    "backward": op.backward_plans,
    "intervals": intervals.plans,
    "windows": intervals.kept,
    "decoding": decoding.plans,
}


@pytest.mark.parametrize("name", CACHES)
def test_no_cache_of_calls_grows_without_end(name):
    """As when a cache of keys grows by one in each call."""
    cache = type(CACHES[name])()
    for length in range(3 * cache.LIMIT):
        cache[length] = length
        assert cache[length] == length and len(cache) <= cache.LIMIT


def test_masks_may_change_in_place():
    """Their values are read anew in each call, whether PyTorch notices a change or not."""
    tensors, ids = inputs(), (torch.arange(40) // 13)[None].contiguous()
    lengths = torch.tensor([30])
    for change in (lambda: None, lambda: ids.fill_(1), lambda: ids.numpy()[:, 20:].fill(7)):
        change()
        check(tensors, document_ids=ids)
    for change in (lambda: None, lambda: lengths.fill_(9), lambda: lengths.numpy().fill(40)):
        change()
        check(tensors, key_lengths=lengths)
    lengths.numpy().fill(41)
    with pytest.raises(ValueError, match="key_lengths .* 40"):
        attention(*tensors, backend=PORTABLE, key_lengths=lengths)


def test_a_window_of_inference_mode_can_be_used_in_training():
    """PyTorch refuses to save for the backward pass a tensor that inference mode made."""
    with torch.inference_mode():
        attention(*inputs(length=43), backend=PORTABLE, window=11)
    check(inputs(length=43), window=11)


def test_autocast_changes_no_result():
    tensors = inputs()
    expected = attention(*tensors, backend=PORTABLE).out
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            assert torch.equal(attention(*tensors, backend=PORTABLE).out, expected)


REFUSED = {
    "causal": (1, "causal=1"),
    "scale": (True, "scale=True"),
    "window": (True, "window=True"),
    "window-pair": ((True, 1), r"window=\(True, 1\)"),
    "window-list": ([1, 2], r"window=\[1, 2\]"),
    "softcap": (True, "softcap=True"),
    "document_ids": (torch.zeros(1, 40), "document_ids .* int64"),
    "document_ids-list": ([0] * 40, "document_ids .* list"),
    "alibi_slopes": (torch.ones(2, requires_grad=True), "alibi_slopes .* gradient"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_passed_once_does_not_let_others_pass(name):
    """In Python True equals 1."""
    tensors = inputs()
    for passing in ({"scale": 1.0}, {"window": 1}, {"window": (1, 1)}, {"softcap": 1.0}):
        attention(*tensors, backend=PORTABLE, **passing)
    attention(*tensors, backend=PORTABLE, document_ids=torch.zeros(1, 40, dtype=torch.int64))
    attention(*tensors, backend=PORTABLE, alibi_slopes=torch.ones(2))
    value, named = REFUSED[name]
    for _ in range(2):
        with pytest.raises(ValueError, match=named):
            attention(*tensors, backend=PORTABLE, **{name.partition("-")[0]: value})


def test_what_a_backend_needs_is_asked_in_each_call(monkeypatch):
    q, k, v = inputs()
    attention(q, k, v, backend=PORTABLE)
    forward_only = Backend("forward_only", PORTABLE.fn, features=PORTABLE.features, backward=False)
    with torch.no_grad():
        attention(q, k, v, backend=forward_only)
    with pytest.raises(ValueError, match="forward_only .* backward"):
        attention(q, k, v, backend=forward_only)
    with pytest.raises(ValueError, match="kernel=fast"):
        attention(q, k, v, backend=get_backend("triton", kernel="fast"))
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="TRITON_INTERPRET"):
        attention(q, k, v, backend=PORTABLE)


def test_packed_sequences_are_no_padding():
    """attention_varlen() hands a backend a tensor (2, S + 1), which is no key_lengths."""
    q, k, v = (x.detach()[0].transpose(0, 1) for x in inputs())
    ends = torch.tensor([0, 10, 40])
    attention_varlen(q, k, v, ends, ends, backend=PORTABLE)
    with pytest.raises(ValueError, match="key_lengths"):
        attention(*inputs(), backend=PORTABLE, key_lengths=torch.stack((ends, ends)).int())


def test_a_second_derivative_is_refused():
    """Autograd would take that of an operator without a gradient for zero, with a warning."""
    q, k, v = inputs()
    out = attention(q, k, v, backend=PORTABLE).out
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative: .*naive"):
        torch.autograd.grad(dq.sum(), q)


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    """A CUDA driver that runs nothing."""
    made = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    source = ROOT / "tests/attention/no_device/driver.c"
    subprocess.run([C_COMPILER, "-shared", "-fPIC", "-o", made, source], check=True)
    return made


def address(argument: str) -> int:
    return int.from_bytes(bytes.fromhex(argument[:POINTER]), "little")


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or C_COMPILER is None,
    reason="needs Triton's compiler and a C compiler",
)
@pytest.mark.parametrize(
    ("kernels", "launches"),
    [
        ("portable", "forward delta dkdv dq"),
        ("hopper", "forward prepare backward join_shares convert_dq"),
    ],
    ids=["portable", "hopper"],
)
def test_the_short_way_brings_what_tritons_launcher_brings(library, kernels, launches):
    """To the CUDA driver: a shorter way than Triton's launcher starts a kernel again."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_LIBCUDA_PATH": library.parent, "LD_LIBRARY_PATH": library.parent}
    command = [sys.executable, "-m", "tests.attention.no_device.launches", library, kernels]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    names = [f"{name}_kernel" for name in launches.split()]
    rows, count = [json.loads(line) for line in done.stdout.splitlines()], len(names)
    tritons, short, others = rows[: 2 * count : 2], rows[1 : 2 * count : 2], rows[2 * count :]
    assert [row["kernel"] for row in tritons] == names
    assert short == tritons
    for row, other in zip(tritons, others, strict=True):
        assert (row["kernel"], row["shape"]) == (other["kernel"], other["shape"])
        for mine, its in zip(row["arguments"], other["arguments"], strict=True):
            if mine != its:  # a tensor that lies elsewhere, and nothing else
                assert mine[POINTER:] == its[POINTER:] and address(its) in other["tensors"]
        assert set(other["tensors"]) <= set(map(address, other["arguments"]))
