"""Loggers: what arrives at wandb equals what was logged, and nothing that wandb does can stop or
prompt a training.

Each wandb case takes 2 to 4 s, in a process of its own: wandb keeps settings, credentials and a
service process for as long as one lives.
"""

import contextlib
import http.server
import importlib.util
import json
import logging
import os
import pty
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from data.network import answers
from tests import processes
from tests.processes import ROOT, python_path
from training.record import loggers
from training.record.loggers import Logger

needs_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="wandb is not installed"
)

# logs the rows FIRST to LAST of a run, and dies at once if the run would have gone on to row 40
PROGRAM = """
import json, logging, os, sys, time
from pathlib import Path
from training.record.files import append_row
from training.record.loggers import LOGGERS, LoggedRun

logging.basicConfig(format="%(levelname)s %(message)s")
folder, name, first, last = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
metrics = folder / "run/metrics.jsonl"
metrics.parent.mkdir(exist_ok=True)
metrics.touch()
# the rows of the checkpoint from which it goes on
metrics.write_text("".join(metrics.open().readlines()[:first]))
start = time.perf_counter()
logger = LOGGERS[name]()
logger.start(LoggedRun(
    project="tilegpt", run_dir=folder / "run", shared_dir=folder,
    name="tiled lr=0.1/2 " + "x" * 150 + " seed=7", group="a sweep of " + "y" * 150,
    tags=["tiled", "z" * 100], settings={"seed": 7, "model": {"num_layers": 2}},
    resumes=first > 0,
))
print(json.dumps({"hint": logger.url_or_hint, "seconds": time.perf_counter() - start}))
for step in range(first, last):
    # what is logged again is told from what was logged first
    row = {"step": step, "tokens": 256 * step, "train/loss": step + 0.125 * first, "mfu": None}
    if step == 20:
        row |= {"val/loss": 2.25, "val/loss_exact": 2.5}
    append_row(metrics, row)
    logger.log(row)
assert logger.active
if last < 40:
    sys.stdout.flush()
    os.kill(os.getpid(), 9)
row = {"step": 99, "tokens": 10_000, "train/loss": float("nan"), "grad_norm": float("inf")}
logger.log(row | {"tokens_per_sec": 2.0})
logger.finish({"status": "diverged", "val/loss": 1.5, "tokens_per_sec": 7.0})
assert logger.active
"""


def environment(home: Path, **variables: str) -> dict[str, str]:
    """This process's environment with no trace of an account."""
    proxies = ("netrc", "http_proxy", "https_proxy")
    clean = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("WANDB") and key.lower() not in proxies
    }
    return clean | {"HOME": str(home), "PYTHONPATH": python_path(ROOT)} | variables


def run_program(folder: Path, name="wandb", rows=(0, 40), **variables: str) -> tuple[dict, str]:
    """The printed result of PROGRAM, and what it wrote to stderr."""
    command = ("-c", PROGRAM, str(folder), name, *map(str, rows))
    done = processes.run(*command, cwd=folder, env=environment(folder, **variables))
    assert done.returncode == (0 if rows[1] == 40 else -9), done.stderr
    return json.loads(done.stdout), done.stderr


def inspect(run: Path) -> list[dict]:
    """The records of an offline run, read by wandb's own tool."""
    command = ("-m", "wandb", "leet", "inspect", "--json", str(run))
    text = processes.run(*command, check=True, env=environment(run)).stdout
    return [json.loads(line) for line in text.splitlines()]


def folder_of(result: dict) -> Path:
    assert result["hint"].startswith("wandb sync ")
    return Path(result["hint"].removeprefix("wandb sync "))


@needs_wandb
def test_an_offline_run_read_back_by_wandb_equals_the_metrics(tmp_path):
    result, stderr = run_program(tmp_path, WANDB_MODE="offline")
    assert stderr == ""
    # every run of a sweep lies in one wandb/ folder, so that one command shows or uploads them all
    assert folder_of(result).parent == tmp_path / "wandb"
    records = inspect(folder_of(result))
    history = [record["history"]["item"] for record in records if record["type"] == "history"]
    assert [item["_step"] for item in history] == [*range(40), 99]
    logged = [
        {key: value for key, value in item.items() if not key.startswith("_")} for item in history
    ]
    rows = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert logged[:-1] == [
        {key: x for key, x in row.items() if x is not None and key != "step"} for row in rows
    ]
    last = {"train/loss": "NaN", "grad_norm": "Infinity", "tokens": 10_000, "tokens_per_sec": 2}
    assert logged[-1] == last

    # the run's own speed counts, not that of its last row
    results = [record["summary"]["update"] for record in records if record["type"] == "summary"]
    speeds = [each["tokens_per_sec"] for each in results if "tokens_per_sec" in each]
    assert speeds == [2, 7] and "diverged" in [each.get("status") for each in results]

    run = next(each["run"] for each in records if "display_name" in each.get("run", {}))
    assert run["config"]["update"]["model"] == {"num_layers": 2} and run["job_type"] == "train"
    metrics = [record["metric"] for record in records if record["type"] == "metric"]
    axes = {each.get("name", each.get("glob_name")): each.get("step_metric") for each in metrics}
    assert axes == {"tokens": None} | dict.fromkeys(("*", "val/loss", "val/loss_exact"), "tokens")
    assert [record["exit"]["exit_code"] for record in records if record["type"] == "exit"] == [1]

    # a regression test: wandb's server takes no more
    assert len(run["display_name"]) == 128 and run["display_name"].startswith("tiled lr=0.1/2 x")
    assert run["display_name"].endswith("x seed=7")
    assert len(run["run_group"]) == 128 and run["run_group"].startswith("a sweep of y")
    assert run["tags"] == ["tiled", "z" * 64]


@needs_wandb
def test_a_killed_and_resumed_run_keeps_its_id(tmp_path):
    """wandb joins both parts when they are uploaded."""
    first, _ = run_program(tmp_path, rows=(0, 23), WANDB_MODE="offline")
    second, _ = run_program(tmp_path, rows=(15, 40), WANDB_MODE="offline")
    run_id = (tmp_path / "run/wandb_id.txt").read_text().strip()
    assert folder_of(first).name.endswith(run_id) and run_id in folder_of(second).name
    records = inspect(folder_of(second))
    assert next(each["run"] for each in records if "run" in each)["resume"] is True
    history = [record["history"]["item"] for record in records if record["type"] == "history"]
    assert [item["_step"] for item in history] == [*range(15, 40), 99]


class WandbServer(http.server.BaseHTTPRequestHandler):
    """Knows the account, and refuses everything else."""

    def do_POST(self):
        known = b"query Viewer" in self.rfile.read(int(self.headers.get("content-length", 0)))
        viewer = {"id": "1", "entity": "me", "username": "me", "flags": "{}"}
        viewer["teams"] = {"edges": []}
        refusal = {"errors": [{"message": "permission denied"}]}
        self.send_response(200 if known else 403)
        self.end_headers()
        answer = {"data": {"viewer": viewer}} if known else refusal
        self.wfile.write(json.dumps(answer).encode())

    do_GET = do_POST
    log_message = print  # to standard output, which is not looked at


@needs_wandb
@pytest.mark.parametrize("refuses", [True, False], ids=["refusing", "no-such-host"])
def test_without_a_server_a_run_is_offline_within_seconds_with_one_line(tmp_path, refuses):
    """wandb's service keeps the id of the refused run, which a resumed one needs again."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/wandb_id.txt").write_text("resumed\n")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), WandbServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}" if refuses else "https://nosuch.invalid"
        account = {"WANDB_BASE_URL": url, "WANDB_API_KEY": "a" * 40}
        result, stderr = run_program(tmp_path, rows=(1, 40), **account)
        server.shutdown()
    (line,) = stderr.splitlines()
    assert line.startswith("WARNING wandb") and "offline" in line
    assert ("permission denied" if refuses else url) in line
    assert folder_of(result).match("offline-run-*-resumed") and result["seconds"] < 30


@needs_wandb
def test_never_prompts_at_a_terminal(tmp_path):
    """There wandb would ask for a key and wait."""
    leader, terminal = pty.openpty()
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), "wandb", "0", "40"]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(tmp_path), **streams)
    os.close(terminal)
    printed = b""
    with contextlib.suppress(OSError):  # Linux reports the end of the other side as an error
        while chunk := os.read(leader, 4096):
            printed += chunk
    os.close(leader)
    assert process.wait(processes.SECONDS) == 0, printed.decode()
    assert b"WARNING wandb: no API key" in printed and b"account" not in printed


class Failing(Logger):
    calls = 0

    @loggers.quietly
    def log(self, row):
        self.calls += 1
        raise OSError("server gone\nfor good")


def test_the_first_failure_is_a_warning_and_the_last_call(caplog):
    logger = Failing()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            logger.log({})
    assert logger.calls == 1
    (said,) = caplog.messages
    assert "server gone" in said and "\n" not in said


def test_a_silent_network_costs_no_more_than_the_probe(monkeypatch):
    """A look-up that hangs, as behind a dropped VPN."""
    ended, leave = [], threading.Event()

    def hang(address, timeout):
        ended.append(leave.wait(60))
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", hang)
    monkeypatch.delenv("https_proxy", raising=False)
    assert not answers("https://api.example.com", timeout=0.2) and not ended
    leave.set()


def test_a_proxy_is_what_must_answer(monkeypatch):
    asked = []

    def connect(address, timeout):
        asked.append(address)
        return socket.socket()

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setenv("https_proxy", "http://proxy.example.com:3128")
    monkeypatch.setenv("no_proxy", "local.example.com")
    assert answers("https://api.example.com") and answers("https://local.example.com")
    assert asked == [("proxy.example.com", 3128), ("local.example.com", 443)]


def test_a_killed_and_resumed_run_is_one_run_in_tensorboard(tmp_path):
    """TensorBoard calls it what its folder is called: by its variant, not by its job's number."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    for rows in ((0, 23), (15, 40)):
        result, _ = run_program(tmp_path, "tensorboard", rows)
    assert result["hint"] == f"tensorboard --logdir {tmp_path}/tensorboard"
    shown = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "tensorboard"))
    shown.Reload()
    (name,) = shown.Runs()
    assert name.startswith("tiled lr=0.1_2 xx") and name.endswith("x seed=7")
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    expected = [(row["tokens"], row["train/loss"]) for row in map(json.loads, lines)]
    events = [(event.step, event.value) for event in shown.Scalars(name, "train/loss")]
    assert events[:-1] == expected and events[-1][0] == 10_000
