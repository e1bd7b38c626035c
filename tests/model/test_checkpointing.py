"""Activation checkpointing, chunks and offloading: the same training with fewer tensors kept."""

import gc

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.utils.flop_counter import FlopCounterMode

from attention import Backend, get_backend
from config import ModelConfig
from conformance.memory_growth import LiveTensors
from model import GPT, KVCache
from model.checkpointing import PRODUCTS, in_chunks
from training.schedule import prepare_model, will_compile

BLOCK, ATTENTION, ELEMENTWISE = (
    {"checkpoint": name} for name in ("block", "attention", "elementwise")
)
CHUNKED = {"chunk_tokens": 20}
MODES = {
    "elementwise": ELEMENTWISE,
    "block": BLOCK,
    "attention": ATTENTION,
    "block-chunks": BLOCK | CHUNKED,
    "attention-chunks": ATTENTION | CHUNKED,
    "attention-chunks-offload": ATTENTION | CHUNKED | {"offload": True},
}
every_mode = pytest.mark.parametrize("keeps", MODES.values(), ids=MODES)


def train_step(
    model: GPT, *inputs: Tensor, dtype: torch.dtype = torch.float32, run=None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and every gradient."""
    device = inputs[0].device.type
    torch.manual_seed(1)  # of dropout
    with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
        loss = (model if run is None else run)(*inputs).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


# with an attention of each kind, in both dtypes and in both models
PAIRS = [
    ("elementwise", "gpt2", "tiled", torch.bfloat16),
    ("block", "modern", "sdpa", torch.float32),
    ("attention", "gpt2", "naive", torch.float32),
    ("block-chunks", "gpt2", "no_rescale", torch.bfloat16),
    ("attention-chunks", "modern", "tiled", torch.float32),
    ("attention-chunks-offload", "modern", "naive", torch.bfloat16),
]


@pytest.mark.parametrize(("mode", "variant", "attention", "dtype"), PAIRS, ids=str)
def test_the_same_loss_and_gradients(
    build_gpt, modern, random_tokens, mode, variant, attention, dtype
):
    keeps = MODES[mode]
    shape = {"max_seq_len": 48} | (modern if variant == "modern" else {})
    tokens, document_ids = random_tokens(2, 48), None
    if "document_ids" in get_backend(attention).features:
        document_ids = (torch.arange(48) // 17).expand(2, -1)
    batch = tokens, tokens, document_ids
    loss, gradients = train_step(build_gpt(attention, **shape), *batch, dtype=dtype)
    found = train_step(build_gpt(attention, **shape, **keeps), *batch, dtype=dtype)
    assert torch.equal(found[0], loss)
    if "chunk_tokens" not in keeps:
        assert all(torch.equal(found[1][name], each) for name, each in gradients.items())
        return
    # the sum over tokens of a weight's gradient is made in parts
    _, exact = train_step(build_gpt(attention, **shape).double(), *batch)
    for name, gradient in gradients.items():
        own, error = ((x - exact[name]).norm() for x in (gradient, found[1][name]))
        assert error <= 1.5 * own + torch.finfo(torch.float32).eps * exact[name].norm(), name


@pytest.mark.parametrize("mode", ["elementwise", "block", "attention-chunks"])
def test_dropout_draws_the_same_again(build_gpt, random_tokens, mode):
    """With other dropout masks than the loss had, a gradient would not be its derivative."""
    keeps = MODES[mode]
    model, tokens = build_gpt("sdpa", dropout=0.3, max_seq_len=48, **keeps), random_tokens(2, 48)
    _, gradients = train_step(model, tokens, tokens)
    if "chunk_tokens" not in keeps:
        expected = train_step(build_gpt("sdpa", dropout=0.3, max_seq_len=48), tokens, tokens)
        assert all(torch.equal(gradients[name], gradient) for name, gradient in expected[1].items())
    # in float64, the slope of the loss along some direction; one mask that differs is far off
    model = build_gpt("sdpa", dropout=0.3, max_seq_len=48, **keeps).double()
    _, gradients = train_step(model, tokens, tokens)
    direction = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    losses = []
    for shift in (1e-3, -2e-3):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter += shift * direction[name]
        torch.manual_seed(1)
        losses.append(model(tokens, tokens).loss.item())
    slope = sum((gradients[name] * direction[name]).sum().item() for name in gradients)
    assert (losses[0] - losses[1]) / 2e-3 == pytest.approx(slope, rel=0.02)


@pytest.mark.parametrize(
    ("variant", "mode"),
    [("gpt2", "elementwise"), ("modern", "block"), ("gpt2", "attention-chunks")],
)
def test_compiles_in_one_graph(build_gpt, modern, random_tokens, variant, mode):
    shape = (modern if variant == "modern" else {}) | {"max_seq_len": 48, "num_layers": 1}
    tokens = random_tokens(2, 48)
    model = build_gpt("sdpa", **shape, **MODES[mode])
    torch._dynamo.reset()
    compiled = model.compiled(backend="aot_eager", fullgraph=True)
    found = train_step(model, tokens, tokens, run=compiled)
    torch.testing.assert_close(found, train_step(build_gpt("sdpa", **shape), tokens, tokens))


@pytest.mark.parametrize(
    ("mode", "calls"),
    [
        ("none", 1),
        ("elementwise", 1),
        ("attention", 1),
        ("block", 2),
        ("attention-chunks", 1),
        ("block-chunks", 2),
    ],
)
def test_how_often_attention_runs(build_gpt, random_tokens, mode, calls):
    """Attention is quadratic in length, so checkpoint=attention computes it only once."""
    model, count = build_gpt(max_seq_len=48, **MODES.get(mode, {})), []
    exact = get_backend("naive")

    def counted(*arguments, **settings):
        count.append(1)
        return exact.fn(*arguments, **settings)

    model.backend = Backend("counted", counted, features=exact.features)
    train_step(model, random_tokens(2, 48), random_tokens(2, 48))
    assert len(count) == calls * len(model.blocks)


def peak(num_layers: int, keeps: dict, *, seq_len: int = 1024) -> int:
    """Bytes alive at the worst moment of a forward and backward pass."""
    torch.manual_seed(0)
    shape = {"num_heads": 2, "hidden_size": 32, "max_seq_len": seq_len, "positions": "rope"}
    config = ModelConfig(num_layers=num_layers, **shape, **keeps)
    model = GPT(config, vocab_size=61, backend=get_backend("sdpa"))
    tokens = torch.randint(61, (1, seq_len))
    with LiveTensors() as live:
        model(tokens, tokens).loss.backward()
    return live.peak


def test_what_a_block_keeps():
    """In multiples of its input, float32 (T, C): the input; with it q, k, v, out; all of it."""
    kept = {}
    for name, keeps in {
        "all": {},
        "elementwise": ELEMENTWISE,
        "attention": ATTENTION | {"chunk_tokens": 128},
        "block": BLOCK,
    }.items():
        kept[name] = (peak(6, keeps) - peak(4, keeps)) / 2 / (1024 * 32 * 4)
    # the weights of a block and their gradients are a seventh of such an input
    assert kept["block"] == pytest.approx(1.0, abs=0.2)
    assert kept["attention"] == pytest.approx(5.1, abs=0.3)
    # two inputs, qkv, q and k once more (turned), out as it comes and with its heads merged, and
    # four widths before the activation
    assert kept["elementwise"] == pytest.approx(13.1, abs=0.3)
    assert kept["all"] > 15


def test_no_product_is_done_twice_for_what_is_elementwise(build_gpt, random_tokens):
    """Recomputation stops at the product whose input is needed."""
    counts = {}
    for name, keeps in {"none": {}, "elementwise": ELEMENTWISE, "attention": ATTENTION}.items():
        model = build_gpt("sdpa", **keeps)
        with FlopCounterMode(display=False) as counter:
            train_step(model, random_tokens(2, 32), random_tokens(2, 32))
        counts[name] = counter.get_total_flops()
    assert counts["none"] == counts["elementwise"] < counts["attention"]


@pytest.mark.slow
def test_nor_in_a_compiled_graph(build_gpt, random_tokens):
    """Where nothing stops before the product at the end of what is recomputed."""
    counts = {}
    for name, keeps in {"none": {}, "elementwise": ELEMENTWISE, "attention": ATTENTION}.items():
        torch.compiler.reset()
        graphs = []

        def note(graph, inputs, graphs=graphs):
            graphs.append(graph)
            return make_boxed_func(graph.forward)

        divided = {
            "fw_compiler": note,
            "bw_compiler": note,
            "partition_fn": min_cut_rematerialization_partition,
        }
        model = torch.compile(
            build_gpt("sdpa", **keeps), fullgraph=True, backend=aot_autograd(**divided)
        )
        train_step(model, random_tokens(2, 32), random_tokens(2, 32))
        calls = [
            node.target
            for graph in graphs
            for node in graph.graph.nodes
            if node.op == "call_function"
        ]
        counts[name] = sum(call in PRODUCTS for call in calls)
    assert 0 < counts["none"] == counts["elementwise"] < counts["attention"]


def test_chunks_bound_what_is_worked_with():
    whole, chunked = (peak(2, BLOCK | keeps) for keeps in ({}, {"chunk_tokens": 128}))
    assert chunked < 0.7 * whole


def test_chunks_without_gradients(build_gpt, random_tokens):
    plain, tokens = build_gpt(), random_tokens(2, 32)
    sparing = build_gpt(checkpoint="block", chunk_tokens=7)
    with torch.no_grad():
        expected = plain(tokens).logits
        torch.testing.assert_close(sparing(tokens).logits, expected)
        cache = KVCache(2, max_len=32)
        parts = [sparing(piece, cache=cache).logits for piece in tokens.split([20, 1, 11], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected)


def test_in_chunks_takes_tokens_of_every_tensor():
    x, y = torch.randn(2, 10, 3, 4), torch.randn(1, 10, 1, 4)
    sizes = []

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        sizes.append(y.shape[1])
        return x + y, x * y

    for size, expected in ((4, [4, 4, 2]), (None, [10]), (10, [10])):
        sizes.clear()
        added, multiplied = in_chunks(function, x, y, size=size)
        assert torch.equal(added, x + y) and torch.equal(multiplied, x * y)
        assert sizes == expected


REFUSED = [
    {"chunk_tokens": 128},
    {"offload": True},
    {"chunk_tokens": 0, "checkpoint": "block"},
    {"checkpoint": "mlp"},
]


@pytest.mark.parametrize("settings", REFUSED, ids=str)
def test_settings_that_do_nothing_or_do_not_exist_are_refused(settings):
    with pytest.raises(ValueError, match=f"model.{next(iter(settings))}="):
        ModelConfig(**settings)


@pytest.mark.parametrize(
    "keeps",
    [BLOCK | {"offload": True}, BLOCK | CHUNKED, ATTENTION | CHUNKED],
    ids=["offload", "chunks", "chunks-of-attention"],
)
def test_what_a_compiled_graph_would_not_spare_is_not_compiled(build_gpt, keeps):
    model, backend = build_gpt(**keeps), get_backend("sdpa")
    with pytest.raises(ValueError, match=f"model.{list(keeps)[1]}=.*compile=false"):
        prepare_model(model, backend, compile_mode="true")
    assert prepare_model(model, backend, compile_mode="auto") is model
    settings = {"backend": backend, "device": "cuda", "compile_mode": "auto"}
    assert not will_compile(model.config, **settings)
    assert all(will_compile(ModelConfig(**each), **settings) for each in ({}, BLOCK, ATTENTION))


@pytest.mark.gpu
@every_mode
@pytest.mark.parametrize("attention", ["sdpa", "triton"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_same_training_on_a_gpu(attention, keeps, compiled):
    if compiled and "offload" in keeps:
        pytest.skip("refused")
    shape = {"num_layers": 2, "num_heads": 4, "hidden_size": 256, "max_seq_len": 48}
    steps = []
    for each in ({}, keeps):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = GPT(
            ModelConfig(**shape, **each), vocab_size=61, backend=get_backend(attention)
        ).cuda()
        tokens = torch.randint(61, (4, 48), device="cuda")
        run = model.compiled(fullgraph=True) if compiled else None
        steps.append(train_step(model, tokens, tokens, dtype=torch.bfloat16, run=run))
    assert steps[1][0].item() == pytest.approx(steps[0][0].item(), rel=1e-3)
    for name, gradient in steps[0][1].items():
        assert (steps[1][1][name] - gradient).norm() < 0.02 * gradient.norm(), name


@pytest.mark.gpu
def test_block_inputs_wait_on_the_host():
    """Two more blocks take GPU memory for attention's tensors, but not for their inputs."""

    def allocated() -> int:
        gc.collect()  # what stands in cycles would go at any time
        # without what the allocator rounds up: it may serve 8 MiB with a block of 9 that an earlier
        # test has left
        return torch.cuda.memory_stats()["requested_bytes.all.current"]

    def kept(offload: bool, checkpoint: str) -> float:
        bytes_of = []
        for num_layers in (2, 2, 4):  # the first takes what libraries keep for themselves
            config = ModelConfig(
                num_layers=num_layers, num_heads=4, hidden_size=256, max_seq_len=8192,
                positions="rope", checkpoint=checkpoint,
                chunk_tokens=1024, offload=offload,
            )  # fmt: skip
            model = GPT(config, vocab_size=61, backend=get_backend("sdpa")).cuda()
            tokens = torch.randint(61, (1, 8192), device="cuda")
            before = allocated()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(tokens, tokens).loss
            bytes_of.append(allocated() - before)
            loss.backward()
        return (bytes_of[2] - bytes_of[1]) / 2 / (8192 * 256 * 4)

    assert kept(False, "block") == pytest.approx(1.0, abs=0.05)
    assert kept(True, "block") == pytest.approx(0.0, abs=0.05)
    assert kept(False, "attention") - kept(True, "attention") == pytest.approx(1.0, abs=0.05)
