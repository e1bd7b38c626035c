"""What an eager call of attention=triton costs the host, and that nothing remembered is used for a
call of another kind.

Kernels are replaced where their arguments are looked at, and run in Triton's interpreter where
their results are. Dimensions: B batch, H query heads, N queries, M keys, D head dim.
"""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
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
    kernels,
    mask,
)
from attention.interface import Plans
from attention.kernels import decoding, intervals, op, portable

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stubs in place of kernels")
PORTABLE = get_backend("triton", kernel="portable")
PLANS = op.forward_plans, op.backward_plans, intervals.plans, decoding.plans


def named(names: list[str], values: tuple[Any, ...]) -> dict[str, Any]:
    """Arguments by their names, descriptors as the values of their fields."""
    values = [dict(vars(x)) if hasattr(x, "block_shape") else x for x in values]
    return dict(zip(names, values, strict=True))


def specialised(arguments: dict[str, Any]) -> dict[str, Any]:
    """What Triton compiles a kernel for."""
    bases = {key: x.get("base") if isinstance(x, dict) else x for key, x in arguments.items()}
    return {
        key: (x.dtype, x.data_ptr() % 16) if isinstance(x, Tensor) else x
        for key, x in bases.items()
    }


class Kernel:
    """In place of a @triton.jit function: it notes its arguments, and those of the compiled kernel
    that it returns, as Triton's does.
    """

    def __init__(self, kernel: Any, notes: list[tuple[str, str, Any, dict[str, Any]]]):
        self.arg_names, self.name, self.notes = kernel.arg_names, kernel.__name__, notes

    def __getitem__(self, grid: tuple[int, ...]):
        def run(*arguments: Any, **constants: Any) -> "Compiled":
            constants = {name: x for name, x in constants.items() if name in self.arg_names}
            given = named(self.arg_names[: len(arguments)], arguments) | constants
            self.notes.append((self.name, "jit", (*grid, 1, 1)[:3], given))
            return Compiled(self, specialised(given))

        return run


class Compiled:
    def __init__(self, kernel: Kernel, compiled_for: dict[str, Any]):
        self.kernel, self.compiled_for = kernel, compiled_for

    def __getitem__(self, grid: tuple[int, ...]):
        def run(*arguments: Any) -> None:
            given = named(self.kernel.arg_names, arguments)
            assert specialised(given) == self.compiled_for
            self.kernel.notes.append((self.kernel.name, "direct", grid, given))

        return run


def forget() -> None:
    for plans in (*PLANS, intervals.kept):
        plans.clear()


@pytest.fixture
def notes(monkeypatch):
    """(kernel, whether by Triton's launcher, grid, arguments) of each launch."""
    found = []
    for module in (portable, intervals, decoding):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Kernel(getattr(module, name), found))
    forget()
    yield found
    forget()


def inputs(*, length: int = 40, kv_heads: int = 2, packed: bool = False) -> list[Tensor]:
    """q (1, 2, N, 16) and k, v (1, H_kv, N, 16), float32."""
    x = torch.randn(1, length, 2 + 2 * kv_heads, 16)
    parts = [part.transpose(1, 2) for part in x.split((2, kv_heads, kv_heads), dim=2)]
    return [(x if packed else x.contiguous()).requires_grad_() for x in map(torch.detach, parts)]


MASKS = {
    "plain": {},
    "documents": {"document_ids": (torch.arange(40) // 13)[None]},
    "window": {"window": 9},
    "softcap-alibi": {"softcap": 5.0, "alibi_slopes": torch.tensor([0.5, 0.1])},
}


def kinds_of_calls() -> list[tuple[list[Tensor], Tensor, dict[str, Any]]]:
    """q, k and v, d_out, optional arguments; any two differ in one thing, or few."""
    plain, d_out = inputs(), torch.randn(1, 2, 40, 16)
    spread = [x.detach()[:, :, ::2].requires_grad_() for x in inputs(length=80)]
    unaligned = [torch.empty(1281)[1:].view(x.shape).requires_grad_() for x in plain]
    shorter = [plain[0].detach()[:, :, 7:].requires_grad_(), *plain[1:]]
    half = [x.detach().half().requires_grad_() for x in plain]
    grouped, packed = inputs(kv_heads=1), inputs(packed=True)
    calls = [(tensors, d_out, {}) for tensors in (plain, spread, unaligned, grouped, packed)]
    calls += (shorter, d_out[:, :, 7:], {}), (half, d_out.half(), {})
    calls += (plain, torch.randn(1, 40, 2, 16).transpose(1, 2), {}), (plain, d_out[:, :1], {})
    optional = [
        *MASKS.values(),
        {"scale": 0.5},
        {"causal": False},
        {"causal": False, "document_ids": MASKS["documents"]["document_ids"]},
        {"window": 10},
        {"window": (9, 4), "causal": False},
        {"window": (9, 5), "causal": False},
        {"softcap": 5.0},
        {"return_max_score": True},
        {"backend": get_backend("no_rescale", impl="triton", block_q=32, block_kv=64)},
        {"backend": get_backend("no_rescale", impl="triton", block_q=32, block_kv=16)},
        {"backend": get_backend("no_max", impl="triton", block_q=32, block_kv=16)},
    ]
    calls += [(plain, d_out, each) for each in optional]
    return [(tensors, d.expand(-1, 2, -1, -1), each) for tensors, d, each in calls]


def test_a_kernel_is_started_with_what_tritons_launcher_would_give_it(notes):
    """From the second call of a kind on, whatever other calls come between."""

    def launches(tensors: list[Tensor], d_out: Tensor, optional: dict[str, Any]) -> list[Any]:
        out = attention(*tensors, **{"backend": PORTABLE} | optional).out
        torch.autograd.grad(out, tensors, d_out)
        return noted(notes, (*tensors, d_out))

    assert_launches_are_those_of_triton(launches, kinds_of_calls(), at_least=4)


def noted(notes: list[Any], tensors: tuple[Tensor, ...]) -> list[Any]:
    """The notes so far, which are cleared: what a call itself allocates may lie anywhere."""
    given = {x.data_ptr() for x in tensors}

    def plain(x: Any) -> Any:
        if isinstance(x, dict):
            return {key: plain(value) for key, value in x.items()}
        if isinstance(x, Tensor):
            place = x.data_ptr() if x.data_ptr() in given else None
            return x.shape, x.stride(), x.dtype, place
        return x

    found = [(name, how, grid, plain(arguments)) for name, how, grid, arguments in notes]
    notes.clear()
    return found


def assert_launches_are_those_of_triton(
    launches: Callable[..., list[Any]], calls: list[tuple[Any, ...]], *, at_least: int
) -> None:
    for call in calls:
        launches(*call)
    for direct, call in zip([launches(*call) for call in calls], calls, strict=True):
        for plans in PLANS:
            plans.clear()
        through_triton = launches(*call)
        assert {how for _, how, *_ in direct} == {"direct"} and len(direct) >= at_least
        assert {how for _, how, *_ in through_triton} == {"jit"}
        assert [(name, *rest) for name, _, *rest in direct] == [
            (name, *rest) for name, _, *rest in through_triton
        ]


def test_so_is_a_kernel_of_decoding(notes):
    q, k, v = torch.randn(2, 4, 1, 16), *torch.randn(2, 2, 2, 40, 16)
    pages, table = torch.randn(9, 8, 2, 16), torch.arange(10).view(2, 5).int() % 9
    lengths, several = torch.tensor([40, 9]), torch.randn(2, 4, 3, 16)
    spread = [x.repeat_interleave(2, dim=2)[:, :, ::2] for x in (k, v)]
    aside = torch.empty(2 * 2 * 40 * 16 + 1)[1:].view(k.shape)
    paged = {"block_table": table}
    calls = [
        (q, k, v, lengths, {}),
        (q, *spread, lengths, {}),
        (q, k, aside, lengths, {}),
        (several, k, v, lengths, {}),
        (q.transpose(1, 3).contiguous().transpose(1, 3), k, v, lengths, {}),
        *((x.half(), k.half(), v.half(), lengths, {}) for x in (q, several)),
        *((q, k, v, x, {}) for x in (lengths.int(), lengths.repeat_interleave(2)[::2])),
        (q, pages, pages, lengths, paged),
        (q, pages, pages, lengths, {"block_table": table.long()}),
        (q, pages, pages, lengths, {"block_table": table.repeat(1, 2)[:, ::2] // 9}),
        *((q, k, v, lengths, {"splits": x}) for x in (1, 3, "fixed")),
        *((q, k, v, lengths, {"window": x}) for x in (9, 10)),
        (several, k, v, lengths, {"window": (9, 1), "causal": False}),
        (several, k, v, lengths, {"causal": False}),
        (q, k, v, lengths, {"scale": 0.5}),
        (q, k, v, lengths, {"softcap": 5.0}),
    ]

    def launches(*call: Any) -> list[Any]:
        *tensors, optional = call
        attention_with_cache(*tensors, backend=PORTABLE, **optional)
        return noted(notes, (*tensors, table))

    assert_launches_are_those_of_triton(launches, calls, at_least=1)


def calls_of(function: Any) -> int:
    """Calls of Python and C functions inside one call."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        ours = frame.f_code.co_filename == __file__  # the kernels' stubs
        count += event in ("call", "c_call") and not ours

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


# of a forward without gradients, with them, and of a backward; without plans there were at least
# 282, 317 and 372, and as many again in Triton's launcher
LIMITS = (160, 185, 165)
DECODING_LIMITS = (128, 122)  # with a cache and without; there were 158 and 131


@pytest.mark.parametrize("name", MASKS)
def test_an_eager_call_does_little_in_python(notes, monkeypatch, name):
    # a GPU's call does not ask for versions
    monkeypatch.setattr(kernels, "version", lambda package: "3.9.0")
    monkeypatch.setattr(kernels, "NumpyVersion", str)
    q, k, v = inputs()
    d_out = torch.randn_like(q)

    def call() -> Tensor:
        return attention(q, k, v, backend="triton", **MASKS[name]).out

    def without_gradients() -> None:
        with torch.no_grad():
            call()

    out = call()

    def backward() -> None:
        torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)

    found = []
    for function in (without_gradients, call, backward):
        function()
        found.append(calls_of(function))
    assert all(x <= limit for x, limit in zip(found, LIMITS, strict=True)), found


def test_so_does_a_step_of_decoding(notes, monkeypatch):
    monkeypatch.setattr(kernels, "version", lambda package: "3.9.0")
    monkeypatch.setattr(kernels, "NumpyVersion", str)
    q, k, v = torch.randn(1, 2, 1, 16), *torch.randn(2, 1, 2, 40, 16)
    lengths = torch.tensor([40])

    def with_cache() -> None:
        attention_with_cache(q, k, v, lengths, backend="triton")

    def of_one_query() -> None:
        attention(q, k, v, backend="triton")

    found = []
    for function in (with_cache, of_one_query):
        function()
        found.append(calls_of(function))
    assert all(x <= limit for x, limit in zip(found, DECODING_LIMITS, strict=True)), found


def test_threads_start_a_kernel_with_tensors_of_their_own(notes):
    def call(_: int) -> None:
        tensors = inputs()
        with torch.no_grad():
            for _ in range(20):
                attention(*tensors, backend=PORTABLE)
        of_thread.append({x.data_ptr() for x in tensors})

    of_thread: list[set[int]] = []
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(call, range(4)))
    assert len(notes) == 80
    for *_, arguments in notes:
        bases = {arguments[f"{name}_desc"]["base"] for name in "qkv"}
        assert {x.data_ptr() for x in bases if x is not None} in (*of_thread, set())


def test_plans_do_not_grow_without_end(notes, monkeypatch):
    """As when a cache of keys grows by one in each call; and none holds a tensor."""
    monkeypatch.setattr(Plans, "LIMIT", 8)
    with torch.no_grad():
        for length in range(1, 40):
            q, k, v = inputs(length=length)
            attention(q, k, v, backend=PORTABLE, window=64)
    assert max(map(len, (op.forward_plans, intervals.plans, checks.passed))) <= 8
    assert len(intervals.kept) <= intervals.Windows.LIMIT


def check(tensors: list[Tensor], backend: Backend = PORTABLE, **optional: Any) -> None:
    """out and gradients equal naive's."""
    results = []
    for each in (backend, "naive"):
        out = attention(*tensors, backend=each, **optional).out
        results.append((out, *torch.autograd.grad(out.square().sum(), tensors)))
    torch.testing.assert_close(*results, rtol=1e-2, atol=2e-3)


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
    with pytest.raises(ValueError, match="key_lengths must lie in 0 to M = 40"):
        attention(*tensors, backend=PORTABLE, key_lengths=lengths)


def test_intervals_of_a_window_are_kept_for_calls_that_can_use_them():
    forget()
    cpu = torch.device("cpu")
    for _, (causal, window) in product(range(2), [(True, [9]), (False, [9, 4]), (False, [9, 5])]):
        found = intervals.kept_intervals(40, 50, causal, window, cpu)
        sides = window[0] if causal else tuple(window)
        expected = mask.intervals(40, 50, cpu, causal=causal, window=sides)
        assert torch.equal(found[0], expected.lo.int()) and torch.equal(found[1], expected.hi.int())
        again = intervals.kept_intervals(40, 50, causal, window, cpu)
        assert all(x is y for x, y in zip(found, again, strict=True))
    forget()
    with torch.inference_mode():  # what it makes cannot be saved for a backward pass
        attention(*inputs(), backend=PORTABLE, window=9)
    check(inputs(), window=9)


def test_gradients_in_one_tensor_and_in_three_have_plans_of_their_own():
    q, k, v = (x.detach() for x in inputs(packed=True))
    settings = (None, None, None, True, 0.25, "", "online", 0, 0)
    out, lse, _ = op.flash_attention(q, k, v, *settings)
    results = []
    for packed in (False, True, False):
        saved = (out, None, q, k, v, out, lse)
        gradients = op.flash_attention_backward(*saved, *settings, packed=packed)
        assert len(gradients) == (1 if packed else 3)
        results.append(torch.cat(list(op.unpacked(gradients, 2, 2))))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_autocast_changes_nothing_that_is_remembered():
    tensors = inputs()
    expected = attention(*tensors, backend=PORTABLE).out
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            assert torch.equal(attention(*tensors, backend=PORTABLE).out, expected)


REFUSED = {
    "causal=1": ({"causal": 1}, "causal=1 must be True or False"),
    "scale=True": ({"scale": True}, "scale=True must be a number"),
    "window=True": ({"window": True}, "window=True must be an integer"),
    "window=(True, 1)": ({"window": (True, 1)}, "must be .left, right., two integers"),
    "window=[1, 2]": ({"window": [1, 2]}, "must be an integer of at least 1"),
    "softcap=True": ({"softcap": True}, "softcap=True must be a positive number"),
    "document_ids": ({"document_ids": torch.zeros(1, 40)}, "document_ids must be of int64"),
    "a list": ({"document_ids": [0] * 40}, "document_ids must be a tensor, its type is list"),
    "slopes": (
        {"alibi_slopes": torch.ones(2, requires_grad=True)},
        "alibi_slopes must not require a gradient",
    ),
}


@pytest.mark.parametrize(("change", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_passed_once_does_not_let_others_pass(notes, change, reason):
    tensors = inputs()
    for passing in ({"scale": 1.0}, {"window": 1}, {"window": (1, 1)}, {"softcap": 1.0}):
        attention(*tensors, backend=PORTABLE, **passing)
    attention(*tensors, backend=PORTABLE, document_ids=torch.zeros(1, 40, dtype=torch.int64))
    attention(*tensors, backend=PORTABLE, alibi_slopes=torch.ones(2))
    for _ in range(2):
        with pytest.raises(ValueError, match=reason):
            attention(*tensors, backend=PORTABLE, **change)


def test_what_a_backend_needs_is_asked_in_each_call(notes, monkeypatch):
    q, k, v = inputs()
    attention(q, k, v, backend=PORTABLE)
    forward_only = Backend("forward_only", PORTABLE.fn, features=PORTABLE.features, backward=False)
    with torch.no_grad():
        attention(q, k, v, backend=forward_only)
    with pytest.raises(ValueError, match="it has no backward pass"):
        attention(q, k, v, backend=forward_only)
    with pytest.raises(ValueError, match="kernel=fast is not one of"):
        attention(q, k, v, backend=get_backend("triton", kernel="fast"))
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="Triton needs a GPU"):
        attention(q, k, v, backend=PORTABLE)


def test_packed_sequences_are_no_padding(notes):
    """attention_varlen() hands a backend a tensor (2, S + 1), which is no key_lengths."""
    q, k, v = (x.detach()[0].transpose(0, 1) for x in inputs())
    ends = torch.tensor([0, 10, 40])
    attention_varlen(q, k, v, ends, ends, backend=PORTABLE)
    with pytest.raises(ValueError, match="key_lengths must be integers of shape"):
        attention(*inputs(), backend=PORTABLE, key_lengths=torch.stack((ends, ends)).int())


def test_a_second_derivative_is_refused():
    """Autograd would take that of an operator without a gradient for zero, with a warning."""
    q, k, v = inputs()
    out = attention(q, k, v, backend=PORTABLE).out
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="attention=triton has no second derivative"):
        torch.autograd.grad(dq.sum(), q)
