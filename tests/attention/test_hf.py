"""Our attention inside the models of transformers: their numbers, their tokens, and refusals that
name the way out.
"""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention import BACKENDS, get_backend
from tests.selection import diagonal

transformers = pytest.importorskip("transformers")

import attention.hf as hf  # noqa: E402 - it imports transformers

VOCAB_SIZE = 61
SHAPE = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
ENDS = dict(bos_token_id=0, eos_token_id=None, pad_token_id=0)
CONFIGS = {
    "llama": transformers.LlamaConfig(**SHAPE, **ENDS),
    "mistral": transformers.MistralConfig(**SHAPE, **ENDS, sliding_window=7),
    "gemma2": transformers.Gemma2Config(**SHAPE, **ENDS, head_dim=8, sliding_window=7),
    # windows in every second layer, and sinks
    "gpt_oss": transformers.GptOssConfig(
        **SHAPE,
        **ENDS,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=7,
        experts_implementation="eager",  # the others know no float64
    ),
    "gpt2": transformers.GPT2Config(
        vocab_size=VOCAB_SIZE, n_positions=64, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0, **ENDS
    ),
}
NAMES = ("llama", "mistral", "gpt2", "gpt_oss")
# one column of tiles would hide what happens between tiles
hf.expose(get_backend("tiled", block_q=8, block_kv=8), "small_tiles")


def build(name, attention="eager", **changes):
    """A random model whose gains and biases are not 1 and 0."""
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[name])
    for key, value in changes.items():
        setattr(config, key, value)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture
def tokens():
    return torch.randint(VOCAB_SIZE, (3, 20), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def left_padding(tokens):
    mask = torch.ones_like(tokens)
    mask[1, :3] = mask[2, :9] = 0
    return mask


def logits_and_gradients(model, tokens):
    model.zero_grad()
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return [logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *((name, "small_tiles") for name in CONFIGS),
        pytest.param("gpt_oss", "tilegpt_triton", marks=pytest.mark.slow),
    ],
)
def test_logits_and_gradients_are_as_near_to_float64_as_eager(name, attention, tokens):
    model = build(name)
    eager = logits_and_gradients(model, tokens)
    exact = logits_and_gradients(copy.deepcopy(model).double(), tokens)
    model.set_attn_implementation(attention)
    for ours, theirs, reference in zip(
        logits_and_gradients(model, tokens), eager, exact, strict=True
    ):
        rounding = torch.finfo(torch.float32).eps * reference.abs().max()
        budget = 2 * (theirs - reference).abs().max() + rounding
        assert (ours - reference).abs().max() <= budget


@pytest.mark.parametrize(
    ("name", "padded", "cache"),
    diagonal(NAMES, {"whole": False, "padded": True}, ["dynamic", "static", "none"]),
)
def test_generate_gives_the_same_tokens(name, padded, cache, tokens, left_padding):
    model = build(name)
    settings = dict(
        attention_mask=left_padding if padded else torch.ones_like(tokens),
        max_new_tokens=8,
        do_sample=False,
        **{"use_cache": False} if cache == "none" else {"cache_implementation": cache},
    )
    eager = model.generate(tokens, **settings)
    model.set_attn_implementation("small_tiles")
    assert torch.equal(model.generate(tokens, **settings), eager)


@pytest.mark.parametrize(("side", "name"), diagonal(["left", "right"], NAMES))
def test_padding_changes_nothing(name, side, tokens, left_padding):
    model = build(name, "small_tiles")
    mask = left_padding if side == "left" else left_padding.flip(1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    padded = model(tokens, attention_mask=mask, position_ids=positions).logits
    for row, own, logits in zip(tokens, mask.bool(), padded, strict=True):
        torch.testing.assert_close(logits[own], model(row[own][None]).logits[0])


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_documents_do_not_see_one_another(name, tokens):
    model = build(name, "small_tiles")
    positions = torch.cat((torch.arange(11), torch.arange(9)))[None]
    packed = model(tokens[:1], position_ids=positions, use_cache=False).logits
    alone = [model(part).logits for part in tokens[:1].split((11, 9), dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1))


MOVES = st.sampled_from([(0, 1), (1, 1), (0, 0), (2, 1), (-3, -2), (0, -1)])


@given(st.lists(MOVES, max_size=12))
def test_pieces_show_each_row_its_keys(moves):
    """Any intervals at all: after 0:1 and 1:2, 1:3 is of a document and 2:3 of a window."""
    pattern = torch.tensor([(0, 1), *moves]).cumsum(0).clamp(min=0)
    pattern[pattern[:, 0] >= pattern[:, 1]] = 0
    shown = torch.zeros_like(pattern)
    for piece in hf.pieces(pattern):
        first, last, stop = piece.keys.start, piece.keys.stop, piece.queries.stop
        for i in range(piece.queries.start, stop):
            hi = last - (stop - 1 - i) if piece.causal else last
            shown[i] = torch.tensor((max(first, hi - (piece.window or hi)), hi))
    assert torch.equal(shown, pattern)


def test_every_backend_is_there():
    names = {f"tilegpt_{name}" for name in BACKENDS}
    assert names <= set(transformers.AttentionInterface())
    assert names <= set(transformers.AttentionMaskInterface())


def test_takes_a_boolean_mask(tokens):
    mask = torch.ones(20, 20, dtype=torch.bool).tril().expand(3, 1, -1, -1)
    model = build("llama", "small_tiles")
    torch.testing.assert_close(model(tokens, attention_mask=mask).logits, model(tokens).logits)


@pytest.mark.parametrize(
    ("model", "backend", "mask", "named"),
    [
        ("llama", "tiled", (torch.arange(20) != 4).long().expand(3, -1), "left"),
        ("llama", "tiled", torch.zeros(3, 1, 20, 20), "boolean"),
        ("gpt2", "tiled", None, "dropout=0.1"),
        ("mistral", "sdpa", None, "window"),
    ],
    ids=["padding-between-tokens", "added-mask", "dropout", "window"],
)
def test_what_is_refused(tokens, model, backend, mask, named):
    changes = {"attn_pdrop": 0.1} if model == "gpt2" else {}
    model = build(model, f"tilegpt_{backend}", **changes).train()
    with pytest.raises(ValueError) as refused:
        model(tokens, attention_mask=mask)
    assert named in str(refused.value)
