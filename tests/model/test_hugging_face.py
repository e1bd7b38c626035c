"""Weights from and for transformers: the same logits, and refusals that name what differs."""

import copy
import re

import pytest
import torch

from config import AttentionConfig
from examples import differential_attention, sigmoid_attention
from model import GPT, load_hugging_face, to_hugging_face

VOCAB_SIZE = 61


@pytest.fixture
def gpt2(build_gpt):
    """A model, and its config.json and weights."""
    model = build_gpt(noise=0.1).eval()
    return model, *to_hugging_face(model)


LLAMA = {"qk_norm": False}
# {model type: fields of ModelConfig beside those of model=modern}
MODELS = {
    "gpt2": {"dropout": 0.1},
    "gpt2-untied": {"tie_embeddings": False},
    "qwen3": {},
    "llama": LLAMA | {"bias": True, "rope_theta": 500.0},
    "llama-tied": LLAMA | {"tie_embeddings": True, "num_kv_heads": None},
}


@pytest.mark.parametrize("kind", MODELS)
def test_transformers_computes_the_same_logits(kind, build_gpt, modern, random_tokens, assert_near):
    """And its weights come back, also where no config.json says what they are."""
    transformers = pytest.importorskip("transformers")
    fields = ({} if kind.startswith("gpt2") else modern) | MODELS[kind]
    model, tokens = build_gpt(noise=0.1, **fields).eval(), random_tokens(2, 32)
    settings, weights = to_hugging_face(model)
    assert settings["model_type"] == kind.partition("-")[0]
    config = transformers.AutoConfig.for_model(**settings)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    assert settings["architectures"] == [type(theirs).__name__]
    theirs.tie_weights()
    with torch.no_grad():
        reference = copy.deepcopy(model).double()(tokens).logits
        logits = theirs.eval()(tokens).logits
        assert_near([logits], [model(tokens).logits], [reference])
    for known in (theirs.config.to_dict(), None):
        another = build_gpt(**fields)
        load_hugging_face(another, theirs.state_dict(), known)
        assert same_weights(another, model)


def same_weights(one: GPT, other: GPT) -> bool:
    weights = other.state_dict()
    return all(torch.equal(tensor, weights[name]) for name, tensor in one.state_dict().items())


def renamed(change):
    return lambda weights: {change(name): tensor for name, tensor in weights.items()}


# what training tools do to the names; what is beside the model, or there twice, or once
EMBEDDING = "transformer.wte.weight"
FORMS = {
    "base": renamed(lambda name: name.removeprefix("transformer.")),
    "lightning": renamed(lambda name: f"net.model.{name}"),
    "compiled-ddp": renamed(lambda name: f"module._orig_mod.{name}"),
    "fsdp": renamed(lambda name: name.replace(".attn.", "._fsdp_wrapped_module.attn.")),
    "masks": lambda weights: {"transformer.h.0.attn.bias": torch.ones(1, 1, 32, 32)} | weights,
    "classifier": lambda weights: weights | {"score.weight": torch.ones(2, 32)},
    "both-ends": lambda weights: weights | {"lm_head.weight": weights[EMBEDDING]},
    "output-end": renamed(lambda name: "lm_head.weight" if name == EMBEDDING else name),
}


@pytest.mark.parametrize("form", FORMS)
def test_takes_every_form_of_names(gpt2, build_gpt, caplog, form):
    model, settings, weights = gpt2
    for known in (settings, None):
        another = build_gpt()
        load_hugging_face(another, FORMS[form](weights), known)
        assert same_weights(another, model)
    assert ("score.weight" in caplog.text) == (form == "classifier")


def test_names_every_tensor_that_does_not_fit(gpt2, build_gpt):
    state_dict = {name.removeprefix("transformer."): tensor for name, tensor in gpt2[2].items()}
    del state_dict["h.1.ln_2.bias"]
    state_dict["h.2.ln_1.bias"] = torch.zeros(32)
    # as nn.Linear would have it
    state_dict["h.0.attn.c_attn.weight"] = state_dict["h.0.attn.c_attn.weight"].T
    state_dict["h.0.ln_1.weight"] = torch.ones(32, dtype=torch.int32)
    state_dict["h.0.ln_2.weight"] = torch.full((32,), torch.nan)
    model, untouched = build_gpt(), build_gpt()
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
    assert same_weights(model, untouched)


def test_refuses_weights_of_another_model(gpt2, build_gpt, modern):
    _, _, weights = gpt2
    for field, value in modern.items():
        with pytest.raises(ValueError, match=re.escape(f"{field}={str(value).lower()}")):
            load_hugging_face(build_gpt(**{field: value}), weights)
    two = weights | {f"average.{name}": tensor for name, tensor in weights.items()}
    with pytest.raises(ValueError, match=r"average\.transformer\."):
        load_hugging_face(build_gpt(), two)
    model = build_gpt(**modern)
    with_gain = to_hugging_face(model)[1]
    with_gain["model.layers.1.self_attn.k_norm.weight"] = torch.full((8,), 0.5)
    with pytest.raises(ValueError, match="layers.1.self_attn.k_norm.weight"):
        load_hugging_face(model, with_gain)


OF_GPT2 = [
    ({"n_head": 8}, "model.num_heads=8"),
    ({"n_layer": 3}, "model.num_layers=3"),
    ({"layer_norm_epsilon": 1e-6}, "=1e-05.* layer_norm_epsilon=1e-06"),
    ({"activation_function": ["gelu_new"]}, r'activation_function=\["gelu_new"\]'),
    ({"activation_function": "relu"}, "gelu_new.* activation_function=relu"),
    ({"model_type": "bert"}, "bert.*gpt2, llama, qwen3"),
]
OF_LLAMA = [
    ({"rope_theta": 5e5}, "model.rope_theta=500000.0"),
    ({"rope_parameters": {"rope_theta": 7.0}}, "model.rope_theta=7.0"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type=linear"),
    ({"rope_scaling": [3]}, "config.json.*list"),
    ({"rope_parameters": {"rope_type": "llama3"}}, "rope_type=llama3"),
    ({"rms_norm_eps": 1e-6}, "=1e-05.* rms_norm_eps=1e-06"),
    ({"num_key_value_heads": None}, "model.num_kv_heads=4"),
    ({"model_type": "qwen3"}, "model.qk_norm=true"),
]


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [("gpt2", *each) for each in OF_GPT2] + [("llama", *each) for each in OF_LLAMA],
)
def test_refuses_settings_of_another_model(build_gpt, modern, kind, changes, named):
    model = build_gpt(**modern | LLAMA if kind == "llama" else {})
    settings, weights = to_hugging_face(model)
    with pytest.raises(ValueError, match=named):
        load_hugging_face(model, weights, settings | changes)


def test_takes_the_first_of_more_positions_but_not_of_tokens(gpt2, build_gpt, random_tokens):
    whole, _, weights = gpt2
    short, tokens = build_gpt(max_seq_len=16).eval(), random_tokens(2, 16)
    load_hugging_face(short, weights)
    assert torch.equal(short(tokens).logits, whole(tokens).logits)
    with pytest.raises(ValueError, match=r"wpe.weight .*\(32, 32\).*\(64, 32\)"):
        load_hugging_face(build_gpt(max_seq_len=64), weights)
    with pytest.raises(ValueError, match=rf"wte.weight .*\({VOCAB_SIZE}, 32\).*\(60, 32\)"):
        load_hugging_face(build_gpt(vocab_size=60), weights)


EVERY_REASON = (
    "gpt2 .*model.positions=learned model.qk_norm=false.*llama .*model.norm=rmsnorm "
    "model.qk_norm=false.*qwen3 .*model.norm=rmsnorm"
)


@pytest.mark.parametrize(
    ("is_modern", "function", "why"),
    [
        (False, {"window": 8}, "windows.*mistral .*model.positions=rope"),
        (False, {"sinks": True}, "sinks"),
        (True, {"window": 8, "softcap": 50.0}, "softcap"),
        (True, {}, EVERY_REASON),
    ],
)
def test_says_why_transformers_has_no_such_model(build_gpt, modern, is_modern, function, why):
    """The weights of other layers would load, and give other numbers in silence."""
    fields = modern | ({} if function else {"norm": "layernorm"}) if is_modern else {}
    model = build_gpt("tiled", attention=AttentionConfig(**function), **fields)
    with pytest.raises(ValueError, match=why):
        to_hugging_face(model)


def test_only_a_module_with_tensors_keeps_a_model_from_transformers(build_gpt):
    """A regression test: the module of sigmoid attention holds nothing."""
    plain = build_gpt()
    sigmoid, differential = (
        GPT(plain.config, vocab_size=plain.vocab_size, backend=each.BACKEND)
        for each in (sigmoid_attention, differential_attention)
    )
    load_hugging_face(plain, to_hugging_face(sigmoid)[1])
    assert same_weights(plain, sigmoid)
    with pytest.raises(ValueError, match="parameters"):
        to_hugging_face(differential)


def test_sinks_are_added_to_weights_without_them(build_gpt):
    """As windows and an attention's own parameters are."""
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
    del settings["layer_types"]  # the layers can be named, or counted
    sliding = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    with pytest.raises(ValueError, match="attention.window=8 attention.pattern=LS"):
        load_hugging_face(model, weights, settings | sliding)
    with pytest.raises(ValueError, match="attention.window=8$"):
        load_hugging_face(model, weights, settings | sliding | {"max_window_layers": 0})
    for typed in ({"sliding_window": "8"}, {"max_window_layers": "1"}, {"layer_types": 2}):
        with pytest.raises(ValueError, match="config.json"):
            load_hugging_face(model, weights, settings | sliding | typed)
    longest = model.config.max_seq_len
    load_hugging_face(model, weights, settings | sliding | {"sliding_window": longest})
