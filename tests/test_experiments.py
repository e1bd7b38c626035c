"""Every shipped recipe composes and runs, shrunk to two steps of a tiny model."""

import math

import pytest
import torch
import yaml

from attention import get_backend
from tests.command import ROOT, TINY, finish, index, start, summary

RECIPES = sorted((ROOT / "conf/experiment").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_runs(recipe, tmp_path):
    text = recipe.read_text()
    assert text.splitlines()[1].startswith(f"# python train.py experiment={recipe.stem}"), "a recipe begins with the command that runs it"
    swept = {key: str(values).split(",") for key, values in yaml.safe_load(text)["hydra"]["sweeper"]["params"].items()}
    # one seed tells as much as three; lengths are the recipe's point in one of them, and stay several
    seq_lens = ["32", "64"] if "seq_len" in swept else []
    smaller = [*(["seed=0"] if "seed" in swept else []), *([f"seq_len={','.join(seq_lens)}"] if seq_lens else [])]
    smaller += ["attention.switch_at=null,1"] if "attention.switch_at" in swept else []
    shrunk = [x for x in TINY if x.partition("=")[0] not in ("seq_len", "steps", "batch_size")]
    q = torch.zeros(1, 1, 1, 16)
    if "triton" in swept.get("attention", []) and get_backend("triton").unsupported_reasons(q, q, q):
        # no interpreter here, as with a GPU
        swept["attention"].remove("triton")
        smaller.append(f"attention={','.join(swept['attention'])}")
    done = finish(
        start(
            f"experiment={recipe.stem}", *shrunk, *smaller, "batch_size=1", "steps=2", f"hydra.sweep.dir={tmp_path}", TRITON_INTERPRET="1"
        )
    )
    assert done.code == 0 and "Traceback" not in done.output, done.output

    expected = {
        key: {"seed": ["0"], "seq_len": seq_lens, "attention.switch_at": ["None", "1"]}.get(key, values) for key, values in swept.items()
    }
    rows = index(tmp_path)
    assert len(rows) == math.prod(map(len, expected.values()))
    for key, values in expected.items():
        assert {str(row.get(key.rpartition(".")[2])) for row in rows} == set(values)
    for row in rows:
        assert row["status"] == "completed" and summary(tmp_path / row["dir"])["steps_done"] == 2
    # what makes a defect a defect: more than one tile, or it would be exact
    assert "is exact here" not in done.output
