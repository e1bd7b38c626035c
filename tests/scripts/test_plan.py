"""`python -m scripts.plan`: the peaks that were measured, what it prints and writes, and one line
for each thing that can be wrong.
"""

import json
import re
from pathlib import Path

import pytest
import torch

from scripts import plan
from scripts.traffic import Call, fused, naive, tile_bytes
from tests.command import run, summary, tiny
from training.record.memory import GIB

SLOW = pytest.mark.slow
OWN = "tests.user_backends:RIGHT"
RESULTS = Path(__file__).resolve().parents[2] / "results"


@pytest.fixture
def run_plan(monkeypatch, capsys):
    """run_plan("key=value", ...): what it printed; SystemExit carries its complaint."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(*arguments: str) -> str:
        plan.main(arguments)
        return capsys.readouterr().out

    return run


def peak_of(*overrides: str) -> float:
    """GiB of a step under the one attention that the overrides name."""
    (name,) = (each for each in overrides if each.startswith("attention="))
    others = [each for each in overrides if each != name]
    asked = plan.Options(attention=[name.removeprefix("attention=")], overrides=others)
    (planned,) = plan.plan_all(asked).values()
    return plan.step_bytes(planned, planned.config.batch_size)["peak"] / GIB


def measured_runs() -> dict[str, tuple[list[str], float]]:
    """Overrides and peak GiB of runs on an H200 and an H100, most of them compiled."""
    runs = json.loads((RESULTS / "training_peaks_h200.json").read_text())["runs"]
    found = {" ".join(each["overrides"]): each for each in runs}
    found = {name: (row["overrides"], row["memory/peak_gib"]) for name, row in found.items()}
    gpt2 = ["model=gpt2", "tokenizer.vocab_size=50304", "attention=triton"]
    for row in json.loads((RESULTS / "nanogpt_wall_h100.json").read_text())["runs"]:
        if row["who"] == "triton":
            length = row["seq_len"]
            overrides = [*gpt2, f"seq_len={length}", f"batch_size={32768 // length}"]
            found[" ".join(overrides)] = overrides, row["memory/peak_gib"]
    return found


# each kind of attention once, and a vocabulary that makes the loss large
SOME = ("naive", "sdpa attention.backend=cudnn", "no_max", "seq_len=32768")


@pytest.mark.parametrize(
    ("overrides", "measured"),
    [
        pytest.param(*case, id=name, marks=() if any(x in name for x in SOME) else SLOW)
        for name, case in measured_runs().items()
    ],
)
def test_within_a_tenth_of_what_a_gpu_measured(overrides, measured):
    assert peak_of(*overrides) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    "settings",
    [
        ("attention=naive",),
        ("attention=tiled", "model.checkpoint=attention"),
        ("attention=no_rescale", "attention.block_kv=16", "dtype=bf16"),
        ("attention=sdpa", "optim=muon", "tokens_per_step=1024"),
    ],
    ids=" ".join,
)
def test_the_peak_of_a_run_on_a_cpu(settings, tmp_path):
    overrides = tiny(tmp_path, "model.hidden_size=128", "batch_size=8", "steps=2", *settings)
    assert run(*overrides).code == 0
    planned = peak_of(*(each for each in overrides if not each.startswith("hydra.")))
    assert planned == pytest.approx(summary(tmp_path)["memory/peak_gib"], rel=0.05)


def test_an_attention_of_ones_own_is_counted_too():
    shape = ("model.num_layers=2", "seq_len=256", "batch_size=2", "device=cpu")
    own, ours = (peak_of(*shape, f"attention={name}") for name in (OWN, "naive"))
    assert own == ours
    assert plan.traffic_of(plan.plan_all(plan.Options([OWN]))[OWN]) is None


def test_the_matrix_of_scores_and_the_batches_that_fit(run_plan):
    model = ("model=gpt2", "model.num_layers=2", "seq_len=4096", "batch_size=4")
    output = run_plan(*model, "attention=naive,triton", "gpu=a100-40")
    parts = {words: cells(output, words) for words in plan.PARTS.values()}
    naive_peak, triton_peak = totals = parts.pop(plan.PARTS["peak"])
    # 2 layers, 4 sequences, 12 heads, 4096 x 4096, in float32 and again in bfloat16
    assert naive_peak - triton_peak > 2 * 4 * 12 * 4096**2 * 6 / 2**30
    for total, column in zip(totals, zip(*parts.values(), strict=True), strict=True):
        assert sum(column) == pytest.approx(total, abs=0.01)
    naive_batch, triton_batch = map(
        int, re.findall(r"batch_size is about (\d+)$", output, re.MULTILINE)
    )
    assert 4 <= naive_batch < triton_batch
    available = plan.GPUS["a100-40"].gib - plan.CONTEXT_GIB
    for name, most in (("naive", naive_batch), ("triton", triton_batch)):
        more = [
            peak_of(*model[:3], f"attention={name}", f"batch_size={n}") for n in (most, most + 1)
        ]
        assert more[0] <= available < more[1]


def test_a_compiled_run_that_keeps_less_has_no_largest_batch(run_plan):
    """The eager step keeps q, k and v: measured were 22.4 GiB where it counts 35."""
    output = run_plan("model.checkpoint=attention", "seq_len=64", "attention=sdpa", "gpu=l4")
    assert "sdpa: fits" in output and "batch_size" not in output


def cells(output: str, words: str) -> list[float]:
    line = next(line for line in output.splitlines() if line.startswith(words))
    return [float(number) for number in line.removeprefix(words).replace(",", "").split()]


def test_an_assumption_comes_first(run_plan):
    model = ("seq_len=64", "attention=naive", "model.num_layers=1")
    assert "gpu=h200" in run_plan(*model).splitlines()[0]
    for given in ("gpu=a100-80", "device=cpu"):
        assert run_plan(*model, given).startswith("model=")


# arguments, and what the refusal names
REFUSED = {
    "model=gpt3": "gpt2",
    "modl=gpt2": "model?",
    "steps=abc": "steps=abc",
    "attention=flash": "tiled",
    "attention=": "'attention'",
    "gpu=voodoo2": "a100-40",
    "seq_len=0": "seq_len=0",
    "attention=naive attention.block_q=16": "block_q",
    "ranks=2": "ranks=2",
    "resume=outputs/x": "resume=outputs/x",
}


@pytest.mark.parametrize(("arguments", "named"), REFUSED.items(), ids=REFUSED)
def test_refused_in_one_line(run_plan, arguments, named):
    with pytest.raises(SystemExit, match="^plan: ") as error:
        run_plan(*arguments.split())
    assert named in error.value.code and "\n" not in error.value.code


def test_a_recipe_may_set_a_key_that_one_attention_does_not_read(run_plan):
    arguments = ("device=cpu", "experiment=break_it", "seq_len=32", "attention.block_kv=8")
    assert re.search("naive +tiled", run_plan(*arguments, "attention=naive,tiled"))
    with pytest.raises(SystemExit, match="attention.block_kv=8 .*attention=naive"):
        run_plan(*arguments, "attention=naive")


def test_traffic_by_hand():
    """One head, 256 queries and keys, D=64, bfloat16, causal, tiles of 128 x 64: two query tiles,
    of which one reads half of K and V, the other all.
    """
    call, line = Call(1, 1, 256, 64, 2), 256 * 64 * 2
    assert fused(call) == 2 * line + 3 * line + 4 * 256
    assert call.flops == 4 * 256 * 256 * 64 / 2
    # naive moves far more than four matrices of scores: float32, and every step on its own
    assert naive(call) > 5 * (4 * 256 * 256 * 2 + 4 * line)
    # a window of 64: the second tile sees keys from 65 on, which lie in the tile of keys from 64
    assert fused(Call(1, 1, 256, 64, 2, window=64)) == 2 * line + 2 * (128 + 192) * 128 + 4 * 256
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
