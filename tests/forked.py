"""`python ...` in a process of its own, without the seconds of importing torch.

    python tests/forked.py SOCKET MODULE ...

imports what a run imports of other packages, and forks itself for each request. A child goes on as
the interpreter would: its signals, streams, exit code and memory are those of any process. Who
names modules of this project too saves their imports, and no test of imports may do that.
"""

import atexit
import contextlib
import functools
import gc
import json
import os
import random
import runpy
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
PID_BYTES = 20  # of the message with a process's id, behind which its exit code comes
PACKAGES = ("torch._dynamo", "matplotlib.pyplot", "hydra", "safetensors.torch", "tqdm.auto")
# for runs that log no table: the first child to end removes the folder that wandb has made for them
WITH_WANDB = (*PACKAGES, "wandb", "wandb.sdk.launch")


class Process:
    """`python ARGUMENTS`, its output in files: what it wrote is lost neither by a kill nor a wait.

    stdout, stderr: other files to write to. Without stderr, both streams are one.
    loaded: modules that are imported before it begins.
    """

    def __init__(
        self,
        *arguments: str,
        env: dict[str, str],
        cwd: Path = ROOT,
        stdin: Path = Path(os.devnull),
        stdout: Path | None = None,
        stderr: Path | None = None,
        new_group: bool = False,
        loaded: tuple[str, ...] = PACKAGES,
    ) -> None:
        folder = server(loaded)
        self.folder = Path(tempfile.mkdtemp(prefix="process-", dir=folder))
        (self.folder / "stdout").touch()
        self.stdout, self.stderr = stdout or self.folder / "stdout", stderr
        self.returncode: int | None = None
        request = {
            "arguments": arguments,
            "env": env,
            "cwd": str(cwd),
            "streams": [str(stdin), str(self.stdout), str(stderr or "")],
            "new_group": new_group,
        }
        (self.folder / "request").write_text(json.dumps(request))
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(str(folder / "socket"))
        self.connection.sendall(str(self.folder).encode())
        self.pid = int(self.connection.recv(PID_BYTES))

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.connection.settimeout(timeout)
            self.returncode = int(self.connection.recv(100))
            self.connection.close()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(timeout=0)
        except BlockingIOError:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        try:
            self.wait(timeout)
        except TimeoutError:
            self.kill()
            raise
        files = (self.stdout, self.stderr)
        return tuple(file.read_text() if file and file.is_file() else "" for file in files)


def popen(
    command: list[str], *, cwd: Path, env: dict[str, str], stdout: IO[str], stderr: IO[str]
) -> Process:
    """subprocess.Popen(["python", *ARGUMENTS], ...) with both streams in one file."""
    assert stdout is stderr
    return Process(*command[1:], cwd=cwd, env=env, stdout=Path(stdout.name))


def run(
    *arguments: str, env: dict[str, str] | None = None, check: bool = False, **options
) -> subprocess.CompletedProcess:
    """subprocess.run(["python", *ARGUMENTS], capture_output=True, text=True)."""
    errors = Path(tempfile.mkdtemp(prefix="stderr-", dir=server(PACKAGES))) / "stderr"
    process = Process(*arguments, env=env or dict(os.environ), stderr=errors, **options)
    output = process.communicate(timeout=100)
    done = subprocess.CompletedProcess(arguments, process.returncode, *output)
    assert not (check and done.returncode), done.stderr
    return done


@functools.cache
def server(loaded: tuple[str, ...]) -> Path:
    """The folder of this worker's server with these modules, which is ready to fork."""
    folder = Path(tempfile.mkdtemp(prefix="tilegpt-fork-"))
    command = (__file__, str(folder / "socket"), *loaded)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    # one that loads more than the packages begins as a child of the server that has those
    begin = server_of_packages if loaded == PACKAGES else server_with_more
    end = begin(command, environment)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(end)
    return folder


def server_of_packages(command: tuple[str, ...], environment: dict[str, str]) -> Callable[[], None]:
    """Start it. Returns what ends it."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment, **pipes)
    assert process.stdout.readline() == b"ready\n"

    def end() -> None:
        process.stdin.close()
        process.wait()

    return end


def server_with_more(command: tuple[str, ...], environment: dict[str, str]) -> Callable[[], None]:
    process = Process(*command, env=environment, new_group=True)
    while not process.stdout.read_text():
        assert process.poll() is None
        time.sleep(0.01)
    return lambda: os.killpg(process.pid, signal.SIGKILL)


def serve(address: str) -> dict:
    """Fork for every request until a pipe at stdin closes. Returns the request, in the children
    alone.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    print("ready", flush=True)
    children: dict[int, socket.socket] = {}  # who asked for a process, by its id
    heard = [listener, 0] if stat.S_ISFIFO(os.fstat(0).st_mode) else [listener]
    while True:
        readable, _, _ = select.select(heard, [], [], 0.01 if children else None)
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with children.pop(pid) as connection:
                    connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        if 0 in readable:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        if listener in readable:
            connection = listener.accept()[0]
            folder = Path(connection.recv(1000).decode())
            pid = os.fork()
            if pid == 0:
                for each in (listener, connection, *children.values()):
                    each.close()
                return json.loads((folder / "request").read_text())
            connection.sendall(f"{pid:{PID_BYTES}}".encode())
            children[pid] = connection


def become(request: dict) -> list[str]:
    """Take on the streams, folder and environment of a request. Returns its arguments."""
    if request["new_group"]:
        os.setsid()
    os.chdir(request["cwd"])
    for number, path in enumerate(request["streams"]):
        if path:
            writing = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            file = os.open(path, writing if number else os.O_RDONLY)
            os.dup2(file, number)
            os.close(file)
        else:
            os.dup2(1, number)
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # as TMPDIR says now
    # what the server's packages have made is the server's to take down
    weakref.finalize._registry.clear()
    if folders := os.environ.get("PYTHONPATH"):
        sys.path[1:1] = folders.split(os.pathsep)
    random.seed()
    return request["arguments"]


def run_python(first: str, *rest: str) -> None:
    if first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv, sys.path[0] = list(rest), os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [first, *rest], str(Path(first).resolve().parent)
        runpy.run_path(first, run_name="__main__")


def leave() -> None:
    """The last function at exit: spare the interpreter to take down what the server imported."""
    if exit_code is not None:
        with contextlib.suppress(OSError):  # the interpreter says what it cannot write
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
            os._exit(exit_code)


if __name__ == "__main__":
    exit_code: int | None = None
    atexit.register(leave)
    sys.path[0] = str(ROOT)
    arguments = sys.argv
    while arguments[0] == __file__:  # a server, or a child of one that is to be one
        for name in arguments[2:]:
            __import__(name)
        # what is forked cannot use a GPU, nor some libraries of macOS
        FORKS = sys.platform == "linux" and not sys.modules["torch"].cuda.is_available()
        gc.collect()
        gc.freeze()
        arguments = become(serve(arguments[1]))
        if not FORKS:
            os.execv(sys.executable, [sys.executable, *arguments])
    try:
        run_python(*arguments)
        exit_code = 0
    except SystemExit as ended:
        exit_code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        raise
    except Exception:
        exit_code = 1
        raise
