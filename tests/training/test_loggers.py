"""Loggers: what arrives at wandb equals what was logged, and nothing that wandb does can stop or
prompt a training.

Each wandb case runs in a process of its own: wandb keeps settings, credentials and a service
process for as long as one lives.
"""

import http.server
import importlib.util
import json
import logging
import math
import os
import pty
import socket
import subprocess
import sys
import threading
import time
import types
from functools import partial
from pathlib import Path

import pytest

from config import LoggerConfig
from data.network import answers
from tests import processes
from tests.processes import ROOT, python_path
from training.record import loggers
from training.record.loggers import Logger, build_logger

KEY = "a" * 40

needs_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="wandb is not installed"
)

PROGRAM = """
import json, logging, sys, time
from pathlib import Path
from config import LoggerConfig
from training.record.loggers import build_logger

logging.basicConfig(format="%(levelname)s %(message)s")
folder, mode = Path(sys.argv[1]), sys.argv[2]
for job, resume in json.loads(sys.argv[3]):
    run_dir = folder / str(job)
    run_dir.mkdir(exist_ok=True)
    start = time.perf_counter()
    logger = build_logger(
        LoggerConfig(mode=mode), run_dir=run_dir, wandb_dir=folder,
        name=f"attention=tiled,seed={job}", group="sweep", tags=["tiled", "seq256"],
        run_config={"seed": job, "model": {"num_layers": 2}}, resume=resume,
    )
    seconds = time.perf_counter() - start
    lines = (run_dir / "metrics.jsonl").read_text().splitlines() if job == 0 else []
    rows = [json.loads(line) for line in lines]
    for row in rows:
        tokens = row.pop("tokens")
        logger.log(row, tokens)
    logger.log({"step": 99, "train/loss": float("nan"), "grad_norm": float("inf")}, 10_000)
    logger.summary({"status": "diverged", "val/loss": 1.5})
    logger.finish(1)
    print(json.dumps({"active": logger.active, "hint": logger.url_or_hint, "seconds": seconds}))
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


def run_program(folder: Path, mode: str = "auto", jobs=((0, False),), **variables: str):
    """The printed results of PROGRAM, one a job, and what it wrote to stderr."""
    (folder / "0").mkdir(exist_ok=True)
    (folder / "0/metrics.jsonl").touch()
    command = ("-c", PROGRAM, str(folder), mode, json.dumps(list(jobs)))
    done = processes.run(*command, cwd=folder, env=environment(folder, **variables))
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def inspect(run: Path) -> list[dict]:
    """The records of an offline run, read by wandb's own tool."""
    command = ("-m", "wandb", "leet", "inspect", "--json", str(run))
    text = processes.run(*command, check=True, env=environment(run)).stdout
    return [json.loads(line) for line in text.splitlines()]


def history_of(records: list[dict]) -> list[dict]:
    return [record["history"]["item"] for record in records if record["type"] == "history"]


@needs_wandb
def test_an_offline_run_read_back_by_wandb_equals_the_metrics(tmp_path):
    rows = [
        {"step": i, "tokens": 256 * i, "train/loss": 5 / (i + 1), "lr": 1e-3 * i} for i in range(40)
    ]
    rows[20] |= {"val/loss": 2.25, "val/loss_exact": 2.5, "mfu": None}
    (tmp_path / "0").mkdir()
    (tmp_path / "0/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    results, stderr = run_program(tmp_path, jobs=[(0, False), (1, False)])
    assert stderr == ""
    assert all(result["active"] and result["hint"].startswith("wandb sync ") for result in results)

    folders = [Path(result["hint"].removeprefix("wandb sync ")) for result in results]
    # every run of a sweep lies in one wandb/ folder, so that one command shows or uploads them all
    assert {folder.parent for folder in folders} == {tmp_path / "wandb"} and len(set(folders)) == 2
    records = inspect(folders[0])
    history = history_of(records)
    logged = [
        {key: value for key, value in item.items() if not key.startswith(("_", "Compare/"))}
        for item in history
    ]
    assert [item["_step"] for item in history] == [*range(40), 99]
    assert logged[:-1] == [
        {key: value for key, value in row.items() if value is not None and key != "step"}
        for row in rows
    ]
    assert logged[-1] == {"train/loss": "NaN", "grad_norm": "Infinity", "tokens": 10_000}

    run = next(each["run"] for each in records if "display_name" in each.get("run", {}))
    told = (run["run_group"], run["job_type"], run["tags"])
    assert told == ("sweep", "train", ["tiled", "seq256"])
    assert run["display_name"] == "attention=tiled,seed=0"
    assert run["config"]["update"]["model"] == {"num_layers": 2}
    metrics = [record["metric"] for record in records if record["type"] == "metric"]
    axes = {each["name"]: each["step_metric"] for each in metrics if "step_metric" in each}
    compared = ("Compare/loss", "Compare/loss_exact")
    own = ("train/loss", "lr", "val/loss", "val/loss_exact", "grad_norm")
    assert axes == dict.fromkeys((*own, *compared), "tokens")
    assert [record["exit"]["exit_code"] for record in records if record["type"] == "exit"] == [1]


@needs_wandb
@pytest.mark.slow
def test_a_resumed_run_keeps_its_id(tmp_path):
    run_program(tmp_path)
    first = (tmp_path / "0/wandb_id.txt").read_text()
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    (folder / f"run-{first.strip()}.wandb.synced").touch()
    (result,), _ = run_program(tmp_path, jobs=[(0, True)])
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 2, "what was uploaded stays"
    assert (tmp_path / "0/wandb_id.txt").read_text() == first
    assert first.strip() in result["hint"]
    run_program(tmp_path, jobs=[(0, False)])
    assert (tmp_path / "0/wandb_id.txt").read_text() != first


KILLED = """
import os, sys
from pathlib import Path
from config import LoggerConfig
from training.record.loggers import build_logger
from training.record.files import MetricsFile

folder, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
metrics = MetricsFile(folder / "metrics.jsonl")
if first:
    metrics.path.write_text("".join(metrics.path.open().readlines()[:first]))
logger = build_logger(
    LoggerConfig(name=sys.argv[4], mode="offline"), run_dir=folder, wandb_dir=folder,
    name="n", group=None, tags=[], run_config={},
    resume=first > 0,
)
for step in range(first, last):
    # what is logged again is told from what was logged first
    row = {"step": step, "tokens": 256 * step, "train/loss": step + 0.125 * first}
    metrics.write(row)
    logger.log(row, 256 * step)
assert logger.active
if last < 40:
    os.kill(os.getpid(), 9)
logger.summary({"status": "completed"})
logger.finish(0)
"""


def kill_and_resume(folder: Path, name: str) -> list[dict]:
    """A run of 40 rows, killed after the 23rd and resumed from a checkpoint before; its metrics."""
    for first, last in ((0, 23), (15, 40)):
        command = ("-c", KILLED, str(folder), str(first), str(last), name)
        code = processes.run(*command, cwd=folder, env=environment(folder)).returncode
        assert code == (-9 if last < 40 else 0)
        if name == "wandb" and last < 40:  # as wandb names the second folder of a second
            (killed,) = folder.glob("wandb/offline-run-*")
            killed.rename(f"{killed}-1")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(40))
    return rows


@needs_wandb
def test_a_killed_and_resumed_run_is_one_run_at_wandb(tmp_path):
    """One id, and of all that lies there to be uploaded, every row once, as metrics.jsonl has
    it.
    """
    rows = kill_and_resume(tmp_path, "wandb")
    run_id = (tmp_path / "wandb_id.txt").read_text().strip()
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert folder.name.endswith(run_id)
    logged = [
        {"step": item["_step"]}
        | {key: value for key, value in item.items() if not key.startswith("_")}
        for item in history_of(inspect(folder))
    ]
    assert logged == rows


@pytest.mark.parametrize("kept", [3, 8], ids=["logged-again", "never-came-through"])
def test_a_resumed_online_run_goes_on_where_the_server_stands(kept):
    """The server has five rows, metrics.jsonl keeps fewer of them or has more.

    Private names are filled in, because a run that is online needs a server.
    """
    sent = []
    logger = loggers.WandbLogger.__new__(loggers.WandbLogger)
    logger._keys = set()
    logger._run = types.SimpleNamespace(
        starting_step=5,
        define_metric=lambda *_, **__: None,
        log=lambda row, step, commit: sent.append((step, row["tokens"])),
    )
    logger._replay([{"step": step, "tokens": 10 * step} for step in range(kept)])
    for step in range(kept, 12):
        logger.log({"step": step}, 10 * step)
    assert sent == [(step, 10 * step) for step in range(5, 12)]


NO_HOST, NOBODY = "https://nosuch.invalid", "http://127.0.0.1:9"
slow = partial(pytest.param, marks=pytest.mark.slow)


@needs_wandb
@pytest.mark.parametrize(
    "mode, variables, said",
    [
        ("auto", {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": NO_HOST}, "nosuch.invalid"),
        slow("auto", {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": NOBODY}, "127.0.0.1"),
        slow("online", {}, "API key"),
        slow("auto", {"WANDB_MODE": "online"}, "API key"),
    ],
    ids=["no-such-host", "nothing-listens", "online-without-key", "WANDB_MODE-online-without-key"],
)
def test_falls_back_to_offline_within_seconds_with_one_warning(tmp_path, mode, variables, said):
    (result,), stderr = run_program(tmp_path, mode, **variables)
    assert result["active"] and result["hint"].startswith("wandb sync ")
    assert result["seconds"] < 30
    (warning,) = stderr.splitlines()
    assert warning.startswith("WARNING wandb") and said in warning and "logged offline" in warning


class WandbServer(http.server.BaseHTTPRequestHandler):
    """Knows the account unless `refused` is the key, and refuses everything else."""

    refused = "key"

    def do_POST(self):
        asked = self.rfile.read(int(self.headers.get("content-length", 0)))
        known = self.refused == "project" and b"query Viewer" in asked
        viewer = {"id": "1", "entity": "me", "username": "me", "flags": "{}"}
        answer = {"data": {"viewer": viewer | {"teams": {"edges": []}}}}
        if not known:
            answer = {"errors": [{"message": "permission denied"}]}
        self.send_response(200 if known else 403)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    do_GET = do_POST

    def log_message(self, *args):
        pass


@needs_wandb
@pytest.mark.parametrize("refused", [slow("key"), "project"])
def test_a_refusing_server_means_offline(tmp_path, monkeypatch, refused):
    """With the project refused, wandb keeps the run's id and an empty folder: both must not meet
    the offline run.
    """
    monkeypatch.setattr(WandbServer, "refused", refused)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), WandbServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        netrc = tmp_path / ".netrc"
        netrc.write_text(f"machine 127.0.0.1:{server.server_port} login user password {KEY}\n")
        netrc.chmod(0o600)
        url = f"http://127.0.0.1:{server.server_port}"
        (result,), stderr = run_program(tmp_path, WANDB_BASE_URL=url)
    finally:
        server.shutdown()
        server.server_close()
    (warning,) = stderr.splitlines()
    assert warning.startswith("WARNING wandb") and "permission denied" in warning
    assert result["active"] and result["seconds"] < 30
    left = [path.name for path in (tmp_path / "wandb").glob("*run-2*")]
    assert left == [Path(result["hint"].split()[-1]).name]


@needs_wandb
@pytest.mark.parametrize("mode", ["auto", slow("online")])
def test_never_prompts_at_a_terminal(tmp_path, mode):
    """At a terminal wandb would ask for a key and wait."""
    (tmp_path / "0").mkdir()
    (tmp_path / "0/metrics.jsonl").touch()
    leader, terminal = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path), mode, "[[0, false]]"],
        cwd=tmp_path,
        env=environment(tmp_path),
        **streams,
    )
    os.close(terminal)
    printed = b""
    try:
        while chunk := os.read(leader, 4096):
            printed += chunk
    except OSError:  # Linux reports the end of the other side as an error
        pass
    finally:
        os.close(leader)
    assert process.wait(processes.SECONDS) == 0, printed.decode()
    assert b'"active": true' in printed and b"account" not in printed


@needs_wandb
@pytest.mark.slow
def test_disabled_leaves_nothing(tmp_path):
    (result,), stderr = run_program(tmp_path, WANDB_MODE="disabled")
    assert result["hint"] is None and stderr == ""
    assert not list((tmp_path).glob("wandb/*run-*"))


@pytest.mark.parametrize(
    ("told", "said"),
    [("bogus", "WANDB_MODE=bogus .*online.*offline.*disabled"), ("shared", "WANDB_MODE=online")],
)
def test_a_mode_that_no_run_has_is_refused(monkeypatch, told, said):
    """A regression test: the run went on, and nothing was logged."""
    monkeypatch.setenv("WANDB_MODE", told)
    with pytest.raises(ValueError, match=said):
        loggers.check_logger(LoggerConfig())
    loggers.check_logger(LoggerConfig(mode="offline"))
    loggers.check_logger(LoggerConfig(name="none"))


@needs_wandb
@pytest.mark.parametrize(
    ("mode", "told"),
    [("auto", "dryrun"), slow("auto", ""), slow("offline", "bogus"), slow("offline", "")],
)
def test_an_empty_or_former_or_overruled_mode_still_logs(tmp_path, mode, told):
    """A regression test: wandb did not start with an empty WANDB_MODE, and its word dryrun was not
    understood.
    """
    (result,), stderr = run_program(tmp_path, mode, WANDB_MODE=told)
    assert result["active"] and result["hint"].startswith("wandb sync ") and stderr == ""


class Failing(Logger):
    calls = 0

    @loggers.quietly
    def log(self, metrics, tokens):
        self.calls += 1
        raise OSError("server gone\nfor good")


def test_the_first_failure_is_a_warning_and_the_last_call(caplog):
    logger = Failing()
    with caplog.at_level(logging.WARNING):
        for tokens in range(3):
            logger.log({}, tokens)
    assert logger.calls == 1
    (said,) = caplog.messages
    assert "server gone" in said and "\n" not in said


ARGUMENTS = {"name": "n", "group": None, "tags": [], "run_config": {}, "resume": False}


def test_none_does_nothing(tmp_path):
    logger = build_logger(
        LoggerConfig(name="none"), run_dir=tmp_path, wandb_dir=tmp_path, **ARGUMENTS
    )
    logger.log({"train/loss": 1.0}, 1)
    logger.summary({})
    logger.finish(0)
    assert logger.url_or_hint is None and not list(tmp_path.iterdir())


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it was not installed
    config = LoggerConfig(name="tensorboard")
    with pytest.raises(ValueError, match="logger=tensorboard .* pip install"):
        build_logger(config, run_dir=tmp_path, wandb_dir=tmp_path, **ARGUMENTS)


def test_a_folder_of_runs_is_not_the_package(tmp_path, monkeypatch, caplog):
    """./wandb makes `import wandb` succeed, as an empty namespace package, where wandb is not
    installed.
    """
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    assert importlib.util.find_spec("wandb").origin is None
    logger = build_logger(LoggerConfig(), run_dir=tmp_path, wandb_dir=tmp_path, **ARGUMENTS)
    assert not logger.active and "pip install wandb" in caplog.text
    logger.log({"train/loss": 1.0}, 1)
    logger.finish(0)


def test_a_silent_network_costs_no_more_than_the_probe(monkeypatch):
    """A look-up that hangs, as behind a dropped VPN."""

    def hang(address, timeout):
        time.sleep(1)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", hang)
    monkeypatch.delenv("https_proxy", raising=False)
    start = time.perf_counter()
    assert not answers("https://api.example.com", timeout=0.2)
    assert time.perf_counter() - start < 0.8


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


def test_tensorboard_events(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = build_logger(
        LoggerConfig(name="tensorboard"), run_dir=tmp_path, wandb_dir=tmp_path, **ARGUMENTS
    )
    logger.log({"train/loss": 2.5, "mfu": None}, 256)
    logger.log({"train/loss": math.nan}, 512)
    logger.summary({"status": "completed"})
    logger.finish(0)
    assert logger.active
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")][0] == (256, 2.5)


@pytest.mark.slow
def test_a_killed_and_resumed_run_is_one_run_in_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows = kill_and_resume(tmp_path, "tensorboard")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    expected = [(row["tokens"], row["train/loss"]) for row in rows]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == expected
