"""The memory calculator against PyTorch's own books: bytes saved for backward, bytes alive at the
worst moment, and peaks of an H200.

A CPU's resident memory is noise, so tensors are counted: saved ones by hooks, live ones under a
dispatch mode.
"""

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import model.kernels
from attention import get_backend
from config import AttentionConfig, ModelConfig, RunConfig
from conformance.memory_growth import LiveTensors
from model import GPT
from model.fast import FastGPT
from model.loss import CHUNK_LOGITS
from scripts.arguments import parse_backend
from scripts.memory_model import (
    StepShape,
    attention_call,
    layer_sizes,
    parameter_count,
    predict_peak_bytes,
    predict_step,
)
from scripts.plan import vocab_size_of
from tests.selection import diagonal
from training.launch.command_line import compose
from training.loop.flops import count_parameters
from training.record.memory import GIB

RESULTS = Path(__file__).resolve().parents[2] / "results"
GPT2 = {"num_layers": 2, "num_heads": 4, "hidden_size": 128, "max_seq_len": 256}
MODERN = GPT2 | {
    "num_kv_heads": 2,
    "positions": "rope",
    "norm": "rmsnorm",
    "qk_norm": True,
    "activation": "swiglu",
    "bias": False,
    "tie_embeddings": False,
}
SHAPES = {"gpt2": GPT2, "modern": MODERN, "dropout": GPT2 | {"dropout": 0.1}}
TILES = {"block_q": 64, "block_kv": 64}
# the min-cut partition of a compiled graph, without a C++ compiler
PARTITIONED = "aot_eager_decomp_partition"
BF16, FP32 = torch.bfloat16, torch.float32


class Step:
    """A model on the CPU, one step of it, and the plan of that step."""

    def __init__(
        self,
        shape: str,
        attention: str,
        dtype: torch.dtype,
        *,
        vocab_size: int = 257,
        batch: int = 2,
        compiled: bool = False,
        window: int | None = None,
        softcap: float | None = None,
        **keeps: Any,
    ):
        torch.manual_seed(0)
        torch._dynamo.reset()
        config, self.dtype, seq_len = (
            ModelConfig(**SHAPES[shape] | keeps),
            dtype,
            SHAPES[shape]["max_seq_len"],
        )
        backend = get_backend(attention)
        backend = backend.configured(**TILES) if TILES.keys() <= backend.options.keys() else backend
        function = {"window": window, "softcap": softcap}
        chosen = AttentionConfig(**function)
        self.model = GPT(config, vocab_size=vocab_size, backend=backend, attention=chosen)
        how = {"backend": PARTITIONED} if compiled else {}
        self.run = FastGPT(self.model, compiled=compiled, **how)
        self.batch = [torch.randint(vocab_size, (batch, seq_len)) for _ in range(2)]
        sizes = {
            "vocab_size": vocab_size,
            "batch_size": batch,
            "seq_len": seq_len,
            "backend": backend,
            "dtype": dtype,
        }
        sizes |= {"device": "cpu", "compiled": compiled}
        self.plan = predict_step(config, **sizes, **function)

    def forward(self) -> Tensor:
        with torch.autocast("cpu", dtype=self.dtype, enabled=self.dtype != FP32):
            return self.run(*self.batch).loss

    def saved_bytes(self) -> int:
        """Of the tensors that the graph still holds after the forward pass, parameters aside."""
        parameters = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        held = []

        class Held:
            def __init__(self, x: Tensor):
                self.x = x.detach()  # an operator's own output would hold the operator

        def pack(x: Tensor) -> Held:
            kept = Held(x)
            held.append(weakref.ref(kept))
            return kept

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.x):
            loss = self.forward()
        storages = [
            kept.x.untyped_storage() for reference in held if (kept := reference()) is not None
        ]
        assert loss.requires_grad
        return sum(
            {s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in parameters}.values()
        )

    def peak_bytes(self) -> int:
        """Of a whole step, weights and AdamW's moments included."""
        optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)

        def step() -> None:
            self.forward().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        step()  # the moments come with the first step
        with LiveTensors() as live:
            step()
        return live.peak + 12 * count_parameters(self.model)


compiled = pytest.mark.parametrize(
    ("shape", "attention"), diagonal(list(SHAPES), ["sdpa", "tiled", "naive"])
)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocab_size", [257, 1000])
def test_parameters(shape, vocab_size):
    config = ModelConfig(**SHAPES[shape])
    model = GPT(config, vocab_size=vocab_size, backend=get_backend("sdpa"))
    assert parameter_count(config, vocab_size) == count_parameters(model)


@pytest.mark.parametrize(
    ("shape", "attention", "dtype"),
    diagonal(
        ["gpt2", "modern"],
        ["sdpa", "tiled", "naive", "no_rescale"],
        {"bf16": BF16, "fp32": FP32},
    ),
)
def test_saved_for_backward(shape, attention, dtype):
    step = Step(shape, attention, dtype)
    assert step.plan.saved == pytest.approx(step.saved_bytes(), rel=0.005)


@compiled
def test_saved_for_backward_of_a_compiled_model(shape, attention):
    step = Step(shape, attention, BF16, compiled=True)
    assert step.plan.saved == pytest.approx(step.saved_bytes(), rel=0.03)


@pytest.mark.parametrize(
    ("shape", "attention"),
    [
        ("gpt2", "sdpa"),
        pytest.param("modern", "tiled", marks=pytest.mark.slow),
        pytest.param("dropout", "naive", marks=pytest.mark.slow),
    ],
)
def test_attention_kept_by_a_compiled_model(shape, attention):
    """A graph keeps what comes out of attention, and computes q, k and v again. Without the
    embeddings and the loss, which are small and fixed beside a model of this size."""
    steps = [
        Step(shape, attention, BF16, compiled=True, checkpoint=checkpoint)
        for checkpoint in ("attention", "block")
    ]
    (planned, planned_block), (kept, kept_block) = (
        [step.plan.saved for step in steps],
        [step.saved_bytes() for step in steps],
    )
    assert planned - planned_block == pytest.approx(kept - kept_block, rel=0.05)


# On a CPU rms_norm keeps more outside of a compiled graph, layer_norm less inside one;
# so does the plan
@pytest.mark.parametrize(
    ("shape", "compiled"),
    [("gpt2", False), pytest.param("modern", True, marks=pytest.mark.slow)],
)
def test_saved_for_backward_where_sum_and_norm_are_one_kernel(monkeypatch, shape, compiled):
    monkeypatch.setattr(model.kernels, "has_norm_kernel", model.kernels.fits_norm_kernel)
    step = Step(shape, "sdpa", BF16, compiled=compiled)
    # without the kernel a compiled graph keeps the branch of each of the two blocks
    branches = 2 * 2 * 256 * 128 * BF16.itemsize if compiled else 0
    assert step.plan.saved - branches == pytest.approx(step.saved_bytes(), rel=0.03)


# the recomputed tile loop keeps the graph of one query tile, whose bytes are fitted, not counted
BUDGETS = {"sdpa": 0.01, "tiled": 0.01, "naive": 0.02, "no_max": 0.1, "no_rescale": 0.1}


@pytest.mark.parametrize(
    ("shape", "attention", "dtype"),
    diagonal(["gpt2", "modern"], list(BUDGETS), {"bf16": BF16, "fp32": FP32}),
)
def test_peak(shape, attention, dtype):
    step = Step(shape, attention, dtype)
    assert step.plan.peak == pytest.approx(step.peak_bytes(), rel=BUDGETS[attention])


@pytest.mark.parametrize(
    ("attention", "function"),
    [
        ("tiled", {"window": 64, "softcap": 5.0}),
        ("no_rescale", {"window": 64}),
        ("naive", {"positions": "alibi"}),
    ],
    ids=str,
)
def test_saved_and_peak_of_what_the_layers_compute(attention, function):
    step = Step("gpt2", attention, FP32, **function)
    assert step.plan.saved == pytest.approx(step.saved_bytes(), rel=0.005)
    assert step.plan.peak == pytest.approx(step.peak_bytes(), rel=BUDGETS[attention])


def test_the_widest_window_of_the_layers_decides():
    def sizes(**function) -> dict:
        return layer_sizes(RunConfig(attention=AttentionConfig(**function)))

    assert sizes(window=9, pattern="SL")["window"] is None
    assert sizes(window=9, softcap=2.0) == {"window": 9, "softcap": 2.0}


def short(value: Any) -> str:
    return str(value).removeprefix("torch.")


RECOMPUTING = [
    # what is recomputed of naive and of the tile loop is fitted, not counted
    ("gpt2", "sdpa", BF16, "attention", 0.02),
    ("modern", "sdpa", FP32, "attention", 0.02),
    ("dropout", "sdpa", FP32, "attention", 0.04),
    ("gpt2", "sdpa", BF16, "block", 0.02),
    ("modern", "sdpa", FP32, "block", 0.02),
    ("gpt2", "tiled", FP32, "block", 0.08),
    ("modern", "naive", FP32, "block", 0.05),
]


@pytest.mark.parametrize(
    ("shape", "attention", "dtype", "checkpoint", "budget"),
    # many CPUs take eight times as long for bfloat16
    [pytest.param(*case, marks=() if FP32 in case else pytest.mark.slow) for case in RECOMPUTING],
    ids=short,
)
def test_saved_and_peak_with_checkpointing(shape, attention, dtype, checkpoint, budget):
    # the gradients of a block's weights, which are not modelled, weigh little beside this many
    # tokens
    step = Step(shape, attention, dtype, batch=12, checkpoint=checkpoint)
    assert step.plan.saved == pytest.approx(step.saved_bytes(), rel=0.005)
    assert step.plan.peak == pytest.approx(step.peak_bytes(), rel=budget)


def test_peak_where_the_logits_are_the_most(monkeypatch):
    monkeypatch.setitem(CHUNK_LOGITS, "cpu", 2**20)
    step = Step("gpt2", "sdpa", BF16, vocab_size=8193)
    whole = (
        2 * 256 * 8193 * 4
    )  # one float32 tensor of all logits, of which the loss once held three
    assert step.plan.working < whole
    assert step.plan.peak == pytest.approx(step.peak_bytes(), rel=0.01)


def test_peak_where_one_chunk_holds_all_logits(monkeypatch):
    monkeypatch.setitem(CHUNK_LOGITS, "cpu", 2**27)
    step = Step("gpt2", "sdpa", BF16, vocab_size=8193)
    assert step.plan.peak == pytest.approx(step.peak_bytes(), rel=0.01)
    assert step.plan.loss + step.plan.working > step.plan.blocks + step.plan.attention


def test_parts_make_the_whole():
    for attention in ("naive", "tiled", "sdpa"):
        plan = Step("modern", attention, BF16).plan
        parts = plan.parameters + plan.optimizer + plan.saved + plan.working
        assert parts == plan.peak
        assert plan.working > 0


def test_only_the_materialised_grow_with_the_square():
    def attention_of(name: str, seq_len: int) -> int:
        sizes = {
            "vocab_size": 257,
            "batch_size": 1,
            "seq_len": seq_len,
            "dtype": BF16,
            "device": "cuda",
        }
        return predict_step(
            ModelConfig(max_seq_len=seq_len), backend=get_backend(name), **sizes
        ).attention

    assert attention_of("triton", 8192) == 2 * attention_of("triton", 4096)
    assert attention_of("naive", 8192) > 3.5 * attention_of("naive", 4096)


# measured on one H200 by earlier versions of the project
GONE = ("detach_max", "splits")  # options of those versions
H200_RUNS = json.loads((RESULTS / "training_peaks_h200.json").read_text())["runs"]


@pytest.mark.parametrize(
    "run", H200_RUNS, ids=lambda run: f"{run['attention']}-{run['seq_len']}-{run['dtype']}"
)
def test_peak_of_training_on_an_h200(run):
    config = compose(*run["overrides"])
    options = {key: value for key, value in run["options"].items() if key not in GONE}
    backend = get_backend(config.attention.name, **options)
    dtype = getattr(torch, run["dtype"])
    plan = predict_peak_bytes(config, vocab_size_of(config), backend, dtype, run["device"])
    assert plan.peak / GIB == pytest.approx(
        run["memory/peak_gib"], rel=0.1 if run["defect"] else 0.06
    )


def test_peak_of_one_attention_call_on_an_h200():
    """Of the kernels that are planned for: triton's for Hopper, and PyTorch's flash kernel of its
    three.
    """
    budgets = {
        "naive": 0.01,
        "triton": 0.01,
        "sdpa:backend=flash": 0.01,
        "tiled:block_q=2048,block_kv=2048": 0.03,
    }
    rows = [
        row
        for row in json.loads((RESULTS / "memory_h200.json").read_text())["rows"]
        if "oom" not in row and row["seq_len"] >= 4096
    ]
    assert {row["attention"] for row in rows} >= budgets.keys()
    for row in rows:
        if row["attention"] in budgets:
            width = row["heads"] * row["head_dim"]
            call = attention_call(
                StepShape(
                    ModelConfig(num_heads=row["heads"], hidden_size=width),
                    vocab_size=1,
                    batch_size=row["batch"],
                    seq_len=row["seq_len"],
                    backend=parse_backend(row["attention"]),
                    dtype=BF16,
                )
            )
            training = call.saved + max(call.forward, call.backward)
            budget = budgets[row["attention"]]
            assert training == pytest.approx(row["training_bytes"], rel=budget), row
            if row["attention"] != "naive":  # which without gradients needs less
                forward = call.saved + call.forward
                assert forward == pytest.approx(row["forward_bytes"], rel=0.02), row


def test_a_run_is_planned_as_its_step():
    config = RunConfig(model=ModelConfig(max_seq_len=256), seq_len=256, batch_size=4)
    sizes = {"vocab_size": 257, "batch_size": 4, "seq_len": 256, "dtype": FP32, "device": "cpu"}
    planned = predict_peak_bytes(config, 257, get_backend("tiled"), FP32, torch.device("cpu"))
    assert planned == predict_step(config.model, backend=get_backend("tiled"), **sizes)
