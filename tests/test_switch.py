"""attention.switch_at: another attention takes over in the middle of a run."""

import signal

import pytest

from tests.command import (
    checkpoint,
    computed,
    metrics,
    run,
    same,
    send_at_step,
    summary,
    tiny,
)

# several tiles, and scores sharp enough that a broken attention shows
RECIPE = (
    *("attention=no_rescale", "attention.block_kv=4", "model.dropout=0.1"),
    *("optim.lr=0.02", "optim.schedule=constant", "optim.warmup_steps=1"),
    *("steps=30", "log_every=3", "eval_every=25", "checkpoint_every=5"),
)
TO_EXACT = ("attention.switch_at=20", "attention.switch_to=tiled")


@pytest.fixture(scope="module")
def switched(tmp_path_factory):
    """30 steps: 20 under no_rescale, 10 under exact attention."""
    run_dir = tmp_path_factory.mktemp("switched")
    done = run(*tiny(run_dir, *RECIPE, *TO_EXACT))
    assert done.code == 0, done.output
    return run_dir, done


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """The same 30 steps under no_rescale throughout."""
    run_dir = tmp_path_factory.mktemp("broken")
    assert run(*tiny(run_dir, *RECIPE)).code == 0
    return run_dir


def by_step(rows: list[dict]) -> dict[int, dict]:
    return {row["step"]: row for row in rows}


def test_after_the_switch_the_attention_is_exact(switched, broken):
    """And before it the run was as one that is never switched. The row of the switch judges the
    same weights before and after.
    """
    rows, theirs = by_step(computed(switched[0])), by_step(computed(broken))
    assert all(rows[step] == theirs[step] for step in range(0, 20, 3))
    assert rows[21]["train/loss"] != theirs[21]["train/loss"]
    assert [step for step, row in rows.items() if "val/loss_switched" in row] == [20]
    assert "attention/out_error" not in rows[20]  # neither evaluated nor diagnosed by its number
    assert abs(rows[20]["val/loss"] - rows[20]["val/loss_switched"]) > 1e-3
    for step, key in ((20, "val/loss_switched"), (25, "val/loss"), (30, "val/loss")):
        assert rows[step][key] == pytest.approx(rows[step]["val/loss_exact"], abs=1e-5)
    for step in (25, 30):
        assert rows[step]["attention/out_error"] < 1e-5
        assert theirs[step]["attention/out_error"] > 1e-2


def test_the_switch_is_recorded_everywhere(switched):
    run_dir, done = switched
    said = {"attention": "no_rescale", "defect": True, "switch_at": 20, "switch_to": "tiled"}
    result, row = summary(run_dir), by_step(metrics(run_dir))[20]
    assert result.items() >= (said | {"val/loss_switched": row["val/loss_switched"]}).items()
    assert (result["options"]["block_kv"], result["switch_options"]["block_kv"]) == (4, 64)
    lines = done.output.splitlines()
    (named,) = [line for line in lines if "attention=no_rescale block_kv=4" in line]
    assert "tiled" in named and "20" in named
    assert sum("step 20: " in line for line in lines) == 1


def test_a_switch_to_the_same_attention_changes_nothing(broken, tmp_path):
    """The control: what changes a run is the other attention, not the switch."""
    again = ("attention.switch_at=20", "attention.switch_to='no_rescale:block_kv=4'")
    assert run(*tiny(tmp_path, *RECIPE, *again)).code == 0
    assert same(checkpoint(tmp_path), checkpoint(broken))
    ours, theirs = by_step(computed(tmp_path)), by_step(computed(broken))
    assert ours[20]["val/loss_switched"] == ours[20]["val/loss"]
    assert {step: row for step, row in ours.items() if step != 20} == theirs


def test_interrupted_at_the_switch_and_resumed_is_the_same_run(switched, monkeypatch, tmp_path):
    """To the last bit. The signal comes while step 20 is prepared; it is still saved."""
    send_at_step(monkeypatch, 19, signal.SIGINT)
    stopped = run(*tiny(tmp_path, *RECIPE, *TO_EXACT))
    assert stopped.code == 130 and checkpoint(tmp_path)["step"] == 20
    done = run(f"resume={tmp_path}")
    assert done.code == 0, done.output
    assert same(checkpoint(tmp_path), checkpoint(switched[0]))
    assert computed(tmp_path) == computed(switched[0])
