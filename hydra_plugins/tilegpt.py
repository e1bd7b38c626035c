"""Additions to Hydra: attention=pkg.module:NAME as a choice, and a sweeper that checks its jobs.

Hydra finds both here, in the package hydra_plugins, like the plugins that pip installs.
"""

import sys
from collections.abc import Mapping
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

    def __init__(self, params: DictConfig | None, variants: DictConfig | None):
        super().__init__(max_batch_size=None, params=params)
        self.variants = variants or {}

    def sweep(self, arguments: list[str]) -> Any:
        from training.launch.folders import check_names
        from training.launch.sweep import begun

        plan = self.plan(self.combinations(arguments))
        check_names([entry["dir"] for entry in plan])
        with begun(Path(self.config.hydra.sweep.dir).absolute(), plan) as left:
            # some launchers cannot start no job
            ended = self.launcher.launch(left, initial_job_idx=0) if left else []
        return [each.return_value for each in ended]  # raises what a job raised outside its run

    def combinations(self, arguments: list[str]) -> list[Job]:
        """The overrides of each job. If a key is given twice, the later one counts."""
        from training.launch.command_line import key_of

        variants = [own for own in self.variants.values() if own is not None] or [{}]
        if not all(isinstance(own, Mapping) for own in variants):
            raise ValueError(
                f"hydra.sweeper.variants={self.variants} must name variants, each with its "
                "settings, as in {small: {attention.window: 64}, exact: {}}"
            )
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        given = parser.parse_overrides([*as_overrides(self.params), *arguments])
        for each in filter(Override.is_sweep_override, given):
            if not (each.is_discrete_sweep() and [*each.sweep_string_iterator()]):
                raise ValueError(f"{each.input_line} gives no values; write KEY=A,B")
        [grid] = self.split_arguments(given, None)
        # the variants take turns, so that a stopped sweep has the same seeds of every variant
        jobs = [[*job, *as_overrides(own)] for job in grid for own in variants]
        return [tuple({key_of(each): each for each in job}.values()) for job in jobs]

    def plan(self, jobs: list[Job]) -> list[dict[str, Any]]:
        """The jobs for begun(), without those that are the same.

        Prints which settings are left out. Raises ValueError if a job cannot run.
        """
        from training.launch.command_line import read_config
        from training.launch.settings import asked_keys, settle, unread_settings
        from training.record.names import identity

        composed, read_by_some = {}, set()
        for job in jobs:
            cfg = self.hydra_context.config_loader.load_sweep_config(self.config, list(job))
            config = read_config(cfg)
            unread = unread_settings(config)
            kept = tuple(each for each in job if not asked_keys([each]) & unread.keys())
            composed[job] = cfg, config, kept
            read_by_some.update(kept)
        plan, lines = {}, {}
        for job, (cfg, config, kept) in composed.items():
            left_out = settle(config, asked=set(job) - read_by_some)
            self.check(config)
            lines |= {f"without {key}: {why}": None for key, why in left_out.items()}
            with open_dict(cfg):
                cfg.hydra.job.num = cfg.hydra.job.id = len(plan)
            place = {"overrides": list(kept), "dir": str(cfg.hydra.sweep.subdir)}
            plan.setdefault(kept, place | identity(config))
        for line in lines:
            print(line)
        if same := len(jobs) - len(plan):
            print(f"{same} of {len(jobs)} jobs are the same as others, and do not run again")
        return list(plan.values())

    def check(self, config: "RunConfig") -> None:
        """Raise ValueError for all errors that can be found before the job begins."""
        from training.loop.device import pick_device, pick_dtype
        from training.loop.schedule import check_model, chosen_attention
        from training.record.loggers import check_logger

        check_logger(config.logger)
        schedule = chosen_attention(config)
        # jobs in other processes may have other devices; and if each has a GPU of its own, this
        # process must not take memory of it
        if isinstance(self.launcher, BasicLauncher):
            device = pick_device(config.device)
            dtype = pick_dtype(config.dtype, device)
            for backend in schedule.values():
                check_model(config, backend, dtype=dtype, device=device)


def as_overrides(settings: Mapping[str, Any]) -> list[str]:
    return [f"{key}={'null' if x is None else x}" for key, x in settings.items()]
