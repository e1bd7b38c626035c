"""Weights from and for transformers: the same logits, and refusals that name what differs."""

import copy
import re

import pytest
import torch

from attention import get_backend
from config import AttentionConfig, ModelConfig
from examples import differential_attention, sigmoid_attention
from model import GPT, load_hugging_face, to_hugging_face

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


@pytest.mark.parametrize("backend", ["tiled", "sdpa"])
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


def test_names_every_tensor_that_does_not_fit(hugging_face_gpt2, build_gpt):
    state_dict = {
        name.removeprefix("transformer."): tensor
        for name, tensor in hugging_face_gpt2.state_dict().items()
    }
    del state_dict["h.1.ln_2.bias"]
    state_dict["h.2.ln_1.bias"] = torch.zeros(32)
    # as nn.Linear would have it
    state_dict["h.0.attn.c_attn.weight"] = state_dict["h.0.attn.c_attn.weight"].T
    state_dict["h.0.ln_1.weight"] = torch.ones(32, dtype=torch.int32)
    state_dict["h.0.ln_2.weight"] = torch.full((32,), torch.nan)
    model = build_gpt()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError) as error:
        load_hugging_face(model, state_dict)
    for tensor, problem in {
        "h.0.ln_1.weight": "int32",
        "h.0.ln_2.weight": "NaN",
        "h.1.ln_2.bias": "",
        "h.2.ln_1.bias": "",
        "h.0.attn.c_attn.weight": r"\(96, 32\) .*\(32, 96\)",
    }.items():
        assert re.search(f"{tensor}.*{problem}", str(error.value))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_refuses_an_output_layer_of_its_own(hugging_face_gpt2, build_gpt):
    state_dict = dict(hugging_face_gpt2.state_dict())
    state_dict["lm_head.weight"] = state_dict["lm_head.weight"] + 1
    with pytest.raises(ValueError, match=r"lm_head\.weight .*wte\.weight"):
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


LLAMA = {"qk_norm": False}
# {model type: fields of ModelConfig beside those of model=modern}
MODERN = {
    "qwen3": {},
    "llama": LLAMA,
    "llama-with-biases": LLAMA | {"bias": True, "rope_theta": 500.0},
    "llama-tied": LLAMA | {"tie_embeddings": True, "num_kv_heads": None},
}
MODELS = {"gpt2": {"dropout": 0.1}, **MODERN}


@pytest.fixture(params=MODELS)
def exported(request, build_gpt, modern):
    """A random model, how to build another one like it, and its model in transformers."""
    transformers = pytest.importorskip("transformers")
    fields = ({} if request.param == "gpt2" else modern) | MODELS[request.param]
    model = build_gpt(**fields)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    settings, weights = to_hugging_face(model.eval())
    assert settings["model_type"] == request.param.partition("-")[0]
    config = transformers.AutoConfig.for_model(**settings)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    assert settings["architectures"] == [type(theirs).__name__]
    theirs.tie_weights()
    return model, lambda: build_gpt(**fields), theirs.eval()


def test_an_exported_model_gives_the_same_logits(exported, random_tokens, assert_within_budget):
    model, _, theirs = exported
    tokens = random_tokens(2, 32)
    with torch.no_grad():
        reference = copy.deepcopy(model).double()(tokens).logits
        assert_within_budget(
            theirs(tokens).logits, baseline=model(tokens).logits, reference=reference
        )


def test_loads_what_transformers_saves(exported):
    model, build_another, theirs = exported
    another = build_another()
    load_hugging_face(another, theirs.state_dict(), theirs.config.to_dict())
    assert all(
        torch.equal(tensor, another.state_dict()[name])
        for name, tensor in model.state_dict().items()
    )
    # by the names of the tensors, where there is no config.json
    load_hugging_face(build_another(), theirs.state_dict())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"n_head": 8}, "model.num_heads=8"),
        ({"n_layer": 3}, "model.num_layers=3"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon=1e-06.* 1e-05"),
        ({"activation_function": "relu"}, "activation_function=relu.*gelu_new"),
        ({"model_type": "bert"}, "bert.*gpt2, llama, qwen3"),
    ],
)
def test_refuses_settings_of_another_gpt2(hugging_face_gpt2, build_gpt, changes, named):
    settings = hugging_face_gpt2.config.to_dict() | changes
    with pytest.raises(ValueError, match=named):
        load_hugging_face(build_gpt(), hugging_face_gpt2.state_dict(), settings)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_theta": 5e5}, "model.rope_theta=500000.0"),
        ({"rope_parameters": {"rope_theta": 7.0}}, "model.rope_theta=7.0"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type=linear"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_type=llama3"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06.* 1e-05"),
        ({"tie_word_embeddings": True}, "model.tie_embeddings=true"),
        ({"num_key_value_heads": None}, "model.num_kv_heads=4"),
        ({"model_type": "qwen3"}, "model.qk_norm=true"),
    ],
)
def test_refuses_settings_of_another_llama(build_gpt, modern, changes, named):
    model = build_gpt(**modern | LLAMA)
    settings, weights = to_hugging_face(model)
    load_hugging_face(model, weights, settings)
    with pytest.raises(ValueError, match=named):
        load_hugging_face(model, weights, settings | changes)


def test_refuses_gains_of_qk_norm(build_gpt, modern):
    model = build_gpt(**modern)
    settings, weights = to_hugging_face(model)
    weights["model.layers.1.self_attn.k_norm.weight"] = torch.full((8,), 0.5)
    with pytest.raises(ValueError, match="layers.1.self_attn.k_norm.weight"):
        load_hugging_face(model, weights, settings)


def test_takes_the_first_of_more_positions(hugging_face_gpt2, build_gpt, random_tokens):
    short, whole, tokens = build_gpt(max_seq_len=16), build_gpt(), random_tokens(2, 16)
    for model in (short, whole):
        load_hugging_face(model, hugging_face_gpt2.state_dict())
    assert torch.equal(short(tokens).logits, whole(tokens).logits)
    with pytest.raises(ValueError, match=r"wpe.weight .*\(32, 32\).*\(64, 32\)"):
        load_hugging_face(build_gpt(max_seq_len=64), hugging_face_gpt2.state_dict())


def test_says_why_transformers_has_no_such_model(build_gpt, modern):
    with pytest.raises(ValueError) as error:
        to_hugging_face(build_gpt(**modern | {"norm": "layernorm"}))
    for reason in (
        "gpt2 .*model.positions=learned model.qk_norm=false",
        "llama .*model.norm=rmsnorm model.qk_norm=false",
        "qwen3 .*model.norm=rmsnorm",
    ):
        assert re.search(reason, str(error.value))


@pytest.mark.parametrize(
    ("is_modern", "function", "why"),
    [
        (False, {"window": 8}, "windows.*mistral .*model.positions=rope"),
        (False, {"sinks": True}, "sinks"),
        (True, {"window": 8, "softcap": 50.0}, "softcap"),
        (True, {"windows": [4, 8]}, "4, 8"),
    ],
)
def test_layers_that_transformers_would_compute_otherwise_are_refused(
    modern, is_modern, function, why
):
    """Their weights would load, and give other numbers in silence."""
    config = ModelConfig(**{"num_layers": 2, "hidden_size": 32} | (modern if is_modern else {}))
    attention = AttentionConfig(**function)
    model = GPT(config, vocab_size=11, backend=get_backend("tiled"), attention=attention)
    with pytest.raises(ValueError, match=why):
        to_hugging_face(model)


def test_only_a_module_with_tensors_keeps_a_model_from_transformers(build_gpt):
    """A regression test: sigmoid attention, whose module holds nothing, was said to have parameters
    of its own, while linear attention, which has no module, was exported.
    """
    plain = build_gpt()
    sigmoid, differential = (
        GPT(plain.config, vocab_size=plain.vocab_size, backend=each.BACKEND)
        for each in (sigmoid_attention, differential_attention)
    )
    load_hugging_face(plain, to_hugging_face(sigmoid)[1])
    assert torch.equal(plain.token_embedding.weight, sigmoid.token_embedding.weight)
    with pytest.raises(ValueError, match="parameters"):
        to_hugging_face(differential)


def test_sinks_are_added_to_weights_without_them(build_gpt):
    """A regression test: "missing h.0.attention.sinks", as if the weights were of another shape,
    though windows and an attention's own parameters were added to the same weights.
    """
    plain = build_gpt()
    settings, weights = to_hugging_face(plain)
    model = build_gpt("tiled", attention=AttentionConfig(sinks=True))
    torch.nn.init.constant_(model.blocks[0].attention.sinks, 0.5)
    torch.nn.init.zeros_(model.token_embedding.weight)
    load_hugging_face(model, weights, settings)
    assert torch.equal(model.token_embedding.weight, plain.token_embedding.weight)
    assert (model.blocks[0].attention.sinks == 0.5).all()


def test_windows_of_weights_are_asked_for(build_gpt, modern):
    """As transformers reads them: only from a layer on, and not at all where they hold all keys."""
    model = build_gpt(**modern)
    settings, weights = to_hugging_face(model)
    sliding = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    with pytest.raises(ValueError, match=r"attention.windows=\[null,8\]"):
        load_hugging_face(model, weights, settings | sliding)
    with pytest.raises(ValueError, match="attention.window=8$"):
        load_hugging_face(model, weights, settings | sliding | {"max_window_layers": 0})
    longest = model.config.max_seq_len
    load_hugging_face(model, weights, settings | sliding | {"sliding_window": longest})
