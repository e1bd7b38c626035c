"""AdamW's parameter groups, Muon beside it, and the learning-rate schedule."""

import copy

import pytest
import torch
from torch import nn

from attention import get_backend
from config import ModelConfig, OptimConfig
from model import GPT
from tests.command import checkpoint, run, same, summary, tiny
from training.loop.optimizer import build_optimizer, learning_rate

MUON = OptimConfig(name="muon", lr=0.01)


def build_gpt(**fields) -> GPT:
    torch.manual_seed(0)
    config = ModelConfig(
        **{"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_size": 32, "max_seq_len": 16}
        | fields
    )
    return GPT(config, vocab_size=37, backend=get_backend("naive"))


def train(model: GPT, optimizer, steps: range) -> list[float]:
    """The losses of some steps, each a function of its number."""
    losses = []
    for step in steps:
        tokens = torch.randint(37, (4, 16), generator=torch.Generator().manual_seed(step % 3))
        loss = model(tokens, tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_weight_decay_reaches_matrices_only():
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    optimizer = build_optimizer(model, OptimConfig(lr=1e-3, weight_decay=0.1, beta1=0.8, beta2=0.9))
    decay = {
        id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    assert {name: decay[id(p)] for name, p in model.named_parameters()} == {
        "0.weight": 0.1,
        "1.weight": 0.0,
        "1.bias": 0.0,
        "2.weight": 0.1,
        "2.bias": 0.0,
    }
    assert all(group["fused"] and group["betas"] == (0.8, 0.9) for group in optimizer.param_groups)


def test_warmup_then_cosine_to_min_lr():
    config = OptimConfig(lr=1.0, min_lr=0.1, warmup_steps=100)
    # a tenth of 200 steps is less than warmup_steps
    rates = [learning_rate(step, 200, config) for step in range(200)]
    assert rates[0] == pytest.approx(1 / 20)
    assert rates[9] == pytest.approx(0.5)
    assert rates[19] == 1.0
    assert rates[109] == pytest.approx(0.55)  # half way down
    assert rates[199] == pytest.approx(0.1)
    assert rates[:20] == sorted(rates[:20])
    assert rates[19:] == sorted(rates[19:], reverse=True)


def test_constant_schedule_warms_up_too():
    config = OptimConfig(lr=1.0, schedule="constant")
    assert [learning_rate(step, 40, config) for step in (0, 3, 4, 39)] == [0.25, 1.0, 1.0, 1.0]
    assert learning_rate(4, 10_000, OptimConfig(lr=1.0, warmup_steps=10)) == pytest.approx(0.5)


@pytest.mark.parametrize("warmup_steps", [0, 100])
def test_short_runs_never_stand_still(warmup_steps):
    config = OptimConfig(lr=1.0, min_lr=0.1, warmup_steps=warmup_steps)
    for steps in (1, 2, 11):
        rates = [learning_rate(step, steps, config) for step in range(steps)]
        assert all(0.1 <= rate <= 1.0 for rate in rates)


def test_muon_has_the_matrices_of_the_blocks_and_adamw_the_rest():
    model = build_gpt(activation="swiglu", tie_embeddings=False)
    optimizer = build_optimizer(model, MUON)
    muon, adamw = (
        [id(p) for group in part.param_groups for p in group["params"]]
        for part in (optimizer.muon, optimizer.adamw)
    )
    names = {name for name, p in model.named_parameters() if id(p) in muon}
    matrices = ("attention.qkv", "attention.proj", "mlp.up", "mlp.down")
    assert names == {f"blocks.{i}.{matrix}.weight" for i in range(2) for matrix in matrices}
    assert sorted(muon + adamw) == sorted(map(id, model.parameters()))
    rows = {id(p): group["rows"] for group in optimizer.muon.param_groups for p in group["params"]}
    block = model.blocks[0]
    assert rows[id(block.attention.qkv.weight)] == (32, 16, 16)
    assert rows[id(block.mlp.up.weight)] == (128, 128) and rows[id(block.mlp.down.weight)] == ()


def test_a_stack_is_updated_as_the_matrices_that_it_stacks():
    """q, k and v of one weight move as three parameters of PyTorch's own Muon would."""
    model = build_gpt()
    optimizer = build_optimizer(model, MUON)
    stack = model.blocks[0].attention.qkv.weight
    apart = [nn.Parameter(part.detach().clone()) for part in stack.split((32, 16, 16))]
    reference = torch.optim.Muon(
        apart, lr=MUON.lr, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(3):
        stack.grad = (
            torch.randn_like(stack) * torch.tensor([1.0, 100.0]).repeat_interleave(32)[:, None]
        )
        for part, grad in zip(apart, stack.grad.split((32, 16, 16)), strict=True):
            part.grad = grad.clone()
        optimizer.step()
        reference.step()
    assert torch.equal(stack, torch.cat(apart))


def test_a_run_with_muon_goes_on_to_the_bit(tmp_path):
    """The command, with two passes a step and the loss scale of float16."""
    options = ("optim=muon", "optim.schedule=constant", "tokens_per_step=256", "dtype=fp16")
    options += ("eval_every=4", "log_every=2")
    assert run(*tiny(tmp_path / "straight", *options, "steps=4")).code == 0
    assert run(*tiny(tmp_path / "parts", *options, "steps=2")).code == 0
    assert run(f"resume={tmp_path / 'parts'}", "steps=4").code == 0
    straight, parts = (checkpoint(tmp_path / name) for name in ("straight", "parts"))
    assert straight["step"] == 4 and straight["optimizer"]["state"]["muon"] and straight["scaler"]
    assert same(straight, parts)
    assert summary(tmp_path / "straight")["val/loss"] == summary(tmp_path / "parts")["val/loss"]


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
            assert group.get("fused", True)
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
