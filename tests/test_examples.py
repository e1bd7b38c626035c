"""The notebook runs from its first cell to its last; the attentions train, rank and verify."""

import json

import pytest
import torch

from attention import get_backend
from conformance.properties import verify_backend
from scripts.report.ranking import rank
from scripts.report.runs import load_runs
from tests import processes
from tests.command import (
    ROOT,
    checkpoint,
    computed,
    environment,
    metrics,
    run,
    same,
    summary,
    tiny,
    tiny_sweep,
)

NOTEBOOK = ROOT / "examples/break_attention.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
ATTENTIONS = [
    f"examples.{file.stem}:BACKEND"
    for file in sorted(NOTEBOOK.parent.glob("*.py"))
    if file.stem not in ("__init__", "numpy_attention")
]
RING = "examples.ring_attention:BACKEND"  # the one that computes softmax attention
# a right attention of any kind is green in these
PROPERTIES = ("forward", "no leak (outputs)", "no leak (gradients)", "rows without a key")
OWED = {"properties": (*PROPERTIES, "prefill = decode", "mask positions"), "random_cases": 0}
DIFFERENTIAL = "attention=examples.differential_attention:BACKEND"


@pytest.mark.slow
def test_every_cell_runs(tmp_path):
    """Its own assertions say what must come out."""
    # the last one shows the report in Jupyter
    cells = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"][:-1]
    (tmp_path / "cells.py").write_text("\n\n".join(cells))
    variables = environment(MPLBACKEND="Agg", PYTHONPATH=str(ROOT))
    done = processes.run("cells.py", cwd=tmp_path, env=variables, timeout=1200, check=True)
    assert (tmp_path / "runs/losses.png").stat().st_size > 10_000
    assert "my_attention:BACKEND" in (tmp_path / "runs/report.html").read_text()
    assert "attention=leaky_attention:BACKEND" in done.stdout


def test_no_outputs_are_committed():
    assert not [cell for cell in CELLS if cell.get("outputs") or cell.get("execution_count")]


def test_an_own_attention_lies_where_the_command_was_typed(tmp_path):
    """A regression test: with hydra.job.chdir=true it was looked for in the run's folder."""
    own = 'from attention import get_backend\n\nBACKEND = get_backend("tiled")\n'
    (tmp_path / "own.py").write_text(own)
    settings = tiny(tmp_path / "run", "attention=own:BACKEND", "hydra.job.chdir=true")
    command = (str(ROOT / "train.py"), *settings)
    processes.run(*command, cwd=tmp_path, env=environment(), check=True)


def test_they_train_and_rank_beside_softmax_attention(tmp_path):
    """7 s: seven runs, each of which tries its attention out first."""
    names = ["tiled", *ATTENTIONS]
    assert len(ATTENTIONS) == 6
    assert run(*tiny_sweep(tmp_path, f"attention={','.join(names)}", "steps=2")).code == 0
    (ranking,) = rank(load_runs([tmp_path]))
    exact = {name: "val/loss_exact" for name in ("tiled", RING)}
    assert ranking.judged_by == dict.fromkeys(names, "val/loss") | exact
    ended = {found["attention"]: found for found in map(summary, sorted(tmp_path.glob("[0-9]")))}
    exact = [name in ("tiled", RING) for name in names]
    assert [found["exact"] for found in ended.values()] == exact
    assert ended[RING]["val/loss"] == pytest.approx(ended["tiled"]["val/loss"], rel=1e-5)
    # nothing but softmax attention is compared with it
    rows = [metrics(run_dir)[-1] for run_dir in sorted(tmp_path.glob("[0-9]"))]
    assert ["attention/out_error" in row for row in rows] == exact
    # four lambdas of half a head's width, and the norm's gain
    more = ended["examples.differential_attention:BACKEND"]["parameters"]
    assert more == ended["tiled"]["parameters"] + 4 * 8 + 16


def test_a_run_with_parameters_of_its_own_goes_on_to_the_last_bit(tmp_path):
    common = (DIFFERENTIAL, "optim.schedule=constant", "checkpoint_every=2")
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    assert run(*tiny(straight, *common)).code == 0
    assert run(*tiny(resumed, *common, "steps=2")).code == 0
    before = checkpoint(resumed)["weights"]
    assert run(f"resume={resumed}", "steps=4").code == 0
    assert same(checkpoint(resumed), checkpoint(straight))
    assert computed(resumed)[-1] == computed(straight)[-1]
    own = {name for name in before if ".attention.own." in name}
    assert len(own) == 5
    assert not any(torch.equal(before[name], checkpoint(resumed)["weights"][name]) for name in own)
    other = run(f"resume={resumed}", "steps=6", "attention=tiled").complaint()
    assert "blocks.0.attention.own.gain" in other and "(16,)" in other


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("how", [OWED, pytest.param({}, marks=pytest.mark.slow)])
def test_they_keep_what_every_attention_owes(name, how):
    cells = verify_backend(get_backend(name), **how)
    assert {cell.property: cell.note for cell in cells if not cell.ok} == {}
    assert sum(cell.checks for cell in cells) > 20
