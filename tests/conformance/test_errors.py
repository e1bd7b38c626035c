"""An exception in one line: what a reader needs to find its cause."""

import pytest

from conformance.errors import LONGEST, in_one_line

TRITON = "at 4:20:\ndef kernel(x):\n    a = x\n    ^\nincompatible dimensions: 16 and 32"
INDUCTOR = "backend='inductor' raised:\nRuntimeError: no compiler\n\nSet TORCH_LOGS"
CUDA = "CUDA error: misaligned address\nSearch for it in the docs."


def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


ERRORS = {
    "empty": (ValueError(), "ValueError: "),
    "long": (ValueError("x" * 1000), f"ValueError: {'x' * (LONGEST - 3)}..."),
    "cuda": (RuntimeError(CUDA), "RuntimeError: CUDA error: misaligned address"),
    "triton": (
        RuntimeError(TRITON),
        "RuntimeError: at 4:20: (incompatible dimensions: 16 and 32)",
    ),
    "inductor": (
        RuntimeError(INDUCTOR),
        "RuntimeError: backend='inductor' raised: (RuntimeError: no compiler)",
    ),
    "from": (
        raised_from(RuntimeError("no launch"), KeyError("table")),
        "RuntimeError: no launch (KeyError: 'table')",
    ),
    "repeated": (
        raised_from(RuntimeError("no launch: no table"), ValueError("no table")),
        "RuntimeError: no launch: no table",
    ),
}


@pytest.mark.parametrize(("error", "line"), ERRORS.values(), ids=ERRORS)
def test_the_line_tells_the_cause(error, line):
    assert in_one_line(error) == line


def test_triton_without_a_gpu_has_a_way_out(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    line = in_one_line(RuntimeError("0 active drivers ([]). There should only be one."))
    assert line.startswith("RuntimeError: 0 active drivers") and "TRITON_INTERPRET=1" in line
