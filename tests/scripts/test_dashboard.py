"""The wandb workspace: what it holds, which runs it shows, and that it is saved or refused in one
line, without a network and without a question.
"""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from scripts import dashboard
from tests import processes
from tests.command import metrics, python_path, run, tiny

reports = pytest.importorskip("wandb_workspaces.reports.v2")
ROOT = Path(__file__).resolve().parents[2]


def lines(workspace) -> list:
    panels = [panel for section in workspace.sections for panel in section.panels]
    return [panel for panel in panels if isinstance(panel, reports.LinePlot)]


def write_run(run_dir: Path, project: str = "mine", logger: str = "wandb") -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    settings = {"logger": {"name": logger, "project": project}}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(settings))
    (run_dir / "summary.json").write_text('{"status": "completed", "overrides": []}')


def test_each_curve_is_a_variant_with_mean_and_band_over_its_seeds():
    workspace = dashboard.build_workspace("mine", "2026-11-22_21-09-10 break_it")
    for panel in lines(workspace):
        assert panel.x == "tokens" and panel.groupby == reports.Config("curve")
        assert (panel.groupby_aggfunc, panel.groupby_rangefunc) == ("mean", "minmax")
    panels = [panel for section in workspace.sections for panel in section.panels]
    (memory,) = (panel for panel in panels if isinstance(panel, reports.ScatterPlot))
    assert memory.x == reports.Config("seq_len") and memory.log_x and memory.log_y
    assert "2026-11-22_21-09-10 break_it" in str(workspace.runset_settings.filters)
    assert not dashboard.build_workspace("mine", None).runset_settings.filters


def test_every_metric_is_one_that_training_logs(tmp_path):
    panels = lines(dashboard.build_workspace("mine", None))
    shown = {metric.name for panel in panels for metric in map(reports.Metric, panel.y)}
    logged = set()
    for data in ("stdlib", "last_write"):
        assert run(*tiny(tmp_path / data, f"data={data}")).code == 0
        logged.update(*metrics(tmp_path / data))
    assert shown <= logged
    compared = {"val/loss", "val/loss_exact", "memory/peak_gib", "tokens_per_sec"}
    assert shown >= compared | {"train/loss", "step_tokens_per_sec", "attention/max_score"}


def test_a_folder_names_its_project_and_the_group_of_its_sweep(tmp_path, capsys):
    sweep = tmp_path / "day" / "time"
    write_run(sweep / "0")
    (sweep / "index.jsonl").touch()
    dashboard.main([str(sweep), "dry_run=true"])
    shown = capsys.readouterr().out
    assert "project='mine'" in shown and "day_time" in shown
    # runs of two sweeps have no group
    write_run(tmp_path / "alone")
    dashboard.main([str(tmp_path), "dry_run=true"])
    assert "day_time" not in capsys.readouterr().out


def test_folders_that_no_project_has_are_refused(tmp_path):
    write_run(tmp_path / "a", logger="none")
    with pytest.raises(SystemExit, match="^dashboard: .*wandb"):
        dashboard.main([str(tmp_path), "dry_run=true"])
    write_run(tmp_path / "b")
    write_run(tmp_path / "c", project="other")
    with pytest.raises(SystemExit, match="^dashboard: .*mine, other"):
        dashboard.main([str(tmp_path), "dry_run=true"])


def test_without_the_package_it_says_what_to_install(monkeypatch, tmp_path):
    write_run(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    with pytest.raises(SystemExit, match=r"pip install -e '\.\[dashboard\]'"):
        dashboard.main([str(tmp_path), "dry_run=true"])


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """A machine whose user has no key."""
    for name in list(os.environ):
        if name.startswith("WANDB_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    return monkeypatch


def start(folder: Path) -> subprocess.CompletedProcess:
    """In a process of its own: wandb reads its settings once. It has no terminal and nothing to
    read, so a question would fail it.
    """
    write_run(folder / "run")
    environment = os.environ | {"PYTHONPATH": python_path(ROOT)}
    return processes.run("-m", "scripts.dashboard", str(folder / "run"), env=environment)


def complaint(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 1 and done.stdout == "", done
    (line,) = done.stderr.splitlines()
    assert line.startswith("dashboard: ")
    return line


def test_without_a_key(offline, tmp_path):
    assert "wandb login" in complaint(start(tmp_path))  # what to type


class Server(BaseHTTPRequestHandler):
    """Stands in for wandb's: gives `saved` to a workspace, and keeps what was sent."""

    saved: dict = {}
    sent: list[dict] = []

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        content = {"data": {"viewer": {"id": "1", "entity": "me", "username": "me"}}}
        if "upsertView" in request["query"]:
            self.sent.append(request["variables"])
            content = self.saved
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())


@pytest.fixture
def server(offline):
    with HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        offline.setenv("WANDB_API_KEY", "0" * 40)
        offline.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        yield Server
        server.shutdown()


def test_the_workspace_is_sent(server, tmp_path):
    view = {"view": {"id": "1", "name": "nw-abc-v"}, "inserted": True}
    server.saved = {"data": {"upsertView": view}}
    done = start(tmp_path)
    assert done.returncode == 0, done.stderr
    (variables,) = server.sent
    assert (variables["entityName"], variables["projectName"]) == ("me", "mine")
    assert "val/loss_exact" in variables["spec"] and "/me/mine?nw=abc" in done.stdout


def test_a_refusal_is_one_line(server, offline, tmp_path):
    offline.setenv("WANDB_ENTITY", "team")
    server.saved = {"errors": [{"message": "project not found"}], "data": None}
    line = complaint(start(tmp_path))
    assert "entity=team project=mine" in line and "project not found" in line
