"""The wandb workspace: what it holds, which runs it shows, and one line where it is refused."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

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


def test_without_a_key_it_is_one_line_that_says_what_to_type(tmp_path):
    """In a process of its own: wandb reads its settings once. It has nothing to read, so a question
    would fail it.
    """
    kept = {name: x for name, x in os.environ.items() if not name.upper().startswith("WANDB_")}
    kept |= {"HOME": str(tmp_path), "NETRC": f"{tmp_path}/netrc", "WANDB_CONFIG_DIR": str(tmp_path)}
    arguments = ("-m", "scripts.dashboard", str(write_run(tmp_path / "run")))
    done = processes.run(*arguments, env=kept)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, "")
    assert line.startswith("dashboard: ") and "wandb login" in line


def test_it_is_saved_for_the_team_or_refused_with_its_name(monkeypatch, capsys):
    monkeypatch.setenv("WANDB_ENTITY", "team")
    monkeypatch.setattr(dashboard, "check_server", lambda: None)
    answers = iter([SimpleNamespace(url="https://its/address")])
    workspace = SimpleNamespace(project="mine", save=lambda: next(answers))
    dashboard.save(workspace)
    assert workspace.entity == "team" and "https://its/address" in capsys.readouterr().out
    with pytest.raises(ValueError, match="entity=team project=mine"):
        dashboard.save(workspace)
