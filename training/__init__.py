"""A run as an object, and as a call.

    build_run(config)                         every part of a run, before training
    run("attention=tiled", "steps=50")        what `python train.py attention=tiled steps=50` does
    compose("attention=tiled", "steps=50")    the settings of that command

All three work in a notebook and from any folder, even beside your own config.py or data/. The
rooms: `launch` is how runs begin, sweep and end; `loop` what a run does; `record` what it leaves.
Each may import the ones after it, and none of them imports this page.
"""

import logging
import os
import sys
from typing import TYPE_CHECKING

from training.own_modules import ROOT, own_modules

if TYPE_CHECKING:
    from config import RunConfig
    from training.loop.run import Run
    from training.record.files import Row

if not (ROOT / "conf").is_dir():
    raise SystemExit(
        f"error: {ROOT} has only the Python files of tilegpt; install it by `pip install -e .` in "
        "its own folder"
    )

# waiting threads must sleep: if another program shares a core, spinning makes a run several times
# slower. OpenMP reads this when torch is loaded. The user's own values win
SLEEP = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
_torch, _own = sys.modules.get("torch"), SLEEP.keys() & os.environ.keys()
if _torch and not _own and _torch.get_num_threads() > 1 and not _torch.cuda.is_available():
    logging.getLogger("tilegpt").warning(
        "torch was imported before training, so on a busy machine runs may be several times "
        "slower; import training first, or set OMP_WAIT_POLICY=PASSIVE"
    )
os.environ |= SLEEP | os.environ


def build_run(config: "RunConfig", summary: "Row | None" = None) -> "Run":
    """Build everything that `config` describes.

    `summary` is filled along the way, so that an error loses nothing. Raises ValueError for what
    can be refused before the first step: an unusable device, dtype, attention or data source.
    """
    with own_modules():
        from training.loop.run import build_run

        return build_run(config, summary)


def compose(*overrides: str) -> "RunConfig":
    """The settings of `python train.py OVERRIDES`. Raises ValueError with the reason."""
    with own_modules():
        from training.launch.command_line import compose

        return compose(*overrides)


def run(*overrides: str) -> "Row":
    """Train as `python train.py OVERRIDES` does; returns what summary.json says.

    A run that diverges, runs out of memory or is interrupted returns with that status. The error of
    a run that fails is raised; refused settings raise ValueError. The run directory is below the
    current folder, as on the command line.
    """
    with own_modules():
        from train import train
        from training.launch.job import run_overrides

        return run_overrides(train, overrides)
