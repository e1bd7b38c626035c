"""The properties of attention, checked on several processes."""

import pytest
import torch

from conformance.backend_under_test import Subject
from conformance.distributed import Processes, Setting
from conformance.properties import examine

ASKED = ("forward", "gradients", "lse", "no leak (outputs)", "bytes of a rank")


def statuses(setting: Setting, names=ASKED) -> dict[str, str]:
    with Processes(setting) as processes:
        subject = Subject(processes.backend, "cpu", torch.float32, 4, 0, 2 * setting.world)
        cells = [examine(subject, name, processes.properties[name]) for name in names]
    return {cell.property: cell.status for cell in cells}


@pytest.mark.slow
def test_our_ring_is_green():
    assert set(statuses(Setting(2, attention="tiled")).values()) == {"green"}


@pytest.mark.slow
def test_exchanged_heads_are_green():
    asked = {name: "green" for name in ASKED if name not in ("lse", "bytes of a rank")}
    assert statuses(Setting(2, attention="tiled", heads=2), tuple(asked)) == asked


@pytest.mark.usefixtures("forked")
def test_a_ring_of_a_users_own_is_told_apart():
    """One ring is right but keeps all keys; the other counts positions within the rank. Both round
    differently in each call, except where PyTorch must be deterministic.
    """
    asked = (*ASKED, "bitwise repeat")
    right = statuses(Setting(2, target="tests.user_rings:RIGHT", layout="contiguous"), asked)
    assert right == dict.fromkeys(asked, "green") | {"bytes of a rank": "red"}
    wrong = statuses(Setting(2, target="tests.user_rings:LOCAL", layout="contiguous"))
    assert {wrong[name] for name in ("forward", "gradients", "lse")} == {"red"}


@pytest.mark.usefixtures("forked")
def test_a_process_that_fails_is_named():
    with Processes(Setting(2, target="tests.user_rings:FAILS")) as processes:
        subject = Subject(processes.backend, "cpu", torch.float32, 0, 0, 4)
        cell = examine(subject, "forward")
    assert cell.status == "red" and cell.note == "RuntimeError: process 1: RuntimeError: no luck"
