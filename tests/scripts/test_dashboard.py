"""The wandb workspace: what it holds, and that it is saved or refused in one line, without a
network and without a question.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from scripts import dashboard
from tests import processes
from tests.command import metrics, python_path, run, tiny

ROOT = Path(__file__).resolve().parents[2]
ASKED = (
    "train/loss",
    "val/loss",
    "val/loss_exact",
    "memory/peak_gib",
    "tokens_per_sec",
    "step_tokens_per_sec",
    "attention/max_score",
)


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """A machine whose user has no key, and a server of wandb's that is not there."""
    for name in [
        name for name in os.environ if name.startswith("WANDB_") or name.lower().endswith("_proxy")
    ]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return monkeypatch


def start(*arguments: str) -> subprocess.CompletedProcess:
    """In a process of its own: wandb reads its settings once. No terminal, and nothing to read: a
    question would fail it.
    """
    return start_python("-m", "scripts.dashboard", *arguments)


def start_python(*arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": python_path(ROOT)}
    return processes.run(*arguments, env=environment, cwd=Path.cwd())


def complaint(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 1 and done.stdout == "", done
    (line,) = done.stderr.splitlines()
    assert line.startswith("dashboard: ")
    return line


def panels(spec: dict) -> list[dict]:
    return [
        panel["config"]
        for section in spec["spec"]["section"]["panelBankConfig"]["sections"]
        for panel in section["panels"]
    ]


def test_dry_run_prints_the_workspace(capsys):
    group = "2026-11-22_21-09-10 break_it"
    dashboard.main(["entity=me", "project=mine", f"group={group}", "dry_run=true"])
    spec = json.loads(capsys.readouterr().out)
    assert (spec["entity"], spec["project"]) == ("me", "mine")
    lines = [panel for panel in panels(spec) if "metrics" in panel]
    assert {metric for panel in lines for metric in panel["metrics"]} >= set(ASKED)
    for panel in lines:
        assert (panel["xAxis"], panel["groupBy"]) == ("tokens", "curve.value")
        assert (panel["groupAgg"], panel["groupArea"]) == ("mean", "minmax")
    (scatter,) = [panel for panel in panels(spec) if "metrics" not in panel]
    axes = ("config:seq_len.value", "summary:memory/peak_gib")
    assert (scatter["xAxis"], scatter["yAxis"]) == axes
    (runs,) = spec["spec"]["section"]["runSets"]
    assert runs["grouping"] == [{"section": "config", "name": "curve.value"}]
    (chosen,) = runs["filters"]["filters"]
    assert chosen["key"] == {"section": "run", "name": "group"}
    assert (chosen["op"], chosen["value"]) == ("=", group)


def test_without_a_group_all_runs_are_shown():
    spec = dashboard.view(dashboard.Options("me"))
    assert spec["spec"]["section"]["runSets"][0]["filters"]["filters"] == []


def test_every_metric_is_one_that_training_logs(tmp_path):
    shown = {plot.metric for plots in dashboard.SECTIONS.values() for plot in plots}
    logged = set()
    for data in ("stdlib", "last_write"):
        assert run(*tiny(tmp_path / data, f"data={data}")).code == 0
        logged.update(*metrics(tmp_path / data))
    assert shown <= logged


def test_dry_run_needs_no_package_of_wandb(monkeypatch, capsys):
    """A regression test: it refused without wandb-workspaces."""
    for package in ("wandb", "wandb_workspaces", "requests"):
        monkeypatch.setitem(sys.modules, package, None)
    dashboard.main(["entity=me", "dry_run=true"])
    assert json.loads(capsys.readouterr().out)["entity"] == "me"
    with pytest.raises(SystemExit, match="^dashboard: .*wandb"):
        dashboard.main(["entity=me"])


def test_the_package_of_wandb_reads_the_workspace():
    """Its schema knows every key, and would send the same."""
    package = pytest.importorskip("wandb_workspaces.workspaces.internal")
    spec = dashboard.view(dashboard.Options("me", group="g"))["spec"]
    read = package.WorkspaceViewspec.model_validate(spec)
    assert json.loads(read.model_dump_json(by_alias=True, exclude_none=True)) == spec


def test_without_a_key(offline):
    assert "wandb login" in complaint(start("entity=me"))  # what to type


@pytest.mark.slow
def test_without_a_server(offline):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    offline.setenv("WANDB_API_KEY", "0" * 40)
    offline.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
    assert f"127.0.0.1:{port}" in complaint(start("entity=me"))


def serve(answer) -> HTTPServer:
    """A server that gives answer(query, variables) to every request; stands in for wandb's, of
    which only the address is needed.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, content = answer(request["query"], request.get("variables") or {})
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def test_the_workspace_is_sent(offline):
    sent = []
    me = {"id": "1", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}
    view = {"view": {"id": "1", "name": "nw-abc-v"}, "inserted": True}

    def answer(query, variables):
        if "upsertView" in query:
            sent.append(variables)
            return 200, {"data": {"upsertView": view}}
        return 200, {"data": {"viewer": me, "serverInfo": {}}}

    server = serve(answer)
    offline.setenv("WANDB_API_KEY", "0" * 40)
    offline.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    done = start("entity=me", "project=mine")
    server.shutdown()
    assert done.returncode == 0, done.stderr
    (variables,) = sent
    assert (variables["entityName"], variables["projectName"]) == ("me", "mine")
    assert variables["type"] == "project-view"
    assert len(panels({"spec": json.loads(variables["spec"])})) == 11
    assert "/me/mine?nw=abc" in done.stdout


def test_a_refusal_is_one_line(offline):
    server = serve(
        lambda query, variables: (200, {"errors": [{"message": "project not found"}], "data": None})
    )
    offline.setenv("WANDB_API_KEY", "0" * 40)
    offline.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    line = complaint(start("entity=me", "project=mine"))
    server.shutdown()
    assert "entity=me project=mine" in line and "project not found" in line


@pytest.mark.slow
def test_a_server_that_never_answers(offline):
    """It accepts the connection and is silent. In this process, whose deadline can be shortened."""
    code = (
        "import sys; from scripts import dashboard; dashboard.SAVE_TIMEOUT = 1.0; "
        "sys.exit(dashboard.main(sys.argv[1:]))"
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        offline.setenv("WANDB_API_KEY", "0" * 40)
        offline.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        done = start_python("-c", code, "entity=me")
        assert "1 s" in complaint(done) and time.monotonic() - began < 50
