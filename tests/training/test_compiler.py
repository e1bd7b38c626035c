"""torch.compile's import and caches."""

import os

import pytest

from tests import processes
from training.loop import compiler


def test_triton_has_one_cache_and_a_users_own_stays(monkeypatch):
    """Inductor would set it in runs that compile, and not in runs that find its graphs."""
    knobs = pytest.importorskip("triton").knobs
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    default = knobs.cache.dir
    compiler.keep_compiled()
    assert os.environ["TRITON_CACHE_DIR"] == default
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    compiler.keep_compiled()
    assert os.environ["TRITON_CACHE_DIR"] == "mine"


def test_changed_operators_are_traced_again(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "ROOT", tmp_path)
    tags = set()
    for name in ("attention/op.py", "model/kernels/op.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        for text in ("a", "b"):
            (tmp_path / name).write_text(text)
            tags.add(compiler.code_of_operators())
    assert len(tags) == 4


# a fused block is a graph with an autograd.Function, as this one is
PROGRAM = """
import torch
from torch._dynamo.utils import counters
from training.loop.compiler import keep_compiled

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy * 2

keep_compiled()
x = torch.ones(3, device="DEVICE", requires_grad=True)
torch.compile(Double.apply)(x).sum().backward()
assert x.grad.tolist() == [2, 2, 2]
print(dict(counters["aot_autograd"]))
"""


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def test_a_later_process_finds_the_graph(tmp_path, device):
    """Unless the tag says that operators changed."""
    variables = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def run(**more: str) -> str:
        program = PROGRAM.replace("DEVICE", device)
        return processes.run("-c", program, check=True, env=variables | more).stdout

    assert "'autograd_cache_miss': 1" in run()
    assert "'autograd_cache_hit': 1" in run()
    assert "'autograd_cache_miss': 1" in run(TORCH_COMPILE_CACHE_KEY_TAG="other")
