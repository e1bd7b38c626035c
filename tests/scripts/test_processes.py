"""Calls side by side: their answers, and that no end leaves a process behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.processes import Died, in_processes

ROOT = Path(__file__).resolve().parents[2]


def late(number: int, seconds: float) -> int:
    time.sleep(seconds)
    return number


def dies(number: int) -> None:
    os._exit(number)


def with_a_compiler(folder: Path, number: int) -> None:
    """Says its own process id and that of a process which it starts."""
    compiler = subprocess.Popen(["sleep", "100"])
    (folder / "part").write_text(f"{os.getpid()} {compiler.pid}")
    (folder / "part").rename(folder / str(number))
    compiler.wait()


def pids(folder: Path, count: int, process: subprocess.Popen) -> list[int]:
    """Those in the first `count` files that the process writes to the folder."""
    began = time.monotonic()
    while len(files := list(folder.glob("[0-9]"))) < count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() - began < 60
        time.sleep(0.01)
    return [int(pid) for file in files for pid in file.read_text().split()]


def is_running(pid: int) -> bool:
    """An orphan that ended stays in the table where nobody waits for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_end(found: list[int]) -> bool:
    began = time.monotonic()
    while any(map(is_running, found)) and time.monotonic() - began < 5:
        time.sleep(0.01)
    return not any(map(is_running, found))


def test_answers_come_as_they_end():
    jobs = [(1, 1.0), (2, 0.0), (3, 0.0)]
    found = list(in_processes(late, jobs, 2))
    assert sorted(found) == [(job, job[0]) for job in jobs] and found[0][1] == 2


def test_who_died_is_told():
    with pytest.raises(Died) as died:
        list(in_processes(dies, [(3,)], 2))
    assert died.value.args == ((3,),)


RUNS = """
import sys
from pathlib import Path
from scripts.processes import in_processes
from tests.scripts.test_processes import with_a_compiler
from training.interrupt import one_line

@one_line("runs")
def main():
    folder = Path(sys.argv[1])
    list(in_processes(with_a_compiler, [(folder, 1), (folder, 2), (folder, 3)], 2))

if __name__ == "__main__":
    main()
"""


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks into /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill"])
def test_no_end_leaves_a_process(tmp_path, number):
    """Ctrl-C goes to all of a terminal's processes, and only the first says something. No signal
    tells that it was killed.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", RUNS, str(tmp_path)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    found = pids(tmp_path, 2, process)
    assert all(map(is_running, found))
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    said = process.communicate(timeout=60)[1]
    assert all_end(found)
    if number == signal.SIGINT:
        assert (process.returncode, said) == (130, "runs: stopped by Ctrl-C\n")
