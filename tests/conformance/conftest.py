"""Shared by the tests of conformance."""

from multiprocessing import get_context

import pytest

from lab import side_by_side


@pytest.fixture
def forked(monkeypatch):
    """Processes are forked by one that has imported torch, which takes each of them seconds."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["lab.false_alarms"])
    monkeypatch.setattr(side_by_side, "get_context", lambda _: context)
