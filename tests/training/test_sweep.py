"""How a sweep ends: its exit code, and what it tells."""

import pytest

from training.launch.sweep import exit_code, finish_sweep


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
