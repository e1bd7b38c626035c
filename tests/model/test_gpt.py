"""The GPT: what it may not see, how it starts, and what it refuses. test_hugging_face.py holds its
numbers.
"""

import math

import pytest
import torch

from attention import AttentionOutput, Backend, attention
from model.seam import LOOKING


def test_swiglu_width_is_eight_thirds_rounded_up_to_64(build_gpt):
    mlp = build_gpt(hidden_size=128, activation="swiglu").blocks[0].mlp
    assert mlp.down.weight.shape == (128, 384)
    assert mlp.up.weight.shape == (2 * 384, 128)


class Capture:
    """A backend that records its inputs and returns zeros."""

    def __init__(self):
        self.calls = []
        self.backend = Backend("capture", self.attend, features=frozenset({"gqa", "cross_length"}))

    def attend(self, q, k, v, *, causal, scale):
        self.calls.append((q, k, v, causal, scale))
        return AttentionOutput(torch.zeros_like(q))


def test_attention_gets_views_of_one_projection(build_gpt, random_tokens):
    model, capture = build_gpt(), Capture()
    with model.using(backend=capture.backend):
        model(random_tokens(2, 7))
    *qkv, causal, scale = capture.calls[0]
    assert {x.shape for x in qkv} == {(2, 4, 7, 8)}
    assert causal and scale == 8**-0.5
    assert len({x.untyped_storage().data_ptr() for x in qkv}) == 1


@pytest.mark.parametrize("variant", ["gpt2", "modern"])
def test_autocast_keeps_one_dtype_in_attention_and_float32_in_norms_and_loss(
    build_gpt, random_tokens, variant
):
    model, capture = build_gpt(variant=variant), Capture()
    dtypes = []
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.register_forward_hook(lambda _, given, out: dtypes.append((given[0], out)))
    tokens = random_tokens(2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16), model.using(backend=capture.backend):
        loss = model(tokens, tokens).loss
    assert {x.dtype for call in capture.calls for x in call[:3]} == {torch.bfloat16}
    assert {x.dtype for pair in dtypes for x in pair} == {torch.float32} and len(dtypes) == 5
    assert loss.dtype == torch.float32


@pytest.mark.parametrize(("variant", "backend"), [("gpt2", "tiled"), ("modern", "sdpa")])
def test_a_token_does_not_change_earlier_logits(build_gpt, random_tokens, variant, backend):
    model = build_gpt(backend, variant=variant)
    tokens = random_tokens(1, 32)
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % model.vocab_size
    moved = (model(tokens).logits != model(changed).logits).any(-1)
    assert moved.flatten().tolist() == [False] * 20 + [True] * 12


@pytest.mark.parametrize("variant", ["gpt2", "modern"])
def test_every_parameter_learns_and_targets_give_the_loss_alone(build_gpt, random_tokens, variant):
    model, tokens = build_gpt(variant=variant), random_tokens(2, 32)
    logits, no_loss = model(tokens)
    no_logits, loss = model(tokens, tokens)
    assert no_loss is None and no_logits is None
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert [
        name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()
    ] == []


def test_dropout_acts_on_embedding_and_branches_in_training_only(build_gpt, random_tokens):
    plain, dropping, tokens = build_gpt(), build_gpt(dropout=0.5), random_tokens(1, 8)
    assert torch.equal(plain(tokens).logits, dropping.eval()(tokens).logits)
    applied = []
    for module in dropping.train().modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda module, inputs, out: applied.append(out))
    dropping(tokens)
    # the embedding, then attention and MLP of each of the two blocks
    assert len(applied) == 1 + 2 * 2
    assert all(0.2 < out.eq(0).float().mean() < 0.8 for out in applied)


def test_initial_weights(build_gpt):
    model = build_gpt(num_layers=8, hidden_size=128, std=0.02, vocab_size=997)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert parameter.eq(1.0 if name.endswith("weight") else 0.0).all(), name
        elif name.endswith("bias"):
            assert parameter.eq(0).all(), name
        else:
            ends_branch = name.endswith(("proj.weight", "down.weight"))
            std = 0.02 / math.sqrt(2 * 8) if ends_branch else 0.02
            size = parameter.numel()
            # five standard errors of a standard deviation and of a mean
            assert abs(parameter.std().item() / std - 1) < 5 / math.sqrt(2 * size), name
            assert abs(parameter.mean().item()) < 5 * std / math.sqrt(size), name


def test_another_attention_reaches_every_layer_until_an_exception(build_gpt, random_tokens):
    model, capture = build_gpt(), Capture()
    before = model.backend
    with pytest.raises(ZeroDivisionError), model.using(backend=capture.backend):
        model(random_tokens(1, 4))
        raise ZeroDivisionError
    assert len(capture.calls) == 2
    assert model.backend is before


def test_a_call_of_ones_own_and_positions_reach_every_layer(build_gpt, random_tokens):
    """As ranks use them that share a sequence. A field that the seam does not have is refused."""
    model, tokens, calls = build_gpt(), random_tokens(1, 12), []

    def call(q, k, v, *, backend, **arguments):
        calls.append(backend.name)
        return attention(q, k, v, backend="tiled", **arguments)

    with model.using(call=call):
        found = model(tokens[:, 4:], positions=torch.arange(4, 12)).logits
    assert calls == ["naive", "naive"]
    assert not torch.allclose(found, model(tokens[:, 4:]).logits, atol=1e-2)
    model.position_embedding.weight.data = model.position_embedding.weight.data.roll(-4, 0)
    torch.testing.assert_close(model(tokens[:, 4:]).logits, found)
    with pytest.raises(TypeError, match="lokk"), model.using(lokk=LOOKING):
        pass


def test_learned_positions_refuse_a_longer_sequence_and_rope_does_not(build_gpt, random_tokens):
    with pytest.raises(ValueError, match="33.* 32 .*seq_len"):
        build_gpt()(random_tokens(1, 33))
    assert build_gpt(variant="modern")(random_tokens(1, 33)).logits.shape == (1, 33, 61)
