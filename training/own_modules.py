"""Imports our own modules even if the user's folder has a config.py or data/ too."""

import contextlib
import importlib.machinery
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
OURS = {
    "attention",
    "conformance",
    "config",
    "data",
    "lab",
    "model",
    "scripts",
    "train",
    "training",
}
# our modules, set aside while the user's modules of the same names are in sys.modules
_aside: dict[str, ModuleType] = {}


@contextlib.contextmanager
def own_modules() -> Iterator[None]:
    """Inside this context, `import config` and the like find this project's modules.

    Afterwards they find the user's again, if the user's folder has modules of these names.
    """
    theirs = [name for name in _loaded() if not _is_ours(sys.modules[name].__spec__)]
    foreign = {name: sys.modules.pop(name) for name in theirs}
    sys.modules.update(_aside)
    _aside.clear()
    path_before = list(sys.path)
    sys.path.insert(0, str(ROOT))
    try:
        yield
    finally:
        sys.path[:] = path_before
        found = {name: importlib.machinery.PathFinder.find_spec(name) for name in OURS}
        shadowed = {name for name, spec in found.items() if spec and not _is_ours(spec)}
        for name in _loaded():
            if name.partition(".")[0] in shadowed:
                _aside[name] = sys.modules.pop(name)
        sys.modules.update(foreign)


def _loaded() -> list[str]:
    # a list first: another thread may be importing, as the plot does beside a checkpoint
    return [name for name in list(sys.modules) if name.partition(".")[0] in OURS]


def _is_ours(spec: importlib.machinery.ModuleSpec | None) -> bool:
    places = (spec.origin, *(spec.submodule_search_locations or ())) if spec else ()
    return any(place and Path(place).resolve().is_relative_to(ROOT) for place in places)
