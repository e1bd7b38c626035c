"""Our step beside another GPT-2's, through the interface that nanoGPT's model.py has. nanoGPT
itself is not here: the stand-in is ours.
"""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import lab.nanogpt
from lab.nanogpt import WARMUP, Options, train_ours, train_theirs
from scripts.arguments import read_settings
from tests import forked
from tests.command import environment, metrics

# the names and the interface of nanoGPT's model.py, around this project's own model
STAND_IN = """
from dataclasses import dataclass
import torch
from torch import nn
from torch.nn import functional as F

@dataclass
class GPTConfig:
    block_size: int = 8
    vocab_size: int = 8
    n_layer: int = 1
    n_head: int = 1
    n_embd: int = 8
    dropout: float = 0.0
    bias: bool = True

class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.c_attn = c.n_head, nn.Linear(c.n_embd, 3 * c.n_embd)
        self.c_proj = nn.Linear(c.n_embd, c.n_embd)

    def forward(self, x):
        parts = self.c_attn(x).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(out.transpose(1, 2).flatten(2))

class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_fc = nn.Linear(c.n_embd, 4 * c.n_embd)
        self.c_proj = nn.Linear(4 * c.n_embd, c.n_embd)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))

class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(c.n_embd), Attention(c)
        self.ln_2, self.mlp = nn.LayerNorm(c.n_embd), MLP(c)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))

class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        blocks = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        wte, wpe = (nn.Embedding(n, c.n_embd) for n in (c.vocab_size, c.block_size))
        parts = {"wte": wte, "wpe": wpe, "h": blocks}
        self.transformer = nn.ModuleDict(parts | {"ln_f": nn.LayerNorm(c.n_embd)})
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.lm_head.weight = parts["wte"].weight

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        rest = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": rest}]
        groups[1]["weight_decay"] = 0.0
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas)

    def forward(self, tokens, targets):
        x = self.transformer.wte(tokens) + self.transformer.wpe.weight[: tokens.shape[1]]
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""
SMALL = (
    "model=tiny",
    "seq_len=32",
    "tokens=64",
    "steps=20",
    "data=stdlib",
    "tokenizer=byte",
    "vocab_size=257",
    "device=cpu",
)


def nanogpt(*arguments: str) -> subprocess.CompletedProcess:
    return forked.run("-m", "lab.nanogpt", *arguments, env=environment())


@pytest.mark.slow
def test_the_same_step_gives_the_same_losses_and_another_one_does_not(tmp_path, monkeypatch):
    """With relu for gelu the stand-in drifts by far more than a rounding error does."""
    (tmp_path / "model.py").write_text(STAND_IN)
    out = tmp_path / "found.json"
    # a process each takes its time to start
    monkeypatch.setattr(
        lab.nanogpt, "in_own_process", lambda train, *arguments, **how: train(*arguments, **how)
    )
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "nanogpt",
            f"folder={tmp_path}",
            *SMALL,
            "attention=sdpa",
            "curve_steps=20",
            "model.checkpoint=elementwise",
            f"out={out}",
        ],
    )
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        lab.nanogpt,
        "subprocess",
        SimpleNamespace(run=lambda command, cwd, **_: forked.run(*command[1:], cwd=cwd)),
    )
    lab.nanogpt.main()
    found = json.loads(out.read_text())
    assert [row["who"] for row in found["speed"]] == ["nanogpt", "sdpa", "nanogpt"]
    assert all(row["step_tokens_per_sec"] > 0 and row["windows"] >= 1 for row in found["speed"])
    assert len(found["curves"]["losses"]["nanogpt"]) == 20
    rms = found["curves"]["rms"]
    assert 0 < rms["nanogpt, noise 1"] < 1e-5 and rms["sdpa"] < 1e-5

    (tmp_path / "model.py").write_text(
        STAND_IN.replace('gelu(self.c_fc(x), approximate="tanh")', "relu(self.c_fc(x))")
    )
    options = read_settings(Options, [f"folder={tmp_path}", *SMALL])
    trained = train_ours(
        options, tmp_path / "run", attention="sdpa", seq_len=32, steps=20, log_every=1
    )
    # nanoGPT's loop looks into nothing: neither does the speed that it is compared with
    speeds = [
        row["step_tokens_per_sec"] for row in metrics(tmp_path / "run") if row["step"] > WARMUP
    ]
    assert trained["step_tokens_per_sec"] == pytest.approx(np.median(speeds))
    ours = trained["losses"]
    theirs = train_theirs(tmp_path, tmp_path / "run", 20)["losses"]
    assert max(abs(ours[step] - theirs[step]) for step in ours) > 1e-3


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        ([], "folder= is missing"),
        (["folder=nowhere"], "folder=nowhere has no model.py"),
        (["folder=HERE", "steps=5"], "steps=5 must be at least 20"),
        (["folder=HERE", "seq_len=1000"], "tokens=32768 is not a multiple of seq_len=1000"),
        (["folder=HERE", "seq_len=long"], "seq_len=long must be a whole number"),
        (
            ["folder=HERE", "model.checkpint=block"],
            "there is no key 'model.checkpint'; did you mean model.checkpoint?",
        ),
        (["folder=HERE", "attention=fast"], "attention=fast is not known"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, arguments, complaint):
    (tmp_path / "model.py").write_text(STAND_IN)
    monkeypatch.setattr(
        sys,
        "argv",
        ["nanogpt", *(argument.replace("HERE", str(tmp_path)) for argument in arguments)],
    )
    with pytest.raises(SystemExit) as end:
        lab.nanogpt.main()
    assert complaint in end.value.code and "\n" not in end.value.code


def test_help_shows_a_line_to_type():
    done = nanogpt("--help")
    assert done.returncode == 0 and "python -m lab.nanogpt folder=../nanoGPT" in done.stdout
