"""GPT-2 in Hugging Face's naming: the same logits, and a refusal that names every tensor."""

import copy
import re

import pytest
import torch

from model import load_hugging_face

VOCAB_SIZE = 61


@pytest.fixture(scope="module")
def hugging_face_gpt2():
    """A random GPT-2. No bias or gain is 0 or 1, so that dropping one is noticed."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = transformers.GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=4,
        attn_implementation="eager",
    )
    model = transformers.GPT2LMHeadModel(shape).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("backend", ["naive", "tiled", "sdpa"])
def test_gives_the_same_logits(
    hugging_face_gpt2, build_gpt, random_tokens, assert_within_budget, backend
):
    model, tokens = build_gpt(backend), random_tokens(2, 32)
    load_hugging_face(model, hugging_face_gpt2.state_dict())
    with torch.no_grad():
        baseline = hugging_face_gpt2(tokens).logits
        reference = copy.deepcopy(hugging_face_gpt2).double()(tokens).logits
        assert_within_budget(model(tokens).logits, baseline=baseline, reference=reference)


def test_takes_names_without_prefix_and_ignores_stored_masks(
    hugging_face_gpt2, build_gpt, random_tokens
):
    with_prefix, without_prefix = build_gpt(), build_gpt()
    load_hugging_face(with_prefix, hugging_face_gpt2.state_dict())
    masks = {
        f"h.{i}.attn.{name}": torch.ones(1, 1, 32, 32)
        for i in range(2)
        for name in ("bias", "masked_bias")
    }
    load_hugging_face(without_prefix, hugging_face_gpt2.transformer.state_dict() | masks)
    tokens = random_tokens(1, 9)
    assert torch.equal(with_prefix(tokens).logits, without_prefix(tokens).logits)


def test_names_every_missing_unexpected_and_wrong_shape_tensor(hugging_face_gpt2, build_gpt):
    state_dict = dict(hugging_face_gpt2.state_dict())
    del state_dict["transformer.h.1.ln_2.bias"]
    state_dict["transformer.h.2.ln_1.bias"] = torch.zeros(32)
    # as nn.Linear would have it
    state_dict["transformer.h.0.attn.c_attn.weight"] = state_dict[
        "transformer.h.0.attn.c_attn.weight"
    ].T
    model = build_gpt()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError) as error:
        load_hugging_face(model, state_dict)
    for problem in (
        "missing h.1.ln_2.bias",
        "unexpected h.2.ln_1.bias",
        "h.0.attn.c_attn.weight has shape (96, 32) instead of (32, 96)",
    ):
        assert problem in str(error.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_refuses_an_output_layer_of_its_own(hugging_face_gpt2, build_gpt):
    state_dict = dict(hugging_face_gpt2.state_dict())
    state_dict["lm_head.weight"] = state_dict["lm_head.weight"] + 1
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from wte\.weight"):
        load_hugging_face(build_gpt(), state_dict)


@pytest.mark.parametrize(
    "field, value",
    [
        ("positions", "rope"),
        ("norm", "rmsnorm"),
        ("qk_norm", True),
        ("activation", "swiglu"),
        ("bias", False),
        ("tie_embeddings", False),
        ("num_kv_heads", 2),
    ],
)
def test_refuses_another_architecture(hugging_face_gpt2, build_gpt, field, value):
    with pytest.raises(ValueError, match=re.escape(f"{field}={value}")):
        load_hugging_face(build_gpt(**{field: value}), hugging_face_gpt2.state_dict())
