"""The sweep's callback, in a Hydra application of its own with Hydra's own sweeper."""

import os

import pytest

from tests import processes
from training.launch.sweep import exit_code, finish_sweep
from training.record.runs import read_sweep

CONFIG = """
attention: tiled
resume: null
hydra:
  sweep: {dir: out/sweep, subdir: "${hydra.job.num}"}
  callbacks: {sweep: {_target_: training.launch.sweep.SweepSummary}}
"""

# each attention stands for one way in which a job can end
APPLICATION = """
import json, os, signal
from pathlib import Path
import hydra
from hydra.core.hydra_config import HydraConfig
from training.record.outcome import Objective

@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config):
    if config.attention == "raises":
        raise RuntimeError("boom")
    ends = {"bad": "failed", "ctrl_c": "interrupted"}
    status = ends.get(config.attention, "completed")
    hydra_config = HydraConfig.get()
    summary = {"status": status, "attention": config.attention, "val/loss": 1.5,
               "overrides": list(hydra_config.overrides.task)}
    Path(hydra_config.runtime.output_dir, "summary.json").write_text(json.dumps(summary))
    return Objective.of(summary | {"stopped": False})

main()
print("after main")
"""


ENDS = {
    "bad,tiled,raises": (1, ["failed", "completed", "failed"]),
    "tiled,ctrl_c,sdpa": (130, ["completed", "interrupted"]),
}


@pytest.mark.parametrize("attentions", ENDS)
def test_each_end_of_a_job_is_in_the_exit_code(tmp_path, attentions):
    """The code leaves from the callback: nothing after main() is needed."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/config.yaml").write_text(CONFIG)
    (tmp_path / "app.py").write_text(APPLICATION)
    environment = os.environ | {"PYTHONPATH": processes.python_path(processes.ROOT)}
    asked = ("-m", f"attention={attentions}")
    done = processes.run("app.py", *asked, cwd=tmp_path, env=environment)
    code, statuses = ENDS[attentions]
    assert done.returncode == code, done.stderr
    rows = read_sweep(tmp_path / "out/sweep")
    assert [row["status"] for row in rows] == statuses
    assert "after main" not in done.stdout
    if "raises" in attentions:
        assert rows[2]["error"] == "boom"


@pytest.mark.parametrize(
    "code, statuses",
    [
        (0, ["completed", "oom", "diverged"]),
        (1, ["interrupted", "failed"]),
        (1, ["completed", "unfinished"]),
        (130, ["completed", "interrupted"]),
    ],
)
def test_exit_code(code, statuses):
    assert exit_code([{"status": status} for status in statuses]) == code


def test_a_sweep_names_its_own_logdir_for_tensorboard(tmp_path, capsys):
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "0").mkdir()
    (tmp_path / "0/summary.json").write_text('{"status": "completed", "attention": "tiled"}')
    with pytest.raises(SystemExit):
        finish_sweep(tmp_path)
    assert f"tensorboard --logdir {tmp_path}/tensorboard\n" in capsys.readouterr().out
