"""`python -m scripts.plan`: what it prints, what it writes, and one line for each thing that can be
wrong.
"""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from config import ModelConfig, RunConfig
from scripts import plan
from tests import processes
from training.command_line import compose
from training.traffic import (
    Call,
    fused,
    naive,
    printed_fused,
    printed_naive,
    tile_bytes,
    visited_keys,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run_plan(monkeypatch, capsys):
    """run_plan("key=value", ...): what it printed; SystemExit carries its complaint."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["plan", *arguments])
        plan.main()
        return capsys.readouterr().out

    return run


def cells(output: str, words: str) -> list[float]:
    line = next(line for line in output.splitlines() if line.startswith(words))
    return [float(number) for number in line.removeprefix(words).replace(",", "").split()]


@pytest.mark.slow
def test_the_line_of_the_help_runs_as_typed(run_plan):
    line = re.search(r"python -m (scripts\.plan .*)", run_plan("--help"))[1]
    done = processes.run("-m", *line.split())
    assert done.returncode == 0, done.stderr
    assert "model=gpt2: 129,944,832 parameters, vocabulary 50,257" in done.stdout
    assert "a100-40's data sheet: from 201 FLOP/byte" in done.stdout


def test_what_is_taken_for_granted_comes_first(run_plan):
    model = ("seq_len=64", "attention=naive")
    assert run_plan(*model).startswith(
        "planned for gpu=h200, an assumption: no GPU is known here; gpu=NAME plans for another"
    )
    assert run_plan(*model, "gpu=l4").startswith("model=") and run_plan(
        *model, "device=cpu"
    ).startswith("model=")


def test_what_is_on_the_host_is_shown_and_is_no_part_of_the_peak(run_plan):
    settings = (
        "model=gpt2",
        "seq_len=8192",
        "batch_size=2",
        "attention=triton",
        "model.checkpoint=block",
    )
    here, there = (
        run_plan(*settings, "compile=false"),
        run_plan(*settings, "compile=false", "model.offload=true"),
    )
    inputs = 12 * 2 * 8192 * 768 * 4 / 2**30
    assert "in the host's memory" not in here and cells(
        there, "block inputs, in the host's memory"
    ) == [pytest.approx(inputs, abs=0.01)]
    # one block's input comes back for its backward pass
    assert cells(here, "peak of a step")[0] - cells(there, "peak of a step")[0] == pytest.approx(
        inputs * 11 / 12, abs=0.02
    )


def test_parts_add_up_and_naive_has_the_matrix(run_plan):
    output = run_plan("model=gpt2", "seq_len=8192", "batch_size=4", "attention=naive,triton")
    parts = [
        cells(output, words) for part, words in plan.PARTS.items() if part not in ("peak", "host")
    ]
    for total, column in zip(
        cells(output, "peak of a step"), zip(*parts, strict=True), strict=True
    ):
        assert sum(column) == pytest.approx(total, abs=0.05)
    # 12 layers, 4 sequences, 12 heads, 8192 x 8192, in float32 and again in bfloat16
    assert cells(output, "attention: N x N probabilities") == [12 * 4 * 12 * 8192**2 * 6 / 2**30, 0]
    fits = dict(re.findall(r"^(\d+) GB +.*?(yes|no) \(batch_size \d+\)$", output, re.MULTILINE))
    assert fits["8"] == "no" and fits["24"] == "yes"


def test_larger_cards_take_no_smaller_batches(run_plan):
    output = run_plan("model=gpt2", "seq_len=1024", "attention=triton")
    batches = [int(n) for n in re.findall(r"GB +(?:yes|no) \(batch_size (\d+)\)", output)]
    assert (
        len(batches) == len(plan.CARD_SIZES)
        and batches == sorted(batches)
        and batches[-1] > batches[0] > 0
    )


def test_measured_on_this_machine(run_plan):
    output = run_plan(
        "attention=tiled,naive",
        "model.num_layers=1",
        "seq_len=128",
        "batch_size=2",
        "device=cpu",
        "measure=true",
    )
    errors = [abs(float(x)) for x in re.findall(r"the prediction is ([+-][\d.]+)% off", output)]
    assert len(errors) == 2 and max(errors) < 5, output


def test_written(run_plan, tmp_path):
    run_plan("attention=sdpa", "tokenizer=bpe", "dtype=fp16", f"out={tmp_path / 'plan.json'}")
    data = json.loads((tmp_path / "plan.json").read_text())
    (row,) = data["rows"]
    assert (
        row["vocab_size"] == 8193 and row["dtype"] == "float16" and row["model"]["name"] == "tiny"
    )
    assert row["plan"]["peak"] > row["plan"]["parameters"] > 0
    assert {"hardware", "versions", "commit"} <= data["environment"].keys() and str(
        tmp_path
    ) not in json.dumps(data)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["model=gpt3"], "gpt2"),
        (["modl=gpt2"], "modl=gpt2: there is no key 'modl'; did you mean model?"),
        (["steps=abc"], "steps=abc: Value 'abc' of type 'str' could not be converted to Integer"),
        (["attention=flash"], "tiled"),
        (["attention="], "attention="),
        (["gpu=voodoo2"], "a100-40"),
        (["measure=yes"], "measure=yes"),
        (["seq_len=0"], "seq_len=0"),
        (["attention=naive", "attention.block_q=16"], "block_q"),
        (["attention=sdpa", "measure=true"], "add device=cpu"),
        (["ranks=2"], "ranks=2: there is no key 'ranks'"),
        (["attention=naive", "attention.block_q=8"], "block_q=8 has no effect: attention=naive"),
        (["resume=outputs/x"], "resume=outputs/x: a step of a new model is the same; leave it out"),
        (["init_from=/nope"], "init_from=/nope: a step of a new model is the same; leave it out"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_refused_in_one_line(run_plan, arguments, words):
    with pytest.raises(SystemExit) as error:
        run_plan(*arguments)
    assert (
        error.value.code.startswith("plan: ")
        and words in error.value.code
        and "\n" not in error.value.code
    )


def test_a_recipe_may_set_what_one_attention_does_not_read(run_plan):
    arguments = ("device=cpu", "experiment=break_it", "attention.block_kv=8")
    assert re.search("naive +tiled", run_plan(*arguments, "attention=naive,tiled"))
    with pytest.raises(SystemExit, match="attention.block_kv=8 has no effect: attention=naive"):
        run_plan(*arguments, "attention=naive")


def test_last_write_has_its_own_vocabulary():
    config = compose("data=last_write")
    assert plan.vocab_size_of(config) == 8 * 8 + 8 + 8
    assert plan.vocab_size_of(RunConfig(model=ModelConfig())) == 257


# traffic


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 5, 16, 17, 40, 500])
def test_keys_are_counted_as_by_walking_the_tiles(window, causal):
    """A regression test: the walk of seq_len=9000000000000000000 never ended."""

    def walked(n: int, block_q: int, block_kv: int) -> int:
        total = 0
        for start in range(0, n, block_q):
            last = min(start + block_q, n) if causal else n
            first = max(start + 1 - (window or n), 0)
            total += min(-(-last // block_kv) * block_kv, n) - first // block_kv * block_kv
        return total

    for n in (1, 2, 15, 16, 17, 31, 63, 64, 65, 100, 129):
        for tile in ((1, 1), (8, 16), (16, 8), (16, 16), (12, 7), (7, 12), (64, 3), (200, 300)):
            found = visited_keys(n, *tile, causal=causal, window=window)
            assert found == walked(n, *tile), (n, tile)
    assert visited_keys(9 * 10**18, 128, 64, causal=causal, window=window) > 0


def test_keys_are_read_again_for_every_query_tile():
    assert visited_keys(1024, 128, 64, causal=False) == 8 * 1024
    assert visited_keys(1024, 128, 64) == sum(range(128, 1025, 128))
    assert visited_keys(1000, 128, 64) == sum(
        min(x, 1000) for x in (128, 256, 384, 512, 640, 768, 896, 1000)
    )


def test_traffic_of_a_kernel_grows_with_the_square_and_the_printed_one_does_not():
    sizes = {length: Call(1, 8, length, 64, 2) for length in (32768, 65536)}
    real, printed = ([f(sizes[n]).bytes for n in sizes] for f in (fused, printed_fused))
    assert printed[1] == 2 * printed[0]
    assert real[1] == pytest.approx(4 * real[0], rel=0.02)


def test_traffic_by_hand():
    """One head, 256 queries and keys, D=64, bfloat16, tiles of 128 x 64, no mask: two query tiles,
    each reads all of K and V.
    """
    call = Call(1, 1, 256, 64, 2, causal=False)
    found = fused(call)
    assert found.read == 256 * 64 * 2 + 2 * 2 * 256 * 64 * 2
    assert found.written == 256 * 64 * 2 + 256 * 4
    assert found.flops == 4 * 256 * 256 * 64
    usual = printed_naive(call)
    assert usual.bytes == (4 * 256 * 256 + 4 * 256 * 64) * 2
    # far above the diagonal of a roofline either way, and our naive moves more than the usual
    # count: float32, and every step on its own
    assert naive(call).bytes > 5 * usual.bytes


def test_what_fits_on_the_chip():
    assert tile_bytes(128, 64, 64, 2) == ((128 + 4 * 64) * 64 * 2, 4 * 128 * (64 + 64))
    # 256 x 256 at head_dim 64 is said to fit: its scores alone fill the registers of a
    # multiprocessor
    (*_, largest), (head, *rows) = plan.chip_table(64, 2), plan.chip_table(128, 2)
    assert largest[0] == "256 x 256" and set(largest[3:]) == {"no"}
    (row,) = (dict(zip(head, row, strict=True)) for row in rows if row[0] == "128 x 128")
    assert (row["8.0"], row["8.9"]) == ("yes", "no")
