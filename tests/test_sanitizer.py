"""Every Triton kernel of the project under NVIDIA's compute-sanitizer: memory outside its tensors,
races in shared memory.

As a program, `python tests/test_sanitizer.py portable,hopper,model`, it makes the calls that the
test watches.
"""

import os
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from attention import get_backend
from attention.kernels.select import why_not_hopper
from conformance.cases import Case, run

ROOT = Path(__file__).parents[1]
MODEL, HOPPER = ROOT / "model" / "kernels", ROOT / "attention" / "kernels" / "hopper"
DOCUMENTS = {"document_ids": True}
CALLS = [
    {},
    {"num_queries": 130, "causal": False},
    {"num_kv_heads": 1},
    {"optional": {"window": 70}},
    {"optional": DOCUMENTS},
    {"batch": 2, "num_queries": 400, "num_keys": 400, "optional": DOCUMENTS},  # some are long
]
# Racecheck reports these lines of the Hopper kernels and the MLP's. docs/hopper.md says why their
# accesses are ordered. A warp stores numbers, and one of its threads hands them over at a barrier.
# Triton's own code for divided warps keeps words in shared memory. Of the word that the forward has
# in common with the backward it reports nothing.
ORDERED = {
    "": (
        "_rows.index(item % STAGES).store(",
        "def forward_kernel(",
        "def backward_kernel(",
        "def mlp_kernel(",
    ),
    "backward_kernel": ("word.store(", "word.load("),
}
PORTABLE_CALLS = [
    {"dtype": torch.float32},
    {"optional": {"softcap": 5.0}},
    {"num_queries": 130, "num_keys": 130, "head_dim": 256},
]


def call(kernel: str, dtype: torch.dtype = torch.bfloat16, **fields: Any) -> None:
    """One attention, forward and backward. fields: those of Case that are not as usual."""
    case = Case(**{"num_queries": 200, "num_keys": 200, "head_dim": 64} | fields)
    backend = get_backend("triton", kernel=kernel)
    check(*run(backend, *case.make(dtype, "cuda")).values())


def check(*results: torch.Tensor) -> None:
    assert all(x.isfinite().all() for x in results)


def model_kernels() -> None:
    """The kernels of the loss and of the norms."""
    from model.kernels.loss import cross_entropy_in_place
    from model.kernels.norm import add_norm_backward, add_norm_forward

    logits = torch.randn(40, 1008, device="cuda", dtype=torch.bfloat16)
    targets = torch.arange(40, device="cuda")
    check(cross_entropy_in_place(logits, targets, 1000, -100, True))
    x, branch = torch.randn(2, 40, 100, device="cuda")
    weight, bias = torch.ones(2, 100, device="cuda")
    total, y, statistics = add_norm_forward(
        x, branch.bfloat16(), weight, bias, 1e-5, True, torch.bfloat16
    )
    check(*add_norm_backward(x, y, total, weight, statistics, torch.bfloat16, True))


def mlp_kernel() -> None:
    from model.kernels.mlp import linear_gelu, product_gelu_backward

    # 12 blocks of tokens for 11 programs of each block of columns: one has two tiles
    x, d_y = torch.randn(2, 1500, 256, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(3072, 256, device="cuda", dtype=torch.bfloat16)
    results = linear_gelu(x, weight, torch.ones(3072, device="cuda"))
    results += product_gelu_backward(d_y, weight.mT.contiguous(), results[0])
    check(*results)


def main(what: str) -> None:
    for name in what.split(","):
        if name in ("model", "mlp"):
            (model_kernels if name == "model" else mlp_kernel)()
            continue
        for options in CALLS:
            for head_dim in (64, 128) if name == "hopper" else (40, 64, 128):
                call(name, head_dim=head_dim, **options)
        for options in PORTABLE_CALLS if name == "portable" else []:
            call(name, **options)


def unexplained(report: str, sources: dict[str, list[str]]) -> list[str]:
    """The reported pairs of accesses of which neither is in a line of ORDERED. sources: each file's
    lines.

    The compiler inlines functions of other files into a kernel. It may give the kernel's next lines
    the name of such a file. So each number is looked up in the kernel's own file too.
    """
    found = []
    for pair in re.split(r"(?=Error: Race reported)", report)[1:]:
        ordered = [each for kernel in ORDERED if kernel in pair for each in ORDERED[kernel]]
        places = re.findall(r" at (\w+)_kernel\S* in (\w+)\.py:(\d+)", pair)
        lines = [
            line
            for kernel, name, number in places
            for file in (f"{kernel}.py", f"{name}.py")
            for line in sources.get(file, [])[int(number) - 1 : int(number)]
        ]
        if not any(each in line for line in lines for each in ordered):
            found.append(pair)
    return found


def test_only_the_ordered_lines_are_explained():
    sources = {
        "primitives.py": ["word.store(x)", "expect(y)", "expect(y)"],
        "backward.py": ["z", "z", "lo_rows.index(item % STAGES).store(x)"],
        "forward.py": ["z", "z", "z"],
    }
    race = (
        "Error: Race reported between Write access at {0}_kernel+0x10 in primitives.py:{1}\n"
        " and Read access at {0}_kernel+0x20 in {0}.py:1\n"
    )
    races = {x: race.format(*x) for x in product(("backward", "forward"), (1, 2, 3))}
    left = unexplained("".join(races.values()), sources)
    # the word is ordered in the backward alone, and the store is the backward's
    explained = {("backward", 1), ("backward", 3)}
    assert left == [pair for x, pair in races.items() if x not in explained]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("compute-sanitizer") is None,
    reason="compute-sanitizer is not installed (it comes with the CUDA toolkit)",
)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("what", ["portable,model", "hopper", "mlp"])
def test_the_sanitizer_finds_nothing(what, tool):
    from tests.command import python_path  # not in the process that it watches

    if what in ("hopper", "mlp") and (
        why := why_not_hopper(device=torch.device("cuda"), dtype=torch.bfloat16, head_dim=64)
    ):
        pytest.skip(why)
    # each tensor an allocation of its own, past whose end nothing else lies
    environment = os.environ | {
        "PYTHONPATH": python_path(ROOT),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    command = ["compute-sanitizer", "--tool", tool, sys.executable, __file__, what]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    if what in ("hopper", "mlp") and tool == "racecheck":
        assert "RACECHECK SUMMARY" in done.stdout
        paths = [path for folder in (MODEL, HOPPER) for path in folder.glob("*.py")]
        sources = {path.name: path.read_text().splitlines() for path in paths}
        assert not unexplained(done.stdout, sources)
    else:
        clean = "0 errors" if tool == "memcheck" else "0 hazards"
        assert clean in done.stdout, done.stdout[-3000:]


if __name__ == "__main__":
    main(sys.argv[1])
