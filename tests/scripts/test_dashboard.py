"""The wandb workspace: what it holds, which runs it shows, and that it is saved or refused in one
line, without a network and without a question.
"""

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from scripts import dashboard
from tests import processes
from tests.command import metrics, run, tiny

reports = pytest.importorskip("wandb_workspaces.reports.v2")


def write_run(run_dir: Path, project: str = "mine", logger: str = "wandb") -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    settings = {"logger": {"name": logger, "project": project}}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(settings))
    (run_dir / "summary.json").write_text('{"status": "completed", "overrides": []}')
    return run_dir


def test_each_curve_is_a_variant_with_mean_and_band_over_its_seeds(tmp_path):
    """Every metric is one that training logs."""
    workspace = dashboard.build_workspace("mine", "2026-11-22_21-09-10 break_it")
    panels = [panel for section in workspace.sections for panel in section.panels]
    curves = [panel for panel in panels if isinstance(panel, reports.LinePlot)]
    for panel in curves:
        assert panel.x == "tokens" and panel.groupby == reports.Config("curve")
        assert (panel.groupby_aggfunc, panel.groupby_rangefunc) == ("mean", "minmax")
    (memory,) = (panel for panel in panels if isinstance(panel, reports.ScatterPlot))
    assert memory.x == reports.Config("seq_len") and memory.log_x and memory.log_y
    shown = {metric.name for panel in curves for metric in map(reports.Metric, panel.y)}
    compared = {"val/loss", "val/loss_exact", "memory/peak_gib", "tokens_per_sec"}
    assert shown >= compared | {"train/loss", "step_tokens_per_sec", "attention/max_score"}
    for data in ("stdlib", "last_write"):
        assert run(*tiny(tmp_path / data, f"data={data}")).code == 0
        shown -= {*metrics(tmp_path / data)[-1]}
    assert not shown


def test_a_folder_names_its_project_and_the_group_of_its_sweep(tmp_path, capsys):
    sweep = write_run(tmp_path / "day/time/0").parent
    (sweep / "index.jsonl").touch()
    dashboard.main([str(sweep), "dry_run=true"])
    shown = capsys.readouterr().out
    assert "project='mine'" in shown and "day_time" in shown
    # runs of two sweeps have no group
    write_run(tmp_path / "alone")
    dashboard.main([str(tmp_path), "dry_run=true"])
    assert "day_time" not in capsys.readouterr().out


def test_folders_that_no_project_has_are_refused(tmp_path, monkeypatch):
    def refused(named: str) -> None:
        with pytest.raises(SystemExit, match=f"^dashboard: .*{named}"):
            dashboard.main([str(tmp_path), "dry_run=true"])

    write_run(tmp_path / "a", logger="none")
    refused("wandb")
    write_run(tmp_path / "b")
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    refused(r"pip install -e '\.\[dashboard\]'")
    write_run(tmp_path / "c", project="other")
    refused("mine, other")


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


def start(folder: Path, **variables: str) -> tuple[int, str, str]:
    """Exit code, output and errors, for a user of whom only these variables are known.

    In a process of its own: wandb reads its settings once. It has nothing to read, so a question
    would fail it.
    """
    beginnings = ("WANDB_", "HTTP_", "HTTPS_", "ALL_", "NO_")
    kept = {name: x for name, x in os.environ.items() if not name.upper().startswith(beginnings)}
    kept |= {"HOME": str(folder), "NETRC": f"{folder}/netrc", "WANDB_CONFIG_DIR": str(folder)}
    done = processes.run(
        *("-m", "scripts.dashboard", str(write_run(folder / "run"))), env=kept | variables
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def server():
    """The variables of a user with a key, for the address of a server of ours."""
    with HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        yield {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": address}
        server.shutdown()


def test_the_workspace_is_sent(server, tmp_path):
    view = {"view": {"id": "1", "name": "nw-abc-v"}, "inserted": True}
    Server.saved = {"data": {"upsertView": view}}
    code, out, err = start(tmp_path, **server)
    assert code == 0, err
    (variables,) = Server.sent
    assert (variables["entityName"], variables["projectName"]) == ("me", "mine")
    assert "val/loss_exact" in variables["spec"] and "/me/mine?nw=abc" in out


def test_without_a_key_or_refused_it_is_one_line(server, tmp_path):
    Server.saved = {"errors": [{"message": "project not found"}], "data": None}
    for variables, named in (
        ({}, ["wandb login"]),  # what to type
        (server | {"WANDB_ENTITY": "team"}, ["entity=team project=mine", "project not found"]),
    ):
        code, out, err = start(tmp_path, **variables)
        (line,) = err.splitlines()
        assert (code, out) == (1, "") and line.startswith("dashboard: ")
        assert all(name in line for name in named)
