"""Every shipped recipe composes and runs, shrunk to two steps of a tiny model."""

import math

import pytest
import yaml

from tests.command import ROOT, TINY, index, run, summary

RECIPES = {
    path.stem: path.read_text() for path in sorted((ROOT / "conf/experiment").glob("*.yaml"))
}
SWEEPS = {name: text for name, text in RECIPES.items() if "MULTIRUN" in text}
# some recipes have no evaluation, and would refuse its size
TINIER = [x for x in TINY if not x.startswith("eval_sequences=")]
# what a run of one recipe needs to stay as small as the others, and offline
SMALL = {
    "gpt2_124m": [
        "data=stdlib",
        "data.val_fraction=0.05",
        "tokenizer=byte",
        "tokenizer.vocab_size=320",
        "tokens_per_step=64",
        "eval_sequences=1",
    ],
    "million_tokens": ["tokenizer.vocab_size=320"],
}


def check(name: str, *arguments: str) -> str:
    """The output of the recipe, whose second line is its command."""
    assert RECIPES[name].splitlines()[1].startswith(f"# python train.py experiment={name}")
    done = run(f"experiment={name}", *arguments)
    assert done.code == 0 and "Traceback" not in done.output, done.output
    return done.output


@pytest.mark.parametrize("name", sorted(RECIPES.keys() - SWEEPS.keys()))
def test_recipe_of_one_run(name, tmp_path):
    """The first of them takes 5 s, three of which import what a run needs."""
    shrunk = [*TINIER, *SMALL[name], "batch_size=1", "steps=2"]
    shrunk += [f"hydra.run.dir={tmp_path}"]
    check(name, *shrunk)
    assert summary(tmp_path)["status"] == "completed" and summary(tmp_path)["steps_done"] == 2


# one seed tells as much as three; lengths and switches are the point of a recipe, and stay several
FEWER = {"seed": "0", "seq_len": "32,64", "attention.switch_at": "null,1"}


@pytest.mark.parametrize("name", SWEEPS)
def test_recipe_of_a_sweep(name, tmp_path):
    """`attentions` takes 5 s for its eleven variants."""
    swept = yaml.safe_load(SWEEPS[name])["hydra"]["sweeper"]["params"]
    fewer = {key: FEWER[key] for key in swept.keys() & FEWER.keys()}
    if "triton" in swept.get("attention", ""):  # interpreted, and not at all where there is a GPU
        fewer["attention"] = swept["attention"].replace(",triton", "")
    swept |= fewer
    shrunk = [x for x in TINIER if not x.startswith(("seq_len=", "steps=", "batch_size="))]
    shrunk += [f"{key}={values}" for key, values in fewer.items()]
    shrunk += ["batch_size=1", "steps=2", "eval_every=0", f"hydra.sweep.dir={tmp_path}"]
    output = check(name, *shrunk)
    rows, expected = index(tmp_path), {key: str(x).split(",") for key, x in swept.items()}
    variants = 11 if name == "attentions" else 1
    assert len(rows) == math.prod(map(len, expected.values())) * variants
    for key, values in expected.items():
        asked = (override.split("=", 1) for row in rows for override in row["overrides"])
        assert {value for name, value in asked if name == key} == set(values)
    for row in rows:
        assert row["status"] == "completed" and summary(tmp_path / row["dir"])["steps_done"] == 2
    # what makes a defect a defect: more than one tile, or it would be exact
    assert "is exact here" not in output
