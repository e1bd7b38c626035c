"""`python -m scripts.plan`: the peaks that were measured, and what it prints."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from scripts import plan
from scripts.traffic import Call, fused, naive, tile_bytes
from tests.command import run, summary, tiny
from training.record.memory import GIB

SLOW = pytest.mark.slow
OWN = "tests.user_backends:RIGHT"
RESULTS = Path(__file__).resolve().parents[2] / "results"


def peak_of(*overrides: str) -> float:
    """GiB of a step under the one attention that the overrides name."""
    (name,) = (each for each in overrides if each.startswith("attention="))
    others = [each for each in overrides if each != name]
    asked = plan.Options(attention=[name.removeprefix("attention=")], overrides=others)
    (planned,) = plan.plan_all(asked).values()
    return plan.step_bytes(planned, planned.config.batch_size)["peak"] / GIB


# runs on an H200, most of them compiled
MEASURED = json.loads((RESULTS / "training_peaks_h200.json").read_text())["runs"]
# a vocabulary that makes the loss large, on an H100: see nanogpt_wall_h100.json
WALL = "model=gpt2 tokenizer.vocab_size=50304 attention=triton seq_len=32768 batch_size=1"
MEASURED.append({"overrides": WALL.split(), "memory/peak_gib": 13.54})
# that vocabulary, a matrix of scores, and none
SOME = ("naive", "sdpa attention.backend=cudnn", WALL)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=name, marks=() if any(x in name for x in SOME) else SLOW)
        for row in MEASURED
        if (name := " ".join(row["overrides"]))
    ],
)
def test_within_a_tenth_of_what_a_gpu_measured(row):
    assert peak_of(*row["overrides"]) == pytest.approx(row["memory/peak_gib"], rel=0.1)


@pytest.mark.parametrize(
    "settings",
    [
        ("attention=no_rescale", "attention.block_kv=16", "dtype=bf16"),
        ("attention=sdpa", "optim=muon", "tokens_per_step=1024"),
        pytest.param(("attention=naive",), marks=SLOW),
        pytest.param(("attention=tiled", "model.checkpoint=attention"), marks=SLOW),
    ],
    ids=" ".join,
)
def test_the_peak_of_a_run_on_a_cpu(settings, tmp_path):
    overrides = tiny(tmp_path, "model.hidden_size=128", "batch_size=8", "steps=2", *settings)
    assert run(*overrides).code == 0
    planned = peak_of(*(each for each in overrides if not each.startswith("hydra.")))
    assert planned == pytest.approx(summary(tmp_path)["memory/peak_gib"], rel=0.05)


def test_an_attention_of_ones_own_is_counted_too():
    shape = ("model.num_layers=1", "seq_len=64", "batch_size=2", "device=cpu")
    own, ours = (peak_of(*shape, f"attention={name}") for name in (OWN, "naive"))
    assert own == ours
    assert plan.traffic_of(plan.plan_all(plan.Options([OWN]))[OWN]) is None


def test_the_matrix_of_scores_and_the_batches_that_fit(typed):
    model = ("model=gpt2", "model.num_layers=1", "seq_len=4096", "batch_size=4")
    output = typed("plan", *model, "attention=naive,triton", "gpu=l4").out
    parts = {words: cells(output, words) for words in plan.PARTS.values()}
    naive_peak, triton_peak = totals = parts.pop(plan.PARTS["peak"])
    # 4 sequences, 12 heads, 4096 x 4096, in float32 and again in bfloat16
    assert naive_peak - triton_peak > 4 * 12 * 4096**2 * 6 / 2**30
    for total, column in zip(totals, zip(*parts.values(), strict=True), strict=True):
        assert sum(column) == pytest.approx(total, abs=0.01)
    naive_batch, triton_batch = map(
        int, re.findall(r"batch_size is about (\d+)$", output, re.MULTILINE)
    )
    assert 4 <= naive_batch < triton_batch
    available = plan.GPUS["l4"].gib - plan.CONTEXT_GIB
    sizes = (naive_batch, naive_batch + 1)
    fits, too_large = (peak_of(*model[:3], "attention=naive", f"batch_size={n}") for n in sizes)
    assert fits <= available < too_large


def cells(output: str, words: str) -> list[float]:
    line = next(line for line in output.splitlines() if line.startswith(words))
    return [float(number) for number in line.removeprefix(words).replace(",", "").split()]


@pytest.mark.parametrize(
    ("name", "gib", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "h100"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40"),
        ("NVIDIA L40S", 44.4, "l40s"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.6, None),
    ],
)
def test_the_card_in_this_machine(monkeypatch, name, gib, gpu):
    here = SimpleNamespace(name=name, total_memory=gib * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: here)
    assert plan.gpu_here() == gpu


def test_an_assumption_comes_first_and_no_batch_size_is_guessed(typed):
    """A compiled step keeps less than the eager one: measured were 22.4 GiB for a count of 35."""
    model = ("seq_len=64", "attention=sdpa", "model.num_layers=1", "model.checkpoint=attention")
    assert "gpu=h200" in typed("plan", *model).out.splitlines()[0]
    output = typed("plan", *model, "gpu=l4").out
    assert output.startswith("model=") and "sdpa: fits" in output and "batch_size" not in output
    assert typed("plan", *model, "device=cpu").out.startswith("model=")


def test_a_recipe_may_set_a_key_that_one_attention_does_not_read(typed):
    small = ("device=cpu", "model.num_layers=1", "seq_len=32")
    arguments = (*small, "experiment=break_it", "attention.block_kv=8")
    assert re.search("naive +tiled", typed("plan", *arguments, "attention=naive,tiled").out)
    with pytest.raises(SystemExit, match="attention.block_kv=8 .*attention=naive"):
        typed("plan", *arguments, "attention=naive")


def test_traffic_by_hand():
    """One head, 256 queries and keys, D=64, bfloat16, causal, tiles of 128 x 64: two query tiles,
    of which one reads half of K and V, the other all.
    """
    call, line = Call(1, 1, 256, 64, 2), 256 * 64 * 2
    assert fused(call) == 2 * line + 3 * line + 4 * 256
    assert call.flops == 4 * 256 * 256 * 64 / 2
    # naive moves far more than four matrices of scores: float32, and every step on its own
    assert naive(call) > 5 * (4 * 256 * 256 * 2 + 4 * line)
    # a window of 65: the second tile sees keys from 64 on, where a tile of keys begins
    assert fused(Call(1, 1, 256, 64, 2, window=65)) == 2 * line + 2 * (128 + 192) * 128 + 4 * 256
    # a kernel's traffic grows with the square of the length
    shorter, longer = (fused(Call(1, 8, length, 64, 2)) for length in (32768, 65536))
    assert longer == pytest.approx(4 * shorter, rel=0.02)


def test_what_fits_on_the_chip():
    assert tile_bytes(128, 64, 64, 2) == ((128 + 4 * 64) * 64 * 2, 4 * 128 * (64 + 64))
    # 256 x 256 at head_dim 64 is said to fit: its scores alone fill the registers of a
    # multiprocessor
    *_, largest = plan.tile_table(Call(1, 1, 1, 64, 2), 227)
    assert largest[0] == "256 x 256" and largest[-1] == "no"
    tables = [plan.tile_table(Call(1, 1, 1, 128, 2), kib) for kib in (163, 99)]
    fits = [{row[0]: row[-1] for row in table}["128 x 128"] for table in tables]
    assert fits == ["yes", "no"]
