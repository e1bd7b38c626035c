"""Shared by the tests of conformance."""

from multiprocessing import get_context

import pytest
from torch import multiprocessing


@pytest.fixture
def forked(monkeypatch):
    """Processes are forked by one that has imported torch, which takes each of them seconds."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["conformance.distributed"])
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
