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


@pytest.mark.parametrize(
    "error, expected",
    [
        (ValueError("head_dim=7"), "ValueError: head_dim=7"),
        (ValueError(), "ValueError: "),
        (KeyError("table"), "KeyError: 'table'"),
        (RuntimeError(CUDA), "RuntimeError: CUDA error: misaligned address"),
        (
            RuntimeError(TRITON),
            "RuntimeError: at 4:20: (incompatible dimensions at index 0: 16 and 32)",
        ),
        (
            RuntimeError(INDUCTOR),
            "RuntimeError: backend='inductor' raised: (RuntimeError: no compiler)",
        ),
        (
            raised_from(RuntimeError("the launch failed"), KeyError("table")),
            "RuntimeError: the launch failed (KeyError: 'table')",
        ),
        (
            raised_from(RuntimeError("the launch failed: no table"), ValueError("no table")),
            "RuntimeError: the launch failed: no table",
        ),
    ],
    ids=["plain", "empty", "key", "cuda", "triton", "inductor", "from", "repeated"],
)
def test_the_line_tells_the_cause(error, expected):
    assert in_one_line(error) == expected


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
    assert cell.status == "red" and "when making fake tensor call" in cell.note
    assert "(RuntimeError(" in cell.note and "16" in cell.note and "\n" not in cell.note
    assert len(cell.note) < 2 * LONGEST + 50


def test_triton_without_a_gpu_has_a_way_out(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    error = RuntimeError("0 active drivers ([]). There should only be one.")
    said = "RuntimeError: 0 active drivers ([]). There should only be one; Triton needs a GPU, or "
    assert in_one_line(error) == said + "TRITON_INTERPRET=1 set before the start"
