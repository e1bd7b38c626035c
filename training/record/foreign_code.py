"""A run's folder is data: reading a run, or resuming it, runs no code from there.

A run may name an attention of its user's own, as pkg.module:NAME, which Python imports from the
current folder. Whoever hands over a run could have put such a module into it.
"""

import logging
import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from training.own_modules import ROOT
from training.record.files import Row
from training.record.runs import sweep_of

log = logging.getLogger("tilegpt")

OWN = re.compile(r"[\w.]+:\w+(:.*)?")  # tiled:block_kv=8 is one of ours


class RunFolders:
    """Finds no module for Python, and refuses those that lie in the folders of runs."""

    def __init__(self) -> None:
        self.folders: set[Path] = set()
        self.named: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.origin is None:
            return
        file = Path(spec.origin).resolve()
        if any(file.is_relative_to(folder) for folder in self.folders):
            raise ImportError(
                f"{file} lies in the folder of a run, and code from there is not run; if you trust "
                "it, move it to a folder of your own"
            )


RUNS = RunFolders()


def run_no_code_of(run_dir: Path, attention: Row) -> None:
    """Refuse from now on to import a module from a run's folder, or from that of its sweep.

    Code of the run's user that its settings of the attention name is told in one line each.
    """
    folder = run_dir.resolve()
    folder = sweep_of(folder) or folder
    if not ROOT.is_relative_to(folder):  # a checkpoint alone may lie beside this program
        RUNS.folders.add(folder)
    if RUNS not in sys.meta_path:
        sys.meta_path.insert(0, RUNS)
    for name in (attention["name"], attention["switch_to"], attention["score_mod"]):
        if name and OWN.fullmatch(name) and name not in RUNS.named:
            RUNS.named.add(name)
            log.warning(
                f"{run_dir} was trained with {name}, code of its user: it is imported, unless it "
                "lies in the folder of a run"
            )
