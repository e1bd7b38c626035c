"""The findings of docs/findings/, in small, and the figures of their pages."""

import json
import re

import pytest
import torch

from attention import attention, get_backend
from config import OptimConfig, RunConfig
from lab.findings import (
    agreement,
    bf16_accumulators,
    captured,
    fp8_forward,
    fp8_large_scores,
    lazy_rescaling,
    polynomial_exp2,
    repeated,
    stabilisers,
    tile_size,
    unshifted_sink,
)
from tests.command import ROOT, TINY, run
from tests.scripts.test_sample import write_run


def test_lazy_rescaling_breaks_where_the_dtype_ends(tmp_path, monkeypatch):
    out = tmp_path / "lazy.json"
    monkeypatch.setattr(lazy_rescaling, "THRESHOLDS", (0, 8, 9, 10))
    monkeypatch.setattr(lazy_rescaling, "OFFSETS", (0,))
    lazy_rescaling.main(["lengths=256", "seeds=0", f"out={out}"])
    regions = {each["dtype"]: each for each in json.loads(out.read_text())["regions"]}
    assert (regions["e4m3"]["last_safe"], regions["e4m3"]["first_broken"]) == (8, 9)
    assert all(regions[name]["first_broken"] is None for name in ("fp16", "bf16", "e5m2"))
    assert out.with_name("lazy.png").is_file()


def test_a_polynomial_is_as_good_as_its_degree():
    x = torch.linspace(-140, 0, 5001)
    errors = [
        ((polynomial_exp2.exp2(x, degree) - x.exp2()) / x.exp2())[x > -126].abs().max()
        for degree in (1, 2, 3, 4, 5)
    ]
    assert all(more > 8 * less for more, less in zip(errors, errors[1:], strict=False))
    assert errors[2] < 2e-4 and errors[-1] < 1e-6
    ends = torch.tensor([-torch.inf, -1e4])
    assert polynomial_exp2.exp2(ends, 3).tolist() == [0, 0]


def test_a_polynomial_changes_a_model_by_its_degree(tmp_path, monkeypatch):
    """Of a model whose weights are large and random."""
    write_run(tmp_path / "run")
    monkeypatch.setattr(polynomial_exp2, "SEQUENCES", 2)
    asked = ["degrees=1,3", "eighths=8", f"out={tmp_path / 'found.json'}"]
    polynomial_exp2.main([str(tmp_path / "run"), *asked])
    (run,) = json.loads((tmp_path / "found.json").read_text())["runs"]
    exact, rough, fine = run["rows"]
    assert exact["out"] < fine["out"] < 1e-3 < rough["out"]
    assert fine["log_p"]["mean"] < rough["log_p"]["mean"] / 10
    with pytest.raises(SystemExit, match="eighths=9"):
        polynomial_exp2.main([str(tmp_path / "run"), "eighths=9"])


def trained(sweep, *overrides):
    """Runs of one recipe, in small, of one seed."""
    small = [each for each in TINY if not each.startswith(("seq_len", "steps"))]
    done = run(*overrides, *small, "steps=4", "seed=0", f"hydra.sweep.dir={sweep}")
    assert done.code == 0, done.output


def test_a_tile_size_tells_a_broken_attention_without_a_reference():
    draw = torch.Generator().manual_seed(0)
    layer = captured.Captured(*(torch.randn(1, 2, 128, 16, generator=draw) for _ in range(4)))
    apart = {
        name: tile_size.difference(get_backend(name), layer, (16, 32), "float32")
        for name in ("tiled", "no_rescale", "no_max")
    }
    assert apart["tiled"] < 1e-5 and apart["no_max"] < 1e-5 and apart["no_rescale"] > 0.1


def described(losses, *, switch_at=None, block_kv=16, own=None):
    steps = [10 * i for i in range(len(losses))]
    curve = {"step": steps, "val/loss": own or losses, "val/loss_exact": losses}
    return {"layers": 2, "seq_len": 128, "seed": 0, "own": (own or losses)[-1]} | {
        "switch_at": switch_at,
        "block_kv": block_kv,
        "curves": curve,
    }


def test_a_repair_is_judged_by_the_run_that_was_never_broken():
    never = described([5.0, 4.0, 3.0, 2.0, 1.5], block_kv=128)
    switched = described([5.0, 5.0, 3.6, 2.2, 2.0], switch_at=10, own=[5.0, 3.9, 3.6, 2.2, 2.0])
    (found,) = tile_size.repairs([never, switched])
    assert (found["shown"], found["behind"], found["steps_to_half"]) == (3.9, 1.0, 20)
    assert (found["behind_at_end"], found["like_never_broken_at"]) == (0.5, 30)
    with pytest.raises(ValueError, match="no run with one tile of 128 keys and seed=0"):
        tile_size.repairs([switched])


@pytest.mark.slow
def test_tile_sizes_of_a_sweep(tmp_path):
    recipe = ("experiment=tile_size", "eval_every=1")
    trained(tmp_path / "runs/size", *recipe, "attention.block_kv=16,128")
    switch = ("attention.switch_at=2", "attention.switch_to=naive", "attention.block_kv=16")
    trained(tmp_path / "runs/repair", *recipe, *switch)
    tile_size.main([str(tmp_path / "runs"), f"out={tmp_path / 'found.json'}"])
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["block_kv"] for row in found["runs"]].count(128) == 1
    assert (tmp_path / "found_dark.png").is_file()


def test_the_unshifted_sink_is_the_mistake_that_it_says():
    draw = torch.Generator().manual_seed(0)
    q, k, v = (3 * torch.randn(1, 2, 70, 16, generator=draw).double() for _ in range(3))
    sinks, mask = torch.tensor([0.5, -1.0]).double(), torch.ones(70, 70).triu(1).bool()
    scores = (q @ k.mT / 4).masked_fill(mask, -torch.inf)
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    mistake = p @ v / (p.sum(-1, keepdim=True) + sinks.exp()[:, None, None])
    backend = unshifted_sink.BACKEND
    torch.testing.assert_close(attention(q, k, v, backend=backend, sinks=sinks).out, mistake)
    exact = attention(q, k, v, backend="naive").out
    torch.testing.assert_close(attention(q, k, v, backend=backend).out, exact)


def test_the_smallest_test_of_a_sink_has_one_key():
    found = [unshifted_sink.smallest(score, torch.device("cpu")) for score in (0.0, 1.0)]
    assert found[0]["exact"] == found[0]["unshifted"] == 0.5
    assert found[1]["exact"] == pytest.approx(torch.tensor(1.0).sigmoid().item())
    assert found[1]["unshifted"] == pytest.approx(0.5)


def test_when_a_sink_shows():
    curve = {"step": [0, 1, 2, 3], "val/loss": [1.0] * 4}
    assert unshifted_sink.shows_at(curve | {"val/loss_exact": [1.0, 1.1, 1.0, 1.1]}) == 3
    assert unshifted_sink.shows_at(curve | {"val/loss_exact": [1.0, 1.1, 1.1, 1.0]}) is None


@pytest.mark.slow
def test_sinks_of_a_sweep(tmp_path):
    trained(tmp_path / "runs", "experiment=unshifted_sink", "seq_len=32")
    unshifted_sink.main([str(tmp_path / "runs"), f"out={tmp_path / 'found.json'}"])
    found = json.loads((tmp_path / "found.json").read_text())
    assert {row["attention"] for row in found["training"]} == {"exact", "unshifted"}
    assert (tmp_path / "found_dark.png").is_file()


def test_bf16_accumulators_round_and_an_exact_delta_does_not():
    draw = torch.Generator().manual_seed(0)
    layer = captured.Captured(*(torch.randn(2, 2, 128, 16, generator=draw) for _ in range(4)))
    backends = bf16_accumulators.variants(block_q=128, block_kv=16)
    errors = {
        (row["narrow"], row["delta"]): row
        for row in bf16_accumulators.errors_of_calls(layer, backends)
    }
    assert errors["both", "exact"]["out"] > 1.5 * errors["neither", "exact"]["out"]
    assert errors["sums", "exact"]["lse_std"] > 100 * errors["out", "exact"]["lse_std"]
    for narrow in bf16_accumulators.NARROW:
        assert errors[narrow, "exact"]["dq"] < errors[narrow, "rounded"]["dq"]


def test_errors_that_repeat_are_coherent():
    draw = torch.Generator().manual_seed(0)
    same = torch.randn(1, 1000, generator=draw).expand(16, -1)
    assert bf16_accumulators.coherence(same) == pytest.approx(4)
    unlike = torch.randn(16, 1000, generator=draw)
    assert bf16_accumulators.coherence(unlike) == pytest.approx(1, rel=0.2)


def test_accumulators_have_these_names():
    q = torch.zeros(1, 1, 4, 4)
    with pytest.raises(ValueError, match="narrow='none' must be one of"):
        attention(q, q, q, backend=bf16_accumulators.BACKEND.configured(narrow="none"))


@pytest.mark.slow
def test_accumulators_of_a_sweep(tmp_path, monkeypatch):
    trained(tmp_path / "runs", "experiment=bf16_accumulators", "seq_len=32")
    out = tmp_path / "found.json"
    monkeypatch.setattr(bf16_accumulators, "SEQUENCES", 2)
    bf16_accumulators.main([str(tmp_path / "runs"), f"out={out}"])
    found = json.loads(out.read_text())
    assert len(found["training"]) == 4 and len(found["gradients"]) == 8
    assert (tmp_path / "found_dark.png").is_file()


def test_a_turn_spreads_outliers_and_changes_no_score():
    turn = fp8_forward.hadamard(32)
    torch.testing.assert_close(turn @ turn.mT, torch.eye(32))
    draw = torch.Generator().manual_seed(0)
    layer = captured.Captured(*(torch.randn(1, 1, 128, 32, generator=draw) for _ in range(4)))
    layer.q[..., 0] *= 50
    errors = {row["scaling"]: row["out"] for row in fp8_forward.errors(layer)}
    assert errors["bf16"] < 0.01 < errors["hadamard"] < errors["tensor"]
    with pytest.raises(ValueError, match="head_dim=48 must be a power of two"):
        fp8_forward.hadamard(48)


def gradients(backend, layer: captured.Captured, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """dq, dk and dv of attention to these q, k and v."""
    inputs = [x.clone().requires_grad_() for x in tensors]
    out = attention(*inputs, backend=backend).out
    return list(torch.autograd.grad(out, inputs, layer.d_out.to(out.dtype)))


@pytest.mark.parametrize("scaling", ["tensor", "block", "hadamard"])
def test_a_rounded_backward_pass_is_that_of_rounded_inputs(scaling):
    """But for the rounding of p in out, which reaches the gradients through delta."""
    layer = fp8_large_scores.drawn(8, 0, torch.device("cpu"))
    layer = captured.Captured(*(x[:, :1, :256].bfloat16().float() for x in layer))
    loop = fp8_forward.loop(
        *layer[:2], scaling=scaling, backward="rounded", causal=True, scale=0.125, block_q=128,
        block_kv=64,
    )  # fmt: skip
    q, k, v = loop.rounded(*layer[:3])
    turn = loop.turn(q)
    q, k = (x if turn is None else x @ turn.mT for x in (q, k))
    exact = gradients(get_backend("naive"), layer, *(x.double() for x in (q, k, v)))

    def errors(backward: str) -> list[float]:
        backend = fp8_forward.BACKEND.configured(scaling=scaling, backward=backward)
        found = gradients(backend, layer, *layer[:3])
        pairs = zip(found, exact, strict=True)
        return [float((x - true).norm() / true.norm()) for x, true in pairs]

    rounded, unrounded = errors("rounded"), errors("unrounded")
    assert max(rounded) < 0.05 and min(unrounded) > 2 * max(rounded)


def test_an_error_that_grows_with_the_scores():
    small, large = (
        fp8_large_scores.errors(fp8_large_scores.drawn(size, 0, torch.device("cpu")))
        for size in (1, 32)
    )
    assert small[0]["dq"] < small[1]["dq"] < 0.1 and small[0]["row_sum"] < 1.2
    assert large[1]["dq"] < 1 < large[0]["dq"] and large[0]["row_sum"] > 100


@pytest.mark.parametrize("narrow", [fp8_forward.shared_scale, fp8_forward.scale_of_block])
def test_a_scale_keeps_the_largest_number(narrow):
    x = torch.randn(2, 100, 8, generator=torch.Generator().manual_seed(0))
    x[1, 99] = 0  # a block of zeros has no largest number
    found = narrow(x)
    assert found.abs().max() == pytest.approx(x.abs().max().item())
    assert ((found - x).abs() <= x.abs() / 16 + x.abs().max() / 448 / 512).all()


@pytest.mark.slow
def test_fp8_of_a_sweep(tmp_path, monkeypatch):
    trained(tmp_path / "runs", "experiment=fp8_forward", "seq_len=32")
    out = tmp_path / "found.json"
    monkeypatch.setattr(fp8_forward, "SEQUENCES", 2)
    fp8_forward.main([str(tmp_path / "runs"), f"out={out}"])
    found = json.loads(out.read_text())
    assert {row["scaling"] for row in found["training"]} == set(fp8_forward.SCALINGS) - {"both"}
    assert (tmp_path / "found_dark.png").is_file()


def test_a_stabiliser_is_named_by_its_settings():
    optim = OptimConfig(qk_clip=8.0, weight_decay=0.0, lr=1e-2)
    assert stabilisers.stabiliser(RunConfig(optim=optim), 1e-2) == "QK-clip 8"
    optim = OptimConfig(name="muon", z_loss=1e-4, weight_decay=0.0, lr=1e-2)
    assert stabilisers.stabiliser(RunConfig(optim=optim), 1e-2) == "z-loss 0.0001 and Muon"
    optim = OptimConfig(weight_decay=0.0, lr=1e-2)
    assert stabilisers.stabiliser(RunConfig(optim=optim), 1e-2) == "none"
    assert stabilisers.stabiliser(RunConfig(optim=optim), 3e-3) == "lr 0.01"


@pytest.mark.slow
def test_stabilisers_of_a_sweep(tmp_path):
    recipe = ("experiment=stabilisers", "log_every=1", "optim.qk_clip=0,0.01")
    trained(tmp_path / "runs/exact", *recipe)
    out = tmp_path / "found.json"
    with pytest.raises(SystemExit, match="no run with attention=no_max among 2 runs"):
        stabilisers.main([str(tmp_path / "runs"), f"out={out}"])
    trained(tmp_path / "runs/fuse", *recipe, "attention=no_max", "dtype=fp16")
    stabilisers.main([str(tmp_path / "runs"), f"out={out}"])
    found = json.loads(out.read_text())
    names = {"none", "QK-clip 0.01"}
    assert {row["stabiliser"] for row in found["exact"]} == names
    assert [row["died_at"] for row in found["fuse"]] == [None, None]
    assert len(found["exact"][0]["largest_by_head"]) == 1  # layer
    assert (tmp_path / "found_dark.png").is_file()


OF_RUNS = [tile_size, unshifted_sink, stabilisers, bf16_accumulators, fp8_forward, fp8_large_scores]


@pytest.mark.parametrize("module", OF_RUNS)
def test_a_run_of_another_recipe(module, tmp_path, monkeypatch):
    """The complaint names the recipe."""
    write_run(tmp_path / "run", checkpoint=False)
    losses = {"val/loss": 3.0, "val/loss_exact": 3.0}
    summary = {"status": "completed", "attention": "naive", "seed": 0, "options": {}} | losses
    (tmp_path / "run/summary.json").write_text(json.dumps(summary | {"max_score": 1.0}))
    monkeypatch.chdir(tmp_path)
    recipe = module.__name__.rpartition(".")[2]
    with pytest.raises(SystemExit, match=f"run has no .*runs of the recipe experiment={recipe}$"):
        module.main(["run"])


def test_a_sweep_without_a_variant(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tile_size, "completed_runs", lambda *_: {}["no_rescale"])
    said = "no completed run of 'no_rescale' in run: this finding compares all variants"
    with pytest.raises(SystemExit, match=said):
        tile_size.main(["run"])


@pytest.mark.parametrize("module", OF_RUNS)
def test_a_page_has_the_figures_of_its_file(module):
    """Means with their spread, and errors such as 1.2e-07, as the command prints them."""
    name = module.__name__.rpartition(".")[2]
    printed = module.in_text(json.loads((ROOT / f"results/{name}.json").read_text()))
    page = (ROOT / f"docs/findings/{name.replace('_', '-')}.md").read_text()
    figures = re.findall(r"[-+]?\d+\.\d+(?: ± \d+\.\d+|e[-+]\d+)", page)
    assert len(figures) > 5
    assert not [each for each in figures if each not in printed]


RESULTS = ROOT / "results"
PAGES = [path for path in (ROOT / "docs/findings").glob("*.md") if path.stem != "index"]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_page_is_short_and_complete(page):
    text = page.read_text()
    assert len(text.split()) <= 400
    for part in ("**Claim.**", "**Evidence.**", "**Limits.**", "**Refuted by**", "**Again"):
        assert part in text
    figures = re.findall(r"\.\./\.\./(results/\w+\.png)", text)
    assert len(figures) == 2 and all((ROOT / each).is_file() for each in figures)


COMMANDS = [*OF_RUNS, agreement, lazy_rescaling, polynomial_exp2, repeated]


@pytest.mark.parametrize("module", COMMANDS)
def test_the_help_of_a_finding_leaves_the_published_results_alone(module):
    """Its command reads the runs that the pages' commands made, and writes a file of its own."""
    asked, out = re.search(r"python -m lab\S+ (.*?)\s*out=(\S+)", module.__doc__).groups()
    assert "/" not in out
    pages = "".join(path.read_text() for path in (ROOT / "docs/findings").glob("*.md"))
    assert asked in pages or module is repeated


@pytest.mark.parametrize("name", ["agree", "polynomial_exp2"])
def test_a_figure_is_drawn_from_its_files(name, tmp_path):
    out = tmp_path / "drawn.png"
    agreement.main([*map(str, RESULTS.glob(f"{name}_*.json")), f"out={out}"])
    assert out.is_file() and out.with_stem("drawn_dark").is_file()


@pytest.mark.parametrize("name", ["none", "tile_size", "stabilisers"])
def test_a_figure_of_no_agreement(name, tmp_path):
    with pytest.raises(SystemExit, match=f"{name}.json is missing, or no result of scripts.agree"):
        agreement.main([str(RESULTS / f"{name}.json"), f"out={tmp_path / 'drawn.png'}"])


def numbers(value):
    """All numbers of a JSON value."""
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return [each for part in parts for each in numbers(part)]
    return [value] if isinstance(value, int | float) else []


@pytest.mark.parametrize(
    "page, files",
    [("kernels-agree", "agree_*"), ("polynomial-exp2", "*_cpu")],
    ids=["agree", "exp2"],
)
def test_the_ranges_of_a_page_are_those_of_its_files(page, files):
    """Numbers such as 1.2e-3, of one run or the mean over runs, as the figures' files have them."""
    found = set()
    for path in RESULTS.glob(f"{files}.json"):
        if path.name.startswith(("agree", "polynomial")):
            each_run = [numbers(run) for run in json.loads(path.read_text())["runs"]]
            found |= {number for run in each_run for number in run}
            found |= {sum(same) / len(same) for same in zip(*each_run, strict=True)}
    shown = {f"{number:.1e}".replace("e-0", "e-") for number in found}
    on_page = re.findall(r"\d\.\de-\d", (ROOT / f"docs/findings/{page}.md").read_text())
    assert len(on_page) > 10
    assert not [each for each in on_page if each not in shown]


def test_one_more_seed_is_judged_by_the_spread_of_the_page():
    low, high = repeated.interval([1.0, 2.0, 3.0])
    assert (low + high) / 2 == pytest.approx(2) and high - 2 == pytest.approx(4.969, abs=1e-3)
    page = repeated.Figure("loss", [1.0, 2.0, 3.0])
    found = repeated.compared(page, repeated.Figure("loss", [6.9, 7.0, None]))
    assert found["inside"] == 1
    never = repeated.Figure("dies at", [28, None, 30])
    assert "inside" not in repeated.compared(never, never)


def test_a_page_repeats_itself(tmp_path):
    """The file of each page, read as if it were a repeat."""
    files = []
    for name, (source, _) in repeated.FINDINGS.items():
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text((RESULTS / f"{source}.json").read_text())
    out = tmp_path / "found.json"
    repeated.main([*map(str, files), f"out={out}"])
    found = json.loads(out.read_text())["figures"]
    assert {row["recipe"] for row in found} == repeated.FINDINGS.keys()
    assert all(row["page"] == row["repeat"] for row in found)
    assert all(row["inside"] == len(row["repeat"]) for row in found if "inside" in row)
    with pytest.raises(SystemExit, match="mine.json is none of break_it.json"):
        repeated.main(["mine.json"])
    with pytest.raises(SystemExit, match="agree.json is missing"):
        repeated.main([str(tmp_path / "none/agree.json")])


def test_the_index_has_the_figures_of_the_repeats():
    found = json.loads((RESULTS / "findings_repeated_cpu.json").read_text())
    printed = repeated.in_text(found["figures"])
    text = (ROOT / "docs/findings/index.md").read_text()
    lines = text.partition("## Done again")[2].partition("## Three habits")[0].splitlines()
    cells = [cell for line in lines if line.startswith("|") for cell in line.split("|")[2:4]]
    figures = re.findall(r"[-+]?\d+\.\d+(?: ± \d+\.\d+|e[-+]\d+)?", " ".join(cells))
    assert len(figures) > 20
    assert not [each for each in figures if each not in printed]
