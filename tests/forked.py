"""`python ...` in a process of its own, without the seconds of importing torch.

    python tests/forked.py SOCKET

imports what a run imports of other packages, and forks itself for each request. A child goes on as
the interpreter would: its signals, streams, exit code and memory are those of any process. Where
the kernel cannot tell of an end (not Linux), and where a fork would lose the GPU, the interpreter
itself is started.
"""

import atexit
import functools
import gc
import json
import os
import random
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRELOADED = ("torch._dynamo", "matplotlib.pyplot", "hydra", "safetensors.torch", "tqdm.auto")


class Process:
    """`python ARGUMENTS`, its output in files: what it wrote is lost neither by a kill nor a wait.

    stdout, stderr: other files to write to. Without stderr, both streams are one.
    """

    def __init__(
        self,
        *arguments: str,
        env: dict[str, str],
        cwd: Path = ROOT,
        stdout: Path | None = None,
        stderr: Path | None = None,
        new_group: bool = False,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="process-", dir=server()))
        self.stdout, self.stderr = stdout or self.folder / "stdout", stderr
        self.returncode: int | None = None
        request = {
            "arguments": arguments,
            "env": env,
            "cwd": str(cwd),
            "streams": [str(self.stdout), str(stderr or "")],
            "new_group": new_group,
        }
        (self.folder / "request").write_text(json.dumps(request))
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(str(server() / "socket"))
        self.connection.sendall(str(self.folder).encode())
        self.pid = int(self.connection.recv(100))

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
        self.wait(timeout)
        return self.stdout.read_text(), self.stderr.read_text() if self.stderr else ""


def run(*arguments: str, env: dict[str, str] | None = None, **options) -> subprocess.CompletedProcess:
    """subprocess.run(["python", *ARGUMENTS], capture_output=True, text=True)."""
    errors = Path(tempfile.mkdtemp(prefix="stderr-", dir=server())) / "stderr"
    process = Process(*arguments, env=env or dict(os.environ), stderr=errors, **options)
    output = process.communicate(timeout=100)
    return subprocess.CompletedProcess(arguments, process.returncode, *output)


@functools.cache
def server() -> Path:
    """The folder of this worker's server, which is ready to fork."""
    folder = Path(tempfile.mkdtemp(prefix="tilegpt-fork-"))
    process = subprocess.Popen(
        [sys.executable, __file__, str(folder / "socket")],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"ready\n"

    def end() -> None:
        process.stdin.close()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return folder


def serve(address: str) -> dict:
    """Fork for every request until stdin closes. Returns the request, in the children alone."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    print("ready", flush=True)
    events = selectors.DefaultSelector()
    events.register(listener, selectors.EVENT_READ)
    events.register(0, selectors.EVENT_READ)
    children: dict[int, tuple[int, socket.socket]] = {}  # file of a process: its id, who asked
    while True:
        for event, _ in events.select():
            if event.fileobj == 0:
                os._exit(0)
            if event.fileobj is not listener:
                pid, connection = children.pop(event.fd)
                events.unregister(event.fd)
                os.close(event.fd)
                status = os.waitpid(pid, 0)[1]
                connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
                connection.close()
                continue
            connection = listener.accept()[0]
            folder = Path(connection.recv(1000).decode())
            pid = os.fork()
            if pid == 0:
                events.close()
                for open_socket in (listener, connection, *(each for _, each in children.values())):
                    open_socket.close()
                for file in children:
                    os.close(file)
                return json.loads((folder / "request").read_text())
            connection.sendall(str(pid).encode())
            file = os.pidfd_open(pid)
            children[file] = pid, connection
            events.register(file, selectors.EVENT_READ)


def become(request: dict) -> list[str]:
    """Take on the streams, folder and environment of a request. Returns its arguments."""
    if request["new_group"]:
        os.setsid()
    os.chdir(request["cwd"])
    output, errors = request["streams"]
    files = [os.open(os.devnull, os.O_RDONLY)]
    files.append(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    files.append(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if errors else files[1])
    for stream, file in enumerate(files):
        os.dup2(file, stream)
    for file in set(files):
        os.close(file)
    os.environ.clear()
    os.environ.update(request["env"])
    random.seed()
    return request["arguments"]


if __name__ == "__main__":
    for name in PRELOADED:
        __import__(name)
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or PyTorch's libraries tell of leaks
    first, *rest = become(serve(sys.argv[1]))
    if first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [first, *rest], str(Path(first).resolve().parent)
        runpy.run_path(first, run_name="__main__")
