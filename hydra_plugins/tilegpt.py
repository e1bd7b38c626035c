"""Additions to Hydra: attention=pkg.module:NAME as a choice, and a sweeper that checks its jobs.

Hydra finds both here, in the package hydra_plugins, like the plugins that pip installs.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict

if TYPE_CHECKING:
    from config import RunConfig

Job = tuple[str, ...]  # the overrides of a job


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


class CheckedSweeper(BasicSweeper):
    """Hydra's grid of jobs, all checked before anything is written.

    A setting that only some of the jobs read is left out of the others. A recipe can name variants,
    each with several settings of its own. Every variant is combined with all other values:

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
        super().__init__(max_batch_size=None, params=params)
        self.variants = variants or {}
        self.composed: dict[Job, tuple[DictConfig, RunConfig]] = {}

    def sweep(self, arguments: list[str]) -> Any:
        from training.launch.sweep import begun

        jobs = self.combinations(arguments)
        self.shared = set.intersection(*map(set, jobs))
        plan = self.checked(self.without_unread(jobs))
        with begun(Path(self.config.hydra.sweep.dir).absolute(), plan) as left:
            return self.launcher.launch(left, initial_job_idx=0) if left else []

    def combinations(self, arguments: list[str]) -> list[Job]:
        """The overrides of each job. If a key is given twice, the later one counts."""
        named = self.variants.values() if isinstance(self.variants, Mapping) else [self.variants]
        given = [own for own in named if own is not None]
        settings = [own.values() if isinstance(own, Mapping) else [{}] for own in given]
        if any(isinstance(value, Mapping) for values in settings for value in values):
            raise SystemExit(
                f"error: hydra.sweeper.variants={self.variants} must name variants, each with its "
                "settings, as in {small: {attention.window: 64}, exact: {}}"
            )
        # the variants take turns, so that a stopped sweep has the same seeds of every variant
        variants = [job for own in given for job in self.grid(as_overrides(own))] or [{}]
        jobs = self.grid([*as_overrides(self.params), *arguments])
        both = [tuple((job | own).values()) for job in jobs for own in variants]
        # two values that one variant overrides give the same job
        return list(dict.fromkeys(both)) if given else both

    def grid(self, overrides: list[str]) -> list[dict[str, str]]:
        """Every combination of the values, as {key: override}."""
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        parsed = parser.parse_overrides(overrides)
        for each in filter(Override.is_sweep_override, parsed):
            if not (each.is_discrete_sweep() and [*each.sweep_string_iterator()]):
                raise SystemExit(f"error: {each.input_line} gives no values; write KEY=A,B")
        [jobs] = self.split_arguments(parsed, None)
        return [{override.partition("=")[0]: override for override in job} for job in jobs]

    def without_unread(self, jobs: list[Job]) -> list[Job]:
        """The jobs, each without the settings that only others of them read."""
        from training.launch.command_line import key_of
        from training.launch.settings import conditional_settings, is_asked

        settings = []
        for job in jobs:
            with self.refusal(job):
                settings.append(conditional_settings(self.compose(job)[1]))
        pairs = [pair for each in settings for pair in each.items()]
        read_by_some = {key for key, unread in pairs if unread is None}
        kept: list[Job] = []
        lines: dict[str, None] = {}
        for job, conditional in zip(jobs, settings, strict=True):
            left = job
            for key, unread in conditional.items():
                without = tuple(each for each in left if not is_asked(key, {key_of(each)}))
                if unread and key in read_by_some and without != left:
                    lines[f"without {key}: {unread}"] = None
                    left = without
            # jobs that are the same without a setting run once
            if left == job or left not in kept:
                kept.append(left)
        for line in lines:
            print(line)
        return kept

    def checked(self, jobs: list[Job]) -> list[dict[str, Any]]:
        """The plan of the sweep; see begun(). Ends the program if a job cannot run."""
        from training.launch.command_line import key_of
        from training.launch.folders import check_names
        from training.launch.settings import settle

        plan = []
        for number, job in enumerate(jobs):
            with self.refusal(job):
                both, config = self.compose(job)
                settle(config, asked=map(key_of, job))
                self.check(config)
                with open_dict(both):
                    both.hydra.job.num = both.hydra.job.id = number
                place = {"dir": str(both.hydra.sweep.subdir)}
            plan.append({"overrides": list(job)} | place | named_by(config))
        check_names([job["dir"] for job in plan])
        return plan

    @contextmanager
    def refusal(self, job: Job) -> Iterator[None]:
        """Ends the program if a setting of this job is refused."""
        from training.launch.command_line import one_sentence
        from training.record.names import apart

        try:
            with one_sentence():
                yield
        except ValueError as error:
            own = apart(job, self.shared)
            reason = f"{own}: {error}" if own else error
            raise SystemExit(f"error: no job was started: {reason}") from None

    def compose(self, job: Job) -> "tuple[DictConfig, RunConfig]":
        """The settings of a job, with Hydra's own and as the run reads them."""
        from training.launch.command_line import check_overrides, read_config

        if job not in self.composed:
            check_overrides(job)
            both = self.hydra_context.config_loader.load_sweep_config(self.config, list(job))
            self.composed[job] = both, read_config(both)
        return self.composed[job]

    def check(self, config: "RunConfig") -> None:
        """Raise ValueError for all errors that can be found before the job begins."""
        from training.loop.device import pick_device, pick_dtype
        from training.loop.schedule import check_model, check_schedule
        from training.record.loggers import check_logger

        check_logger(config.logger)
        schedule = check_schedule(config)
        # jobs in other processes may have other devices; and if each has a GPU of its own, this
        # process must not take memory of it
        if isinstance(self.launcher, BasicLauncher):
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
