"""Runs whose layers have windows, a softcap, ALiBi or a score_mod: refused where the attention
cannot, kept by a resume, named in a sweep, and read as trained by the commands.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attention import get_backend, kernel_choice
from model import GPT
from scripts import cross_eval, sample, trace
from scripts.plan import Options, plan_all, traffic_of
from tests.command import cache_folder, metrics, run, summary, tiny
from training.launch.command_line import compose
from training.loop.device import autocast_to
from training.loop.schedule import check_model, chosen_attention, run_compiles, schedule_summary

FUNCTION = ("attention.window=9", "attention.pattern=SL", "attention.softcap=1")
ALIBI = (*FUNCTION, "model.positions=alibi", "model.num_layers=2")
TILES = ("attention.block_q=8", "attention.block_kv=8")
VARIANT = ["tiled", "block_q=8", "block_kv=8", "window=9", "pattern=SL", "softcap=1"]
CPU = {"dtype": torch.float32, "device": torch.device("cpu")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Six steps with everything but a score_mod."""
    run_dir = tmp_path_factory.mktemp("trained")
    done = run(*tiny(run_dir, *ALIBI, *TILES, "steps=6"))
    assert done.code == 0, done.output
    assert f"attention={' '.join(VARIANT)}" in done.output
    return run_dir


def test_a_score_mod_may_hide_keys():
    config = compose("attention.score_mod='tests.user_backends:HIDES_A_DIAGONAL'")
    check_model(config, get_backend("tiled"), **CPU)


@pytest.mark.parametrize(("model", "dtype"), [("gpt2", torch.float32), ("modern", torch.bfloat16)])
def test_an_attention_is_tried_out_on_what_the_model_hands_over(model, dtype):
    """Views of one projection; QK-norm and RoPE make other ones."""
    layouts, naive = set(), get_backend("naive")

    def noting(q, k, v, **arguments):
        if torch.is_grad_enabled():
            layouts.add(tuple((x.shape, x.stride(), x.dtype) for x in (q, k, v)))
        return naive.fn(q, k, v, **arguments)

    own = replace(naive, name="of_a_user:BACKEND", fn=noting, exact=False)
    sizes = ["model.num_layers=1", "model.num_heads=4", "model.hidden_size=64", "batch_size=2"]
    config = compose(f"model={model}", "seq_len=48", *sizes)
    check_model(config, own, dtype=dtype, device=torch.device("cpu"))
    tried = layouts.copy()
    layouts.clear()
    tokens = torch.zeros(2, 48, dtype=torch.int64)
    with autocast_to(dtype, torch.device("cpu")):
        GPT(config.model, vocab_size=9, backend=own)(tokens)
    assert len(layouts) == 1 and layouts <= tried


@pytest.mark.parametrize(
    ("asked", "kernel"),
    [
        ("attention.softcap=3", "attention.kernels.score_mods:softcap"),
        ("seq_len=32", ""),
        (
            "attention.score_mod='tests.user_backends:HALVED_WITH_KERNEL'",
            "conformance.every_index_kernel:every_index",
        ),
    ],
)
def test_a_score_mods_kernel_decides_about_the_kernels(monkeypatch, asked, kernel):
    given = {}

    def choice(backend, **inputs):
        given.update(inputs)
        return kernel_choice(backend, **inputs)

    monkeypatch.setattr("training.loop.schedule.kernel_choice", choice)
    config = compose("attention=triton", asked)
    described = schedule_summary(config, chosen_attention(config), **CPU)
    assert described["kernel"] == "portable" and given["score_mod"] == kernel


def test_a_score_mod_in_a_compiled_graph():
    config = compose("attention.score_mod='tests.user_backends:HALVED'")
    for name, fits in {"triton": True, "naive": True, "tiled": False, "flex": False}.items():
        assert run_compiles(config, get_backend(name), "cuda") == fits, name


def test_a_run_says_what_its_layers_compute(trained):
    row, last = summary(trained), metrics(trained)[-1]
    assert row["function"] == {"window": 9, "pattern": "SL", "softcap": 1.0}
    assert row["variant"].split() == VARIANT
    assert last["val/loss"] == pytest.approx(last["val/loss_exact"], abs=1e-5)
    assert last["attention/out_error"] < 1e-5 and last["attention/dk_error"] < 1e-4


def test_another_attention_takes_over_the_function(trained, tmp_path):
    """A window belongs to the model, so another backend on resume keeps it."""
    run_dir = Path(shutil.copytree(trained, tmp_path / "run"))
    assert run(f"resume={run_dir}", "attention=naive", "steps=8").code == 0
    variant = summary(run_dir)["variant"]
    assert variant.endswith("naive window=9 pattern=SL softcap=1 after step 6")
    done = run(f"resume={run_dir}", "attention=sdpa", "steps=9")
    assert "attention.window=9" in done.complaint()


def test_a_score_mod_trains(tmp_path):
    done = run(*tiny(tmp_path, "attention.score_mod='tests.user_backends:HALVED'"))
    assert done.code == 0, done.output
    last = metrics(tmp_path)[-1]
    assert last["val/loss"] == pytest.approx(last["val/loss_exact"], abs=1e-6)
    assert last["attention/out_error"] < 1e-5
    assert summary(tmp_path)["variant"] == "tiled score_mod=tests.user_backends:HALVED"


def test_scripts_read_the_weights_as_they_were_trained(trained, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TILEGPT_CACHE", cache_folder())
    cross_eval.main([str(trained), "device=cpu", "sequences=4", f"out={tmp_path}/table.json"])
    row, _ = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert row["loss"] == metrics(trained)[-1]["val/loss_exact"]
    assert "window=9 pattern=SL softcap=1" in capsys.readouterr().out
    written = []
    for name, cache in (("tiled", "true"), ("naive", "false")):
        asked = [f"run={trained}", "tokens=40", "temperature=0", "device=cpu"]
        sample.main([*asked, f"attention={name}", f"cache={cache}"])
        written.append(capsys.readouterr().out)
    assert written[0] == written[1]
    page = f"out={tmp_path}/trace.html"
    trace.main([f"run={trained}", "layer=0", "head=1", page])
    told = capsys.readouterr().out
    assert "window=9, softcap=1, alibi=0.00390625" in told
    trace.main([f"run={trained}", "layer=1", page])  # an L of the pattern
    assert "window" not in capsys.readouterr().out.splitlines()[0]


def test_the_plan_of_a_windowed_run(monkeypatch):
    monkeypatch.setenv("TILEGPT_CACHE", cache_folder())
    windowed = ["seq_len=4096", "batch_size=1", "device=cpu", "attention.window=512"]
    planned = plan_all(Options(overrides=windowed))
    assert list(planned) == ["naive", "triton"]
    full = plan_all(Options(attention=["triton"], overrides=windowed[:-1]))["triton"]
    assert traffic_of(planned["triton"]) < 0.4 * traffic_of(full)
    with pytest.raises(ValueError, match="attention=sdpa"):
        plan_all(Options(attention=["sdpa"], overrides=windowed))
