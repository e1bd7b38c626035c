"""Activation checkpointing: what a block keeps, and how often its attention runs.

That training stays the same is tested in test_fast.py.
"""

from collections import Counter

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.utils.flop_counter import FlopCounterMode

from attention import Backend, get_backend
from config import ModelConfig
from conformance.memory_growth import LiveTensors
from model import GPT
from model.fast import FastGPT

RUNS = {"none": 1, "attention": 1, "block": 2}
every_mode = pytest.mark.parametrize("keep", RUNS)


@every_mode
def test_how_often_attention_runs(build_gpt, random_tokens, keep):
    """Attention is quadratic in length, so checkpoint=attention computes it only once."""
    network, count = build_gpt(checkpoint=keep), []
    exact = get_backend("naive")

    def counted(*arguments, **settings):
        count.append(1)
        return exact.fn(*arguments, **settings)

    network.backend = Backend("counted", counted, features=exact.features)
    FastGPT(network)(random_tokens(2, 32), random_tokens(2, 32)).loss.backward()
    assert len(count) == RUNS[keep] * 2


@every_mode
def test_how_often_attention_runs_in_a_compiled_graph(build_gpt, random_tokens, keep):
    torch.compiler.reset()
    calls = Counter()

    def note(graph, inputs):
        calls.update(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    divided = {"fw_compiler": note, "bw_compiler": note}
    divided["partition_fn"] = min_cut_rematerialization_partition
    network = build_gpt("tiled", checkpoint=keep)
    fast = FastGPT(network, compiled=True, fullgraph=True, backend=aot_autograd(**divided))
    fast(random_tokens(2, 32), random_tokens(2, 32)).loss.backward()
    assert calls["tilegpt.tile_loop.default"] == RUNS[keep]
    assert calls["tilegpt.tile_loop_backward.default"] == 1


def test_the_last_product_is_not_repeated(build_gpt, random_tokens):
    """Neither the MLP's second, nor, where q, k and v are kept, the one that they come from. In
    C^2 FLOPs a token: qkv 6, proj 2, up 8, down 8.
    """
    flops = {}
    for keep in RUNS:
        network, tokens = build_gpt("tiled", checkpoint=keep, num_layers=1), random_tokens(2, 32)
        with FlopCounterMode(display=False) as counter:
            FastGPT(network)(tokens, tokens).loss.backward()
        flops[keep] = counter.get_flop_counts()["Global"]
    linear = torch.ops.aten.addmm
    repeated = {keep: flops[keep][linear] - flops["none"][linear] for keep in RUNS}
    assert repeated == {"none": 0, "attention": 10 * 32**2 * 64, "block": 16 * 32**2 * 64}


def peak(num_layers: int, keep: str) -> int:
    """Bytes alive at the worst moment of a forward and backward pass."""
    torch.manual_seed(0)
    shape = {"num_heads": 2, "hidden_size": 32, "max_seq_len": 1024}
    config = ModelConfig(num_layers=num_layers, **shape, checkpoint=keep)
    network = FastGPT(GPT(config, vocab_size=61, backend=get_backend("sdpa")))
    tokens = torch.randint(61, (1, 1024))
    with LiveTensors() as live:
        network(tokens, tokens).loss.backward()
    return live.peak


def test_what_a_block_keeps():
    """In multiples of its input, float32 (T, C): the input; with it q, k, v, out; all of it."""
    kept = {keep: (peak(6, keep) - peak(4, keep)) / 2 / (1024 * 32 * 4) for keep in RUNS}
    # the weights of a block and their gradients are a seventh of such an input
    assert kept["block"] == pytest.approx(1.0, abs=0.2)
    assert kept["attention"] == pytest.approx(5.1, abs=0.3)
    assert kept["none"] > 15


def test_a_mode_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="model.checkpoint=mlp.*none.*attention.*block"):
        ModelConfig(checkpoint="mlp")
