"""Additions to Hydra: attention=pkg.module:NAME as a choice, and a sweeper that checks its jobs.

Hydra finds both here, in the package hydra_plugins, like the plugins that pip installs.
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

if TYPE_CHECKING:
    from config import RunConfig
    from training.launch.settings import Unread


class OwnAttention(ConfigSource):
    """Choices of the group `attention` without a file: pkg.module:NAME, and register()ed names."""

    @staticmethod
    def scheme() -> str:
        return "attention"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return False

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.partition("/")
        # no import is needed: registering a backend has loaded the package
        registered = getattr(sys.modules.get("attention"), "BACKENDS", ())
        return group == "attention" and (":" in name or name in registered)

    def load_config(self, config_path: str) -> ConfigResult:
        config = OmegaConf.create({"name": config_path.partition("/")[2]})
        header = {"package": None}
        return ConfigResult(self.provider, self.full_path(), config, header=header)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []


class OwnAttentionPath(SearchPathPlugin):
    """Makes Hydra search OwnAttention after the folders."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("tilegpt", "attention://")


class CheckedSweeper(Sweeper):
    """Runs every combination of the values, like Hydra's basic sweeper, but checks all jobs first.

    A setting that only some of the jobs read is left out of the others. If jobs are the same
    without it, only one of them runs. A recipe can name variants, each with several settings of its
    own. Every variant is combined with all other values:

        hydra:
          sweeper:
            params: {seed: "0,1"}
            variants:
              exact: {}
              pattern: {attention.window: 256, attention.pattern: SSSL}
              alibi: {model.positions: alibi}

    runs the three with seed 0, then with seed 1. A variant's settings override the params and the
    command line. hydra.sweeper.variants.pattern={attention.window:64} changes a variant, and
    hydra.sweeper.variants.alibi=null removes one.
    """

    def __init__(self, params: DictConfig | None, variants: DictConfig | None = None):
        self.params = params or {}
        self.variants = variants or {}

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.hydra_context = hydra_context
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        from training.launch.sweep import begin_sweep, finish_sweep, forget_sweep

        folder = Path(self.config.hydra.sweep.dir)
        try:
            jobs = self.checked(self.combinations(arguments))
        except BaseException:
            forget_sweep(folder)
            raise
        begin_sweep(folder, jobs)
        OmegaConf.save(self.config, folder / "multirun.yaml")
        try:
            return self.launcher.launch([job["overrides"] for job in jobs], initial_job_idx=0)
        except KeyboardInterrupt:  # the launcher runs its jobs in other processes
            finish_sweep(folder, 130)

    def combinations(self, arguments: list[str]) -> list[list[str]]:
        """The overrides of each job. If a key is given twice, the later one counts."""
        jobs = self.grid([*as_overrides(self.params), *arguments])
        given = [as_overrides(each) for each in self.settings_of_variants() if each is not None]
        if not given:
            return [list(job.values()) for job in jobs]
        variants = [own for each in given for own in self.grid(each)]
        # the variants take turns, so that a stopped sweep has the same seeds of every variant
        both = [(job | own).values() for job in jobs for own in variants]
        return [list(job) for job in dict.fromkeys(map(tuple, both))]

    def settings_of_variants(self) -> list[Any]:
        """A mapping for each variant, or null. Ends the program for anything else."""
        key = "hydra.sweeper.variants"
        if not isinstance(self.variants, Mapping):
            raise SystemExit(
                f"error: {key}={self.variants} must name variants, each with its settings, as in "
                "{small: {attention.window: 64}, exact: {}}"
            )
        for name, own in self.variants.items():
            if own is None:
                continue
            if not isinstance(own, Mapping):
                raise SystemExit(
                    f"error: {key}.{name}={own} must be the settings of the variant, as in "
                    "{attention.window: 64}, or null to leave it out"
                )
            for setting, value in own.items():
                if isinstance(value, Mapping):
                    inner = next(iter(value), "NAME")
                    raise SystemExit(
                        f"error: {key}.{name}: {setting} has settings of its own; write them as "
                        f"{setting}.{inner}: {value.get(inner)}"
                    )
        return list(self.variants.values())

    def grid(self, overrides: list[str]) -> list[dict[str, str]]:
        """Every combination of the values, as {key: override}."""
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        values: dict[str, list[str]] = {}
        for override in parser.parse_overrides(overrides):
            key = override.get_key_element()
            if not override.is_sweep_override():
                values[key] = [f"{key}={override.get_value_element_as_str()}"]
                continue
            if not override.is_discrete_sweep():
                raise SystemExit(
                    f"error: {override.input_line} has no list of values to sweep over; write "
                    f"{key}=choice(A,B)"
                )
            values[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
            if not values[key]:
                raise SystemExit(
                    f"error: {override.input_line} has no value to sweep over, so there is no "
                    f"job; write {key}=A,B"
                )
        return [dict(zip(values, job, strict=True)) for job in product(*values.values())]

    def checked(self, jobs: list[list[str]]) -> list[dict[str, Any]]:
        """The jobs to launch, each with left_out= for the settings that it does not read.

        See begin_sweep() for the entries of a job. Ends the program with all reasons if a job
        cannot run.
        """
        from training.launch.command_line import key_of
        from training.launch.settings import is_asked, settle, unread

        problems: dict[int, str] = {}
        composed = self.composed(jobs, problems)
        read_by_some = {
            key
            for _, settings in composed.values()
            for key, reason in settings.items()
            if reason is None
        }
        kept: list[dict[str, Any]] = []
        seen: dict[str, bool] = {}  # the settings of each job, and whether it left out some
        left_out: dict[str, None] = {}
        ranks_of = getattr(self.launcher, "ranks_of", lambda config: 1)  # gpus may start several
        for number, (config, settings) in composed.items():
            job = jobs[number]
            asked = {key_of(override) for override in job}
            excused = [
                key for key in unread(settings) if key in read_by_some and is_asked(key, asked)
            ]
            config.left_out = [*config.left_out, *excused]
            try:
                reasons = settle(config, asked=asked)
                self.check(config)
                ranks = ranks_of(config)
            except ValueError as error:
                problems[number] = str(error)
                continue
            left_out |= dict.fromkeys(f"without {key}: {reasons[key]}" for key in excused)
            same = repr(asdict(replace(config, left_out=[])))
            if same in seen and (seen[same] or excused):
                continue
            seen[same] = bool(excused)
            if excused:
                job = [override for override in job if key_of(override) != "left_out"]
                job.append(f"left_out=[{','.join(config.left_out)}]")
            kept.append({"overrides": job} | named_by(config) | {"ranks": ranks})
        if problems:
            raise SystemExit(refusal(jobs, problems))
        folders = self.config.hydra.sweep
        if len(kept) > 1 and not OmegaConf.is_interpolation(folders, "subdir"):
            raise SystemExit(
                f"error: hydra.sweep.subdir={folders.subdir} is one folder for {len(kept)} jobs; "
                "leave it out, or name a folder by the job, as in ${hydra.job.num}"
            )
        for line in left_out:
            print(line)
        if len(kept) < len(jobs):
            print(f"{len(kept)} jobs in place of {len(jobs)}: the others would repeat one of them")
        return kept

    def composed(
        self, jobs: list[list[str]], problems: dict[int, str]
    ) -> "dict[int, tuple[RunConfig, dict[str, Unread | None]]]":
        """Each job's settings, and those that only some choices read, by its number.

        A job that cannot be composed goes into `problems` instead.
        """
        from training.launch.interrupt import Stopped
        from training.launch.settings import conditional_settings

        composed = {}
        for number, job in enumerate(jobs):
            try:
                config = self.compose(job)
                composed[number] = config, conditional_settings(config)
            except (ValueError, KeyboardInterrupt) as error:
                if isinstance(error, Stopped):  # by a signal, not by a user's module
                    raise
                raised = f"{type(error).__name__} was raised while the job was checked"
                problems[number] = str(error) or raised
        return composed

    def compose(self, job: list[str]) -> "RunConfig":
        from training.launch.command_line import one_sentence, read_config

        with one_sentence():
            composed = self.hydra_context.config_loader.load_sweep_config(self.config, job)
        with open_dict(composed):
            del composed["hydra"]
        return read_config(composed)

    def check(self, config: "RunConfig") -> None:
        """Raise ValueError for all errors that can be found before the job begins."""
        from training.loop.device import pick_device, pick_dtype
        from training.loop.schedule import check_model, check_schedule
        from training.record.loggers import check_logger

        check_logger(config.logger)
        schedule = check_schedule(config)
        # cluster nodes may have devices that this machine lacks; and if jobs have GPUs of their
        # own, this process must not take memory of these
        basic = self.config.hydra.launcher._target_.endswith(".BasicLauncher")
        if basic or getattr(self.launcher, "slots", None):  # on the CPU
            device = pick_device(config.device)
            check_model(config, schedule, dtype=pick_dtype(config.dtype, device), device=device)


def named_by(config: "RunConfig") -> dict[str, Any]:
    """The entries of the sweep's index from which a job gets its name."""
    from training.record.names import attention_names

    attentions = attention_names(config.attention)
    return {
        "attention": config.attention.name,
        "variant": attentions[0][1],
        "seq_len": config.seq_len,
        "seed": config.seed,
        "starts": [{"step": 0, "attention": attentions, "changed": {}}],
    }


def as_overrides(settings: DictConfig | dict[str, Any]) -> list[str]:
    return [f"{key}={'null' if x is None else x}" for key, x in settings.items()]


def refusal(jobs: list[list[str]], problems: dict[int, str]) -> str:
    """error: 2 of 3 jobs cannot run, so none was started: attention=sdpa, attention=flex: ..."""
    from training.launch.command_line import unescaped

    shared = set.intersection(*map(set, jobs))
    by_reason: dict[str, list[str]] = {}
    for number, reason in problems.items():
        own = [unescaped(override) for override in jobs[number] if override not in shared]
        by_reason.setdefault(reason, []).append(" ".join(own))
    lines = [
        f"{', '.join(filter(None, names))}: {reason}".removeprefix(": ")
        for reason, names in by_reason.items()
    ]
    count = f"{len(problems)} of {len(jobs)} jobs cannot"
    if len(problems) == len(jobs):
        count = "no job can"
    return f"error: {count} run, so none was started: " + "\n  ".join(lines)
