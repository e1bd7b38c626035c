"""Documents packed into one sequence do not reach one another in the model."""

import pytest
import torch
import torch.nn.functional as F

from attention import Backend, get_backend
from data import PackedBatch
from data.batches import windows
from model import GPT
from model.fast import FastGPT
from model.seam import LOOKING
from training.loop.evaluate import evaluate_under, exact_attention
from training.loop.health import diagnose

END = 0
# documents begin inside a tile, at its edge, and are longer than one
TILES = {"block_q": 32, "block_kv": 16}
# of the documents of the first row, ends included; the second row has them the other way round
LENGTHS = (9, 1, 22, 16, 30, 2)


@pytest.fixture
def build(build_gpt):
    """build(backend): of two heads of sixteen, which share one key head if positions are rotary."""

    def build(backend: Backend | str = "naive", *, positions: str = "learned") -> GPT:
        heads = {"num_heads": 2, "num_kv_heads": 1 if positions == "rope" else 2}
        return build_gpt(backend, max_seq_len=80, positions=positions, **heads)

    return build


def packed() -> PackedBatch:
    """Two rows of 80 tokens, with documents of LENGTHS and of LENGTHS reversed."""
    tokens = torch.randint(1, 61, (2, 81), generator=torch.Generator().manual_seed(2))
    for row, lengths in zip(tokens, (LENGTHS, LENGTHS[::-1]), strict=True):
        row[torch.tensor(lengths).cumsum(0) - 1] = END
    return separated(tokens)


def separated(tokens: torch.Tensor) -> PackedBatch:
    """The batch that data.documents=true makes of tokens (2, 81)."""
    return windows(tokens.numpy(), end_of_text=END)


def with_another(batch: PackedBatch, document: int) -> tuple[PackedBatch, torch.Tensor]:
    """The batch with another text in that document, and where its tokens are (B, N)."""
    inside = batch.document_ids == document
    exchange = inside & (batch.inputs != END)
    assert exchange.any(1).all()
    tokens = torch.cat((batch.inputs, batch.targets[:, -1:]), 1)
    tokens[:, :-1][exchange] = tokens[:, :-1][exchange] % 60 + 1
    return separated(tokens), inside


@torch.no_grad()
def logits_of(model: GPT, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """(B, N, vocab_size) for the inputs and, where there are some, the documents of the batch."""
    return model(batch[0], None, *batch[2:]).logits


def test_no_document_reaches_another(build):
    """To the last bit, through the whole model; that every backend keeps them apart is the part of
    tests/attention. Without document_ids, later tokens see the same change.
    """
    model, batch = build(get_backend("tiled", **TILES)), packed()
    logits = logits_of(model, batch)
    for document in (2, 3):  # one begins and ends inside tiles, the other is one's middle
        changed, inside = with_another(batch, document)
        other = logits_of(model, changed)
        assert torch.equal(logits[~inside], other[~inside])
        assert (logits[inside] != other[inside]).any()

    after = changed.document_ids > document
    together, moved = (logits_of(model, each[:2])[after] for each in (batch, changed))
    assert (together != moved).any(-1).all()


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_a_packed_document_is_the_document_alone_if_positions_are_rotary(build, positions):
    """They depend on distances only, while learned positions go on counting."""
    model, batch = build("tiled", positions=positions).double(), packed()
    logits = logits_of(model, batch)
    for row in range(2):
        for document in range(1, len(LENGTHS)):
            inside = batch.document_ids[row] == document
            alone = model(batch.inputs[row, inside][None]).logits[0]
            # the angles are float32, and larger further on
            near = torch.allclose(logits[row, inside], alone, rtol=1e-4, atol=1e-5)
            assert near == (positions == "rope")


def documents(batch: PackedBatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets, (1, length) each, of every document by itself."""
    return [
        (inputs[ids == each][None], targets[ids == each][None])
        for inputs, targets, ids in zip(*batch, strict=True)
        for each in ids.unique()
    ]


@torch.no_grad()
def test_the_evaluation_keeps_documents_apart(build):
    """Loss and accuracy are the means over the targets of every document by itself."""
    model, batch = build(positions="rope"), packed()
    logits = torch.cat([model(inputs).logits[0] for inputs, _ in documents(batch)])
    asked = torch.cat([targets[0] for _, targets in documents(batch)])
    right = (logits.argmax(-1) == asked).float().mean().item()
    expected = pytest.approx((F.cross_entropy(logits, asked).item(), right), rel=1e-5)
    exact = exact_attention(16, torch.device("cpu"), {"document_ids"})
    how = {"autocast": torch.autocast("cpu", enabled=False), "accuracy": True, "batch_size": 1}
    assert evaluate_under(model, exact, *batch, **how) == expected
    assert evaluate_under(model, exact, *batch[:2], **how) != expected


def test_held_out_data_without_a_target_that_counts(build):
    model, (inputs, targets, _) = build("tiled", positions="rope"), packed()
    how = {"batch_size": 2, "autocast": torch.autocast("cpu", enabled=False), "accuracy": False}
    with pytest.raises(ValueError, match="held-out targets"):
        evaluate_under(model, model.backend, inputs, torch.full_like(targets, -100), **how)


@torch.no_grad()
def test_the_largest_score_is_one_between_tokens_of_a_document(build):
    model, batch = build(positions="rope"), packed()

    def largest(*given: torch.Tensor | None) -> float:
        with model.using(look=LOOKING):
            model(*given)
        return model.max_scores().max().item()

    expected = pytest.approx(max(largest(inputs) for inputs, _ in documents(batch)), rel=1e-4)
    assert largest(batch.inputs, None, batch.document_ids) == expected != largest(batch.inputs)
    with torch.enable_grad():
        assert diagnose(model, [batch])[1] == expected


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "compiled"), [("triton", False), ("triton", True), ("flex", True)]
)
def test_a_step_on_a_gpu_waits_for_nothing(build, name, compiled):
    """Documents make the host wait for the GPU neither forward nor backward.

    The losses are those of naive attention.
    """
    torch.compiler.reset()
    model, batch = build(name).cuda(), PackedBatch(*(x.cuda() for x in packed()))
    step = FastGPT(model, compiled=True, fullgraph=True) if compiled else model
    step(*batch).loss.backward()  # kernels and caches
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = step(*batch).loss
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with model.using(backend=get_backend("naive")):
        torch.testing.assert_close(loss, model(*batch).loss, rtol=2e-3, atol=2e-3)
