"""AdamW's parameter groups, Muon beside it, and the learning-rate schedule."""

import copy

import pytest
import torch
from torch import nn

from attention import get_backend
from config import ModelConfig, OptimConfig
from model import GPT
from tests.command import checkpoint, run, same, summary, tiny
from training.loop.optimizer import Muon, build_optimizer, learning_rate

MUON = OptimConfig(name="muon", lr=0.01)


def build_gpt(**fields) -> GPT:
    torch.manual_seed(0)
    config = ModelConfig(
        num_layers=2, num_heads=4, num_kv_heads=2, hidden_size=32, max_seq_len=16, **fields
    )
    return GPT(config, vocab_size=37, backend=get_backend("naive"))


def test_weight_decay_reaches_matrices_only():
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    optimizer = build_optimizer(model, OptimConfig(lr=1e-3, weight_decay=0.1, beta1=0.8, beta2=0.9))
    groups = optimizer.param_groups
    decay = {id(x): group["weight_decay"] for group in groups for x in group["params"]}
    matrices = {name for name, x in model.named_parameters() if decay[id(x)] == 0.1}
    assert matrices == {"0.weight", "2.weight"} and sorted(decay.values()) == [0, 0, 0, 0.1, 0.1]
    assert all(group["fused"] and group["betas"] == (0.8, 0.9) for group in groups)


def test_warmup_then_cosine_to_min_lr():
    config = OptimConfig(lr=1.0, min_lr=0.1, warmup_steps=100)
    # a tenth of 200 steps is less than warmup_steps
    rates = [learning_rate(step, 200, config) for step in range(200)]
    expected = [0.05, 0.5, 1, 0.55, 0.1]
    assert [rates[step] for step in (0, 9, 19, 109, 199)] == pytest.approx(expected)
    assert rates[:20] == sorted(rates[:20]) and rates[19:] == sorted(rates[19:], reverse=True)
    constant = OptimConfig(lr=1.0, schedule="constant")
    assert [learning_rate(step, 40, constant) for step in (0, 3, 4, 39)] == [0.25, 1.0, 1.0, 1.0]
    assert learning_rate(4, 10_000, OptimConfig(lr=1.0, warmup_steps=10)) == pytest.approx(0.5)
    # short runs never stand still
    for steps, warmup_steps in ((1, 0), (1, 100), (2, 100), (11, 0), (11, 100)):
        config = OptimConfig(lr=1.0, min_lr=0.1, warmup_steps=warmup_steps)
        assert all(0.1 <= learning_rate(step, steps, config) <= 1.0 for step in range(steps))


def test_muon_has_the_matrices_of_the_blocks_and_adamw_the_rest():
    model = build_gpt(activation="swiglu", tie_embeddings=False)
    optimizer, names = build_optimizer(model, MUON), {id(x): n for n, x in model.named_parameters()}
    muon, adamw = (
        {names[id(x)]: group.get("rows") for group in part.param_groups for x in group["params"]}
        for part in (optimizer.muon, optimizer.adamw)
    )
    rows = {"attention.qkv": (32, 16, 16), "mlp.up": (128, 128), "attention.proj": ()}
    rows["mlp.down"] = ()
    assert muon == {f"blocks.{i}.{x}.weight": rows[x] for i in range(2) for x in rows}
    assert adamw.keys() == set(names.values()) - muon.keys()


def test_a_stack_is_updated_as_the_matrices_that_it_stacks():
    """q, k and v of one weight move as three parameters would."""
    model = build_gpt()
    optimizer = build_optimizer(model, MUON)
    stack = model.blocks[0].attention.qkv.weight
    apart = [nn.Parameter(part.detach().clone()) for part in stack.split((32, 16, 16))]
    how = {"weight_decay": 0.1, "momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
    reference = Muon([{"params": apart, "rows": ()}], lr=MUON.lr, **how)
    for _ in range(3):
        stack.grad = torch.randn_like(stack)
        stack.grad[32:] *= 100
        for part, grad in zip(apart, stack.grad.split((32, 16, 16)), strict=True):
            part.grad = grad.clone()
        optimizer.step()
        reference.step()
    assert torch.equal(stack, torch.cat(apart))


def test_a_run_with_muon_goes_on_to_the_bit(tmp_path):
    """With two passes a step and the loss scale of float16. Its state is Muon's alone."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = ("optim=muon", "optim.schedule=constant", "tokens_per_step=256", "dtype=fp16")
    assert run(*tiny(whole, *options, "steps=4")).code == 0
    assert run(*tiny(parts, *options, "steps=2")).code == 0
    assert run(f"resume={parts}", "steps=4").code == 0
    saved = checkpoint(whole)
    assert saved["step"] == 4 and saved["optimizer"]["muon"]["state"] and saved["scaler"]
    assert same(saved, checkpoint(parts))
    assert summary(whole)["val/loss"] == summary(parts)["val/loss"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("where", ["blocks.1.mlp.down.weight", "token_embedding.weight"])
def test_an_infinite_gradient_skips_both(device, where):
    """float16's GradScaler looks through both and steps neither; the next step, all finite, moves
    every parameter.
    """
    model = build_gpt().to(device)
    optimizer = build_optimizer(model, MUON)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    tokens = torch.arange(16, device=device)[None]
    for infinite in (True, False):
        before = copy.deepcopy(model.state_dict())
        scaler.scale(model(tokens, tokens).loss).backward()
        if infinite:
            model.get_parameter(where).grad[0, 0] = torch.inf
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
        assert moved == (set() if infinite else {name for name, _ in model.named_parameters()})
        assert scaler.get_scale() == 512.0
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_no_step_waits_for_the_gpu(name):
    """The learning rate is a Python number, set anew before each step."""
    model = build_gpt().cuda()
    optimizer = build_optimizer(model, OptimConfig(name=name, lr=0.01))
    for step in range(3):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (step + 1)
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
