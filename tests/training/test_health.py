"""Looking into a model's attention: largest scores, distance from exact attention, and the card of
a run that went wrong.
"""

import contextlib
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from attention import BACKENDS, Recorder, compare_with_exact, get_backend
from config import AttentionConfig, Due, ModelConfig
from data.prefetch import Pass
from model import GPT
from tests.weights import with_weights
from training.loop import health
from training.loop.health import AttentionMonitor, compare_layers, diagnose
from training.loop.optimizer import AdamW
from training.loop.ranks import ALONE
from training.loop.step import gradients

TILES = {"block_q": 8, "block_kv": 4}


def build(name: str, *, std: float = 0.5, attention: AttentionConfig | None = None, **shape) -> GPT:
    """Two layers of two heads with large random weights, so that the attention is sharp."""
    torch.manual_seed(0)
    config = ModelConfig(num_layers=2, num_heads=2, hidden_size=32, max_seq_len=32, **shape)
    model = GPT(
        config,
        vocab_size=50,
        backend=get_backend(name, **(TILES if BACKENDS[name].observable else {})),
        attention=attention,
    )
    return with_weights(model, std)


def batch(count: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(50, (count, 33), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].clone(), tokens[:, 1:].clone()


def run_of(model: GPT, batch: tuple[torch.Tensor, ...] = (), *, loss_scale: float = 1.0):
    """A run whose every step has this batch in one pass."""
    return SimpleNamespace(
        model=model,
        autocast=contextlib.nullcontext(),
        scaler=SimpleNamespace(get_scale=lambda: loss_scale),
        config=SimpleNamespace(),
        tokens_per_step=32,
        ranks=ALONE,
        sequences=lambda step: [batch],
    )


def due(*, log: bool = True, compare: bool = False) -> Due:
    return Due(log=log, compare=compare, evaluate=False, switch=False, save=False)


def breaking(layer: int, head: int) -> GPT:
    """Under no_max, whose scores in that head alone are too large."""
    model = build("no_max", std=0.2)
    rows = slice(head * model.config.head_dim, (head + 1) * model.config.head_dim)  # of q
    with torch.no_grad():
        model.blocks[layer].attention.qkv.weight[rows] *= 1e4
    return model


@pytest.mark.parametrize("name", ["tiled", "triton"])
def test_exact_attention_is_near_exact_in_every_layer(name):
    """triton adds the sinks itself, tiled leaves that to attention()."""
    chosen = AttentionConfig(name=name, sinks="true")
    row = compare_layers(build(name, attention=chosen), *batch(1))
    for tensor in ("out", "dq", "dk", "dv"):
        assert 0 < row.pop(f"attention/{tensor}_error") < 1e-5
        assert row.pop(f"attention/{tensor}_cosine") > 1 - 1e-6
    assert not row


def test_the_gradients_are_those_of_the_loss_in_its_worst_layer():
    model = build("no_rescale")
    recorder = Recorder(model.backend, keep_calls=True)
    with model.using(backend=recorder.backend):
        loss = model(*batch(1)).loss
    for call in recorder.calls:
        call.out.retain_grad()
    loss.backward()
    first, second = (
        compare_with_exact(call.q, call.k, call.v, call.out.grad, backend=model.backend)
        for call in recorder.calls
    )
    worst = {name: (max if "error" in name else min)(x, second[name]) for name, x in first.items()}
    expected = {f"attention/{name}": x for name, x in worst.items()}
    assert compare_layers(model, *batch(1)) == pytest.approx(expected, rel=1e-4)
    assert worst["dq_error"] > 0.05
    assert first["dq_error"] != pytest.approx(second["dq_error"], rel=0.01)


def test_comparing_leaves_the_run_as_it_was():
    """Neither a gradient, nor a random number, nor dropout, nor the attention. The loss scale
    cancels.
    """
    model = build("no_rescale", dropout=0.5).train()
    backend, state = model.backend, torch.get_rng_state()
    row, scaled = compare_layers(model, *batch(1)), compare_layers(model, *batch(1), loss_scale=1e3)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state) and model.training and model.backend is backend
    assert scaled == pytest.approx(row, rel=1e-4)


def test_no_memory_for_the_comparison_does_not_end_the_run(caplog):
    watch, tried = AttentionMonitor(run_of(build("tiled"), batch(1)), (), {}), []

    def full(*_, **__):
        tried.append(1)
        raise torch.OutOfMemoryError("tried to allocate")

    watch.model.backend = replace(watch.model.backend, fn=full)
    for step in (1, 2):
        row = watch.inspect(step, [[1.0, 2.0]], due(compare=True))
        assert row.keys() == {"attention/max_score", "attention/max_score_by_head"}
    assert len(tried) == 1
    assert sum("diagnose_every=0" in line for line in caplog.messages) == 1


@pytest.mark.parametrize(
    ("earlier", "score", "limits", "said"),
    [({}, 90.0, (5, 5, 5), ["11.09", "88.72"]), ({2: 9.0, 4: 12.5}, 10.0, (4, None, None), [])],
    ids=["at once", "resumed"],
)
def test_the_first_score_past_a_limit_is_announced_once(caplog, earlier, score, limits, said):
    """Also of the rows of an earlier start, some of which have no score."""
    rows = [{"step": step, "attention/max_score": x} for step, x in earlier.items()]
    summary = {}
    watch = AttentionMonitor(run_of(build("tiled")), [*rows, {"step": 4, "val/loss": 1.0}], summary)
    for step in (5, 6):
        assert watch.inspect(step, [[1.0, score]], due())["attention/max_score"] == score
    assert list(watch.scores) == [*earlier, 5, 6]
    lines = [line for line in caplog.messages if "passed" in line]
    assert len(lines) == bool(said)
    assert all(each in lines[0] for each in ("step 5", f"{score:.2f}", *said) if said)
    names = ("float16", "bfloat16", "float32")
    assert summary == {"max_score": max([score, *earlier.values()])} | {
        f"{name}_overflow_step": step for name, step in zip(names, limits, strict=True)
    }


def test_the_card_names_layer_and_head():
    earlier = [{"step": 1, "attention/max_score": 3.0}]
    card = AttentionMonitor(run_of(breaking(1, 0), batch()), earlier, {}).diagnose(7)
    said = {"step": 7, "layer": 1, "head": 0, "tensor": "row_sum"}
    said |= {"float32_overflow_step": 7, "history": [[1, 3.0], [7, card["max_score"]]]}
    assert card.items() >= said.items()
    assert card["message"].startswith("layer 1, head 0: row_sum ")
    assert card["queries"][0] <= card["row"] < card["queries"][1] and card["keys"][0] <= card["row"]
    assert card["tile_max_score"] > 88.7 and card["fate"] in ("NaN", "inf", "zero")


def test_the_sequence_is_counted_through_the_whole_step():
    """Two passes of 3 and 2 sequences, of which the last alone holds the token that breaks."""
    model = build("no_max", std=0.1)
    passes = [batch(3), batch(2, seed=1)]
    for inputs, _ in passes:
        inputs[inputs == 49] = 0
    passes[1][0][1, 20] = 49
    # nothing is wrong with it
    assert "gradients" in diagnose(model, passes)[0]["message"]
    with torch.autocast("cpu", torch.float16):
        assert "loss scale" in diagnose(model, passes)[0]["message"]
    with torch.no_grad():
        model.token_embedding.weight[49, 0] = math.inf
    found, _ = diagnose(model, passes)
    assert (found["sequence"], found["layer"], found["tensor"]) == (4, 0, "q")


@pytest.mark.parametrize("why", ["kernel", "long", "own"])
def test_a_kernel_that_cannot_be_watched_is_diagnosed_by_the_loop(monkeypatch, why):
    """Of a long sequence, for which the tile loop is too slow, and of a user's attention, which has
    no loop, the output is named.
    """
    model = breaking(0, 1)
    expected, _ = diagnose(model, [batch()])

    def fn(*tensors, kernel, **arguments):
        return BACKENDS["no_max"].fn(*tensors, **arguments)

    options = {"kernel": "portable", **model.backend.options}
    changed = {"observable": False, "on_gpu": None, "options": options}
    changed["name"] = "mine" if why == "own" else "no_max"
    model.backend = replace(model.backend, fn=fn, **changed)
    if why == "long":
        monkeypatch.setattr(health, "MAX_INSPECTED", batch()[0].shape[1] - 1)
    found, _ = diagnose(model, [batch()])
    if why == "kernel":
        assert found == expected and found["queries"] is not None
        return
    assert (found["layer"], found["head"], found["tensor"], found["queries"]) == (0, 1, "out", None)
    assert found["message"].startswith("layer 0, head 1: out ")


@pytest.mark.parametrize(("value", "grad_clip"), [(math.nan, 1.0), (math.inf, 0.0)])
def test_a_gradient_alone_that_is_not_finite(value, grad_clip):
    """The norm is not finite either: what it divides must not become so."""
    model = build("tiled")
    for weight in (model.token_embedding.weight, model.blocks[0].attention.qkv.weight):
        weight.register_hook(lambda x: x.index_fill(0, torch.tensor([0]), value))
    run = run_of(model)
    run.step_model, run.optimizer = model, AdamW(model.parameters())
    run.scaler = torch.amp.GradScaler("cpu", enabled=False)
    run.config.optim = SimpleNamespace(grad_clip=grad_clip)
    loss, norm, _ = gradients(run, [Pass(batch(), 1)])
    assert loss.isfinite() and not norm.isfinite()
    found, score = diagnose(model, [batch()])
    assert (found["layer"], found["tensor"]) == (0, "gradient of blocks.0.attention.qkv.weight")
    assert "2 tensors, blocks.0.attention.qkv.weight" in found["message"] and math.isfinite(score)


def test_a_loss_that_is_not_finite_on_its_own():
    model = build("tiled")
    with torch.no_grad():
        model.final_norm.weight.fill_(math.inf)
    found, _ = diagnose(model, [batch()])
    assert found["tensor"] == "loss" and found.keys() == {"message", "tensor"}


def test_of_a_long_sequence_the_beginning_is_compared(monkeypatch):
    """The loss of a prefix is a mean over fewer tokens."""
    seen = []
    monkeypatch.setattr(
        "training.loop.health.compare_layers",
        lambda model, *tensors, loss_scale: seen.append((tensors[0].shape, loss_scale)) or {},
    )
    monkeypatch.setattr("training.loop.health.MAX_INSPECTED", 16)
    watch = AttentionMonitor(run_of(build("tiled"), batch(3), loss_scale=8.0), (), {})
    watch.inspect(1, [[1.0]], due(compare=True))
    assert seen == [((1, 16), 4.0)]


def test_the_row_has_a_score_a_layer_and_head():
    """A score that is not finite is null in its place, and does not count as the largest. A step
    without a row is not looked at: the third of an attention computes its scores.
    """
    scores = [[1.0, math.nan], [math.inf, 3.23456789]]
    watch = AttentionMonitor(run_of(build("tiled")), (), {})
    assert watch.inspect(1, scores, due()) == {
        "attention/max_score": 3.23456789,
        "attention/max_score_by_head": [[1.0, None], [None, 3.23457]],
    }
    assert watch.inspect(3, scores, due(log=False)) == {}
