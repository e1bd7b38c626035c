"""torch.compile of the model, without a graph break, for every way of calling attention: the bits
that GPT, its specification, computes.
"""

import pytest
import torch
from torch import Tensor, nn

from attention import BACKENDS, Backend, Recorder, get_backend, is_operator
from config import AttentionConfig, ModelConfig, RunConfig
from model import GPT
from model.fast import FastGPT
from model.seam import LOOKING, QUIET
from training.loop.schedule import run_compiles

pytestmark = pytest.mark.anywhere
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH = 40
TILES = {"block_q": 16, "block_kv": 16}  # several, and the last is ragged


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """On a GPU a compiled model has another form of GELU, which bfloat16 may round differently."""
    if DEVICE == "cpu":
        return {"rtol": 0, "atol": 0}
    return {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-3}


def build(backend: Backend, *, attention: AttentionConfig | None = None, **shape: object) -> GPT:
    torch.manual_seed(0)
    torch._dynamo.reset()
    sizes = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_size": 64}
    backend = backend.configured(**TILES if TILES.keys() <= backend.options.keys() else {})
    config = ModelConfig(**sizes | {"max_seq_len": LENGTH} | shape)
    return GPT(config, vocab_size=50, backend=backend, attention=attention).to(DEVICE)


def tokens() -> Tensor:
    return torch.arange(2 * LENGTH, device=DEVICE).view(2, LENGTH) * 7 % 50


def loss_and_gradients(
    run: nn.Module, model: GPT, *, dtype: torch.dtype, documents: int = 0, look: Tensor = QUIET
) -> list[Tensor]:
    """documents: the tokens of each. Only the forward pass looks, as in a step."""
    ids = torch.arange(LENGTH, device=DEVICE).expand(2, -1) // documents if documents else None
    with torch.autocast(DEVICE, dtype, dtype != torch.float32), model.using(look=look):
        loss = run(tokens(), tokens(), ids).loss
    if not torch.is_grad_enabled():
        return [loss]
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def check_graphs(
    model: GPT,
    *,
    dtype: torch.dtype = torch.float32,
    by: str = "aot_eager",
    documents: tuple[int, int] = (0, 0),
) -> None:
    """A compiled model gives what it gives operator by operator, to the bit on a CPU.

    One graph serves all blocks, with a look at the largest scores and without, and any documents.
    On a CPU the loss has one too.
    """
    torch._dynamo.utils.counters.clear()
    compiled = FastGPT(model, compiled=True, fullgraph=True, backend=by)
    cases = [
        {"dtype": dtype, "documents": length, "look": look}
        for length, look in zip(documents, (QUIET, LOOKING), strict=True)
    ]
    found = [loss_and_gradients(compiled, model, **case) for case in cases]
    scores = model.max_scores()
    assert not scores.requires_grad
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1 + (DEVICE == "cpu")
    expected = [loss_and_gradients(model, model, **case) for case in cases]
    torch.testing.assert_close(found, expected, **tolerance(dtype))
    torch.testing.assert_close(scores, model.max_scores(), **tolerance(dtype))


# each way of calling attention once: the others are the operator of tiled with another softmax
@pytest.mark.parametrize(
    ("backend", "settings", "shape"),
    [
        (get_backend("naive"), {"documents": (17, 9)}, {"activation": "swiglu"}),
        (get_backend("sdpa"), {}, {"checkpoint": "attention"}),
        (get_backend("tiled"), {"documents": (17, 9), "dtype": torch.bfloat16}, {}),
        (get_backend("lazy_rescale", softmax_dtype="input"), {"dtype": torch.bfloat16}, {}),
    ],
    ids=["naive", "sdpa", "tiled", "statistics-in-bf16"],
)
def test_in_two_graphs(backend, settings, shape):
    check_graphs(build(backend, **shape), **settings)


def test_flex_in_two_graphs():
    with torch.set_grad_enabled(DEVICE == "cuda"):  # on a CPU it has no backward pass
        check_graphs(build(get_backend("flex")), documents=(17, 17))


@pytest.mark.parametrize("by", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_attention_that_runs_again_in_the_backward_pass(by):
    """A regression test: its graph keeps the flag that it looked by, which was written to before
    the backward pass: "modified by an inplace operation".
    """
    shape = {"checkpoint": "block", "num_heads": 1, "num_kv_heads": 1}  # head_dim 64, for Hopper
    model = build(get_backend("triton"), attention=AttentionConfig(sinks=True), **shape)
    check_graphs(model, dtype=torch.bfloat16, documents=(17, 9), by=by)


def test_the_layers_of_a_pattern_have_their_own_graphs():
    """The second step tries the last layer's graph first."""
    function = AttentionConfig(window=7, pattern="SL", softcap=2.0)
    model = build(get_backend("tiled"), attention=function, positions="alibi")
    compiled = FastGPT(model, compiled=True, backend="aot_eager", fullgraph=True)
    expected = model(tokens(), tokens()).loss
    for _ in range(2):
        torch.testing.assert_close(compiled(tokens(), tokens()).loss, expected)


@torch.no_grad()
def test_a_compiled_model_follows_a_change_of_attention():
    """To the loop itself, where the function around it is not the registered operator."""
    model = build(get_backend("tiled"), num_layers=1)
    compiled = FastGPT(model, compiled=True, backend="eager")
    loss, recorder = compiled(tokens(), tokens()).loss, Recorder(get_backend("no_scale"))
    assert is_operator(model.backend) and not is_operator(recorder.backend)
    with model.using(backend=recorder.backend):
        found = compiled(tokens(), tokens()).loss
        torch.testing.assert_close(found, model(tokens(), tokens()).loss)
    assert found != loss and len(recorder.max_scores) == 2


def test_what_auto_compiles():
    def auto(backend: Backend, device: str = "cuda") -> bool:
        return run_compiles(RunConfig(), backend, device)

    assert all(auto(backend) for backend in BACKENDS.values())
    assert not auto(get_backend("tiled"), "cpu")
    assert not auto(Backend("own", get_backend("naive").fn, traceable=False))
