"""A process in which Triton compiles for a GPU that need not be there. The tests' own interprets
the kernels, and code that the compiler refuses passes there.
"""

import importlib.util
import json
import os
from typing import Any

import pytest

from tests.processes import run

NEEDED = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton's compiler, not a GPU"
)


def printed(*arguments: str, **variables: str) -> list[Any]:
    """What python ARGUMENTS prints with these variables set: a line of JSON for each result."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # a kernel takes seconds, and some tests ask for dozens of them
    done = run(*arguments, check=True, env=environment | variables, timeout=None)
    return [json.loads(line) for line in done.stdout.splitlines()]
