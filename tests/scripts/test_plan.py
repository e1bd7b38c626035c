"""`python -m scripts.plan`: what it prints, what it writes, and one line for each thing that can be
wrong.
"""

import json
import re

import pytest
import torch

from config import ModelConfig, RunConfig
from scripts import plan
from scripts.traffic import (
    Call,
    fused,
    naive,
    printed_fused,
    printed_naive,
    tile_bytes,
    visited_keys,
)
from training.launch.command_line import compose


@pytest.fixture
def run_plan(monkeypatch, capsys):
    """run_plan("key=value", ...): what it printed; SystemExit carries its complaint."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(*arguments: str) -> str:
        plan.main(arguments)
        return capsys.readouterr().out

    return run


def cells(output: str, words: str) -> list[float]:
    line = next(line for line in output.splitlines() if line.startswith(words))
    return [float(number) for number in line.removeprefix(words).replace(",", "").split()]


def test_an_assumption_comes_first(run_plan):
    model = ("seq_len=64", "attention=naive")
    assert "gpu=h200" in run_plan(*model).splitlines()[0]
    for given in ("gpu=l4", "device=cpu"):
        assert run_plan(*model, given).startswith("model=")


def test_parts_add_up_and_naive_has_the_matrix(run_plan):
    output = run_plan("model=gpt2", "seq_len=8192", "batch_size=4", "attention=naive,triton")
    parts = {part: cells(output, words) for part, words in plan.PARTS.items()}
    totals = parts.pop("peak")
    for total, column in zip(totals, zip(*parts.values(), strict=True), strict=True):
        assert sum(column) == pytest.approx(total, abs=0.05)
    # 12 layers, 4 sequences, 12 heads, 8192 x 8192, in float32 and again in bfloat16
    assert [12 * 4 * 12 * 8192**2 * 6 / 2**30, 0] in parts.values()
    fits = dict(re.findall(r"^(\d+) GB +.*?(yes|no) \(batch_size \d+\)$", output, re.MULTILINE))
    assert fits["8"] == "no" and fits["24"] == "yes"


def test_larger_cards_take_no_smaller_batches(run_plan):
    output = run_plan("model=gpt2", "seq_len=1024", "attention=triton")
    batches = [int(n) for n in re.findall(r"GB +(?:yes|no) \(batch_size (\d+)\)", output)]
    assert len(batches) == len(plan.CARD_SIZES)
    assert batches == sorted(batches) and batches[-1] > batches[0] > 0


def test_measured_on_this_machine(run_plan):
    shape = ("model.num_layers=1", "seq_len=128", "batch_size=2", "device=cpu")
    output = run_plan("attention=tiled,naive", *shape, "measure=true")
    errors = [abs(float(x)) for x in re.findall(r"([+-][\d.]+)% off", output)]
    assert len(errors) == 2 and max(errors) < 5, output


def test_written(run_plan, tmp_path):
    run_plan("attention=sdpa", "tokenizer=bpe", "dtype=fp16", f"out={tmp_path / 'plan.json'}")
    data = json.loads((tmp_path / "plan.json").read_text())
    (row,) = data["rows"]
    assert (row["vocab_size"], row["dtype"], row["model"]["name"]) == (8193, "float16", "tiny")
    assert row["plan"]["peak"] > row["plan"]["parameters"] > 0
    assert {"hardware", "versions", "commit"} <= data["environment"].keys()
    assert str(tmp_path) not in json.dumps(data)


# arguments, and what the refusal names
REFUSED = {
    "model=gpt3": "gpt2",
    "modl=gpt2": "model?",
    "steps=abc": "steps=abc",
    "attention=flash": "tiled",
    "attention=": "attention=",
    "gpu=voodoo2": "a100-40",
    "measure=yes": "measure=yes",
    "seq_len=0": "seq_len=0",
    "attention=naive attention.block_q=16": "block_q",
    "attention=sdpa measure=true": "device=cpu",
    "ranks=2": "ranks=2",
    "resume=outputs/x": "resume=outputs/x",
    "init_from=/nope": "init_from=/nope",
}


@pytest.mark.parametrize(("arguments", "named"), REFUSED.items(), ids=REFUSED)
def test_refused_in_one_line(run_plan, arguments, named):
    with pytest.raises(SystemExit, match="^plan: ") as error:
        run_plan(*arguments.split())
    assert named in error.value.code and "\n" not in error.value.code


def test_a_recipe_may_set_a_key_that_one_attention_does_not_read(run_plan):
    arguments = ("device=cpu", "experiment=break_it", "attention.block_kv=8")
    assert re.search("naive +tiled", run_plan(*arguments, "attention=naive,tiled"))
    with pytest.raises(SystemExit, match="attention.block_kv=8 .*attention=naive"):
        run_plan(*arguments, "attention=naive")


def test_last_write_has_its_own_vocabulary():
    config = compose("data=last_write")
    assert plan.vocab_size_of(config) == 8 * 8 + 8 + 8
    assert plan.vocab_size_of(RunConfig(model=ModelConfig())) == 257


# traffic


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 17, 500])
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
