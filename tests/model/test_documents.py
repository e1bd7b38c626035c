"""Documents packed into one sequence do not reach one another in the model."""

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from attention import Backend, get_backend
from config import AttentionConfig, DataConfig, RunConfig
from data import PackedBatch
from data.batches import windows
from model import GPT
from model.fast import FastGPT
from model.seam import LOOKING
from training.loop.evaluate import evaluate_under, exact_attention
from training.loop.health import diagnose
from training.loop.schedule import attention_schedule

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
    batch = windows(tokens.cpu().numpy(), end_of_text=END)
    return PackedBatch(*(x.to(tokens.device) for x in batch))


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


@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_no_document_reaches_another(build, positions):
    """To the last bit, through the whole model; that every backend keeps them apart is the part of
    tests/attention. Without document_ids, later tokens see the same change.
    """
    model, batch = build(get_backend("tiled", **TILES), positions=positions), packed()
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


def test_compiled_without_a_graph_break_and_once(build):
    """A batch of the same shape with other documents is not compiled again."""
    torch.compiler.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    model, (first, second) = build(), zip(*(x[:, :48].split(1) for x in packed()), strict=True)
    compiled = FastGPT(
        model, compiled=True, fullgraph=True, backend=aot_autograd(fw_compiler=count)
    )
    for batch in (first, second):
        gradients = []
        for run in (compiled, model):
            model.zero_grad()
            run(*batch).loss.backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
        torch.testing.assert_close(*gradients)
    assert len(graphs) == 4, "forward and backward passes of a block and of the loss"


def test_the_evaluation_keeps_documents_apart(build):
    """val/loss and val/loss_exact are the mean over the targets of every document by itself."""
    model, batch = build("tiled", positions="rope"), packed()
    exact = exact_attention(16, torch.device("cpu"), {"document_ids"})
    how = {"autocast": torch.autocast("cpu", enabled=False), "accuracy": True}
    found = [
        evaluate_under(model, backend, *batch, batch_size=1, **how)
        for backend in (model.backend, exact)
    ]
    total, right, count = 0.0, 0, 0
    for inputs, targets, ids in zip(*batch, strict=True):
        for document in ids.unique():
            logits = model(inputs[ids == document][None]).logits[0]
            asked = targets[ids == document]
            total += F.cross_entropy(logits, asked, reduction="sum").item()
            right += (logits.argmax(-1) == asked).sum().item()
            count += len(asked)
    for each in found:
        assert each == pytest.approx((total / count, right / count), rel=1e-5)
    together, _ = evaluate_under(model, model.backend, *batch[:2], batch_size=2, **how)
    assert abs(together - total / count) > 1e-3


def test_held_out_data_without_a_target_that_counts(build):
    model, (inputs, targets, _) = build("tiled", positions="rope"), packed()
    how = {"batch_size": 2, "autocast": torch.autocast("cpu", enabled=False), "accuracy": False}
    with pytest.raises(ValueError, match="held-out targets"):
        evaluate_under(model, model.backend, inputs, torch.full_like(targets, -100), **how)


def test_the_largest_score_is_one_between_tokens_of_a_document(build):
    model, batch = build(positions="rope"), packed()

    @torch.no_grad()
    def largest(inputs: torch.Tensor, document_ids: torch.Tensor | None = None) -> torch.Tensor:
        """(layers, B, H)"""
        with model.using(look=LOOKING):
            model(inputs, None, document_ids)
        return model.max_scores()

    found = largest(batch.inputs, batch.document_ids)
    for row, (inputs, ids) in enumerate(zip(batch.inputs, batch.document_ids, strict=True)):
        alone = [largest(inputs[ids == document][None])[:, 0] for document in ids.unique()]
        torch.testing.assert_close(found[:, row], torch.stack(alone).amax(0), rtol=1e-4, atol=1e-5)
    assert (largest(batch.inputs) > found).any()
    assert diagnose(model, [batch])[1] == pytest.approx(found.max().item(), rel=1e-6)


def test_an_attention_without_document_masks_is_refused_at_the_start():
    def schedule(name: str, **settings: object) -> list:
        attention = AttentionConfig(name=name, **settings)
        config = RunConfig(attention=attention, data=DataConfig(documents=True))
        return attention_schedule(config, dtype=torch.float32, device=torch.device("cpu"))

    for settings in ({"name": "sdpa"}, {"name": "tiled", "switch_at": 5, "switch_to": "sdpa"}):
        with pytest.raises(ValueError, match="data.documents=true.*attention=sdpa.*naive, tiled"):
            schedule(**settings)
    assert schedule("tiled")[0].name == "tiled"


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


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("triton", torch.float32),
        ("triton", torch.bfloat16),
        ("flex", torch.bfloat16),
        ("naive", torch.float32),
    ],
)
def test_no_document_reaches_another_on_a_gpu(build, name, dtype):
    model, batch = build(name).cuda(), PackedBatch(*(x.cuda() for x in packed()))
    changed, inside = with_another(batch, 3)
    with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
        logits, other = logits_of(model, batch), logits_of(model, changed)
    assert torch.equal(logits[~inside], other[~inside]) and (logits[inside] != other[inside]).any()
