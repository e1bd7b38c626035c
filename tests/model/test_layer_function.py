"""Windows, patterns of layers, a softcap, ALiBi and a score_mod: what the layers of a GPT compute,
under any backend.
"""

from dataclasses import replace

import pytest
import torch

from attention import ScoreMod, get_backend
from config import AttentionConfig, ModelConfig
from model import GPT
from model.fast import FastGPT
from model.layer_function import alibi_slopes
from tests.weights import with_weights
from training.loop.evaluate import evaluate_under, exact_attention
from training.loop.flops import flops_per_token
from training.loop.health import compare_layers, diagnose

LENGTH = 40


def flattened(score, b, h, i, j, params):
    """A change that depends on the head and the distance."""
    factor = 1 / (1 + (h + 1) * (i - j).abs())
    return score * factor, factor.expand_as(score)


FLATTEN = ScoreMod(flattened)
FUNCTIONS = {
    "pattern": {"window": 7, "pattern": "SL"},
    "softcap": {"softcap": 2.0},
    "alibi": {"positions": "alibi"},
    "sinks": {"sinks": True},
    "all": {"window": 7, "pattern": "SL", "softcap": 2.0, "positions": "alibi"},
    "score_mod": {"score_mod": f"{__name__}:FLATTEN", "window": 7},
}


def build(backend: str = "naive", *, positions: str = "learned", **function) -> GPT:
    """Two layers with four heads of sixteen over two key heads, the same weights every time."""
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_size": 64}
    config = ModelConfig(**sizes, max_seq_len=LENGTH, positions=positions)
    chosen = get_backend(backend)
    if "block_q" in chosen.options:
        chosen = chosen.configured(block_q=16, block_kv=8)
    model = GPT(config, vocab_size=61, backend=chosen, attention=AttentionConfig(**function))
    return with_weights(model, 0.2)


@pytest.fixture
def batch():
    tokens = torch.randint(61, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


@torch.no_grad()
def logits(model: GPT, tokens: torch.Tensor, **arguments) -> torch.Tensor:
    return model(tokens, **arguments).logits


def gradients(model: GPT, batch) -> list[torch.Tensor]:
    model(*batch).loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_every_function_and_its_gradients(function, batch):
    """The model for training computes it too. That every backend computes it is the part of
    tests/attention.
    """
    plain, model = build(**function), build("tiled", **function)
    found = logits(plain, batch[0])
    torch.testing.assert_close(logits(model, batch[0]), found, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, logits(build(), batch[0]), atol=1e-2)
    trained = gradients(FastGPT(model), batch)
    torch.testing.assert_close(trained, gradients(plain, batch), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("key", ["sinks", "all", "score_mod"])
def test_exact_attention_is_exact_for_the_function(key, batch):
    """In the evaluation, and in the comparison with float64, which knows documents too."""
    how = {"batch_size": 2, "autocast": torch.no_grad(), "accuracy": False}
    model, broken = (build(name, **FUNCTIONS[key]) for name in ("tiled", "no_rescale"))
    exact = exact_attention(16, torch.device("cpu"), model.attention_features)
    loss, wrong, same = (
        evaluate_under(model, backend, *batch, **how)[0]
        for backend in (model.backend, broken.backend, exact)
    )
    assert loss == pytest.approx(same, abs=1e-5) and abs(wrong - same) > 1e-4
    document_ids = (torch.arange(LENGTH) // 9).expand(2, -1)
    row = compare_layers(model, *batch, document_ids)
    assert all(row[f"attention/{x}_error"] < 1e-4 for x in ("out", "dq", "dk", "dv"))
    assert compare_layers(broken, *batch, document_ids)["attention/out_error"] > 1e-3


def test_zero_sinks_are_not_learned(batch):
    model, learned, plain = build(sinks="zero"), build(sinks=True), build()
    assert torch.equal(logits(model, batch[0]), logits(learned, batch[0]))
    assert [*model.state_dict()] == [*plain.state_dict()]


@pytest.mark.parametrize("ignored", ["window", "document_ids"])
def test_a_backend_that_ignores_an_argument_is_seen(ignored, batch):
    model = build("tiled", window=7)
    listen = model.backend.fn

    def deaf(*tensors, **arguments):
        del arguments[ignored]
        return listen(*tensors, **arguments)

    model.backend = replace(model.backend, fn=deaf)
    document_ids = (torch.arange(LENGTH) // 9).expand(2, -1)
    assert compare_layers(model, *batch, document_ids)["attention/out_error"] > 0.1


@pytest.mark.parametrize("key", ["alibi", "score_mod"])
def test_a_divergence_is_found_under_the_function(key, batch):
    model = build("no_max", **FUNCTIONS[key])
    with torch.no_grad():
        model.blocks[1].attention.qkv.weight[:64] *= 1e4
    found, _ = diagnose(model, [batch])
    assert (found["layer"], found["tensor"]) in ((1, "row_sum"), (1, "acc"))


def test_the_layers_of_a_pattern_differ(batch):
    """A layer with a window does not see the first token from far away, another does."""
    changed = batch[0].clone()
    changed[:, 0] = (changed[:, 0] + 1) % 61
    for layer in range(2):
        model = build(window=7, pattern="SL")
        model.blocks = model.blocks[layer : layer + 1]
        moved = (logits(model, batch[0]) != logits(model, changed)).any(-1)
        assert moved[:, :7].all() and moved[:, 7:].any() == (layer == 1)
    chosen = AttentionConfig(window=9, pattern="SSSL")
    assert chosen.layer_windows(6) == [9, 9, 9, None, 9, 9]


def test_alibi_slopes_are_those_of_the_paper():
    assert alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    assert alibi_slopes(16).tolist() == pytest.approx([2 ** (-n / 2) for n in range(1, 17)])
    # get_slopes(12) of the authors' code: those of 8, then every second one of 16
    rest = [2 ** (-n / 2) for n in (1, 3, 5, 7)]
    assert alibi_slopes(12).tolist() == pytest.approx([2.0**-n for n in range(1, 9)] + rest)
    assert alibi_slopes(1).tolist() == [2.0**-8]


def test_alibi_adds_no_weight_and_no_entry_of_a_checkpoint():
    model = build(positions="alibi")
    assert model.position_embedding is None and not any("alibi" in x for x in model.state_dict())
    assert model.to("meta").blocks[0].attention.function["alibi_slopes"].device.type == "meta"


def test_who_judges():
    cpu = torch.device("cpu")
    assert exact_attention(16, cpu).name == "sdpa"
    assert exact_attention(16, cpu, {"window"}).name == "tiled"
    assert exact_attention(64, torch.device("cuda"), {"softcap"}).name == "flex"


def test_flops_count_the_keys_of_a_window(batch):
    """mfu stays PaLM's; mfu_causal counts what the queries see."""
    full, windowed = build(), build(window=7, pattern="LS")
    assert flops_per_token(full, LENGTH) == flops_per_token(windowed, LENGTH)
    seen = sum(min(i + 1, 7) for i in range(LENGTH)) / LENGTH
    hidden = (LENGTH + 1) / 2 - seen
    counted = [flops_per_token(model, LENGTH, causal=True) for model in (full, windowed)]
    assert counted[0] - counted[1] == pytest.approx(12 * 64 * hidden, abs=1)
    assert flops_per_token(build(window=10**6), LENGTH, causal=True) == counted[0]
