"""Activation checkpointing: what a block keeps, and what it computes again.

That training stays the same is tested in test_fast.py.
"""

from collections import Counter

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.utils.flop_counter import FlopCounterMode

from conformance.memory_growth import LiveTensors
from model.fast import FastGPT

RUNS = {"none": 1, "attention": 1, "block": 2}


@pytest.mark.parametrize("keep", ["attention", "block"])
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


def test_what_is_computed_again(build_gpt, random_tokens):
    """Attention, which is quadratic in length, only under checkpoint=block. Never the last product:
    neither the MLP's second, nor, where q, k and v are kept, the one that they come from. In
    C^2 FLOPs a token: qkv 6, proj 2, up 8, down 8.
    """
    flops, tokens = {}, random_tokens(2, 32)
    for keep in RUNS:
        with FlopCounterMode(display=False) as counter:
            FastGPT(build_gpt(checkpoint=keep, num_layers=1))(tokens, tokens).loss.backward()
        flops[keep] = counter.get_flop_counts()["Global"]
    linear, attention = torch.ops.aten.addmm, torch.ops.aten.bmm
    repeated = {keep: flops[keep][linear] - flops["none"][linear] for keep in RUNS}
    assert repeated == {"none": 0, "attention": 10 * 32**2 * 64, "block": 16 * 32**2 * 64}
    # two products forward, four backward
    times = {keep: flops[keep][attention] / flops["none"][attention] for keep in RUNS}
    assert times == {"none": 1, "attention": 1, "block": pytest.approx(8 / 6)}


def test_what_a_block_keeps(build_gpt):
    """In multiples of its input, float32 (T, C): the input; with it q, k, v, out; all of it."""
    tokens = torch.randint(61, (1, 1024))

    def peak(num_layers: int, keep: str) -> int:
        """Bytes alive at the worst moment of a forward and backward pass."""
        shape = {"num_layers": num_layers, "num_heads": 2, "max_seq_len": 1024}
        network = FastGPT(build_gpt("sdpa", checkpoint=keep, **shape))
        with LiveTensors() as live:
            network(tokens, tokens).loss.backward()
        return live.peak

    kept = {keep: (peak(6, keep) - peak(4, keep)) / 2 / (1024 * 32 * 4) for keep in RUNS}
    # the weights of a block and their gradients are a seventh of such an input
    assert kept["block"] == pytest.approx(1.0, abs=0.2)
    assert kept["attention"] == pytest.approx(5.1, abs=0.3)
    assert kept["none"] > 15
