"""nanochat's step beside ours, through the interface of its gpt.py and flash_attention.py. nanochat
itself is not here: the stand-in is ours.
"""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

import lab.nanochat
import lab.nanogpt
from attention import attention, get_backend
from lab.nanochat import as_flash_attn_func
from tests import forked
from tests.command import environment
from tests.lab.test_nanogpt import SMALL

ATTENTION = """
from types import SimpleNamespace
import torch
from torch.nn import functional as F

CALLS = []

def flash_attn_func(q, k, v, causal=False, window_size=(-1, -1)):
    CALLS.append(window_size)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

flash_attn = SimpleNamespace(flash_attn_func=flash_attn_func)
"""
GPT = """
from dataclasses import dataclass
import torch
from torch import nn
from torch.nn import functional as F
from nanochat.flash_attention import flash_attn

@dataclass
class GPTConfig:
    sequence_len: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_kv_head: int
    n_embd: int
    window_pattern: str

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.qkv = nn.ModuleList(
            nn.Linear(config.n_embd, 3 * config.n_embd) for _ in range(config.n_layer)
        )

    def init_weights(self):
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def setup_optimizer(self):
        print("two lines that it prints")
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def estimate_flops(self):
        return 1000

    def forward(self, tokens, targets):
        x = self.wte(tokens)
        for i, layer in enumerate(self.qkv):
            pattern = self.config.window_pattern
            short = pattern[i % len(pattern)] == "S" and i + 1 < len(self.qkv)
            window = self.config.sequence_len // 4 if short else self.config.sequence_len
            q, k, v = layer(x).unflatten(-1, (3, self.config.n_head, -1)).unbind(2)
            y = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(window, 0))
            x = x + y.flatten(2)
        return F.cross_entropy((x @ self.wte.weight.T).flatten(0, 1), targets.flatten())
"""


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A clone of nanochat whose modules no other test has imported."""
    folder = tmp_path / "nanochat"
    folder.mkdir()
    for name, text in {"__init__": "", "gpt": GPT, "flash_attention": ATTENTION}.items():
        (folder / f"{name}.py").write_text(text)
    for name in ("nanochat", "nanochat.gpt", "nanochat.flash_attention"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.mark.slow
def test_every_program_has_a_row(clone, tmp_path, monkeypatch, capsys):
    out = tmp_path / "found.json"

    def here(train, *arguments, **how):
        for name in ("nanochat", "nanochat.gpt", "nanochat.flash_attention"):
            sys.modules.pop(name, None)  # its own process would import it anew
        return train(*arguments, **how)

    monkeypatch.setattr(lab.nanochat, "in_own_process", here)
    run = lambda command, cwd, **_: forked.run(*command[1:], cwd=cwd)  # noqa: E731
    monkeypatch.setattr(lab.nanogpt, "subprocess", SimpleNamespace(run=run))
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    arguments = [f"folder={clone}", *SMALL, "attention=tiled", "passes=1,2", "rounds=1"]
    monkeypatch.setattr(sys, "argv", ["nanochat", *arguments, f"out={out}"])
    lab.nanochat.main()
    rows = json.loads(out.read_text())["speed"]
    programs = ["tiled", "nanochat", "nanochat, tiled, L", "nanochat, tiled, SSSL"]
    assert [(row["passes"], row["who"]) for row in rows] == [
        (passes, who) for passes in (1, 2) for who in programs
    ]
    assert all(row["step_tokens_per_sec"] > 0 and row["windows"] == 1 for row in rows)
    assert {row["flops_per_token"] for row in rows if row["who"] != "tiled"} == {1000}
    assert "two lines" not in capsys.readouterr().out


@pytest.mark.parametrize(("left", "window"), [(5, (5, 0)), (32, None), (-1, None)])
def test_our_attention_in_the_layout_and_with_the_window_of_flash_attn_func(left, window):
    q, k, v = torch.randn(3, 2, 32, 4, 16)
    backend = get_backend("naive")
    found = as_flash_attn_func(q, k, v, causal=True, window_size=(left, 0), backend=backend)
    heads = (x.transpose(1, 2) for x in (q, k, v))
    expected = attention(*heads, backend="naive", causal=True, window=window).out
    assert torch.equal(found.transpose(1, 2), expected)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["folder=HERE"], "folder=HERE has no nanochat/gpt.py, nanochat/flash_attention.py; "),
        (["folder=CLONE", "nanogpt=HERE"], "nanogpt=HERE has no model.py; "),
        (["folder=CLONE", "passes=0"], "passes=0 must be at least 1"),
    ],
)
def test_refused_in_one_line_before_any_run(clone, tmp_path, monkeypatch, arguments, words):
    here = tmp_path / "here"
    named = {"HERE": str(here), "CLONE": str(clone)}
    for name, path in named.items():
        arguments = [argument.replace(name, path) for argument in arguments]
        words = words.replace(name, path)
    monkeypatch.setattr(sys, "argv", ["nanochat", *arguments])
    with pytest.raises(SystemExit) as end:
        lab.nanochat.main()
    assert words in end.value.code and "\n" not in end.value.code
