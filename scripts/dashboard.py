"""Save the comparison of a project's runs as a wandb workspace: a curve against tokens for each
variant and seq_len, with mean and band over seeds.

    python -m scripts.dashboard entity=me project=tilegpt dry_run=true

Arguments are key=value:

    entity   user or team that the workspace is saved for
    project  where the runs are (tilegpt)
    group    one sweep only: the group of its runs, as '2026-11-22_21-09-10 break_it'
    name     of the workspace (attentions compared)
    dry_run  true: print the workspace as wandb's JSON, and send nothing (false)

It never asks for a key. docs/guide.md says more.
"""

import json
import os
import secrets
from dataclasses import dataclass
from importlib.util import find_spec

from data.network import answers
from scripts.arguments import command
from scripts.tables import Row
from training.record.loggers import PROBE_TIMEOUT, prepare_environment

SAVE_TIMEOUT = 60.0  # seconds; wandb itself would keep trying


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
    "Accuracy (last_write, recall, needle)": [
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
MEMORY = list(SECTIONS).index("Memory and speed")
# the run's setting by which every panel groups: its variant and seq_len
CURVE = "curve.value"
# columns of the list of runs
PINNED = (
    "summary:status",
    "summary:val/loss.last",
    "summary:val/loss_exact.last",
    "summary:tokens_per_sec",
    "summary:step_tokens_per_sec",
)
PANEL_SETTINGS = {
    "smoothingWeight": 0,
    "smoothingType": "none",
    "smoothingActive": False,
    "xAxis": "_step",
    "xAxisActive": False,
    "ignoreOutliers": False,
    "useRunsTableGroupingInPanels": True,
}
UPSERT = """
mutation UpsertView(
  $entityName: String, $projectName: String, $type: String, $name: String, $displayName: String,
  $description: String, $spec: String
) {
  upsertView(input: {
    entityName: $entityName, projectName: $projectName, type: $type, name: $name,
    displayName: $displayName, description: $description, spec: $spec, createdUsing: WANDB_SDK
  }) { view { id name } inserted }
}
"""


@command
def main(options: Options) -> None:
    print(json.dumps(view(options), indent=1) if options.dry_run else save(options))


def view(options: Options) -> Row:
    """The workspace in wandb's own form, as the package wandb-workspaces sends it. Fields that are
    left out keep wandb's defaults.
    """
    sections = [
        _section(title, [_line(plot) for plot in plots]) for title, plots in SECTIONS.items()
    ]
    # one point per run: this figure shows which attention is linear
    memory = {
        "chartTitle": "peak memory (GiB) against seq_len",
        "xAxis": "config:seq_len.value",
        "yAxis": "summary:memory/peak_gib",
        "xAxisLogScale": True,
        "yAxisLogScale": True,
    }
    sections[MEMORY]["panels"].append(_panel("Scatter Plot", memory))
    settings = PANEL_SETTINGS | {
        "xAxis": "tokens",
        "xAxisActive": True,
        # the default, 10 runs, is too few for a sweep of three attentions and four seeds
        "maxRuns": 100,
        "pointVisualizationMethod": "bucketing-gorilla",
        "tooltipNumberOfRuns": "default",
        "shouldAutoGeneratePanels": False,
    }
    bank_settings = {
        "autoOrganizePrefix": 2,
        "showEmptySections": False,
        "sortAlphabetically": False,
    }
    section = {
        "name": "",
        "panelBankConfig": {"state": 1, "settings": bank_settings, "sections": sections},
        "panelBankSectionConfig": _section("Report Panels", []) | {"isOpen": False, "type": "grid"},
        "customRunColors": {},
        "runSets": [_run_set(options.group)],
        "settings": settings,
        "openRunSet": 0,
        "openViz": True,
    }
    return {
        "entity": options.entity,
        "project": options.project,
        "displayName": options.name,
        "spec": {"section": section, "vizExpanded": False, "libraryExpanded": True},
    }


def _run_set(group: str | None) -> Row:
    """The runs of a sweep, or of the whole project."""
    pinned = dict.fromkeys(("run:displayName", *PINNED), True)
    of_group = {"key": {"section": "run", "name": "group"}, "op": "=", "value": group}
    return {
        "id": "",
        "name": "Run set",
        "enabled": True,
        "search": {"query": ""},
        "filters": {
            "filterFormat": "filterV2",
            "filters": [of_group | {"disabled": False}] if group else [],
        },
        "grouping": [{"section": "config", "name": CURVE}],
        "sort": {"keys": [{"key": {"section": "run", "name": "createdAt"}, "ascending": False}]},
        "runFeed": {
            "version": 2,
            "columnVisible": pinned,
            "columnPinned": pinned,
            "columnWidths": {},
            "columnOrder": list(pinned),
            "pageSize": 10,
            "onlyShowSelected": False,
        },
        "selections": {"root": 1, "bounds": [], "tree": []},
        "expandedRowAddresses": [],
    }


def _section(name: str, panels: list[Row]) -> Row:
    return {
        "name": name,
        "isOpen": True,
        "panels": panels,
        "type": "flow",
        "flowConfig": {
            "snapToColumns": True,
            "columnsPerPage": 3,
            "rowsPerPage": 2,
            "gutterWidth": 16,
            "boxWidth": 460,
            "boxHeight": 300,
        },
        "sorted": 0,
        "localPanelSettings": PANEL_SETTINGS,
        "pinned": False,
    }


def _line(plot: Plot) -> Row:
    config = {
        "chartTitle": plot.title,
        "xAxis": "tokens",
        "metrics": [plot.metric],
        "yLogScale": plot.log_y,
        "groupBy": CURVE,
        "groupAgg": "mean",
        "groupArea": "minmax",
        "aggregate": True,
    }
    return _panel("Run History Line Plot", config)


def _panel(kind: str, config: Row) -> Row:
    layout = {"x": 0, "y": 0, "w": 8, "h": 6}
    return {"__id__": secrets.token_hex(5), "layout": layout, "viewType": kind, "config": config}


def save(options: Options) -> str:
    """Save the workspace and return its address. Raises ValueError without a key, without an
    answer, or if wandb refuses.
    """
    prepare_environment()
    os.environ.pop("WANDB_MODE", None)  # meant for runs
    if find_spec("wandb") is None:
        raise ValueError("the package wandb is missing: pip install wandb")
    import requests
    import wandb

    logged_in = wandb.login(prompt=False, verify=False)
    settings = wandb.setup().settings
    if not (logged_in and settings.api_key):
        raise ValueError(
            "wandb has no API key: wandb login, or WANDB_API_KEY; dry_run=true prints the "
            "workspace without one"
        )
    if not answers(settings.base_url, PROBE_TIMEOUT):
        raise ValueError(
            f"wandb's server {settings.base_url} does not answer; dry_run=true prints the "
            "workspace without it"
        )
    workspace = view(options)
    variables = {
        "entityName": workspace["entity"],
        "projectName": workspace["project"],
        "displayName": workspace["displayName"],
        "name": f"nw-{secrets.token_hex(6)}-v",
        "type": "project-view",
        "description": "",
        "spec": json.dumps(workspace["spec"]),
    }
    refused = f"wandb refused the workspace for entity={options.entity} project={options.project}"
    try:
        answer = requests.post(
            f"{settings.base_url}/graphql",
            json={"query": UPSERT, "variables": variables},
            auth=("api", settings.api_key),
            timeout=SAVE_TIMEOUT,
        )
        content = answer.json()
    except requests.Timeout:
        raise ValueError(
            f"wandb's server {settings.base_url} took longer than {SAVE_TIMEOUT:.0f} s; nothing "
            "is known to be saved"
        ) from None
    except requests.RequestException as error:  # includes answers that are not JSON
        raise ValueError(f"{refused}: {error}") from None
    saved = (content.get("data") or {}).get("upsertView")
    if not saved:
        errors = [error.get("message", "") for error in content.get("errors") or []]
        raise ValueError(f"{refused}: {'; '.join(errors) or answer.reason}")
    name = saved["view"]["name"].removeprefix("nw-").removesuffix("-v")
    return f"{settings.app_url}/{options.entity}/{options.project}?nw={name}"


if __name__ == "__main__":
    main()
