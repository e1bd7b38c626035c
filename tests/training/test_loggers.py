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
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest

from tests import processes
from tests.processes import ROOT, python_path
from training.record import loggers
from training.record.files import append_row
from training.record.loggers import LOGGERS, LoggedRun, Logger, check_server

needs_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="wandb is not installed"
)

PROGRAM = """
import logging, sys
from tests.training.test_loggers import log_rows
from training.record import loggers

logging.basicConfig(format="%(levelname)s %(message)s")
loggers.PROBE_TIMEOUT = loggers.INIT_TIMEOUT = 120  # where a core is shared, seconds are short
log_rows("wandb", *sys.argv[1:])
"""


def log_rows(name: str, folder: str, first: str = "0", last: str = "40") -> None:
    """Log these rows of a run of 40 in the folder. A part that is not the last one is killed, if it
    has a process of its own.
    """
    run_dir, begin, end = Path(folder, "run"), int(first), int(last)
    run_dir.mkdir(exist_ok=True)
    metrics = run_dir / "metrics.jsonl"
    metrics.touch()
    # the rows of the checkpoint from which it goes on
    metrics.write_text("".join(metrics.open().readlines()[:begin]))
    logger = LOGGERS[name]()
    run = LoggedRun(
        project="tilegpt",
        run_dir=run_dir,
        shared_dir=Path(folder),
        name="tiled lr=0.1/2 " + "x" * 150 + " seed=7",
        group="a sweep of " + "y" * 150,
        tags=["tiled", "z" * 100],
        settings={"seed": 7, "model": {"num_layers": 2}},
    )
    logger.start(run)
    print(logger.url_or_hint, flush=True)
    for step in range(begin, end):
        # what is logged again is told from what was logged first
        row = {"step": step, "tokens": 256 * step, "train/loss": step + 0.125 * begin, "mfu": None}
        if step == 20:
            row |= {"val/loss": 2.25, "val/loss_exact": 2.5}
        append_row(metrics, row)
        logger.log(row)
    assert logger.active
    if end == 40:
        nan = float("nan")
        row = {"step": 99, "tokens": 10_000, "train/loss": nan, "grad_norm": float("inf")}
        logger.log(row | {"val/loss": nan, "tokens_per_sec": 2.0})
        logger.finish({"status": "diverged", "val/loss": 1.5, "tokens_per_sec": 7.0})
        assert logger.active
    elif name == "wandb":
        os.kill(os.getpid(), signal.SIGKILL)


def environment(home: Path, **variables: str) -> dict[str, str]:
    """This process's environment with no trace of an account."""
    gone = ("wandb", "netrc", "http_proxy", "https_proxy")
    clean = {key: value for key, value in os.environ.items() if not key.lower().startswith(gone)}
    return clean | {"HOME": str(home), "PYTHONPATH": python_path(ROOT)} | variables


def log_in_a_process(folder: Path, rows=(0, 40), **variables: str) -> tuple[Path, str]:
    """The folder of the offline run, and what was written to stderr."""
    command = ("-c", PROGRAM, str(folder), *map(str, rows))
    done = processes.run(*command, cwd=folder, env=environment(folder, **variables))
    assert done.returncode == (0 if rows[1] == 40 else -signal.SIGKILL), done.stderr
    words = "wandb sync "
    assert done.stdout.startswith(words)
    return Path(done.stdout.splitlines()[0].removeprefix(words)), done.stderr


def inspect(run: Path) -> list[dict]:
    """The records of an offline run, read by wandb's own tool."""
    command = ("-m", "wandb", "leet", "inspect", "--json", str(run))
    text = processes.run(*command, check=True, env=environment(run)).stdout
    return [json.loads(line) for line in text.splitlines()]


@needs_wandb
def test_a_killed_and_resumed_run_read_back_by_wandb_equals_the_metrics(tmp_path):
    """Of one id: wandb joins both parts when they are uploaded. 10 s: two runs, and wandb's tool
    reads the second.
    """
    first, _ = log_in_a_process(tmp_path, rows=(0, 23), WANDB_MODE="offline")
    folder, stderr = log_in_a_process(tmp_path, rows=(15, 40), WANDB_MODE="offline")
    assert stderr == ""
    run_id = (tmp_path / "run/wandb_id.txt").read_text().strip()
    assert first.name.endswith(run_id) and run_id in folder.name
    # every run of a sweep lies in one wandb/ folder, so that one command shows or uploads them all
    assert first.parent == folder.parent == tmp_path / "wandb"
    records = inspect(folder)
    history = [record["history"]["item"] for record in records if record["type"] == "history"]
    assert [item["_step"] for item in history] == [*range(15, 40), 99]
    logged = [
        {key: value for key, value in item.items() if not key.startswith("_")} for item in history
    ]
    rows = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines()[15:])
    assert logged[:-1] == [
        {key: x for key, x in row.items() if x is not None and key != "step"} for row in rows
    ]
    # without val/loss: NaN would be its lowest value
    last = {"train/loss": "NaN", "grad_norm": "Infinity", "tokens": 10_000, "tokens_per_sec": 2}
    assert logged[-1] == last

    # the run's own speed counts, not that of its last row
    results = [record["summary"]["update"] for record in records if record["type"] == "summary"]
    speeds = [each["tokens_per_sec"] for each in results if "tokens_per_sec" in each]
    assert speeds == [2, 7] and "diverged" in [each.get("status") for each in results]

    run = next(each["run"] for each in records if "display_name" in each.get("run", {}))
    assert run["config"]["update"]["model"] == {"num_layers": 2} and run["job_type"] == "train"
    assert run["resume"] is True
    metrics = [record["metric"] for record in records if record["type"] == "metric"]
    axes = {each.get("name", each.get("glob_name")): each.get("step_metric") for each in metrics}
    assert axes == {"tokens": None} | dict.fromkeys(("*", "val/loss", "val/loss_exact"), "tokens")
    assert [record["exit"]["exit_code"] for record in records if record["type"] == "exit"] == [1]

    # a regression test: wandb's server takes no more
    assert len(run["display_name"]) == 128 and run["display_name"].startswith("tiled lr=0.1/2 x")
    assert run["display_name"].endswith("x seed=7")
    assert len(run["run_group"]) == 128 and run["run_group"].startswith("a sweep of y")
    assert run["tags"] == ["tiled", "z" * 64]


class WandbServer(http.server.BaseHTTPRequestHandler):
    """Knows the account, and refuses everything else."""

    def do_POST(self):
        known = b"query Viewer" in self.rfile.read(int(self.headers.get("content-length", 0)))
        me = {"id": "1", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}
        refusal = {"errors": [{"message": "permission denied"}]}
        self.send_response(200 if known else 403)
        self.end_headers()
        self.wfile.write(json.dumps({"data": {"viewer": me}} if known else refusal).encode())

    do_GET = do_POST
    log_message = print  # to standard output, which is not looked at


@needs_wandb
def test_a_run_that_the_server_refuses_is_offline_with_one_line(tmp_path):
    """wandb's service keeps the id of the refused run, which a resumed one needs again."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/wandb_id.txt").write_text("resumed\n")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), WandbServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        account = {"WANDB_BASE_URL": url, "WANDB_API_KEY": "a" * 40}
        folder, stderr = log_in_a_process(tmp_path, rows=(1, 40), **account)
        server.shutdown()
    (line,) = stderr.splitlines()
    assert line.startswith("WARNING wandb") and "offline" in line and "permission denied" in line
    assert folder.match("offline-run-*-resumed")


def test_a_server_that_does_not_answer_is_named(monkeypatch):
    """tests/data/test_hub.py has networks that are silent, and proxies."""
    wandb, connect = mock.MagicMock(), mock.Mock(side_effect=ConnectionRefusedError)
    wandb.setup().settings.base_url = "https://api.example.com"
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setenv("no_proxy", "*")
    with pytest.raises(ConnectionError, match="https://api.example.com"):
        check_server()
    assert connect.call_args.args == (("api.example.com", 443),)


@needs_wandb
def test_never_prompts_at_a_terminal(tmp_path):
    """There wandb would ask for a key and wait."""
    leader, terminal = pty.openpty()
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
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


def test_a_killed_and_resumed_run_is_one_run_in_tensorboard(tmp_path, capsys):
    """TensorBoard calls it what its folder is called: by its variant, not by its job's number."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    for rows in (("0", "23"), ("15", "40")):
        log_rows("tensorboard", str(tmp_path), *rows)
    hint = f"tensorboard --logdir {tmp_path}/tensorboard"
    assert capsys.readouterr().out.splitlines() == [hint, hint]
    shown = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "tensorboard"))
    shown.Reload()
    (name,) = shown.Runs()
    assert name.startswith("tiled lr=0.1_2 xx") and name.endswith("x seed=7")
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    expected = [(row["tokens"], row["train/loss"]) for row in map(json.loads, lines)]
    events = [(event.step, event.value) for event in shown.Scalars(name, "train/loss")]
    assert events[:-1] == expected and events[-1][0] == 10_000
