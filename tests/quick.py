"""`python train.py ...` without half a second of starting and drawing, for tests of several
processes.

tests/forked.py imports this module once, and forks itself for each call of command.start_quick().
"""

import importlib
import runpy
import sys

from tests import composition
from tests.command import ROOT, git_once, register_once, shortcuts
from training import command_line, ranks

# with what they import, all that a tiny run needs
for name in ("data.batches", "training.evaluate", "training.pretrained", "training.settings"):
    importlib.import_module(name)
for name in ("job", "recorder", "resume", "run", "sweep"):
    importlib.import_module(f"training.{name}")
composition.quicken()
register_once()
git_once()
command_line.hydra_config(with_hydra=True)  # Hydra looks for its plugins, and reads its own files


def main() -> None:
    sys.argv[0] = "train.py"
    for module in (command_line, ranks):
        module.PATIENCE = 1.0  # the first rank has less to do before it has its say
    with shortcuts():
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
