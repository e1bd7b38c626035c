"""Sampling: the same with and without a cache, within the context, from the right distribution."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch

from attention import get_backend
from config import AttentionConfig
from data.tokenizer import byte
from model import GPT, generate, sample_text


@pytest.mark.parametrize(
    ("variant", "backend", "how"),
    [
        ("modern", "tiled", {"temperature": 0.0}),
        ("gpt2", "sdpa", {"temperature": 0.8, "top_k": 5}),
    ],
    ids=str,
)
def test_cache_changes_no_token_even_past_the_last_position(
    build_gpt, random_tokens, variant, backend, how
):
    # an untied output layer: a tied one makes an untrained model repeat its last token, whatever
    # came before
    model = build_gpt(backend, variant=variant, tie_embeddings=False)
    prompt = random_tokens(2, 5)

    def sample(use_cache: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(3)
        settings = how | {"generator": generator, "use_cache": use_cache}
        return generate(model, prompt, max_new_tokens=60, **settings)

    # 65 tokens through 32 positions: the context restarts twice
    with_cache, without_cache = sample(True), sample(False)
    assert with_cache.shape == (2, 65)
    assert torch.equal(with_cache[:, :5], prompt)
    assert torch.equal(with_cache, without_cache)
    assert with_cache[:, 5:].unique().numel() > 5


def greedy(model: GPT, prompt: torch.Tensor, count: int, *, use_cache: bool = True) -> torch.Tensor:
    return generate(model, prompt, max_new_tokens=count, temperature=0.0, use_cache=use_cache)


# functions of layers, and whether steps of fixed shape compute them; else each token is read by
# itself
STEPS = {
    "fixed": (True, "rope", {"window": 4, "pattern": "SL", "softcap": 6.0, "sinks": True}),
    "alibi": (False, "alibi", {"window": 4, "pattern": "LS"}),
    "score_mod": (False, "learned", {"score_mod": "tests.user_backends:HIDES_A_DIAGONAL"}),
}


@pytest.mark.parametrize(("fixed", "positions", "function"), STEPS.values(), ids=STEPS)
def test_steps_change_no_token(build_gpt, random_tokens, fixed, positions, function):
    """Past the last position too."""
    calls, tiled = [], get_backend("tiled")

    def decode(q, *arguments, **settings):
        calls.append(len(q))
        return tiled.decode(q, *arguments, **settings)

    fields = {"num_kv_heads": 2, "max_seq_len": 12, "tie_embeddings": False, "positions": positions}
    chosen = AttentionConfig(**function)
    model = build_gpt(replace(tiled, decode=decode), attention=chosen, **fields)
    if fixed:
        torch.nn.init.normal_(model.blocks[0].attention.sinks)
    prompt = random_tokens(3, 3)
    tokens = greedy(model, prompt, 14)
    # one pass reads the prompt, and one what stays of a full context; 12 steps have two layers
    assert calls == [3] * 24 * fixed
    assert torch.equal(greedy(model, prompt, 14, use_cache=False), tokens)
    assert tokens.unique().numel() > 5


def test_compiled_blocks_change_no_token(build_gpt, random_tokens):
    model = build_gpt("triton", num_layers=1, tie_embeddings=False)
    prompt = random_tokens(1, 3)
    plain = greedy(model, prompt, 6)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    assert torch.equal(greedy(model, prompt, 6), plain)
    torch.compiler.reset()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("variant", "backend", "batch_size"), [("gpt2", "tiled", 3), ("modern", "triton", 1)]
)
def test_a_cuda_graph_changes_no_token(build_gpt, random_tokens, variant, backend, batch_size):
    """Past the last position too, and after the weights change."""
    model = build_gpt(backend, variant=variant, tie_embeddings=False).cuda()
    prompt = random_tokens(batch_size, 5).cuda()
    found = []
    for _ in range(2):
        found.append(greedy(model, prompt, 60))
        assert torch.equal(found[-1], greedy(model, prompt, 60, use_cache=False))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-1.5)  # in place, as the optimiser changes weights
    assert not torch.equal(*found)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_cuda_graph_reads_the_weights_that_autocast_copies(build_gpt, random_tokens, compiled):
    model, prompt = build_gpt("triton", tie_embeddings=False).cuda(), random_tokens(3, 5).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        plain = greedy(model, prompt, 12, use_cache=False)
        if compiled:
            for block in model.blocks:
                block.compile()
        # other kernels round otherwise, and a near tie may then fall otherwise
        assert (greedy(model, prompt, 12) == plain).float().mean() > 0.9
    torch.compiler.reset()


def test_context_restarts_from_its_most_recent_half(build_gpt, random_tokens):
    """The walk drawn in the module's docstring: six tokens, then three and growing. A cache reads
    each token once between restarts.
    """
    model, prompt, contexts = build_gpt(max_seq_len=6), random_tokens(1, 5), []
    model.register_forward_pre_hook(lambda module, inputs: contexts.append(inputs[0]))
    tokens = greedy(model, prompt, 7, use_cache=False)
    spans = [(0, 5), (0, 6), (4, 7), (4, 8), (4, 9), (4, 10), (8, 11)]
    for context, (start, stop) in zip(contexts, spans, strict=True):
        assert torch.equal(context, tokens[:, start:stop])
    contexts.clear()
    greedy(model, prompt, 7)
    assert [context.shape[1] for context in contexts] == [5, 1, 3, 1, 1, 1, 3]


@pytest.mark.parametrize(("max_seq_len", "use_cache"), [(1, True), (2, False), (7, True)])
def test_prompt_longer_than_the_context(build_gpt, random_tokens, max_seq_len, use_cache):
    """Its last half is read, as if the prompt had been that."""
    model, prompt = build_gpt("tiled", max_seq_len=max_seq_len), random_tokens(1, 20)
    tokens = greedy(model, prompt, 5, use_cache=use_cache)
    half = max(max_seq_len // 2, 1)
    of_half = greedy(model, prompt[:, -half:], 5)
    assert torch.equal(tokens, torch.cat((prompt, of_half[:, half:]), 1))
    assert torch.equal(greedy(model, prompt, 0), prompt)


@pytest.fixture
def draw(build_gpt):
    """draw(logits, count, **settings): how often generate() draws each token of these logits."""

    def shares(logits: list[float], count: int, **settings) -> torch.Tensor:
        model = build_gpt(vocab_size=len(logits), tie_embeddings=False)
        with torch.no_grad():  # any text gives these logits
            model.final_norm.weight.zero_()
            model.final_norm.bias.fill_(1 / 32)
            model.output_layer.weight.copy_(torch.tensor(logits)[:, None])
        settings |= {"max_new_tokens": 1, "generator": torch.Generator().manual_seed(0)}
        prompt = torch.zeros(count, 1, dtype=torch.int64)
        drawn = generate(model, prompt, **settings)[:, 1]
        return drawn.bincount(minlength=len(logits)) / count

    return shares


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_draws_follow_the_tempered_softmax(draw, temperature):
    logits, count = [2.0, 0.5, 0.0, -1.0], 40_000
    p = (torch.tensor(logits).double() / temperature).softmax(-1)
    share = draw(logits, count, temperature=temperature)
    # five standard errors of a share
    assert ((share - p).abs() < 5 * (p * (1 - p) / count).sqrt()).all()


# settings, and which of four tokens they draw; extreme temperatures made logits infinite
DRAWN = [
    ({"top_k": 1}, [1]),
    ({"top_k": 99}, [0, 1, 2, 3]),
    ({"temperature": 0.0}, [1]),
    ({"temperature": 1e-300, "top_k": 2}, [1]),
    ({"temperature": 1e-40, "top_k": 2}, [1]),
    ({"temperature": 1e300, "top_k": 2}, [1, 3]),
]


@pytest.mark.parametrize(("settings", "likeliest"), DRAWN, ids=str)
def test_draws_the_likeliest_only(draw, settings, likeliest):
    share = draw([0.0, 5.0, 2.0, 4.0], 2000, **settings)
    assert share.nonzero().flatten().tolist() == likeliest


def test_dropout_is_off_while_sampling_and_the_mode_comes_back(build_gpt, random_tokens):
    model, plain, prompt = build_gpt(dropout=0.5).train(), build_gpt().eval(), random_tokens(1, 4)
    tokens = greedy(model, prompt, 20)
    assert torch.equal(tokens, greedy(plain, prompt, 20))
    assert model.training and not plain.training


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_refused(build_gpt, random_tokens, value, device):
    """On a GPU, drawing from NaN would end the process and every later job of a sweep with it."""
    model, prompt = build_gpt("tiled").train().to(device), random_tokens(1, 4).to(device)
    torch.nn.init.constant_(model.final_norm.bias, value)
    for temperature in (0.0, 1.0):
        with pytest.raises(FloatingPointError, match="not finite"):
            generate(model, prompt, max_new_tokens=3, temperature=temperature, top_k=2)
    assert model.training


# a prompt, and what its refusal names
PROMPTS = {
    "flat": (torch.tensor([1, 2]), r"\(B, N\).* \(2,\) in int64"),
    "floats": (torch.tensor([[1.0, 2.0]]), r"int64.* \(1, 2\) in float32"),
    "no sequence": (torch.zeros(0, 3, dtype=torch.int64), r"\(0, 3\) in int64"),
    "no token": (torch.zeros(1, 0, dtype=torch.int64), r"\(1, 0\)"),
    "negative": (torch.tensor([[1, -2]]), "-2.* 0 to"),
    "large": (torch.tensor([[1, 10**6]]), "1000000"),
    "device": (torch.zeros(1, 3, dtype=torch.int64, device="meta"), "meta"),
}
SETTINGS = {
    "temperature": (-0.5, float("nan"), float("inf")),
    "top_k": (0, 1.5),
    "max_new_tokens": (-1, 2.0),
}


def test_refuses_what_it_cannot_read_or_follow(build_gpt, random_tokens):
    """A regression test: PyTorch raised errors of its own, and a GPU is lost."""
    model = build_gpt()
    for prompt, named in PROMPTS.values():
        with pytest.raises(ValueError, match=named):
            generate(model, prompt, max_new_tokens=3)
    for key, values in SETTINGS.items():
        for value in values:
            with pytest.raises(ValueError, match=re.escape(f"{key}={value}")):
                generate(model, random_tokens(1, 4), **{"max_new_tokens": 3} | {key: value})


@pytest.mark.parametrize(("prompt", "context"), [("abc", [97, 98, 99]), ("", [256])])
def test_sample_text_goes_on_from_the_prompt(build_gpt, prompt, context):
    """An empty one starts a document after an end of text, which is not shown."""
    model = build_gpt(vocab_size=257)
    text = sample_text(model, byte(), prompt, max_new_tokens=20, temperature=0.9, seed=7)
    generator = torch.Generator().manual_seed(7)
    settings = {"max_new_tokens": 20, "temperature": 0.9, "generator": generator}
    tokens = generate(model, torch.tensor([context]), **settings)[0, len(context) :]
    assert text == prompt + byte().decode(tokens.tolist())


def test_sample_text_does_without_a_cache_where_the_attention_must(build_gpt):
    model = build_gpt(vocab_size=257)
    sample = partial(sample_text, model, byte(), "abc", max_new_tokens=10)
    text = sample()
    with model.using(backend=replace(model.backend, features=frozenset())):
        assert sample() == text
        with pytest.raises(ValueError, match="cross_length"):
            sample(use_cache=True)
