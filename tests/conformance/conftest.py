"""Shared by the tests of conformance."""

from multiprocessing import get_context

import pytest
from torch import multiprocessing

from lab import side_by_side


@pytest.fixture
def forked(monkeypatch):
    """Processes are forked by one that has imported torch, which takes each of them seconds."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["conformance.distributed", "lab.false_alarms"])
    for module in (multiprocessing, side_by_side):
        monkeypatch.setattr(module, "get_context", lambda _: context)
