"""Turns a command line into the settings of a run, and reports mistakes in it.

`launch()` runs train.py's main() on the arguments of the process. `compose()` returns the settings
that such arguments mean. Nothing here imports torch, so a mistyped key is reported at once.
"""

import argparse
import atexit
import difflib
import gc
import logging
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, chdir, contextmanager
from importlib.machinery import PathFinder
from itertools import chain, islice
from pathlib import Path
from traceback import extract_tb
from typing import Any, NoReturn

from config import ATTENTION, FUNCTION_SETTINGS, RunConfig, register, setting_keys
from training.launch.interrupt import Ending, end_unread
from training.loop.ranks import PATIENCE, Ranks, leave, of_environment, run_before_restart
from training.own_modules import OURS, ROOT
from training.record import phases
from training.record.retention import newest_first, no_run

CONF = ROOT / "conf"

# options that make Hydra print something and run nothing
ANSWERS = ("--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i")
ANSWERS += ("--shell-completion", "-sc")
# Hydra's options that take the next argument as their value
VALUE_OPTIONS = ("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn")
VALUE_OPTIONS += ("--package", "-p", "--cfg", "-c")

# options that name folders with a user's own choices
SEARCH_OPTIONS = ("--config-dir", "-cd", "--config-path", "-cp", "hydra.searchpath=")
# the choices of each config group
CHOICES = {
    folder.name: sorted(path.stem for path in folder.glob("*.yaml")) for folder in CONF.iterdir()
}

# options of a group that all of its choices share
SHARED_OPTIONS = {
    "attention": ("switch_at", "switch_to", *FUNCTION_SETTINGS),
    "data": ("val_fraction", "documents"),
}


def leave_garbage() -> None:
    """At the exit, Python would look for garbage twice, for a second or two.

    From version 3.7 on, Triton prints a line for each of its objects that the second look has not
    found, so there only the first is left out.
    """
    triton = sys.modules.get("triton")
    if triton and [*map(int, triton.__version__.split(".")[:2])] >= [3, 7]:
        gc.disable()
    else:
        gc.freeze()


def launch(main: Callable[[], Any], began: float, resume_sweep: Callable[[Path], NoReturn]) -> None:
    """Run `main`, which Hydra decorates, with the command line of this process.

    If that is resume=DIR and DIR is the folder of a sweep, run resume_sweep(DIR) instead. `began`
    is the time at which the program started; its first run counts from there.
    """
    phases.process_began = began
    # the imports and torch.compile make a million objects that stay. Python would look among them
    # for garbage for more than a second
    gc.set_threshold(100_000, 20, 100)
    atexit.register(leave_garbage)
    answers = any(argument.startswith(ANSWERS) for argument in sys.argv[1:])
    logging.raiseExceptions = False  # or each line would print a traceback after `| head`
    for stream in (sys.stdout, sys.stderr):
        # a sample may hold characters that the terminal lacks
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    ranks = of_environment()
    if not ranks.first:  # only the first rank prints; the others report to it
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # hides that the first rank ended
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    try:
        if sweep := sweep_to_resume(sys.argv[1:]):
            resume_sweep(sweep)
        arguments = replay_overrides([*sys.argv[1:], *after_restart(ranks)])
        refuse_unreadable(arguments)
        refuse_mistakes_in_files(arguments)
        sys.argv[1:] = arguments if ranks.first else [*arguments, *folder_that_goes()]
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
        try:
            with Ending(), one_sentence():
                main()
        finally:
            if answers and sys.stdout is not None:  # Hydra exits after --help
                sys.stdout.flush()
        leave()
    except BrokenPipeError:  # `| head` has read enough
        end_unread()
    except Mistake as error:
        raise SystemExit(f"error: {error}") from None
    except Exception as error:  # raised by a launcher or sweeper that pip installed?
        files = [frame.filename for frame in extract_tb(error.__traceback__)]
        plugins = [Path(file).parent.name for file in files if "/hydra_plugins/hydra_" in file]
        if not plugins or files[-1].startswith(str(ROOT / "training")):
            raise
        keys = ("hydra/", "hydra.launcher.", "hydra.sweeper.")
        given = [argument for argument in sys.argv[1:] if argument.startswith(keys)]
        raise SystemExit(f"error: {' '.join(given) or plugins[-1]}: {error}") from None
    except KeyboardInterrupt:  # before or between jobs
        sys.exit(130)
    except SystemExit as ended:
        if ended.code and not ranks.first:
            time.sleep(PATIENCE)  # torchrun ends all ranks after this; let the first report why
        raise


def after_restart(ranks: Ranks) -> list[str]:
    """The override with which ranks continue after torchrun restarted them, if it did."""
    run_dir = run_before_restart()
    if run_dir is None:
        return []
    if list(newest_first(run_dir)):
        return [f"resume={run_dir}"]
    if ranks.first:  # nothing was saved, so the run starts over in its folder
        (run_dir / "metrics.jsonl").unlink(missing_ok=True)
    return [f"hydra.run.dir={quoted(str(run_dir))}"]


def folder_that_goes() -> list[str]:
    """The overrides that give a run a temporary folder, removed when this process ends."""
    folder = tempfile.mkdtemp(prefix="tilegpt-rank-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return [f"hydra.run.dir={quoted(folder)}", "hydra.output_subdir=null"]


def refuse_unreadable(arguments: list[str]) -> None:
    """Exit with a one-line error for an override that Hydra would refuse in several lines."""
    options, overrides = options_first(arguments)
    # a recipe may ask for a sweep
    sweeps = {"-m", "--multirun"} & set(options) or any(
        override.startswith(("experiment=", "hydra.mode=")) for override in overrides
    )
    try:
        check_readable(overrides, sweeps=bool(sweeps))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


def check_readable(overrides: Iterable[str], *, sweeps: bool = False) -> None:
    """Raise ValueError for an override that Hydra's grammar cannot read, that removes a setting, or
    that has several values outside a sweep.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    for override in overrides:
        key, equals, value = override.partition("=")
        if equals and not key:
            raise ValueError(f"{override!r} has no key; write key=value")
        try:
            parsed = OverridesParser.create().parse_override(override)
        except HydraException as error:
            lines = str(error).splitlines()
            reason = next(line for line in lines if not line.startswith("Error parsing override"))
            as_text = shlex.quote(f"{key}={quoted(value)}")
            way_out = f"if the value is text, write {as_text}" if equals else "write key=value"
            if settings := as_settings(override):
                raise ValueError(f"{override}: write {settings}") from None
            raise ValueError(f"Hydra cannot read {override!r} ({reason}); {way_out}") from None
        if parsed.is_delete() and key_of(override) in {*known_keys()} - {*CHOICES}:
            raise ValueError(
                f"{override} removes a setting, and a run needs all: leave it out, or write "
                f"{key_of(override)}=VALUE"
            )
        if key_of(override).startswith("hydra.sweeper.variants") and not sweeps:
            typed = override.lstrip("+")  # replay_overrides() adds the sign
            raise ValueError(
                f"{typed} names a variant, as a sweep has: write python train.py -m "
                f"{shlex.quote(typed)}"
            )
        if parsed.is_sweep_override() and not sweeps:
            raise ValueError(
                f"{override} has several values, as a sweep has: write python train.py -m "
                f'{shlex.quote(override)}; if it is one text, write "{key}={quoted(value)}"'
            )


def as_settings(override: str) -> str | None:
    """How train.py takes what the scripts take: attention=tiled attention.block_q=16 for
    attention=tiled:block_q=16, and a sweep's variants for a list. None for any other override.
    """
    key, _, value = override.partition("=")
    found = [ATTENTION.fullmatch(each) for each in split(value)]
    if key != "attention" or None in found:
        return None
    chosen = {each[0]: (each[1], each[2].split(",") if each[2] else []) for each in found if each}
    if len(found) == 1:
        [(name, options)] = chosen.values()
        # the options of a user's own attention are not in the schema
        prefix = "+attention.options." if ":" in name else "attention."
        return " ".join([f"attention={name}", *(prefix + option for option in options)])
    if any(":" in name for name, _ in chosen.values()):
        return None
    variants = []
    for text, (name, options) in chosen.items():
        settings = [f"attention.{option.replace('=', ':')}" for option in options]
        settings = ",".join([f"attention:{name}", *settings])
        variant = re.sub(r"\W+", "_", text)
        variants.append(shlex.quote(f"hydra.sweeper.variants.{variant}={{{settings}}}"))
    return f"-m {' '.join(variants)}"


def split(text: str) -> list[str]:
    """Split at the commas between values, not those between options of one value:
    naive,tiled:block_q=8,impl=x has two values.
    """
    return re.split(r",(?![^,:=]*=)", text)


def refuse_mistakes_in_files(arguments: list[str]) -> None:
    """Exit with a one-line error for a mistake in a recipe, or in a file of the user's own folder.

    Hydra would print several lines, or PyYAML's traceback. The sweeper checks the values that a
    sweep varies. With any other option of Hydra's, nothing is checked here.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    if not any(argument.startswith((*SEARCH_OPTIONS, "experiment=")) for argument in arguments):
        return  # composing once more takes time
    options, overrides = options_first(arguments)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--multirun", "-m", action="store_true")
    known, others = parser.parse_known_args(options)
    if others:
        return
    parsed = OverridesParser.create().parse_overrides(overrides)
    fixed = [each.input_line for each in parsed if not each.is_sweep_override()]
    if known.config_dir is not None:
        if not os.path.isdir(known.config_dir):
            raise SystemExit(f"error: --config-dir={known.config_dir} is not a folder")
        if any(line.startswith("hydra.searchpath=") for line in fixed):
            return
        fixed.append(f"hydra.searchpath=[{quoted(f'file://{os.path.abspath(known.config_dir)}')}]")
    try:
        hydra_config(*fixed)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


def check_keys(arguments: list[str], others: Sequence[str] = ()) -> None:
    """Raise ValueError for a key=value whose key does not exist; the error names the closest key,
    which may also be one of `others`, the keys of a command that passes these arguments on.

    Hydra would advise +key=value, which then has no effect. Arguments that are not key=value are
    left to Hydra.
    """
    if {"-sc", "--shell-completion"} & set(arguments):  # with install=bash or query=bash
        return
    keys = known_keys()
    own_folders = any(argument.startswith(SEARCH_OPTIONS) for argument in arguments)
    for argument in arguments:
        if argument.startswith("--experimental-rerun"):
            raise ValueError(
                "--experimental-rerun would write over the earlier run; resume=DIR goes on with "
                "it, and DIR/overrides.yaml lists the settings that start it again"
            )
        written, _, value = argument.partition("=")
        key = written.lstrip("-+")
        if written.startswith("-") and key in keys:
            raise ValueError(f"{argument}: write {key}={value or 'VALUE'}, without dashes")
        is_setting = "=" in argument and not written.startswith("-")
        if not is_setting or not key.replace(".", "").isidentifier():
            continue
        if key in CHOICES and not own_folders:
            check_choices(key, value)
        if key in keys or key.startswith(("hydra.", "attention.options.")):
            continue
        raise ValueError(f"{argument}: {no_key(key, others)}")


def known_keys() -> list[str]:
    return ["experiment", *setting_keys(RunConfig)]


def no_key(key: str, others: Sequence[str] = ()) -> str:
    """there is no key 'step'; did you mean steps?"""
    keys = [*others, *known_keys()]
    # steps for step, attention.block_kv for attention.block_k; optim.lr for lr
    close = [other for other in keys if other.rpartition(".")[2] == key]
    close = close or difflib.get_close_matches(key, keys, n=1)
    shown = "hydra" if key.startswith("hydra.") else "job"
    hint = f"python train.py --cfg {shown} shows all keys"
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    return f"there is no key '{key}'; {hint}"


def check_choices(group: str, value: str) -> None:
    """Raise ValueError if a name in `value` is not a choice of the group; the error lists them.

    Only plain words are checked, not attention=pkg.module:NAME and the rest of Hydra's grammar.
    """
    for name in value.split(","):
        if not re.fullmatch(r"\w+", name) or name in CHOICES[group]:
            continue
        close = difflib.get_close_matches(name, CHOICES[group], n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        if group == "attention" and (file := users_module(name)):
            hint = f"for the BACKEND in {file}, write attention={name}:BACKEND; "
        raise ValueError(
            f"{group}={value}: there is no {group} '{name}'; {hint}"
            f"the choices are {', '.join(CHOICES[group])}"
        )


def users_module(name: str) -> str | None:
    """The file of a user's module of that name, if there is one. It is not imported."""
    if name in OURS or name in sys.stdlib_module_names:
        return None
    spec = PathFinder.find_spec(name, [*sys.path, os.getcwd()])
    return spec.origin if spec else None


def replay_overrides(arguments: list[str]) -> list[str]:
    """Expand resume=DIR in the arguments to the overrides that the run in DIR was started with.

    These come first, the new overrides after them, and the folder stays the same.
    """
    try:
        check_keys(arguments)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    # argparse finds its own options before the first override or after the last one
    arguments = [*chain(*options_first(arguments))]
    # a variant may have settings that the recipe gives it none of
    arguments = [re.sub(r"^(hydra\.sweeper\.variants\.\w+=\{)", r"++\1", x) for x in arguments]
    resume = folders_to_resume(arguments)
    if not resume or resume[-1] == "null":
        return arguments
    if not resume[-1]:  # such as that of an unset shell variable
        raise SystemExit("error: resume= is empty: name a run directory")
    run_dir = Path(resume[-1])
    recorded = _recorded_overrides(run_dir)
    if {"-m", "--multirun"} & set(arguments):
        raise SystemExit(
            f"error: resume={run_dir} goes on with one run; it cannot be part of a sweep"
        )

    options, new = options_first(
        argument for argument in arguments if not argument.startswith("resume=")
    )
    for argument in new:
        key, _, folder = argument.partition("=")
        if key == "hydra.run.dir" and Path(folder.strip("'\"")).resolve() != run_dir.resolve():
            raise SystemExit(
                f"error: resume={run_dir} goes on in its own folder: leave out {argument}, or "
                "copy the folder and resume the copy"
            )
    # an experiment may ask for a sweep, but a resume continues a single run; .hydra keeps what the
    # first start wrote
    folder = quoted(str(run_dir))
    own = [f"hydra.run.dir={folder}", "hydra.mode=RUN", "hydra.output_subdir=null"]
    # cli_overrides() takes those after resume= as the new ones
    return [*options, *_kept_overrides(recorded, new), f"resume={folder}", *new, *own]


def folders_to_resume(arguments: list[str]) -> list[str]:
    given = (each.partition("=") for each in arguments)
    return [folder.strip("'\"") for key, _, folder in given if key == "resume"]


def sweep_to_resume(arguments: list[str]) -> Path | None:
    """The sweep that resume= names, if it names one. Exits if there are other arguments."""
    sweeps = [Path(x) for x in folders_to_resume(arguments) if os.path.isfile(f"{x}/index.jsonl")]
    if not sweeps:
        return None
    others = [each for each in arguments if not each.startswith("resume=")]
    if others or of_environment().several:
        raise SystemExit(
            f"error: resume={sweeps[-1]} goes on with a sweep as it began: leave out "
            f"{' '.join(others) or 'torchrun'}, or resume one of its runs, as "
            f"resume={sweeps[-1]}/0"
        )
    return sweeps[-1]


def _kept_overrides(recorded: list[str], new: list[str]) -> list[str]:
    """The recorded overrides that the new ones do not replace.

    Options of one attention or data source do not carry over to another.
    """
    replaced = {key_of(override) for override in new} | {"resume"}
    kept = [override for override in recorded if key_of(override) not in replaced]
    for group, shared in SHARED_OPTIONS.items():
        choice = {override for override in new if key_of(override) == group}
        if choice and not choice & set(recorded):
            keys = tuple(f"{group}.{option}" for option in shared)
            kept = [
                override
                for override in kept
                if not key_of(override).startswith(f"{group}.") or key_of(override).startswith(keys)
            ]
    return kept


def _recorded_overrides(run_dir: Path) -> list[str]:
    """The list in a run's overrides.yaml. Exits if the file is missing or damaged."""
    import yaml
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    path = run_dir / "overrides.yaml"
    if not os.path.isfile(path):  # pathlib raises an error for a name that is too long
        raise SystemExit(f"error: resume={no_run(run_dir, path.name)}")
    try:
        recorded = yaml.safe_load(path.read_bytes())
        if not isinstance(recorded, list) or not all(isinstance(each, str) for each in recorded):
            raise ValueError("it is not a list of settings")
        OverridesParser.create().parse_overrides(recorded)
        check_keys(recorded)
    except (OSError, ValueError, yaml.YAMLError, HydraException) as error:
        reason = " ".join(str(error).split())
        raise SystemExit(
            f"error: {path} is damaged: {reason}. Write the run's settings into it again, each on "
            f"a line as '- seq_len=512'; {run_dir / 'config.yaml'} has the values of all, and what "
            "you leave out is refused by name"
        ) from None
    return recorded


def options_first(arguments: Iterable[str]) -> tuple[list[str], list[str]]:
    """Split arguments into Hydra's own options (--config-dir DIR, ...) and the overrides."""
    options, overrides, pending = [], [], iter(arguments)
    for argument in pending:
        if not argument.startswith("-"):
            overrides.append(argument)
            continue
        options.append(argument)
        if argument in VALUE_OPTIONS:
            options += islice(pending, 1)
    return options, overrides


def key_of(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def quoted(text: str) -> str:
    """Quote any string for Hydra, which takes a backslash literally unless a quote follows."""
    escaped = re.sub(
        r"(\\*)('|\Z)", lambda found: found[1] * 2 + found[2].replace("'", "\\'"), text
    )
    return f"'{escaped}'"


def unescaped(text: str) -> str:
    """A value as a person would write it: sweepers put a backslash before colons, commas etc."""
    return re.sub(r"\\([\\()\[\]{}:=, \t])", r"\1", text)


def compose(*overrides: str) -> RunConfig:
    """The settings of `python train.py OVERRIDES`. Raises ValueError with the reason."""
    check_keys(list(overrides))
    check_readable(overrides)
    return read_config(hydra_config(*overrides))


def hydra_config(*overrides: str, with_hydra: bool = False) -> Any:
    """The config that Hydra composes from overrides; with_hydra keeps its own node, as in a job."""
    from hydra import compose as compose_by_hydra
    from hydra import initialize_config_dir

    register()
    with one_sentence(), initialize_config_dir(str(CONF), version_base="1.3"):
        return compose_by_hydra("config", list(overrides), return_hydra_config=with_hydra)


class Mistake(ValueError):
    """A one-line error for settings that Hydra cannot compose."""


@contextmanager
def one_sentence() -> Iterator[None]:
    """Raises errors of Hydra and YAML inside this block as a one-line Mistake."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        # Hydra lists the choices, one per line, and then the folders that it searched
        message = str(error).partition("Config search path")[0]
        message = message.removeprefix("Error merging override ")
        if isinstance(error.__cause__, OmegaConfBaseException):
            message += f": {str(error.__cause__).splitlines()[0]}"
        message = mistake_in_a_file(message) or " ".join(message.split()).removeprefix(": ")
        raise Mistake(message or type(error).__name__) from error
    except YAMLError as error:
        reason = " ".join(str(error).split())
        raise Mistake(f"{reason}; indent with spaces, close quotes and brackets") from error
    except UnicodeDecodeError as error:
        raise Mistake(f"a yaml file is not text in UTF-8: {error}; save it as such") from error


def mistake_in_a_file(message: str) -> str:
    """Hydra's message about a key, value or choice in a yaml file as one line; else ""."""
    pattern = r"In '(.*)': (\w+) raised while composing config:\s*(.*)\n\s*full_key: ?(.*)"
    if found := re.match(pattern, message):
        file, kind, reason, key = found.groups()
        if file.startswith("experiment/") and key == "experiment":
            reason = "its first line must be '# @package _global_', and settings must follow"
        elif kind == "ConfigKeyError":
            reason = no_key(key)
        elif key:
            reason = f"{key}: {reason}"
        return f"{file}.yaml: {reason}"
    if found := re.match(r"In '(experiment/.*)': Could not find 'experiment/(\w+)/(.*)'", message):
        file, group, choice = found.groups()
        return f"{file}.yaml: write '- override /{group}: {choice}' in its defaults"
    if found := re.match(r"In '.*': Could not find '(\w+)/(.*)'\s+Available .*:\s([^:]*)", message):
        group, choice, choices = found.groups()
        return f"there is no {group} '{choice}'; the choices are {', '.join(choices.split())}"
    pattern = r"Could not override '(attention\.\w*options\..*)'\.\s.* use (\+.*): "
    if found := re.match(pattern, message):
        return f"there is no {found[1]} yet to change: write {shlex.quote(found[2])}"
    # an unknown key in a sweep's params
    if found := re.match(r"Could not override '(?!attention\.\w*options\.)(.*)'", message):
        return no_key(found[1])
    return ""


def as_written(node: Any) -> Any:
    """Plain lists, dictionaries and values, with interpolations such as ${seq_len} as written."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(node, resolve=False)


def read_config(cfg: Any) -> RunConfig:
    """Convert the config that Hydra composed to a RunConfig.

    Raises a one-line ValueError for an interpolation that cannot be resolved, such as ${nope:1},
    and for an attention without a name.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    try:
        return OmegaConf.to_object(cfg)
    except MissingMandatoryValue as error:
        raise ValueError(
            f"{error.full_key} is missing: the yaml file of an attention says which it is, as in "
            "'name: tiled'"
        ) from None
    except OmegaConfBaseException as error:
        written = as_written(cfg)
        for part in str(error.full_key or "").split("."):
            written = written.get(part) if isinstance(written, dict) else None
        reason = str(error).splitlines()[0]
        raise ValueError(f"{error.full_key}={written}: {reason}; write the value itself") from None


def where_it_was_typed() -> AbstractContextManager[None]:
    """Relative paths start where the command was typed, also under hydra.job.chdir=true."""
    from hydra.core.hydra_config import HydraConfig

    return chdir(HydraConfig.get().runtime.cwd if HydraConfig.initialized() else ".")


def task_overrides() -> list[str]:
    """Every override of the job that runs now, as Hydra recorded it."""
    from hydra.core.hydra_config import HydraConfig

    return as_written(HydraConfig.get().overrides.task)


def job_overrides() -> list[str]:
    """The overrides of this job, without what resume= adds."""
    return [override for override in task_overrides() if not override.startswith("resume=")]


def cli_overrides() -> list[str]:
    """The overrides of this command line; in a resumed run, those that follow resume=."""
    overrides = task_overrides()
    resumes = [i for i, override in enumerate(overrides) if override.startswith("resume=")]
    return overrides[resumes[-1] + 1 :] if resumes else overrides


def asked_keys() -> set[str]:
    """The keys that the user set on this job's command line.

    Empty if another sweeper or `wandb agent` chose the job, because these do not know which
    settings each choice reads.
    """
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    job = HydraConfig.get()
    # every launcher numbers the jobs of a sweep, even if it runs each as a separate command
    in_sweep = not OmegaConf.is_missing(job.job, "num")
    swept = in_sweep and not job.sweeper._target_.endswith(".CheckedSweeper")
    if swept or "WANDB_SWEEP_ID" in os.environ:
        return set()
    return {key_of(override) for override in task_overrides()}


def searched_folders() -> list[str]:
    """The override that repeats --config-dir and hydra.searchpath, if there was any."""
    from hydra.core.hydra_config import HydraConfig

    sources = HydraConfig.get().runtime.config_sources
    paths = [source.path for source in sources if "command-line" in source.provider]
    folders = [quoted(f"file://{path}") for path in dict.fromkeys(paths) if path]
    return [f"hydra.searchpath=[{','.join(folders)}]"] if folders else []
