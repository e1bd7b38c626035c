"""Sampling: the same with and without a cache, within the context, from the right distribution."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from attention import get_backend
from config import AttentionConfig
from model import GPT, decoding, generate, sample_text
from model.decoding import KEPT, DecodingStep, has_steps, keep_step, take_step
from model.fused_step import MOST_SEQUENCES
from model.generate import sample_token


@pytest.mark.parametrize("backend", ["naive", "tiled", "sdpa"])
@pytest.mark.parametrize(
    "temperature, top_k", [(0.0, None), (1.0, None), (0.8, 5)], ids=["greedy", "sampled", "top5"]
)
@pytest.mark.parametrize("variant", ["gpt2", "modern"])
def test_cache_changes_no_token_even_past_the_last_position(
    build_gpt, modern, random_tokens, variant, temperature, top_k, backend
):
    # an untied output layer: a tied one makes an untrained model repeat its last token, whatever
    # came before
    model, prompt = (
        build_gpt(backend, **modern if variant == "modern" else {"tie_embeddings": False}),
        random_tokens(2, 5),
    )

    def sample(use_cache: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(3)
        return generate(
            model,
            prompt,
            max_new_tokens=60,
            temperature=temperature,
            top_k=top_k,
            generator=generator,
            use_cache=use_cache,
        )

    # 65 tokens through 32 positions: the context restarts twice
    with_cache, without_cache = sample(True), sample(False)
    assert with_cache.shape == (2, 65)
    assert torch.equal(with_cache[:, :5], prompt)
    assert torch.equal(with_cache, without_cache)
    assert with_cache[:, 5:].unique().numel() > 5


@pytest.mark.parametrize("backend", ["tiled", "triton"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_steps_of_fixed_shape_change_no_token(
    build_gpt, random_tokens, monkeypatch, backend, batch_size
):
    """Of a model with every function that a step can have; past the last position too."""
    fields = {"num_kv_heads": 2, "positions": "rope", "max_seq_len": 12, "tie_embeddings": False}
    function = AttentionConfig(windows=[4, None], softcap=6.0, sinks=True)
    model = build_gpt(attention=function, **fields)
    torch.nn.init.normal_(model.blocks[0].attention.sinks)
    prompt, steps = random_tokens(batch_size, 3), []
    plain = generate(model, prompt, max_new_tokens=14, temperature=0.0, use_cache=False)
    call = DecodingStep.__call__
    monkeypatch.setattr(
        DecodingStep, "__call__", lambda step, tokens: steps.append(tokens) or call(step, tokens)
    )
    with model.use_backend(get_backend(backend)):
        assert torch.equal(generate(model, prompt, max_new_tokens=14, temperature=0.0), plain)
    # one pass reads the prompt, and one what stays of a full context
    assert len(steps) == 14 - 2
    assert plain.unique().numel() > 5


def test_a_layer_that_steps_cannot_compute_reads_through_views(build_gpt, random_tokens):
    model, prompt = build_gpt("tiled", positions="alibi"), random_tokens(1, 3)
    assert not has_steps(model)
    plain = generate(model, prompt, max_new_tokens=5, temperature=0.0, use_cache=False)
    assert torch.equal(generate(model, prompt, max_new_tokens=5, temperature=0.0), plain)


@pytest.fixture
def kept_step(build_gpt):
    """A model, and a step of it that was kept, as one with a CUDA graph."""
    model = build_gpt("tiled")
    step = take_step(model, 2, 12)
    step.graph = object()
    keep_step(model, step)
    return model, step


def test_a_step_is_kept_for_one_call_of_its_shape(kept_step):
    model, step = kept_step
    assert take_step(model, 2, 13) is not step and take_step(model, 1, 12) is not step
    with torch.no_grad():  # as the optimiser changes weights
        for parameter in model.parameters():
            parameter.mul_(2)
    step.cache.layers[0].length = 5
    assert take_step(model, 2, 12) is step and step.cache.length == 0
    assert take_step(model, 2, 12) is not step  # it is in use


def test_a_step_without_a_graph_is_not_kept(build_gpt, random_tokens):
    model = build_gpt("tiled")
    generate(model, random_tokens(1, 3), max_new_tokens=4, temperature=0.0)
    assert model not in decoding.kept


def test_a_step_of_weights_without_an_address_is_not_kept(build_gpt, monkeypatch):
    """As torchao's: wrapped tensors, which could be exchanged unseen."""
    model = build_gpt("tiled")
    step = take_step(model, 2, 12)
    step.graph = object()
    monkeypatch.setattr(decoding, "tensors_of", lambda model: [torch.empty(0)])
    keep_step(model, step)
    assert model not in decoding.kept


def other_weights(model: GPT) -> None:
    model.final_norm.weight.data = model.final_norm.weight.data.clone()


def other_dtype(model: GPT) -> None:
    model.double()


def other_backend(model: GPT) -> None:
    model.backend = get_backend("tiled", block_kv=32)


def other_backend_of_a_layer(model: GPT) -> None:
    model.blocks[1].attention.backend = get_backend("triton")


CHANGES = [other_weights, other_dtype, other_backend, other_backend_of_a_layer]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_graph_of_other_memory_or_code_is_not_replayed(kept_step, change: Callable):
    model, step = kept_step
    change(model)
    assert take_step(model, 2, 12) is not step


def test_a_graph_of_another_mode_is_not_replayed(kept_step):
    model, step = kept_step
    for mode in (torch.autocast("cpu", torch.bfloat16), torch.inference_mode()):
        with mode:
            assert take_step(model, 2, 12) is not step
    assert take_step(model, 2, 12) is step
    with torch.autocast("cpu", torch.bfloat16):  # whose copies of the weights are freed
        keep_step(model, step)
    assert take_step(model, 2, 12) is not step


def test_few_steps_are_kept_and_none_keeps_its_model(build_gpt):
    model = build_gpt("tiled")
    for room in range(8, 9 + KEPT):
        step = take_step(model, 2, room)
        step.graph = object()
        keep_step(model, step)
    assert [step.cache.max_len for step in decoding.kept[model].values()] == [9, 8 + KEPT]
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["tiled", "triton"])
def test_a_cuda_graph_changes_no_token(build_gpt, random_tokens, backend):
    """With and without autocast, whose copies of the weights the graph reads."""
    model, prompt = build_gpt(backend, tie_embeddings=False).cuda(), random_tokens(3, 5).cuda()

    def greedy(use_cache: bool) -> torch.Tensor:
        return generate(model, prompt, max_new_tokens=60, temperature=0.0, use_cache=use_cache)

    assert torch.equal(greedy(True), greedy(False))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        # other kernels round otherwise, and a near tie may then fall otherwise
        assert (greedy(True)[:, :12] == greedy(False)[:, :12]).float().mean() > 0.9


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["gpt2", "modern"])
@pytest.mark.parametrize("batch_size", [1, 3, MOST_SEQUENCES + 1])
def test_a_kept_graph_reads_the_weights_of_today(
    build_gpt, modern, random_tokens, variant, batch_size
):
    """In float32, by the kernels of a step and by PyTorch's operators."""
    fields = modern if variant == "modern" else {"tie_embeddings": False}
    model, prompt = build_gpt("triton", **fields).cuda(), random_tokens(batch_size, 5).cuda()

    def greedy(use_cache: bool) -> torch.Tensor:
        return generate(model, prompt, max_new_tokens=20, temperature=0.0, use_cache=use_cache)

    first = greedy(True)
    (step,) = decoding.kept[model].values()
    assert torch.equal(first, greedy(False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.5)
    second = greedy(True)
    assert list(decoding.kept[model].values()) == [step]
    assert torch.equal(second, greedy(False)) and not torch.equal(first, second)
    model.half()
    greedy(True)
    assert len(decoding.kept[model]) == 2


@pytest.mark.parametrize("variant", ["gpt2", "modern"])
def test_context_restarts_from_its_most_recent_half(build_gpt, modern, random_tokens, variant):
    """The walk drawn in the module's docstring: six tokens, then three and growing."""
    model = build_gpt(**(modern if variant == "modern" else {}) | {"max_seq_len": 6})
    contexts = []
    model.register_forward_pre_hook(lambda module, inputs: contexts.append(inputs[0]))
    tokens = generate(
        model, random_tokens(1, 5), max_new_tokens=7, temperature=0.0, use_cache=False
    )
    spans = [(0, 5), (0, 6), (4, 7), (4, 8), (4, 9), (4, 10), (8, 11)]
    assert [context.shape[1] for context in contexts] == [stop - start for start, stop in spans]
    assert all(
        torch.equal(context, tokens[:, start:stop])
        for context, (start, stop) in zip(contexts, spans, strict=True)
    )


def test_cache_reads_each_token_once_between_restarts(build_gpt, random_tokens):
    model = build_gpt(max_seq_len=6)
    lengths = []
    model.register_forward_pre_hook(lambda module, inputs: lengths.append(inputs[0].shape[1]))
    generate(model, random_tokens(1, 5), max_new_tokens=7, temperature=0.0)
    assert lengths == [5, 1, 3, 1, 1, 1, 3]


@pytest.mark.parametrize("max_seq_len", [1, 2, 7])
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no-cache"])
def test_prompt_longer_than_the_context(build_gpt, random_tokens, max_seq_len, use_cache):
    model, prompt = build_gpt(max_seq_len=max_seq_len), random_tokens(1, 20)
    tokens = generate(model, prompt, max_new_tokens=5, temperature=0.0, use_cache=use_cache)
    half = max(max_seq_len // 2, 1)
    assert torch.equal(tokens[:, :20], prompt)
    assert torch.equal(
        tokens,
        torch.cat(
            (
                prompt,
                generate(model, prompt[:, -half:], max_new_tokens=5, temperature=0.0)[:, half:],
            ),
            1,
        ),
    )


def test_zero_new_tokens_is_the_prompt(build_gpt, random_tokens):
    assert torch.equal(
        generate(build_gpt(), random_tokens(1, 4), max_new_tokens=0), random_tokens(1, 4)
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_tempered_softmax(temperature):
    logits, draws = torch.tensor([2.0, 0.5, 0.0, -1.0]), 40_000
    generator = torch.Generator().manual_seed(0)
    drawn = sample_token(
        logits.expand(draws, -1), temperature=temperature, top_k=None, generator=generator
    )
    p = (logits.double() / temperature).softmax(-1)
    # five standard errors of a share
    assert (
        (drawn.flatten().bincount(minlength=4) / draws - p).abs() < 5 * (p * (1 - p) / draws).sqrt()
    ).all()


def test_top_k_draws_the_k_likeliest_only():
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0]).expand(2000, -1)
    for top_k, likeliest in ((1, {1}), (2, {1, 3}), (4, {0, 1, 2, 3}), (99, {0, 1, 2, 3})):
        drawn = sample_token(
            logits, temperature=1.0, top_k=top_k, generator=torch.Generator().manual_seed(0)
        )
        assert set(drawn.flatten().tolist()) == likeliest


def test_zero_temperature_is_the_likeliest_token(build_gpt, random_tokens):
    model, tokens = build_gpt(), random_tokens(2, 4)
    found = generate(model, tokens, max_new_tokens=1, temperature=0.0)
    assert torch.equal(found[:, -1], model(tokens).logits[:, -1].argmax(-1))


def test_dropout_is_off_while_sampling_and_the_mode_comes_back(build_gpt, random_tokens):
    model, plain = build_gpt(dropout=0.5).train(), build_gpt()
    tokens = generate(model, random_tokens(1, 4), max_new_tokens=20, temperature=0.0)
    assert torch.equal(
        tokens, generate(plain, random_tokens(1, 4), max_new_tokens=20, temperature=0.0)
    )
    assert model.training
    assert not generate(plain.eval(), random_tokens(1, 4), max_new_tokens=1).requires_grad
    assert not plain.training


def test_logits_that_are_not_finite_are_refused(build_gpt, random_tokens):
    """On a GPU, drawing from NaN would end the process and every later job of a sweep with it."""
    model = build_gpt().train()
    torch.nn.init.constant_(model.final_norm.bias, torch.nan)
    for temperature in (0.0, 1.0):
        with pytest.raises(FloatingPointError, match="logits are not finite"):
            generate(model, random_tokens(1, 4), max_new_tokens=3, temperature=temperature)
    assert model.training


@pytest.mark.parametrize(
    "options, complaint",
    [
        ({"temperature": -0.5}, r"temperature=-0\.5"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_k": 1.5}, r"top_k=1\.5 must be at least 1, and a whole number"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1 must be a whole number, at least 0"),
        ({"max_new_tokens": 2.0}, r"max_new_tokens=2\.0 must be a whole number, at least 0"),
    ],
    ids=str,
)
def test_refuses_settings_that_mean_nothing(build_gpt, random_tokens, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        generate(build_gpt(), random_tokens(1, 4), **{"max_new_tokens": 3} | options)


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        (torch.tensor([1, 2]), r"must be token ids \(B, N\) in int64.*; got \(2,\) in int64"),
        (torch.tensor([[1.0, 2.0]]), r"in int64.*; got \(1, 2\) in float32"),
        (torch.zeros(0, 3, dtype=torch.int64), r"got \(0, 3\) in int64"),
        (torch.tensor([[1, -2]]), "has token -2, and the model knows 0 to"),
        (torch.tensor([[1, 10**6]]), "has token 1000000, .*: encode the text with the model's own"),
        (torch.zeros(1, 3, dtype=torch.int64, device="meta"), "is on meta: move it to the model's"),
    ],
    ids=["flat", "floats", "no sequence", "negative", "large", "device"],
)
def test_refuses_a_prompt_that_the_model_cannot_read(build_gpt, prompt, complaint):
    """A regression test: PyTorch raised errors of its own, and a GPU is lost."""
    with pytest.raises(ValueError, match=complaint):
        generate(build_gpt(), prompt, max_new_tokens=3)


def test_refuses_an_empty_prompt(build_gpt):
    with pytest.raises(ValueError, match=r"at least one token, got tokens of shape \(1, 0\)"):
        generate(build_gpt(), torch.zeros(1, 0, dtype=torch.int64), max_new_tokens=3)


class Letters:
    """a to z, and a full stop for the end of a text."""

    vocab_size, end_of_text = 27, 26

    def encode(self, text: str) -> np.ndarray:
        return np.array([ord(letter) - ord("a") for letter in text], dtype=np.uint16)

    def decode(self, tokens) -> str:
        return "".join("abcdefghijklmnopqrstuvwxyz."[token] for token in tokens)


def test_sample_text_goes_on_from_the_prompt(build_gpt):
    model, generator = build_gpt(vocab_size=27), torch.Generator().manual_seed(7)
    tokens = generate(
        model, torch.tensor([[0, 1, 2]]), max_new_tokens=20, temperature=0.8, generator=generator
    )
    text = sample_text(model, Letters(), "abc", max_new_tokens=20, seed=7)
    assert text.startswith("abc") and len(text) == 23
    assert text == Letters().decode(tokens[0].tolist())


def test_sample_text_starts_a_document_after_an_end_of_text_that_it_does_not_show(build_gpt):
    model, generator = build_gpt(vocab_size=27), torch.Generator().manual_seed(0)
    tokens = generate(
        model, torch.tensor([[26]]), max_new_tokens=20, temperature=0.8, generator=generator
    )
    assert sample_text(model, Letters(), "", max_new_tokens=20) == Letters().decode(
        tokens[0, 1:].tolist()
    )


def test_sample_text_does_without_a_cache_where_the_attention_must(build_gpt):
    model = build_gpt(vocab_size=27)
    text = sample_text(model, Letters(), "abc", max_new_tokens=10)
    with model.use_backend(replace(model.backend, features=frozenset())):
        assert sample_text(model, Letters(), "abc", max_new_tokens=10) == text
        with pytest.raises(ValueError, match="cross_length"):
            sample_text(model, Letters(), "abc", max_new_tokens=10, use_cache=True)


@pytest.mark.parametrize("temperature", (1e-300, 1e-40, 1e-3))
def test_the_smallest_temperature_takes_the_likeliest(temperature):
    """A regression test: logits divided by it were infinite."""
    logits = torch.tensor([[1.0, 5.0, 3.0]])
    options = {"top_k": 2, "generator": None}
    assert sample_token(logits, temperature=temperature, **options).item() == 1
    assert sample_token(logits, temperature=1e300, **options).item() in (1, 2)
    with pytest.raises(ValueError, match="temperature=inf must be at least 0, and finite"):
        generate(None, torch.zeros(1, 1), max_new_tokens=1, temperature=float("inf"))
