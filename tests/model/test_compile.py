"""torch.compile of the model, without a graph break, for every attention.

The tile loops run inside as one operator.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from attention import BACKENDS, Backend, Recorder, get_backend, is_operator
from config import AttentionConfig, ModelConfig, RunConfig
from model import GPT
from model.fast import FastGPT
from model.seam import LOOKING
from training.loop.schedule import run_compiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH = 40
SHAPE = {
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "hidden_size": 64,
    "max_seq_len": LENGTH,
}
TILES = {"block_q": 16, "block_kv": 16}  # several, and the last is ragged


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """On a GPU a compiled model has another form of GELU, which bfloat16 may round differently."""
    if DEVICE == "cpu":
        return {"rtol": 0, "atol": 0}
    return {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-3}


def build(backend: Backend, *, sinks: bool = False, **shape: object) -> GPT:
    torch.manual_seed(0)
    tiles = TILES if TILES.keys() <= backend.options.keys() else {}
    settings = {"backend": backend.configured(**tiles), "attention": AttentionConfig(sinks=sinks)}
    return GPT(ModelConfig(**SHAPE | shape), vocab_size=50, **settings).to(DEVICE)


def loss_and_gradients(
    run: nn.Module,
    model: GPT,
    *,
    dtype: torch.dtype = torch.float32,
    documents: bool = False,
    look: bool = False,
) -> list[Tensor]:
    """Only the forward pass looks, as in a step."""
    tokens = torch.arange(2 * LENGTH, device=DEVICE).view(2, LENGTH) * 7 % 50
    document_ids = torch.arange(LENGTH, device=DEVICE).expand(2, -1) // 17 if documents else None
    looking = model.using(look=LOOKING) if look else nullcontext()
    with torch.autocast(DEVICE, dtype, dtype != torch.float32), looking:
        loss = run(tokens, tokens, document_ids).loss
    return [
        loss.detach(),
        *(torch.autograd.grad(loss, list(model.parameters())) if torch.is_grad_enabled() else ()),
    ]


def check_graphs(
    model: GPT, *, dtype: torch.dtype = torch.float32, by: str = "aot_eager", **settings: object
) -> None:
    """A compiled model gives what it gives operator by operator. One graph serves all blocks,
    with a look at the largest scores and without. On a CPU the loss has one too.

    To the bit on a CPU without generated code.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = FastGPT(model, compiled=True, fullgraph=True, backend=by)
    settings["dtype"] = dtype
    found = [loss_and_gradients(compiled, model, look=look, **settings) for look in (False, True)]
    scores = model.max_scores()
    assert not scores.requires_grad
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1 + (DEVICE == "cpu")
    expected = loss_and_gradients(model, model, look=True, **settings)
    for each in found:
        torch.testing.assert_close(each, expected, **tolerance(dtype))
    torch.testing.assert_close(scores, model.max_scores(), **tolerance(dtype))


# each way of calling attention once: the others are the operator of tiled with another softmax
@pytest.mark.parametrize("name", ["naive", "tiled", "sdpa", "flex", "triton"])
def test_in_two_graphs(name):
    """5 s for triton, which is interpreted."""
    backend = get_backend(name)
    # on a CPU FlexAttention has no backward pass
    with torch.set_grad_enabled(name != "flex" or DEVICE == "cuda"):
        check_graphs(build(backend), documents="document_ids" in backend.features)


@pytest.mark.parametrize(
    ("backend", "checkpoint"),
    [
        (get_backend("tiled"), "block"),
        (get_backend("lazy_rescale", softmax_dtype="input"), "none"),
    ],
    ids=["tiled", "statistics-in-bf16"],
)
def test_under_autocast_and_with_less_kept(backend, checkpoint):
    check_graphs(build(backend, checkpoint=checkpoint), dtype=torch.bfloat16)


@pytest.mark.parametrize("by", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_attention_that_runs_again_in_the_backward_pass(by):
    """5 s, as Triton is interpreted. Its graph keeps the flag that it looked by, which once was
    written to before the backward pass: "modified by an inplace operation".
    """
    shape = {"checkpoint": "block", "num_heads": 1, "num_kv_heads": 1}  # head_dim 64, for Hopper
    check_graphs(build(get_backend("triton"), sinks=True, **shape), dtype=torch.bfloat16, by=by)


@pytest.mark.slow
def test_a_recorder_watches_the_loop_itself():
    """A function wrapped around the loop is not the registered operator."""
    model = build(get_backend("tiled"))
    recorder = Recorder(model.backend)
    assert is_operator(model.backend) and not is_operator(recorder.backend)
    compiled = FastGPT(model, compiled=True, backend="aot_eager")
    expected = loss_and_gradients(compiled, model)
    with model.using(backend=recorder.backend):
        torch.testing.assert_close(loss_and_gradients(compiled, model), expected)
    assert len(recorder.max_scores) == SHAPE["num_layers"]


def test_what_auto_compiles():
    def auto(backend: Backend, device: str = "cuda") -> bool:
        return run_compiles(RunConfig(), backend, device)

    assert all(auto(backend) for backend in BACKENDS.values())
    assert not auto(get_backend("tiled"), "cpu")
    assert not auto(Backend("own", get_backend("naive").fn, traceable=False))
