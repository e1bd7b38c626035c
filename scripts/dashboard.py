"""Save the comparison of runs as a wandb workspace: a curve against tokens for each variant and
seq_len, with mean and band over seeds.

    python -m scripts.dashboard multirun/2026-01-31/12-00-00

The arguments are runs, sweeps or folders of either that were logged to one project of wandb. The
workspace shows the sweep, or the whole project if they are not one sweep's. The key is

    dry_run  true: print the workspace, and send nothing (false)

It is saved for wandb's default user or team, or for WANDB_ENTITY. It needs
`pip install -e '.[dashboard]'`, and never asks for a key.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.arguments import command
from scripts.runs import runs_below
from training.record.files import read_mapping
from training.record.loggers import check_server, group_name, prepare_environment, shortened
from training.record.runs import sweep_of

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace


@dataclass
class Options:
    paths: list[Path]
    dry_run: bool = False


# {section: {metric: title}}
SECTIONS = {
    "Loss: a wrong attention shows on the right": {
        "val/loss": "held-out loss, own attention",
        "val/loss_exact": "held-out loss, same weights under exact attention",
        "train/loss": "training loss",
    },
    "Accuracy (last_write, recall, needle)": {
        "val/accuracy": "accuracy, own attention",
        "val/accuracy_exact": "accuracy, same weights under exact attention",
    },
    "Memory and speed": {
        "memory/peak_gib": "peak memory (GiB)",
        "tokens_per_sec": "tokens per second, by the wall clock",
        "step_tokens_per_sec": "tokens per second, the steps alone",
    },
    "Inside": {
        "attention/max_score": "largest score; exp overflows float16 at 11.09, float32 at 88.72",
        "grad_norm": "gradient norm",
    },
}
LOG_SCALE = ("memory/peak_gib", "attention/max_score", "grad_norm")


@command
def main(options: Options) -> None:
    project, group = logged_to(options.paths)
    try:
        workspace = build_workspace(project, group)
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is missing: pip install -e '.[dashboard]'") from error
    if options.dry_run:
        print(workspace)
    else:
        save(workspace)


def logged_to(folders: Iterable[Path]) -> tuple[str, str | None]:
    """The project of the runs below the folders, and their group if all are of one sweep. Raises
    ValueError unless one project has them all.
    """
    projects, groups = set(), set()
    for run_dir, run in runs_below(folders).items():
        logger = read_mapping(run_dir / "config.yaml").get("logger")
        if isinstance(logger, dict) and logger.get("name") == "wandb":
            projects.add(str(logger.get("project")))
            sweep = sweep_of(run_dir)
            groups.add(sweep and group_name(sweep, run.get("overrides") or []))
    if len(projects) != 1:
        where = ", ".join(map(str, folders))
        names = ", ".join(sorted(projects)) or "none"
        raise ValueError(f"the runs below {where} must be of one project of wandb, not {names}")
    return projects.pop(), groups.pop() if len(groups) == 1 else None


def build_workspace(project: str, group: str | None) -> "Workspace":
    from wandb_workspaces import expr
    from wandb_workspaces.reports.v2 import Config, LinePlot, ScatterPlot, SummaryMetric
    from wandb_workspaces.workspaces import RunsetSettings, Section, Workspace, WorkspaceSettings

    sections = []
    for name, metrics in SECTIONS.items():
        panels = [
            LinePlot(
                title=title,
                x="tokens",
                y=[metric],
                log_y=metric in LOG_SCALE,
                aggregate=True,
                groupby=Config("curve"),  # a variant and its seq_len
                groupby_aggfunc="mean",
                groupby_rangefunc="minmax",
            )
            for metric, title in metrics.items()
        ]
        sections.append(Section(name, panels, is_open=True))
    # one point per run: this figure shows which attention is linear
    memory = ScatterPlot(
        title="peak memory (GiB) against seq_len",
        x=Config("seq_len"),
        y=SummaryMetric("memory/peak_gib"),
        log_x=True,
        log_y=True,
    )
    return Workspace(
        entity="",
        project=project,
        name="attentions compared",
        sections=[*sections, Section("Memory by length", [memory], is_open=True)],
        # the default of 10 runs is too few for a sweep of three attentions and four seeds
        settings=WorkspaceSettings(x_axis="tokens", max_runs=100),
        runset_settings=RunsetSettings(
            filters=expr.And(expr.Metric("Group") == shortened(group)) if group else "",
            groupby=[expr.Config("curve")],
        ),
    )


def save(workspace: "Workspace") -> None:
    """Save the workspace and print its address. Raises OSError without a key or an answer, and
    ValueError if wandb refuses.
    """
    prepare_environment()
    os.environ.pop("WANDB_MODE", None)  # meant for runs
    import wandb

    check_server()
    try:
        workspace.entity = os.environ.get("WANDB_ENTITY") or wandb.Api().default_entity
        print(workspace.save().url)
    # the package raises errors of three libraries
    except Exception as error:
        where = f"entity={workspace.entity} project={workspace.project}"
        raise ValueError(f"wandb refused the workspace for {where}: {error}") from error


if __name__ == "__main__":
    main()
