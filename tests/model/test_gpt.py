"""The GPT: what it computes, what it may not see, how it starts, and what it refuses."""

import math

import numpy as np
import pytest
import torch

from attention import AttentionOutput, Backend, get_backend
from config import ModelConfig
from model import GPT, count_parameters

BACKENDS = ("naive", "tiled", "sdpa")


def perturb(model: GPT) -> GPT:
    """Move every gain and bias off its initial 1 or 0, so that none can be left out unnoticed."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def modern_oracle(model: GPT, tokens: torch.Tensor, dtype: type) -> torch.Tensor:
    """model=modern once more, in numpy, head by head: logits (N, vocab_size) for tokens (N,)."""
    w = {name: tensor.numpy().astype(dtype) for name, tensor in model.state_dict().items()}
    config, num_tokens, head_dim = model.config, len(tokens), model.config.head_dim
    queries_per_key = config.num_heads // config.kv_heads

    def rms_norm(x):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + dtype(1e-5))

    def rotate(x):
        plane = x[:, : head_dim // 2] + 1j * x[:, head_dim // 2 :]
        angles = np.arange(num_tokens)[:, None] * config.rope_theta ** (
            -2 * np.arange(head_dim // 2) / head_dim
        )
        plane = plane * np.exp(1j * angles).astype(plane.dtype)
        return np.concatenate((plane.real, plane.imag), -1)

    x = w["token_embedding.weight"][tokens]
    for layer in range(config.num_layers):
        block = f"blocks.{layer}"
        projected = (rms_norm(x) * w[f"{block}.attention_norm.weight"]) @ w[
            f"{block}.attention.qkv.weight"
        ].T
        heads = np.split(projected, projected.shape[1] // head_dim, axis=1)
        outputs = []
        for head in range(config.num_heads):
            q = rotate(rms_norm(heads[head]))
            k = rotate(rms_norm(heads[config.num_heads + head // queries_per_key]))
            v = heads[config.num_heads + config.kv_heads + head // queries_per_key]
            p = np.tril(np.exp(q @ k.T / dtype(math.sqrt(head_dim))))
            outputs.append(p / p.sum(-1, keepdims=True) @ v)
        x = x + np.concatenate(outputs, -1) @ w[f"{block}.attention.proj.weight"].T
        gate, up = np.split(
            (rms_norm(x) * w[f"{block}.mlp_norm.weight"]) @ w[f"{block}.mlp.up.weight"].T, 2, axis=1
        )
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{block}.mlp.down.weight"].T
    logits = (rms_norm(x) * w["final_norm.weight"]) @ w["output_layer.weight"].T
    assert logits.dtype == dtype
    return torch.from_numpy(logits)


@pytest.mark.parametrize("backend", BACKENDS)
def test_modern_equals_its_oracle(build_gpt, modern, random_tokens, assert_within_budget, backend):
    model, tokens = perturb(build_gpt(backend, **modern)), random_tokens(1, 32)
    baseline, reference = (
        modern_oracle(model, tokens[0], dtype) for dtype in (np.float32, np.float64)
    )
    assert_within_budget(model(tokens).logits[0], baseline=baseline, reference=reference)


def test_grouped_queries_equal_expanded_keys_and_values(build_gpt, modern, random_tokens):
    grouped, expanded = (
        build_gpt(**modern).double(),
        build_gpt(**modern | {"num_kv_heads": 4}).double(),
    )
    state_dict = grouped.state_dict()
    for name in [name for name in state_dict if name.endswith("qkv.weight")]:
        q, k, v = state_dict[name].unflatten(0, (-1, 8)).split((4, 2, 2))
        state_dict[name] = torch.cat((q, k[[0, 0, 1, 1]], v[[0, 0, 1, 1]])).flatten(0, 1)
    expanded.load_state_dict(state_dict)
    tokens = random_tokens(2, 20)
    torch.testing.assert_close(grouped(tokens).logits, expanded(tokens).logits)


@pytest.mark.parametrize("width, hidden", [(384, 1024), (128, 384), (96, 256), (768, 2048)])
def test_swiglu_width_is_eight_thirds_rounded_up_to_64(build_gpt, width, hidden):
    mlp = build_gpt(hidden_size=width, activation="swiglu").blocks[0].mlp
    assert mlp.down.weight.shape == (width, hidden)
    assert mlp.up.weight.shape == (2 * hidden, width)


class Capture:
    """A backend that records its inputs and returns zeros."""

    def __init__(self):
        self.calls = []
        self.backend = Backend("capture", self.attend, features=frozenset({"gqa", "cross_length"}))

    def attend(self, q, k, v, *, causal, scale):
        self.calls.append((q, k, v, causal, scale))
        return AttentionOutput(torch.zeros_like(q))


def test_qk_norm_bounds_the_scores_by_the_root_of_head_dim(build_gpt, modern, random_tokens):
    model, capture = build_gpt(**modern | {"init_std": 30.0}), Capture()
    with model.use_backend(capture.backend):
        model(random_tokens(2, 32))
    for q, k, _, _, scale in capture.calls:
        scores = q @ k.repeat_interleave(2, 1).mT * scale
        assert scores.abs().max() <= math.sqrt(8) * (1 + 1e-6)
        # the bound is all but reached: it is the norm that holds them, not small weights
        assert scores.abs().max() > 0.9 * math.sqrt(8)


def test_attention_gets_views_of_one_projection(build_gpt, random_tokens):
    model, capture = build_gpt(), Capture()
    with model.use_backend(capture.backend):
        model(random_tokens(2, 7))
    q, k, v, causal, scale = capture.calls[0]
    assert q.shape == k.shape == v.shape == (2, 4, 7, 8)
    assert causal and scale == 8**-0.5
    assert (
        q.untyped_storage().data_ptr()
        == k.untyped_storage().data_ptr()
        == v.untyped_storage().data_ptr()
    )


@pytest.mark.parametrize("variant", ["gpt2", "modern"])
def test_autocast_keeps_one_dtype_in_attention_and_float32_in_norms_and_loss(
    build_gpt, modern, random_tokens, variant
):
    model, capture = build_gpt(**modern if variant == "modern" else {}), Capture()
    norm_dtypes = []
    for module in (
        model.final_norm,
        *(norm for block in model.blocks for norm in (block.attention_norm, block.mlp_norm)),
    ):
        module.register_forward_hook(
            lambda module, inputs, out: norm_dtypes.append((inputs[0].dtype, out.dtype))
        )
    tokens = random_tokens(2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16), model.use_backend(capture.backend):
        loss = model(tokens, tokens).loss
    assert {x.dtype for call in capture.calls for x in call[:3]} == {torch.bfloat16}
    assert norm_dtypes == [(torch.float32, torch.float32)] * 5
    assert loss.dtype == torch.float32


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", ["gpt2", "modern"])
def test_a_token_does_not_change_earlier_logits(build_gpt, modern, random_tokens, variant, backend):
    model, tokens = (
        build_gpt(backend, **modern if variant == "modern" else {}),
        random_tokens(1, 32),
    )
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % model.vocab_size
    before, after = model(tokens).logits, model(changed).logits
    assert torch.equal(before[:, :20], after[:, :20])
    # but it does change every logit from its own position on
    assert (before[:, 20:] != after[:, 20:]).any(-1).all()


def test_positions_are_seen(build_gpt, modern):
    """The order of two earlier tokens matters to a later one; without positions it would not."""
    for fields in ({}, modern):
        model = build_gpt(
            num_layers=1, **{key: value for key, value in fields.items() if key != "num_layers"}
        )
        first, second = torch.tensor([[3, 5, 7]]), torch.tensor([[5, 3, 7]])
        assert (model(first).logits[0, -1] - model(second).logits[0, -1]).abs().max() > 1e-3


@pytest.mark.parametrize("variant", ["gpt2", "modern"])
def test_every_parameter_learns_and_targets_give_the_loss_alone(
    build_gpt, modern, random_tokens, variant
):
    model, tokens = build_gpt(**modern if variant == "modern" else {}), random_tokens(2, 32)
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
    dropping.train()
    assert not torch.equal(dropping(tokens).logits, dropping(tokens).logits)
    applied = []
    for module in dropping.modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda module, inputs, out: applied.append(out))
    dropping(tokens)
    # the embedding, then attention and MLP of each of the two blocks
    assert len(applied) == 1 + 2 * 2
    assert all(0.2 < out.eq(0).float().mean() < 0.8 for out in applied)


def test_initial_weights(build_gpt):
    model = build_gpt(num_layers=8, hidden_size=128, init_std=0.02, vocab_size=997)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert parameter.eq(1.0 if name.endswith("weight") else 0.0).all(), name
        elif name.endswith("bias"):
            assert parameter.eq(0).all(), name
        else:
            std = 0.02 / math.sqrt(2 * 8) if name.endswith(("proj.weight", "down.weight")) else 0.02
            # five standard errors of a standard deviation and of a mean
            assert abs(parameter.std().item() / std - 1) < 5 / math.sqrt(2 * parameter.numel()), (
                name
            )
            assert abs(parameter.mean().item()) < 5 * std / math.sqrt(parameter.numel()), name


def test_a_new_model_knows_nothing(build_gpt, random_tokens):
    tokens = random_tokens(4, 32)
    loss = build_gpt(init_std=0.02)(tokens, tokens.roll(-1, 1)).loss.item()
    assert abs(loss - math.log(61)) < 0.05


def test_flops_per_token_follows_the_palm_convention(build_gpt, modern):
    # a block: qkv 32 x 96 + 96, proj 32 x 32 + 32, up 32 x 128 + 128, down 128 x 32 + 32, two norms
    # of 64; then a norm and the output layer
    tied = 2 * (3168 + 1056 + 4224 + 4128 + 128) + 64 + 61 * 32
    assert build_gpt().flops_per_token(100) == 6 * tied + 12 * 2 * 4 * 8 * 100
    # qkv 32 x 64, proj 32 x 32, up 32 x 256, down 128 x 32, two norms of 32
    untied = 2 * (2048 + 1024 + 8192 + 4096 + 64) + 32 + 61 * 32
    assert build_gpt(**modern).flops_per_token(100) == 6 * untied + 12 * 2 * 4 * 8 * 100


def test_count_parameters_counts_the_tied_embedding_once(build_gpt):
    tied, untied = build_gpt(), build_gpt(tie_embeddings=False)
    assert count_parameters(untied) - count_parameters(tied) == 61 * 32
    assert "output_layer.weight" not in tied.state_dict()


@pytest.mark.parametrize("variant", [pytest.param("gpt2", marks=pytest.mark.slow), "modern"])
def test_survives_torch_compile_in_one_graph(build_gpt, modern, random_tokens, variant):
    model, tokens = build_gpt("sdpa", **modern if variant == "modern" else {}), random_tokens(2, 16)
    torch._dynamo.reset()
    compiled = model.compiled(backend="aot_eager", fullgraph=True)
    loss = compiled(tokens, tokens).loss
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    expected = model(tokens, tokens).loss
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)
    # a compiled model follows a change of attention
    capture = Capture()
    with model.use_backend(
        Backend(
            "zero",
            lambda q, k, v, *, causal, scale: AttentionOutput(q * 0),
            features=capture.backend.features,
        )
    ):
        assert compiled(tokens, tokens).loss != loss
        torch.testing.assert_close(compiled(tokens, tokens).loss, model(tokens, tokens).loss)


def test_use_backend_reaches_every_layer_and_restores_after_an_exception(build_gpt, random_tokens):
    model, capture = build_gpt(), Capture()
    before = model.backend
    with pytest.raises(RuntimeError, match="on the way"), model.use_backend(capture.backend):
        model(random_tokens(1, 4))
        raise RuntimeError("on the way")
    assert len(capture.calls) == 2
    assert before.name == "naive"
    assert all(block.attention.backend is before for block in model.blocks)


def test_setting_backend_reaches_every_layer(build_gpt):
    model, tiled = build_gpt(), get_backend("tiled")
    model.backend = tiled
    assert all(block.attention.backend is tiled for block in model.blocks)


def test_learned_positions_refuse_a_longer_sequence_and_rope_does_not(
    build_gpt, modern, random_tokens
):
    with pytest.raises(ValueError, match=r"33 tokens are more than the 32 learned positions"):
        build_gpt()(random_tokens(1, 33))
    assert build_gpt(**modern)(random_tokens(1, 33)).logits.shape == (1, 33, 61)


@pytest.mark.parametrize(
    "num_layers, num_heads, hidden_size, parameters",
    [(12, 12, 768, 124_439_808), (24, 16, 1024, 354_823_168)],
    ids=["gpt2", "gpt2_medium"],
)
def test_gpt2_has_the_published_number_of_parameters(
    num_layers, num_heads, hidden_size, parameters
):
    config = ModelConfig(
        num_layers=num_layers, num_heads=num_heads, hidden_size=hidden_size, max_seq_len=1024
    )
    with torch.device("meta"):
        assert (
            count_parameters(GPT(config, vocab_size=50257, backend=get_backend("naive")))
            == parameters
        )
