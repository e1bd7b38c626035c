"""Published tests of attention, each restated from its file: its calls, inputs and rule. We reduce
batches, heads and the longest lengths, and `left_out` says so. Sequences and heads do not interact
in attention, so the original is hardly stricter.

Dimensions: B batch, H query heads, H_kv key/value heads, N queries, M keys, D head dim.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from attention import AttentionOutput, Backend
from attention.mask import visible_keys
from lab.public_suites.suite import Call, Results, Source, Suite, close, plain

KERNELBENCH = "423217d9fda91e0c2d67e4a43bf62f96f6d104f1"
TRIALS = 5  # inputs that KernelBench draws for a problem


def kernelbench_97(dtype: torch.dtype) -> Iterator[Call]:
    for seed in range(TRIALS):
        torch.manual_seed(seed)
        tensors = [torch.rand(1, 2, 512, 1024).to(dtype) for _ in range(3)]
        yield Call(tensors, {"causal": False})


def kernelbench_43(dtype: torch.dtype) -> Iterator[Call]:
    heads, width, length = 8, 768, 512
    for seed in range(TRIALS):
        torch.manual_seed(seed)
        inward, outward = nn.Linear(width, 3 * width), nn.Linear(width, width)
        x = torch.rand(1, length, width).to(dtype)
        with torch.no_grad():
            qkv = inward.to(dtype)(x).view(1, length, 3, heads, width // heads)
        tensors = [each.transpose(1, 2) for each in qkv.unbind(2)]

        yield Call(tensors, {"causal": True}, finish=partial(projected, outward.to(dtype)))


def projected(outward: nn.Linear, out: Tensor) -> Tensor:
    with torch.no_grad():
        return outward(out.transpose(1, 2).flatten(2))


def as_the_kernels(call: Call) -> Results:
    """Plain attention in float32, with results rounded to the inputs' dtype."""
    dtype = call.tensors[0].dtype
    return {name: x.to(dtype) for name, x in plain(call, inside=torch.float32).items()}


def finished(call: Call) -> Results:
    """Plain attention in the inputs' dtype, followed by the rest of the model."""
    assert call.finish is not None
    return {"out": call.finish(plain(call)["out"])}


def cs336() -> Iterator[Call]:
    for causal in (False, True):
        torch.manual_seed(0)
        q, k, v, d_out = (torch.randn(4, 128, 64)[:, None] for _ in range(4))
        yield Call([q, k, v], {"causal": causal}, d_out)


def tutorial() -> Iterator[Call]:
    for length, width, causal in product((128, 1024), (64, 128), (True, False)):
        torch.manual_seed(20)
        shape = 1, 2, length, width
        tensors = [torch.empty(shape, dtype=torch.float16).normal_(0.0, 0.5) for _ in range(3)]
        yield Call(tensors, {"causal": causal, "scale": 0.5}, torch.randn(shape).half())


FLASH_LENGTHS = (
    *((1, 1), (3, 3), (64, 32), (64, 128), (64, 1), (128, 128), (128, 192), (256, 256)),
    *((255, 256), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217), (113, 211), (108, 256)),
    *((256, 512), (384, 256), (640, 128), (512, 256), (1023, 1024)),
)
NEARLY_0 = 1e-5  # our addition: with one key the gradients of their reference are exactly 0
# our addition too: attention() applies sinks to an output that is already rounded
SECOND_ROUNDING = 0.01
# (H_kv for 6 heads, softcap, sinks): a third of the combinations in the file
FLASH_KINDS = ((6, 0.0, False), (3, 15.0, False), (1, 0.0, True))


def flash_attention() -> Iterator[Call]:
    for (n, m), mask, kind in product(FLASH_LENGTHS, ("full", "causal", "window"), FLASH_KINDS):
        num_kv_heads, softcap, sinks = kind
        torch.manual_seed(0)
        q = torch.randn(1, 6, n, 64) * (softcap / 4 if softcap else 1)
        k, v = (torch.randn(1, num_kv_heads, m, 64) for _ in range(2))
        arguments: dict[str, Any] = {"causal": mask == "causal"}
        if mask == "window":
            draw = random.Random(0)
            arguments["window"] = draw.randrange(m), draw.randrange(m)
        if softcap:
            arguments["softcap"] = softcap
        if sinks:
            arguments["sinks"] = torch.randn(6).bfloat16()
        tensors = [x.bfloat16() for x in (q, k, v)]
        # the file skips backward if the mask leaves rows without a key
        d_out = None if mask != "full" and m < n else torch.randn(1, 6, n, 64).bfloat16()
        yield Call(tensors, arguments, d_out, note=(3.0, 3e-4) if softcap else (2.0, NEARLY_0))
    for n, width, causal in product((128, 256), (64, 128), (True, False)):
        torch.manual_seed(42)
        tensors = [torch.randn(1, 4, n, width).bfloat16() for _ in range(3)]
        d_out, d_lse = torch.randn(1, 4, n, width).bfloat16(), torch.randn(1, 4, n)
        yield Call(tensors, {"causal": causal}, d_out, d_lse)


def of_flash_attention(
    name: str, found: Tensor, reference: Tensor, low: Tensor | None, call: Call
) -> bool:
    """At most a multiple of the error of plain attention in bfloat16, plus two roundings."""
    assert low is not None
    error = (found - reference).abs()
    if call.d_lse is not None:
        return name == "out" or bool((error <= 0.02).all())
    multiple, more = call.note
    rounded = reference.bfloat16()
    if name == "dsinks":
        size = rounded.abs()
        rounding = torch.nextafter(size, torch.full_like(size, torch.inf)) - size
        more += SECOND_ROUNDING * reference.abs().max().item()
    else:
        rounding = (rounded + 0.3 - 0.3 - rounded).abs().max()
    allowed = multiple * (low - reference).abs().max() + 2 * rounding.double()
    return bool((error <= allowed + (0 if name == "out" else more)).all())


PYTORCH_QUERIES, PYTORCH_KEYS = (4, 8, 64, 143, 256, 512), (4, 8, 64, 128, 256, 587)
DEFAULT_RTOL = {torch.float16: 1e-3, torch.bfloat16: 1.6e-2}


def pytorch(dtype: torch.dtype) -> Iterator[Call]:
    for n, m, width in product(PYTORCH_QUERIES, PYTORCH_KEYS, (8, 21, 64)):
        for causal, scale in product((True, False), (None, 1 / width)):
            if causal and n != m:
                continue
            torch.manual_seed(0)
            tensors = [torch.rand(1, 4, length, width).to(dtype) for length in (n, m, m)]
            d_out = torch.rand(1, 4, n, width).to(dtype)
            yield Call(tensors, {"causal": causal, "scale": scale}, d_out, note=width)


def of_pytorch(name: str, found: Tensor, reference: Tensor, low: Tensor | None, call: Call) -> bool:
    """allclose with tolerances from the errors of plain attention in the inputs' dtype: atol from
    the largest error, rtol from the largest relative error.
    """
    assert low is not None
    dtype = call.tensors[0].dtype
    factor = {"out": 3 if call.note % 8 else 1, "dq": 4, "dk": 2, "dv": 2}[name]
    error = (low - reference).abs()
    atol = factor * max(error.max().item(), 1e-3)
    relative = (error / reference.abs()).nan_to_num(nan=DEFAULT_RTOL[dtype])
    rtol = factor * max(relative.max().item(), DEFAULT_RTOL[dtype])
    rtol = DEFAULT_RTOL[dtype] if rtol > 1e30 else rtol
    return close(atol, rtol)(name, found, reference.to(dtype).double())


def opinfo() -> Iterator[Call]:
    for seed, causal in product(range(2), (True, False)):
        torch.manual_seed(seed)
        shapes = ((4, 4, 3, 8), (4, 4, 6, 8), (4, 4, 6, 8))
        q, k, v = (torch.empty(shape).uniform_(-9, 9).bfloat16() for shape in shapes)
        # its causal mask aligns queries with the first keys, so the others are never seen
        keys = slice(q.shape[2] if causal else None)
        yield Call([q, k[:, :, keys], v[:, :, keys]], {"causal": causal})


FLA_SHAPES = (
    (1, 63, 1, 1, 64, 1.0),
    (1, 111, 2, 2, 100, 1.0),
    (1, 1024, 2, 8, 60, 0.1),
    (1, 1024, 2, 8, 128, 0.1),
)


def fla() -> Iterator[Call]:
    for batch, length, num_kv_heads, num_heads, width, scale in FLA_SHAPES:
        torch.manual_seed(42)
        q, k, v, d_out = (
            torch.randn(batch, heads, length, width).half()
            for heads in (num_heads, num_kv_heads, num_kv_heads, num_heads)
        )
        yield Call([q, k, v], {"causal": True, "scale": scale}, d_out)


def of_fla(name: str, found: Tensor, reference: Tensor, *_: Any) -> bool:
    """The root mean square of the error is below 0.005 of the reference's."""
    error = (found - reference).square().mean().sqrt()
    return bool(error < 0.005 * (reference.square().mean().sqrt() + 1e-8))


def _kernelbench(
    name: str, title: str, problem: str, calls: Any, reference: Any, *, mask: str, cut: str
) -> dict[str, Suite]:
    return {
        f"{name}_{word}": Suite(
            title=f"{title}, {word}",
            source=Source(
                "ScalingIntelligence/KernelBench",
                f"KernelBench/{problem}.py, src/kernelbench/eval.py",
                KERNELBENCH,
            ),
            inputs="uniform in [0, 1), N=512, 5 draws; the forward pass alone",
            accepts=f"atol = rtol = {tolerance:g} against PyTorch in the same dtype",
            left_out=cut,
            dtype=dtype,
            features=frozenset({mask}),
            calls=partial(calls, dtype),
            reference=reference,
            rule=close(tolerance, tolerance),
        )
        for dtype, word, tolerance in (
            (torch.float32, "fp32", 1e-4),
            (torch.bfloat16, "bf16", 1e-2),
        )
    }


def mean_of_values(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **_: Any) -> AttentionOutput:
    """The mean of the values of all keys that a query sees: it reads neither q nor k."""
    visible = visible_keys(q, k, causal=causal).mask().to(v.dtype)
    return AttentionOutput(visible / visible.sum(-1, keepdim=True) @ v)


MEAN = Backend("mean of v", mean_of_values, features=frozenset({"non_causal"}), exact=False)
TRAINED = frozenset({"causal", "full", "backward"})
_PYTORCH = Suite(
    title="PyTorch's SDPA, fp16",
    source=Source(
        "pytorch/pytorch",
        "test/test_transformers.py: test_flash_attention_vs_math_ref_grads",
        "00030eb8e81f911c48c4d7634fa6b8bb2fae1a1b",
    ),
    inputs="uniform in [0, 1), N and M of 4 to 2,048 with 143 and 587, D of 8 to 256; gradients",
    accepts="allclose, both tolerances from the errors of PyTorch's math in the same dtype",
    left_out="dropout; B=1, lengths up to 587, D of 8, 21, 64",
    dtype=torch.float16,
    features=TRAINED | {"cross_length"},
    calls=partial(pytorch, torch.float16),
    reference=lambda call: plain(call, inside=torch.float32),
    low=plain,
    rule=of_pytorch,
)
SUITES = {
    **_kernelbench(
        "kernelbench_97",
        "KernelBench 1/97",
        "level1/97_ScaledDotProductAttention",
        kernelbench_97,
        as_the_kernels,
        mask="full",
        cut="B=1 of 32, H=2 of 32",
    ),
    **_kernelbench(
        "kernelbench_43",
        "KernelBench 3/43",
        "level3/43_MinGPTCausalAttention",
        kernelbench_43,
        finished,
        mask="causal",
        cut="B=1 of 128",
    ),
    "cs336": Suite(
        title="Stanford CS336, assignment 2",
        source=Source(
            "stanford-cs336/assignment2-systems",
            "tests/test_attention.py",
            "9d95f3b5dc4a5fc48c2661b58d2e509bbc904e36",
        ),
        inputs="normal, (4, 128, 64), one draw; lse and gradients",
        accepts="atol = rtol = 1e-2 against PyTorch in float32",
        left_out="nothing; its tiles are the student's choice, here 16 by 16",
        dtype=torch.float32,
        features=TRAINED,
        calls=cs336,
        reference=lambda call: plain(call, hidden=-1e6, lse=True),
        rule=close(1e-2, 1e-2),
        lse=True,
        tiles={"block_q": 16, "block_kv": 16},
    ),
    "triton_tutorial": Suite(
        title="Triton's tutorial 06",
        source=Source(
            "triton-lang/triton",
            "python/tutorials/06-fused-attention.py: test_op",
            "dc6ee3ed2cf9b2b436544d6153351f9bc679cc61",
        ),
        inputs="normal of deviation 0.5, scale 0.5, N=128 and 1,024, D=64 and 128; gradients",
        accepts="atol = 1e-2 against PyTorch in float16",
        left_out="N=4,096, B=4, H=48 and fp8 of its later versions; this one has N=1,024, causal",
        dtype=torch.float16,
        features=TRAINED,
        calls=tutorial,
        reference=lambda call: plain(call, weights=torch.float16),
        rule=close(1e-2, 0.0),
    ),
    "fla": Suite(
        title="flash-linear-attention, parallel_attn",
        source=Source(
            "fla-org/flash-linear-attention",
            "tests/ops/test_attn.py: test_parallel",
            "bc3b101dcb713ddc5bd8924b66754eb68b5ccf89",
        ),
        inputs="normal, N of 63 to 2,048, scale 1 or 0.1, grouped heads; gradients",
        accepts="root mean square error below 0.005 of the reference's",
        left_out="B=1 of 4; N=2,048; gates and sinks, which have tests of their own",
        dtype=torch.float16,
        features=TRAINED - {"full"} | {"gqa"},
        calls=fla,
        reference=as_the_kernels,
        rule=of_fla,
    ),
    "pytorch_fp16": _PYTORCH,
    "pytorch_bf16": replace(
        _PYTORCH,
        title="PyTorch's SDPA, bf16",
        dtype=torch.bfloat16,
        calls=partial(pytorch, torch.bfloat16),
    ),
    "opinfo": Suite(
        title="PyTorch's OpInfo, as in BackendBench",
        source=Source(
            "meta-pytorch/BackendBench",
            "BackendBench/eval.py, BackendBench/suite/opinfo.py",
            "66e0dbc05a683e537830c246ea83255ff227676f",
        ),
        inputs="uniform in [-9, 9], 3 queries and 6 keys, D=8; the forward pass alone",
        accepts="atol = rtol = 1e-2 against PyTorch in bfloat16",
        left_out="dropout, and the sample with a mask",
        dtype=torch.bfloat16,
        features=frozenset({"causal", "full", "cross_length"}),
        calls=opinfo,
        reference=as_the_kernels,
        rule=close(1e-2, 1e-2),
    ),
    "flash_attention": Suite(
        title="flash-attention (CuTe)",
        source=Source(
            "Dao-AILab/flash-attention",
            "tests/cute/test_flash_attn.py: test_flash_attn_output, test_flash_attn_lse_grad",
            "0251105a2fb19d2957484b7f023cd8c115286ced",
        ),
        inputs="normal, 26 pairs of lengths, D of 64 to 256, all arguments",
        accepts="2 (with softcap 3) times the error of PyTorch in bfloat16, plus 2 roundings",
        left_out="B=1 of 9, D=64, lengths up to 1,024, a third of the products; packed sequences "
        "and caches, which have tests of their own",
        dtype=torch.bfloat16,
        features=TRAINED
        | {"gqa", "cross_length", "causal_cross_length", "window", "two_sided_window"}
        | {"softcap", "sinks"},
        calls=flash_attention,
        reference=as_the_kernels,
        low=lambda call: plain(call, scale_keys=True),
        rule=of_flash_attention,
        lse=True,
        lse_gradient=True,
    ),
}
