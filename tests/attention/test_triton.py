"""The Triton kernels as an operator: what torch.compile, autograd, checkpointing and long tensors
ask of it.

Without a GPU the kernels run in Triton's interpreter. That their numbers are right is the
conformance suite's part. Dimensions: B batch, H query heads, H_kv key/value heads, N queries, M
keys, D head dim.
"""

import os
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attention import Backend, attention, get_backend
from attention.kernels import op
from attention.kernels.forward import place
from attention.kernels.op import flash_attention, flash_attention_backward, is_packed, readable
from attention.kernels.score_mods import tanh
from attention.mask import visible_keys
from config import ModelConfig
from model.gpt import CausalSelfAttention
from tests.selection import diagonal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PORTABLE = get_backend("triton", kernel="portable")  # the Hopper kernels have tests of their own


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def packed_views(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (B, H, N, D) as views of one projection (B, N, 3, H, D)."""
    return packed.permute(2, 0, 3, 1, 4).unbind()


def parts(projected: Tensor, num_kv_heads: int) -> tuple[Tensor, ...]:
    """q (B, H, N, D) and k, v (B, H_kv, N, D) as views of one projection (B, N, H + 2 H_kv, D)."""
    sizes = (projected.shape[2] - 2 * num_kv_heads, num_kv_heads, num_kv_heads)
    return tuple(x.transpose(1, 2) for x in projected.split(sizes, dim=2))


OPERANDS = {
    "B1-H1-N20-D16": lambda: (
        random(1, 1, 20, 16),
        random(1, 1, 20, 16, seed=1),
        random(1, 1, 20, 16, seed=2),
    ),
    "B2-H2kv1-N9-M17-D24": lambda: (
        random(2, 2, 9, 24),
        random(2, 1, 17, 24, seed=1),
        random(2, 1, 17, 24, seed=2),
    ),
    "packed-B1-H2kv1-N9-D16": lambda: parts(random(1, 9, 4, 16), 1),
    "B1-H1-N9-D16-bf16": lambda: tuple(
        random(1, 1, 9, 16, dtype=torch.bfloat16, seed=seed) for seed in range(3)
    ),
}


@pytest.mark.parametrize(
    ("everything", "operands"),
    diagonal({"plain": False, "window-softcap-no_rescale": True}, OPERANDS),
)
def test_the_operator_keeps_pytorchs_contract(operands, everything):
    """Schema, shapes, strides and dtypes promised to torch.compile, and the registered gradient."""
    causal = operands in (OPERANDS["B1-H1-N20-D16"], OPERANDS["packed-B1-H2kv1-N9-D16"])
    q, k, v = (x.detach().requires_grad_() for x in operands())
    optional, settings = [None, None, None], [causal, 0.25, "", "online", 0, 0]
    if everything:
        visible = visible_keys(q, k, causal=True, window=5)
        optional = [visible.lo.int(), visible.hi.int(), torch.tensor([3.0], device=DEVICE)]
        settings = [True, 0.25, "attention.kernels.score_mods:softcap", "no_rescale", 16, 16]
    look = torch.ones((), dtype=torch.bool)
    torch.library.opcheck(flash_attention, (q, k, v, *optional, *settings), {"look": look})
    with torch.no_grad():
        out, lse, _ = flash_attention(q, k, v, *optional, *settings)
        d_out, d_lse = (
            random(*out.shape, dtype=out.dtype),
            None if everything else torch.ones_like(lse),
        )
        for packed in {False, is_packed(q, k, v)}:
            torch.library.opcheck(
                flash_attention_backward,
                (d_out, d_lse, q, k, v, out, lse, *optional, *settings),
                {"packed": packed},
            )


@pytest.mark.parametrize(
    "used", [(True, False), (False, True), (True, True)], ids=["out", "lse", "both"]
)
def test_the_gradient_of_eager_mode_is_the_registered_one(used, monkeypatch):
    """To the bit, whichever result has a gradient; and no zeros are made for the gradient of an lse
    that nobody used.
    """
    given, backward = [], op.flash_attention_backward

    def watched(
        d_out: Tensor, d_lse: Tensor | None, *others: object, **options: object
    ) -> list[Tensor]:
        given.append(d_lse)
        return backward(d_out, d_lse, *others, **options)

    monkeypatch.setattr(op, "flash_attention_backward", watched)
    q, k, v = (
        random(2, heads, 40, 16, seed=seed).requires_grad_() for seed, heads in enumerate((4, 2, 2))
    )

    def gradients(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        terms = [
            (x * random(*x.shape, seed=3)).sum()
            for x, use in zip(results[:2], used, strict=True)
            if use
        ]
        return torch.autograd.grad(sum(terms), (q, k, v), materialize_grads=True)

    eager = attention(q, k, v, backend=PORTABLE)
    assert "FlashAttentionBackward" in type(eager.out.grad_fn).__name__
    found = gradients(eager)
    torch.testing.assert_close(
        found,
        gradients(flash_attention(q, k, v, None, None, None, True, 0.25, "", "online", 0, 0)),
        rtol=0,
        atol=0,
    )
    assert [x is not None for x in given] == [used[1]] * 2
    torch.testing.assert_close(
        found, gradients(attention(q, k, v, backend="naive")), rtol=1e-4, atol=1e-5
    )


@triton.jit
def note_places(found_ptr, num_tiles, num_heads, section):
    tile, head = place(tl.program_id(0), num_tiles, num_heads, section)
    tl.store(found_ptr + 2 * tl.program_id(0), tile)
    tl.store(found_ptr + 2 * tl.program_id(0) + 1, head)


@pytest.mark.parametrize(
    ("num_tiles", "num_heads", "section"), [(2, 6, 4), (3, 7, 2), (1, 5, 3), (4, 3, 8), (5, 4, 1)]
)
def test_every_tile_of_every_head_has_one_program_section_by_section(num_tiles, num_heads, section):
    found = torch.full((num_tiles * num_heads, 2), -1, dtype=torch.int32, device=DEVICE)
    note_places[(len(found),)](found, num_tiles, num_heads, section)
    left_over = num_heads % section or min(section, num_heads)
    sections = [
        range(left_over),
        *(range(first, first + section) for first in range(left_over, num_heads, section)),
    ]
    assert found.tolist() == [
        [tile, head] for heads in sections for tile in range(num_tiles) for head in heads
    ]


@triton.jit
def tanh_kernel(x_ptr, y_ptr, derivative_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y, derivative = tanh(tl.load(x_ptr + at))
    tl.store(y_ptr + at, y)
    tl.store(derivative_ptr + at, derivative)


def test_tanh_and_its_derivative_are_precise_everywhere():
    """To a few roundings of their own size: 2 sigmoid(2 x) - 1 has no digit left where x is
    1e-8.
    """
    x = torch.logspace(-37, 1.5, 4096, dtype=torch.float64).float()
    x = torch.cat(
        (
            x,
            -x,
            torch.linspace(-1, 1, 4096),
            torch.tensor([0.0, -0.0, torch.inf, -torch.inf]).repeat(1024),
        )
    ).to(DEVICE)
    y, derivative = torch.empty_like(x), torch.empty_like(x)
    tanh_kernel[(len(x) // 1024,)](x, y, derivative, BLOCK=1024)
    exact = x.double().tanh()
    torch.testing.assert_close(y.double(), exact, rtol=8 * 2**-24, atol=0)
    small = x.abs() < 40  # beyond, the derivative is below float32
    torch.testing.assert_close(
        derivative[small].double(), 1 / x[small].double().cosh() ** 2, rtol=100 * 2**-24, atol=0
    )
    assert not derivative[x.isinf()].any()


def block(packed: Tensor) -> tuple[Tensor, Tensor]:
    """As a model calls it: views of one projection in, merged heads out."""
    out, lse = attention(*packed_views(packed), backend="triton")
    return out.transpose(1, 2).flatten(2) * 2, lse


def differentiated(function) -> tuple[Tensor, ...]:
    packed = random(1, 40, 3, 2, 16).requires_grad_()
    out, lse = function(packed)
    return (
        out.detach(),
        lse.detach(),
        *torch.autograd.grad((out * random(*out.shape, seed=1)).sum() + lse.sum(), packed),
    )


def test_compiled_into_one_graph_it_equals_eager():
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(differentiated(compiled), differentiated(block), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(PORTABLE, id="triton"),
        pytest.param(get_backend("no_rescale", impl="triton"), id="no_rescale"),
    ],
)
def test_inductor_lowers_the_operators(backend):
    """It hands on by name what stands at its default, to a function with argument names of its
    own.
    """

    def function(packed: Tensor) -> tuple[Tensor, Tensor]:
        out = attention(*packed_views(packed), backend=backend).out
        return out, out[..., 0]

    torch._dynamo.reset()  # the other backend's graph is not to be made general
    with torch._inductor.config.patch(
        force_disable_caches=True
    ):  # a graph from the cache is not lowered again
        found = differentiated(torch.compile(function, fullgraph=True))
    torch.testing.assert_close(found, differentiated(function), rtol=0, atol=0)


class Block(torch.nn.Module):
    def forward(self, packed: Tensor) -> Tensor:
        return block(packed)[0]


def test_exports():
    packed = random(1, 40, 3, 2, 16)
    exported = torch.export.export(Block(), (packed,))
    assert torch.equal(exported.module()(packed), Block()(packed))


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
def test_cuda_graph_capture(packed):
    """Nothing waits for the device or allocates outside the graph's pool: window and documents
    included.
    """
    tensors = parts(random(2, 300, 12, 64, dtype=torch.bfloat16), 4)
    tensors = [(x if packed else x.contiguous()).detach().requires_grad_() for x in tensors]
    d_out = random(2, 4, 300, 64, dtype=torch.bfloat16, seed=3)
    documents = torch.arange(300, device=DEVICE).expand(2, -1) // 77

    def step() -> tuple[Tensor, ...]:
        out = attention(*tensors, backend=PORTABLE, window=50, document_ids=documents).out
        return out, *torch.autograd.grad(out, tensors, d_out)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = step()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(captured, expected, strict=True))


def test_activation_checkpoint():
    again = differentiated(lambda packed: checkpoint(block, packed, use_reentrant=False))
    torch.testing.assert_close(again, differentiated(block), rtol=0, atol=0)


def test_packed_views_are_read_where_they_are():
    """No copy on the way in, and merging the heads of the output copies nothing either."""
    q, k, v = packed_views(random(2, 40, 3, 2, 16))
    assert all(readable(x) is x for x in (q, k, v))
    plain = (None, None, None, True, 0.25, "", "online", 0, 0)
    out, lse, _ = flash_attention(q, k, v, *plain)
    grads = flash_attention_backward(out, None, q, k, v, out, lse, *plain)
    for x in (out, *grads):
        assert x.transpose(1, 2).is_contiguous()
        assert x.transpose(1, 2).flatten(2).data_ptr() == x.data_ptr()


ONE_PROJECTION = {
    "causal": (2, 2, torch.float32, {}),
    "grouped-bf16": (4, 2, torch.bfloat16, {}),
    "full-bf16": (2, 2, torch.bfloat16, {"causal": False}),
    "window": (2, 1, torch.float32, {"window": 25}),
    "documents-softcap": (2, 1, torch.float32, {"document_ids": True, "softcap": 2.0}),
}


@pytest.mark.parametrize(
    ("case", "compiled"), diagonal(ONE_PROJECTION, {"compiled": True, "eager": False})
)
def test_gradients_in_one_tensor_are_the_separate_ones(case, compiled):
    """To the bit: q, k and v as views of one projection, and copied."""
    num_heads, num_kv_heads, dtype, optional = case
    projected = random(2, 40, num_heads + 2 * num_kv_heads, 24, dtype=dtype).requires_grad_()
    if "document_ids" in optional:
        optional = optional | {"document_ids": torch.arange(40, device=DEVICE).expand(2, -1) // 17}

    def run(projected: Tensor, copied: bool) -> tuple[Tensor, Tensor]:
        q, k, v = (x.contiguous() if copied else x for x in parts(projected, num_kv_heads))
        return attention(q, k, v, backend=PORTABLE, **optional)

    def results(function, copied: bool) -> tuple[Tensor, ...]:
        out, lse = function(projected, copied)
        return (
            out.detach(),
            lse.detach(),
            *torch.autograd.grad(
                (out * random(*out.shape, dtype=dtype, seed=1)).sum() + lse.sum(), projected
            ),
        )

    function = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    assert all(
        torch.equal(x, y) for x, y in zip(results(function, False), results(run, True), strict=True)
    )


def test_gradients_of_a_projections_parts_lie_as_the_parts_do():
    q, k, v = (x.detach().requires_grad_() for x in parts(random(2, 40, 8, 16), 2))
    grads = torch.autograd.grad(attention(q, k, v, backend=PORTABLE).out.sum(), (q, k, v))
    assert [x.stride() for x in grads] == [x.stride() for x in (q, k, v)]
    assert [x.storage_offset() for x in grads] == [x.storage_offset() for x in (q, k, v)]
    assert len({x.untyped_storage().data_ptr() for x in grads}) == 1


OTHERS = {
    "separate": lambda: (random(2, 2, 9, 16), random(2, 2, 9, 16), random(2, 2, 9, 16)),
    "heads-merged": lambda: tuple(random(2, 9, 2, 16).transpose(1, 2) for _ in range(3)),
    "q-apart": lambda: (random(2, 2, 9, 16), *parts(random(2, 9, 6, 16), 2)[1:]),
    "fewer-keys": lambda: tuple(
        x[:, :, : 9 - i] for i, x in zip((0, 1, 1), parts(random(2, 9, 6, 16), 2), strict=True)
    ),
    "every-other-token": lambda: tuple(x[:, :, ::2] for x in parts(random(2, 18, 6, 16), 2)),
    "side-by-side-per-head": lambda: tuple(
        x.transpose(1, 2) for x in random(2, 9, 2, 48).split(16, dim=3)
    ),
    "padded": lambda: tuple(x[..., :16] for x in parts(random(2, 9, 6, 20), 2)),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_of_other_tensors_every_gradient_is_its_own(make):
    q, k, v = (x.detach().requires_grad_() for x in make())
    grads = torch.autograd.grad(attention(q, k, v, backend=PORTABLE).out.sum(), (q, k, v))
    assert all(x.transpose(1, 2).is_contiguous() for x in grads)


@pytest.mark.slow
def test_a_compiled_projection_reads_its_gradient_where_it_is(monkeypatch):
    """Inductor drops what would put dq, dk and dv together: the projection's two products take the
    operator's result.
    """
    layer = CausalSelfAttention(
        ModelConfig(num_heads=4, num_kv_heads=2, hidden_size=64), PORTABLE, {}
    ).to(DEVICE)
    x = random(2, 40, 64).requires_grad_()

    def run(x: Tensor) -> Tensor:
        return layer.attend(*layer.heads(layer.qkv(x), None), document_ids=None, cache=None)[0]

    def gradients(function) -> tuple[Tensor, ...]:
        out = function(x)
        return torch.autograd.grad(
            out, (x, layer.qkv.weight, layer.qkv.bias), random(*out.shape, seed=1)
        )

    def operators() -> set[object]:
        """In the graph of the backward pass, as it is lowered."""
        graphs: list[set[object]] = []
        torch._dynamo.reset()
        note = {
            "post_grad_custom_post_pass": lambda graph: graphs.append(
                {node.target for node in graph.nodes}
            )
        }
        with torch._inductor.config.patch(force_disable_caches=True, **note):
            found = gradients(torch.compile(run, fullgraph=True))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        (backward,) = (
            graph for graph in graphs if torch.ops.tilegpt.flash_attention_backward.default in graph
        )
        return backward

    # code for the processor's vectors would do the same, and to ask for them takes ten seconds
    monkeypatch.setattr(torch._inductor.cpu_vec_isa, "valid_vec_isa_list", list)
    expected = gradients(run)
    copies = {torch.ops.aten.cat.default, torch.ops.aten.clone.default, torch.ops.aten.copy.default}
    assert not operators() & copies
    monkeypatch.setattr(op, "is_packed", lambda *_: False)
    assert operators() & copies


AWKWARD = {
    "odd-head-dim": lambda: random(2, 2, 9, 17),
    "starts-between-granules": lambda: random(2, 2, 9, 32)[..., 1:17],
    "odd-row-stride": lambda: random(2, 2, 9, 18)[..., :16],
    "one-sequence-read-twice": lambda: random(1, 2, 9, 16).expand(2, -1, -1, -1),
    "head-dim-strided": lambda: random(2, 2, 16, 9).mT,
    "odd-head-dim-bf16": lambda: random(2, 2, 9, 20, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("make", AWKWARD.values(), ids=AWKWARD)
def test_what_a_descriptor_cannot_point_at_is_copied(make):
    x = make()
    y = readable(x)
    assert torch.equal(y.to(x.dtype), x)
    assert y.stride(-1) == 1 and y.data_ptr() % 16 == 0
    assert all(stride > 0 and stride * y.element_size() % 16 == 0 for stride in y.stride()[:3])


def test_the_same_bits_every_time():
    first = differentiated(block)
    for _ in range(10 if DEVICE == "cuda" else 2):
        assert all(torch.equal(x, y) for x, y in zip(differentiated(block), first, strict=True))


@pytest.mark.parametrize(
    ("name", "block_kv", "detach_max", "optional"),
    diagonal(
        ["no_max", "no_rescale"],
        [16, 32],
        {"true-gradient": False, "max-detached": True},
        {"causal": {}, "window": {"window": 25}},
    ),
)
def test_a_defect_is_the_tile_loops(name, block_kv, detach_max, optional):
    """Result and true gradient, at the same tile size; one query tile size more or less changes
    nothing.
    """
    tiles = {"block_kv": block_kv, "detach_max": detach_max}
    tensors = [
        x.requires_grad_()
        for x in (
            2 * random(1, 4, 70, 16),
            random(1, 2, 70, 16, seed=1),
            random(1, 2, 70, 16, seed=2),
        )
    ]
    d_out = random(1, 4, 70, 16, seed=3)

    def results(**options) -> list[Tensor]:
        out = attention(*tensors, backend=get_backend(name, **tiles, **options), **optional).out
        return [out.detach(), *torch.autograd.grad(out, tensors, d_out)]

    for found, expected in zip(
        results(impl="triton", block_q=32), results(block_q=64), strict=True
    ):
        assert (found - expected).norm() <= 2e-6 * expected.norm()


def test_a_defect_in_triton_says_what_it_does_not_take():
    q = torch.zeros(1, 1, 4, 16, device=DEVICE)
    with pytest.raises(ValueError, match="16, 32, 64, 128 rows and keys, not block_kv=24"):
        attention(q, q, q, backend=get_backend("no_rescale", impl="triton", block_kv=24))
    with pytest.raises(ValueError, match="no option 'softmax_dtype'"):
        get_backend("no_max", impl="triton", softmax_dtype="input")
    with pytest.raises(ValueError, match="no impl=cuda; valid: tiled, triton"):
        get_backend("no_max", impl="cuda")


CALL = """
import sys
{before}
import torch
from attention import attention
q = torch.zeros(1, 1, 4, 16)
try:
    attention(q, q, q, backend="triton")
except ValueError as error:
    print(error)
print("triton" in sys.modules and sys.modules["triton"] is not None)
"""


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ("", "Triton needs a GPU; set TRITON_INTERPRET=1 before the start"),
        (
            "sys.modules['triton'] = None",
            "Triton is not installed here (pip install triton, Linux only)",
        ),
    ],
    ids=["no-gpu", "not-installed"],
)
def test_refusal_says_the_way_out(before, reason):
    """In a fresh process, and before Triton is imported."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", CALL.format(before=before)]
    text = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert text.startswith(
        "attention=triton cannot take q (1, 1, 4, 16), k (1, 1, 4, 16), float32 on cpu: " + reason
    )
    assert "attention=tiled" in text
    assert text.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("installed", "refused"), [("3.6.0", True), ("3.7.1", False), ("3.10.0", False)]
)
def test_versions_are_numbers(monkeypatch, installed, refused):
    """Whose interpreter fails with a newer numpy."""
    from attention import kernels

    monkeypatch.setattr(kernels, "version", lambda package: installed)
    monkeypatch.setattr(kernels.numpy, "__version__", "2.5.0")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    q = torch.zeros(1, 1, 4, 16)
    assert ("triton>=3.7" in "".join(kernels.refusals(q, q, q, causal=True, scale=0.25))) == refused


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_same_bits_fifty_times(head_dim):
    tensors = [
        random(2, heads, 1000, head_dim, dtype=torch.bfloat16, seed=heads).requires_grad_()
        for heads in (8, 2, 2)
    ]
    d_out = random(2, 8, 1000, head_dim, dtype=torch.bfloat16)

    def once() -> tuple[Tensor, ...]:
        out, lse = attention(*tensors, backend=PORTABLE)
        return out, lse, *torch.autograd.grad(out, tensors, d_out)

    first = once()
    for _ in range(50):
        assert all(torch.equal(x, y) for x, y in zip(once(), first, strict=True))


def assert_within_budget(found: list[Tensor], reference: list[Tensor], naive: list[Tensor]) -> None:
    for x, exact, plain in zip(found, reference, naive, strict=True):
        budget = (
            2 * (plain.double() - exact).abs().max() + torch.finfo(x.dtype).eps * exact.abs().max()
        )
        assert (x.double() - exact).abs().max() <= budget


def run(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, *, backend: str | Backend, dtype: torch.dtype
) -> list[Tensor]:
    """out, dq, dk, dv without a mask."""
    inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    out = attention(*inputs, backend=backend, causal=False).out
    return [out.detach(), *torch.autograd.grad(out, inputs, d_out.to(dtype))]


def check_long_keys(num_keys: int, head_dim: int) -> None:
    """k and v are views of one projection; only the last 64 keys score above 0, so the rest of a
    long problem weighs nothing.
    """
    dtype = torch.bfloat16
    kv = torch.zeros(1, num_keys, 2, 1, head_dim, dtype=dtype, device=DEVICE)
    kv[:, -64:] = 6 * random(1, 64, 2, 1, head_dim, dtype=dtype)
    k, v = kv.permute(2, 0, 3, 1, 4).unbind()
    q, d_out = (
        6 * random(1, 1, 64, head_dim, dtype=dtype, seed=1),
        random(1, 1, 64, head_dim, dtype=dtype, seed=2),
    )
    out, dq, dk, dv = run(q, k, v, d_out, backend=PORTABLE, dtype=dtype)
    # no mass outside the last keys, so no gradient either
    assert all(abs(extreme) < 1e-3 for x in (dk, dv) for extreme in x[:, :, :-64].aminmax())
    last = q, k[:, :, -64:], v[:, :, -64:], d_out
    expected = (run(*last, backend="naive", dtype=x) for x in (torch.float64, dtype))
    assert_within_budget([out, dq, dk[:, :, -64:], dv[:, :, -64:]], *expected)


@pytest.mark.gpu
def test_offsets_past_two_to_the_31_in_keys_and_their_gradients():
    check_long_keys(2**31 // 128 + 200, 128)


@pytest.mark.gpu
def test_offsets_past_two_to_the_31_in_queries():
    """The last rows of the last head, against the same rows alone."""
    q = torch.zeros(1, 2**31 // 256 + 200, 2, 128, dtype=torch.bfloat16, device=DEVICE).transpose(
        1, 2
    )
    q[:, :, -64:] = random(1, 2, 64, 128, dtype=torch.bfloat16)
    k, v = (random(1, 2, 100, 128, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    with torch.no_grad():
        long, short = (
            attention(x, k, v, backend=PORTABLE, causal=False) for x in (q, q[:, :, -64:])
        )
    torch.testing.assert_close(long.out[:, :, -64:], short.out)
    torch.testing.assert_close(long.lse[:, :, -64:], short.lse)
