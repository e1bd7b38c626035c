"""An exception in one line: what a reader needs to find its cause."""

import logging

import pytest
import torch

from attention import Backend
from conformance.errors import LONGEST, in_one_line
from conformance.properties import verify_backend

TRITON = """at 4:20:
def kernel(x, n: tl.constexpr):
    a = tl.arange(0, 16)
                    ^
incompatible dimensions at index 0: 16 and 32"""
INDUCTOR = "backend='inductor' raised:\nRuntimeError: no compiler\n\nSet TORCH_LOGS"
CUDA = "CUDA error: misaligned address\nSearch for `cudaErrorMisalignedAddress' in the docs."


def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


ERRORS = {
    "plain": (ValueError("head_dim=7"), "ValueError: head_dim=7"),
    "empty": (ValueError(), "ValueError: "),
    "key": (KeyError("table"), "KeyError: 'table'"),
    "cuda": (RuntimeError(CUDA), "RuntimeError: CUDA error: misaligned address"),
    "triton": (
        RuntimeError(TRITON),
        "RuntimeError: at 4:20: (incompatible dimensions at index 0: 16 and 32)",
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


def test_a_long_message_is_cut():
    assert in_one_line(ValueError("x" * 1000)) == f"ValueError: {'x' * (LONGEST - 3)}..."


def test_a_note_quotes_the_exception_that_the_compiler_met(caplog):
    """The first line of Dynamo is the same for every wrong shape; the next quotes the exception."""

    def attend(q, k, v, *, causal, scale):
        return q @ k

    compiled = torch.compile(attend, backend="aot_eager")
    caplog.set_level(logging.CRITICAL)  # PyTorch logs a traceback for each
    (cell,) = verify_backend(Backend("compiled", compiled), properties=["forward"])
    torch.compiler.reset()
    assert cell.status == "red" and "\n" not in cell.note
    assert "(RuntimeError(" in cell.note and "16" in cell.note
    assert len(cell.note) < 2 * LONGEST + 50


def test_triton_without_a_gpu_has_a_way_out(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    line = in_one_line(RuntimeError("0 active drivers ([]). There should only be one."))
    assert line.startswith("RuntimeError: 0 active drivers") and "TRITON_INTERPRET=1" in line
