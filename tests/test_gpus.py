"""hydra/launcher=gpus: jobs side by side, each a process with a GPU of its own."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from hydra_plugins import gpus
from tests.command import computed, index, run, summary, tiny_sweep

LAUNCHER = "hydra/launcher=gpus"
TWO = (LAUNCHER, "hydra.launcher.slots=2")


def use_as_python(monkeypatch, folder: Path, program: str) -> None:
    (folder / "python").write_text(program)
    (folder / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))


# in place of python: the first job is killed, the second ends without a word, the others train
PYTHON = f"""#!/bin/sh
echo "it sees $CUDA_VISIBLE_DEVICES"
case "$*" in
  *seed=0*) kill -9 $$ ;;
  *seed=1*) exit 3 ;;
  *) exec '{sys.executable}' "$@" ;;
esac
"""


def test_no_end_of_a_job_is_the_end_of_another(tmp_path, monkeypatch):
    """Three jobs on two GPUs, which were given to this process by UUID and by number. Each process
    sees its GPU alone.
    """
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a1b2,7")
    use_as_python(monkeypatch, tmp_path, PYTHON)
    sweep = tmp_path / "sweep"
    done = run(*tiny_sweep(sweep, LAUNCHER, "seed=0,1,2"))
    assert done.code == 1 and "Traceback" not in done.output, done.output
    rows = index(sweep)
    assert [row["status"] for row in rows] == ["failed", "failed", "completed"]
    for row, said in zip(rows, ("signal 9", "exit code 3"), strict=False):
        assert said in row["error"] and row["error"] in (sweep / "table.txt").read_text()
    for job, seen in (("0", "GPU-a1b2"), ("1", "7")):
        assert f"it sees {seen}\n" in (sweep / job / "output.log").read_text()
        assert f"job {job} on GPU {seen}: " in done.output


# in place of python: the first job ends at once. When the sweep has noted it, and so has no other
# to start, the second sends it Ctrl-C, and goes on until it is asked to end
WAITS = """#!/bin/sh
case "$*" in *seed=0*) exit 3 ;; esac
trap 'echo asked to end; exit 130' TERM
echo $$ $(cut -d' ' -f5 /proc/self/stat)
i=0
until [ -s "$NOTED" ] || [ $((i += 1)) -gt 2000 ]; do sleep 0.05; done
kill -INT $PPID
while kill -0 $PPID; do sleep 0.05; done
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the group of a process in /proc")
def test_ctrl_c_ends_a_job_that_runs_and_waits_for_it(tmp_path, monkeypatch):
    """A terminal sends it to every process of a group, so each job is in a group of its own."""
    use_as_python(monkeypatch, tmp_path, WAITS)
    sweep = tmp_path / "sweep"
    done = run(*tiny_sweep(sweep, *TWO, "seed=0,1"), NOTED=str(sweep / "0/summary.json"))
    assert done.code == 130 and "Traceback" not in done.output, done.output
    ids, end = (sweep / "1/output.log").read_text().splitlines()
    process, group = ids.split()
    assert process == group and end == "asked to end"
    assert [row["status"] for row in index(sweep)] == ["failed", "unfinished"]


@pytest.mark.slow
def test_a_sweep_is_that_of_one_process(tmp_path):
    """Settings that some jobs do not read, and what Hydra was told beside. And it goes on."""
    swept = ("attention=naive,tiled", "attention.block_kv=16", "seed=0", "steps=2")
    swept += ("hydra.job_logging.root.level=ERROR", "hydra.sweep.subdir=${attention.name}/${seed}")
    both = {"one": swept, "many": (*swept, "checkpoint_every=1", *TWO)}
    done = {name: run(*tiny_sweep(tmp_path / name, *asked)) for name, asked in both.items()}
    assert done["one"].code == done["many"].code == 0, done["many"].output
    for job in ("naive/0", "tiled/0"):
        assert computed(tmp_path / "one" / job) == computed(tmp_path / "many" / job)
    # as after a kill in its last step
    lost = tmp_path / "many/tiled/0"
    (lost / "summary.json").unlink()
    for name in ("checkpoint", "checkpoint.best"):
        shutil.rmtree(lost / name)
    assert run(*tiny_sweep(tmp_path / "many", *both["many"])).code == 0
    assert [each["step"] for each in summary(lost)["starts"]] == [0, 1]
    assert computed(tmp_path / "one/tiled/0") == computed(lost)


@pytest.mark.parametrize(
    "typed, named",
    [("null", "no GPU; hydra.launcher.slots=2"), ("0", "slots=0 .* at least 1"), ("two", "=two ")],
)
def test_a_launcher_without_a_place_is_refused(tmp_path, typed, named):
    slots = f"hydra.launcher.slots={typed}"
    answer = run(*tiny_sweep(tmp_path / "sweep", LAUNCHER, slots)).complaint()
    assert re.search(named, answer) and not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    "visible, names",
    [(None, ["0", "1"]), ("4, 5", ["4", "5"]), ("GPU-a,MIG-c,-1,3", ["GPU-a", "MIG-c"])],
)
def test_which_gpus(monkeypatch, visible, names):
    """Of those that whoever started this process gave it."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus.visible_gpus() == names
