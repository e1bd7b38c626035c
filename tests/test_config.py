"""Every choice in conf/ fits the schema; a resumed run replays the arguments of its first start.

What is refused stands in test_bad_input.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from attention import BACKENDS
from config import AttentionConfig, ModelConfig, OptimConfig, RunConfig
from tests.run_folder import write_run
from training.launch.command_line import quoted, replay_overrides
from training.loop.schedule import suit_gpu

ROOT = Path(__file__).resolve().parents[1]
CHOICES = [
    (file.parent.name, file.stem)
    for file in sorted((ROOT / "conf").glob("*/*.yaml"))
    if file.parent.name != "experiment"
]
# what a choice cannot do without
NEEDED = {
    ("data", "text"): ["data.path=book.txt"],
    ("data", "hub"): ["data.name=org/name"],
}


@pytest.mark.parametrize("choice", CHOICES, ids="=".join)
def test_a_choice_fits_the_schema_and_shows_its_command(choice):
    (group, name), path = choice, ROOT / "conf" / "{}/{}.yaml".format(*choice)
    files = {group: OmegaConf.load(path)}, OmegaConf.from_dotlist(NEEDED.get(choice, []))
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), *files))
    assert getattr(getattr(config, group), "source" if group == "data" else "name") == name
    assert f"# python train.py {group}={name}" in path.read_text().splitlines()[0]


@pytest.mark.parametrize("name", BACKENDS)
def test_an_attentions_yaml_holds_its_options_with_their_defaults(name):
    """All of them, but those that its kernels lack, and what the device decides: these stay
    None.
    """
    config = yaml.safe_load((ROOT / f"conf/attention/{name}.yaml").read_text())
    backend = BACKENDS[name]
    on_gpu = suit_gpu(RunConfig(), backend, {})
    shared = set(backend.options).intersection(on_gpu.options)
    if on_gpu.options != backend.options and backend.on_gpu is None:
        shared.remove("block_q")  # the device decides
    assert config == {"name": name} | {key: backend.options[key] for key in shared}
    assert {key: on_gpu.options[key] for key in shared} == {key: config[key] for key in shared}


MODEL = {"hidden_size": 64, "num_heads": 4}


def test_what_follows_from_the_fields():
    assert ModelConfig(**MODEL).kv_heads == 4 and ModelConfig(**MODEL, num_kv_heads=2).kv_heads == 2
    assert ModelConfig(**MODEL).head_dim == 16
    compiles = [RunConfig(compile=value).compile for value in (True, False, "auto")]
    assert compiles == ["true", "false", "auto"]
    run = RunConfig(batch_size=2, seq_len=8, tokens_per_step=48)
    assert run.sequences_per_step == 6
    options = AttentionConfig(block_q=4, options={"mine": 1}).backend_options()
    assert options == {"mine": 1, "block_q": 4}
    assert AttentionConfig().backend_options() == {}


def test_learning_rate_follows_the_width_unless_set():
    wide = RunConfig(model=ModelConfig(hidden_size=768, num_heads=12))
    assert wide.optimizer().lr == pytest.approx(5e-4)
    assert wide.optimizer().min_lr == pytest.approx(5e-5)
    chosen = RunConfig(optim=OptimConfig(lr=2e-3, min_lr=0.0))
    assert (chosen.optimizer().lr, chosen.optimizer().min_lr) == (2e-3, 0.0)
    assert wide.optim.lr is None  # the setting itself stays what it was


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "a run, with = in its name"
    overrides = ["attention=sdpa", "seq_len=64", "+attention.options.mine=1"]
    write_run(folder, overrides=overrides)
    return folder


def test_without_resume_nothing_is_replayed():
    for arguments in ([], ["-m", "seq_len=3"], ["resume=null"]):
        assert replay_overrides(arguments) == arguments
    # a regression test: argparse took what followed the flag of a sweep for unknown arguments
    assert replay_overrides(["seq_len=3", "-m", "seed=0,1"]) == ["-m", "seq_len=3", "seed=0,1"]


def test_resume_replays_what_the_run_was_asked_for(run_dir):
    old = ["attention=sdpa", "seq_len=64", "+attention.options.mine=1"]
    resume = f"resume='{run_dir}'"
    place = [f"hydra.run.dir='{run_dir}'", "hydra.mode=RUN", "hydra.output_subdir=null"]
    assert replay_overrides([resume]) == [*old, resume, *place]
    # what is asked for now stands after resume=
    again = [*old, resume, "steps=9", *place]
    assert replay_overrides([f'resume="{run_dir}"', "steps=9"]) == again
    # Hydra's own options come first, with their values
    options = ["--config-dir", "my_conf", "-cn", "mine"]
    given = ["steps=9", *options[:2], f"resume={run_dir}", *options[2:]]
    assert replay_overrides(given) == [*options, *again]
    # what is given now counts, whatever sign it carries
    new = ["attention=tiled", "++attention.options.mine=2", "logger=none"]
    assert replay_overrides([*new, f"resume={run_dir}"]) == ["seq_len=64", resume, *new, *place]
    # and Hydra reads the path back
    parsed = OverridesParser.create().parse_overrides(replay_overrides([f"resume={run_dir}"]))
    values = {override.key_or_group: override.value() for override in parsed}
    assert values["resume"] == str(run_dir)


@pytest.mark.parametrize("text", ["", "it's", "''", "a\\b", "a, b = {c: [d]}", "${e}"], ids=repr)
def test_hydra_reads_back_what_is_quoted(text):
    """A regression test: a backslash in the middle of a setting was doubled in the way out."""
    (override,) = OverridesParser.create().parse_overrides([f"data.path={quoted(text)}"])
    assert override.value() == text


def test_a_resume_stays_in_its_folder(run_dir, tmp_path):
    assert replay_overrides([f"resume={run_dir}", f"hydra.run.dir={quoted(f'{run_dir}/')}"])
    with pytest.raises(ValueError, match="hydra.run.dir="):
        replay_overrides([f"resume={run_dir}", f"hydra.run.dir={tmp_path}/elsewhere"])


@pytest.mark.parametrize(
    ("step", "diverged", "due"),
    [
        (1, False, ()),
        (3, False, ("log",)),
        (4, False, ("compare",)),
        (5, False, ("evaluate",)),
        (7, False, ("evaluate", "switch")),
        (10, False, ("evaluate", "save")),
        (11, False, ("log", "compare", "evaluate", "save")),
        (2, True, ("log", "evaluate", "save")),
        (7, True, ("log", "evaluate", "save")),
    ],
)
def test_what_is_due_after_a_step(step, diverged, due):
    """A diverged step is the last one: nothing is compared with it, and no attention follows."""
    switched = AttentionConfig("no_rescale", switch_at=7, switch_to="tiled")
    intervals = {"log_every": 3, "diagnose_every": 4, "eval_every": 5, "checkpoint_every": 10}
    config = RunConfig(attention=switched, steps=11, **intervals)
    told = config.due(step, diverged=diverged)
    assert {name for name, value in told._asdict().items() if value} == set(due)
    never = replace(config, eval_every=0, diagnose_every=0).due(step, diverged=diverged)
    assert (never.evaluate, never.compare, never.switch) == (False, False, told.switch)
