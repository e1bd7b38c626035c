"""Turns a command line into the settings of a run, and reports mistakes in it.

`launch()` runs train.py's main() on the arguments of the process. `compose()` returns the settings
that such arguments mean. Nothing here imports torch, so a mistyped key is reported at once.
"""

import copy
import difflib
import gc
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from config import RunConfig, register
from training.launch.help import explained_keys
from training.launch.interrupt import Ending, reader_may_leave
from training.loop.ranks import leave, of_environment
from training.own_modules import ROOT
from training.record.files import newest_first, newest_meta, no_checkpoint, run_of
from training.record.foreign_code import run_no_code_of
from training.record.starts import flat

CONF = ROOT / "conf"

# the groups of which a run has one choice each
GROUPS = {folder.name for folder in CONF.iterdir() if folder.is_dir()} - {"experiment", "hydra"}
# the beginnings of keys that the schema does not list
FREE = ("hydra.", "hydra/", "attention.options.")
# what other programs call a setting
MEANT = {
    "learning_rate": "optim.lr",
    "max_iters": "steps",
    "epochs": "steps",
    "block_size": "seq_len",
    "n_layer": "model.num_layers",
    "n_head": "model.num_heads",
    "n_embd": "model.hidden_size",
}


def launch(main: Callable[[], Any]) -> None:
    """Run `main`, which Hydra decorates, with the command line of this process."""
    # the imports and torch.compile make a million objects that stay: looking among them for garbage
    # takes 0.7 s of the shortest run
    gc.set_threshold(100_000, 20, 100)
    logging.raiseExceptions = False  # or each line would print a traceback after `| head`
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
    ranks = of_environment()
    if not ranks.first:  # only the first rank prints; the others report to it
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # hides that the first rank ended
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    OmegaConf.register_new_resolver("keys", explained_keys, replace=True)  # for --help
    try:
        arguments = replay_overrides(sys.argv[1:])
        if not ranks.first:
            folder = tempfile.TemporaryDirectory(prefix="tilegpt-rank-")  # it goes with the process
            arguments.append(f"hydra.run.dir={quoted(folder.name)}")
        sys.argv[1:] = arguments
        with reader_may_leave(), Ending(), one_sentence():
            main()
        leave()
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:  # before or between jobs
        sys.exit(130)
    except SystemExit as ended:
        if ended.code and not ranks.first:
            time.sleep(2)  # torchrun ends all ranks after this; let the first report why
        raise


def compose(*overrides: str) -> RunConfig:
    """The settings of `python train.py OVERRIDES`. Raises ValueError with the reason."""
    return read_config(hydra_config(*overrides))


def hydra_config(*overrides: str) -> Any:
    """The config that Hydra composes from overrides, with its own node, as in a job."""
    check_overrides(overrides)
    register()
    with one_sentence(), hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose("config", list(overrides), return_hydra_config=True)


def read_config(cfg: Any) -> RunConfig:
    """Convert the config that Hydra composed to a RunConfig. Raises ValueError with the reason."""
    settings = copy.deepcopy(cfg)
    with one_sentence(), open_dict(settings):
        settings.pop("hydra", None)
        return OmegaConf.to_object(settings)


@contextmanager
def one_sentence() -> Iterator[None]:
    """Raises errors of Hydra, OmegaConf and YAML inside this block as a ValueError of one line."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as error:
        parts = [getattr(error, "override", None), error, error.__cause__]
        raise ValueError(": ".join(in_one_line(part) for part in parts if part)) from error


def in_one_line(error: BaseException | str) -> str:
    # after these words Hydra lists folders, and OmegaConf the types around a key
    text = re.split("Config search path|reference_type=|object_type=", str(error))[0]
    return " ".join(text.split())


def check_overrides(
    overrides: Iterable[str], *, sweeps: bool = False, others: Sequence[str] = ()
) -> None:
    """Raise ValueError for an override that Hydra cannot read, or would use in another way.

    These are a key that does not exist, no value or several for what a run has one of, and, unless
    it `sweeps`, a sweep. The error names the closest key, also of `others`, the keys of a command
    that passes these overrides on.
    """
    with one_sentence():
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    keys = ["experiment", *GROUPS, *flat(asdict(RunConfig()))]
    own = any(each.key_or_group == "attention" and ":" in each.input_line for each in parsed)
    for override in parsed:
        key, value = override.key_or_group, override.value()
        if key not in keys and not key.startswith(FREE):
            hint = no_key(key, [*others, *keys])
            if own and key.startswith("attention."):
                option = key.replace("attention.", "+attention.options.", 1)
                hint += f" (an option of your own attention is {option}=)"
            raise ValueError(f"{override.input_line}: {hint}")
        names = getattr(value, "list", [value]) if key in GROUPS else []
        no_name = any(name is None or isinstance(name, list) for name in names)
        swept = override.is_sweep_override() and not sweeps
        if key in keys and (swept or no_name or override.is_delete()):
            raise ValueError(
                f"{override.input_line}: a run has one {key}; for several runs write python "
                f"train.py -m {key}=A,B"
            )


def no_key(key: str, keys: Sequence[str]) -> str:
    """there is no key 'step'; did you mean steps?"""
    last = key.rpartition(".")[2]
    # lr is optim.lr, and so is model.learning_rate
    names = {each.rpartition(".")[2]: each for each in keys} | MEANT | {each: each for each in keys}
    close = difflib.get_close_matches(last if last in names else key, names, n=1)
    hint = f"did you mean {names[close[0]]}?" if close else "python train.py --help lists all keys"
    return f"there is no key '{key}'; {hint}"


def replay_overrides(arguments: list[str]) -> list[str]:
    """Check the arguments, and expand resume=DIR to the overrides that its run was started with.

    These come first, the new overrides after them, and the folder stays the same. Raises
    ValueError with the reason.
    """
    options, overrides = options_first(arguments)
    if {"-sc", "--shell-completion"} & set(options):
        return arguments
    sweep = {"-m", "--multirun"} & set(options)
    recipe = any(each.startswith(("experiment=", "hydra.mode=")) for each in overrides)
    new = [each for each in overrides if key_of(each) != "resume"]
    check_overrides(new, sweeps=bool(sweep) or recipe)
    given = {key_of(each): each.partition("=")[2].strip("'\"") for each in overrides}
    resume = given.get("resume", "null")
    if resume == "null":
        return [*options, *overrides]
    # empty where a variable of the shell is not set
    if not resume or sweep or os.path.isfile(f"{resume}/index.jsonl"):
        raise ValueError(
            f"resume={resume} must name one run; to go on with a sweep, give its command again "
            "with its hydra.sweep.dir=FOLDER"
        )
    run_dir = Path(resume)
    if run_of(run_dir) != run_dir or not newest_first(run_dir):
        raise ValueError(f"resume={no_checkpoint(run_dir)}")
    meta = newest_meta(run_dir)
    run_no_code_of(run_dir, meta["config"]["attention"])
    folder = given.get("hydra.run.dir", resume)
    if os.path.realpath(folder) != os.path.realpath(resume):
        raise ValueError(
            f"resume={resume} goes on in its own folder: leave out hydra.run.dir={folder}, or copy "
            "the folder and resume the copy"
        )
    place = quoted(resume)
    # an experiment may ask for a sweep, but a resume continues a single run; .hydra keeps what the
    # first start wrote
    own = [f"hydra.run.dir={place}", "hydra.mode=RUN", "hydra.output_subdir=null"]
    replaced = {"resume", *map(key_of, new)}
    kept = [each for each in meta["overrides"] if key_of(each) not in replaced]
    # cli_overrides() takes those after resume= as the new ones
    return [*options, *kept, f"resume={place}", *new, *own]


def options_first(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into Hydra's own options (--config-dir DIR, ...) and the overrides.

    They may stand in any order, which Hydra itself does not allow.
    """
    overrides = get_args_parser().parse_intermixed_args(arguments).overrides
    return [each for each in arguments if each not in overrides], overrides


def key_of(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def quoted(text: str) -> str:
    """Quote a string for Hydra."""
    return "'" + text.replace("'", r"\'") + "'"


def as_written(node: Any) -> Any:
    """Plain lists, dictionaries and values, with interpolations such as ${seq_len} as written."""
    return OmegaConf.to_container(node, resolve=False)


def task_overrides() -> list[str]:
    """Every override of the job that runs now, as Hydra recorded it."""
    return as_written(HydraConfig.get().overrides.task)


def in_a_sweep() -> bool:
    """Whether the job that runs now is one of a sweep; every launcher numbers these."""
    return not OmegaConf.is_missing(HydraConfig.get().job, "num")


def cli_overrides() -> list[str]:
    """The overrides of this command line; in a resumed run, those that follow resume=."""
    overrides = task_overrides()
    resumes = [each.startswith("resume=") for each in overrides]
    return overrides[resumes.index(True) + 1 :] if any(resumes) else overrides
