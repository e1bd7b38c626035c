"""Save the comparison of a project's runs as a wandb workspace: attentions beside one another,
against tokens, mean and band over seeds.

    python -m scripts.dashboard entity=me project=tilegpt dry_run=true

Arguments are key=value:

    entity   user or team that the workspace is saved for
    project  where the runs are (tilegpt)
    group    one sweep only: the name of its folder, which its runs have as their group
    name     of the workspace (attentions compared)
    dry_run  true: print the workspace as JSON, in the form in which wandb keeps it, and send
             nothing (false)

Needs the package wandb-workspaces; never asks for a key.
"""

import json
import os
import threading
from dataclasses import dataclass
from typing import Any

from scripts.arguments import command
from training.loggers import has_key, installed, reachable

SAVE_TIMEOUT = 60.0  # seconds: wandb itself would go on trying


@dataclass
class Options:
    entity: str
    project: str = "tilegpt"
    group: str | None = None
    name: str = "attentions compared"
    dry_run: bool = False


@dataclass
class Plot:
    metric: str
    title: str
    log_y: bool = False


SECTIONS = {
    "Loss: a wrong attention shows on the right": [
        Plot("val/loss", "held-out loss, own attention"),
        Plot("val/loss_exact", "held-out loss, same weights under exact attention"),
        Plot("train/loss", "training loss"),
    ],
    "Accuracy (last_write)": [
        Plot("val/accuracy", "accuracy, own attention"),
        Plot("val/accuracy_exact", "accuracy, same weights under exact attention"),
    ],
    "Memory and speed": [
        Plot("memory/peak_gib", "peak memory (GiB)", log_y=True),
        Plot("tokens_per_sec", "tokens per second, by the wall clock"),
        Plot("step_tokens_per_sec", "tokens per second, the steps alone"),
    ],
    "Inside": [
        Plot(
            "attention/max_score",
            "largest score: exp overflows float16 past 11.09, float32 past 88.72",
            log_y=True,
        ),
        Plot("grad_norm", "gradient norm", log_y=True),
    ],
}
# columns of the list of runs
PINNED = ("status", "val/loss", "val/loss_exact", "tokens_per_sec", "step_tokens_per_sec")


@command("dashboard", Options)
def main(options: Options) -> None:
    for package in ("wandb", "wandb_workspaces"):
        if not installed(package):
            raise ValueError(
                f"the package {package} is missing: pip install wandb-workspaces, or pip install "
                "-e '.[dashboard]'"
            )
    workspace = build_workspace(options)
    print(json.dumps(spec(workspace), indent=1) if options.dry_run else save(workspace))


def build_workspace(options: Options) -> Any:
    """A wandb_workspaces Workspace; asks nothing of a network."""
    # no reports of its own errors and no chatter, unless the user asks for them
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    attention = "attention.name"

    def panel(plot: Plot) -> Any:
        by_attention = {
            "groupby": wr.Config(attention),
            "groupby_aggfunc": "mean",
            "groupby_rangefunc": "minmax",
        }
        return wr.LinePlot(
            title=plot.title, x="tokens", y=[plot.metric], log_y=plot.log_y, **by_attention
        )

    sections = {name: [panel(plot) for plot in plots] for name, plots in SECTIONS.items()}
    # one point a run: the figure that shows which attention is linear
    memory = {
        "x": wr.Config("seq_len"),
        "y": wr.SummaryMetric("memory/peak_gib"),
        "log_x": True,
        "log_y": True,
    }
    sections["Memory and speed"].append(
        wr.ScatterPlot(title="peak memory (GiB) against seq_len", **memory)
    )
    return ws.Workspace(
        entity=options.entity,
        project=options.project,
        name=options.name,
        sections=[
            ws.Section(name=name, panels=panels, is_open=True) for name, panels in sections.items()
        ],
        # the default of 10 runs is less than a sweep of three attentions and four seeds
        settings=ws.WorkspaceSettings(x_axis="tokens", max_runs=100),
        runset_settings=ws.RunsetSettings(
            groupby=[ws.Config(attention)],
            filters=[ws.Metric("Group") == options.group] if options.group else [],
            pinned_columns=[f"summary:{name}" for name in PINNED],
        ),
    )


def spec(workspace: Any) -> dict[str, Any]:
    """What save() would send."""
    # the package has no public name for it
    return json.loads(workspace._to_model().model_dump_json(by_alias=True, exclude_none=True))


def save(workspace: Any) -> str:
    """Save and return the address. ValueError without a key, without an answer, or where wandb
    refuses.
    """
    import wandb

    settings = wandb.setup().settings
    if not (settings.api_key or has_key(settings.base_url)):
        raise ValueError(
            "wandb has no API key: wandb login, or WANDB_API_KEY; dry_run=true prints the "
            "workspace without one"
        )
    if not reachable(settings.base_url):
        raise ValueError(
            f"wandb's server {settings.base_url} does not answer; dry_run=true prints the "
            "workspace without it"
        )
    outcome: list[str | Exception] = []

    def attempt() -> None:
        try:
            workspace.save()
            outcome.append(workspace.url)
        # a server may refuse in any way, and each is one line for the user
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(SAVE_TIMEOUT)
    if not outcome:
        raise ValueError(
            f"wandb's server {settings.base_url} took longer than {SAVE_TIMEOUT:.0f} s; nothing "
            "is known to be saved"
        )
    if isinstance(outcome[0], Exception):
        reason = (str(outcome[0]) or type(outcome[0]).__name__).splitlines()[0]
        raise ValueError(
            f"wandb refused the workspace for entity={workspace.entity} "
            f"project={workspace.project}: {reason}"
        )
    return outcome[0]


if __name__ == "__main__":
    main()
