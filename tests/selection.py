"""Some cases of many for `make test`, all of them for `make test-all`."""

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

import pytest

Axis = Mapping[str, Any] | Iterable[Any]  # values by their names in the test's id, or values


def diagonal(*axes: Axis) -> list:
    """The product of the axes, for pytest.mark.parametrize. Slow are all but those whose positions
    add up to a multiple of the shortest axis' length. The others have every value of two axes, and
    every pair of values of three or more:

           a b c d e
        x  0 . 0 . 0
        y  . 0 . 0 .
    """
    axes = [axis if isinstance(axis, Mapping) else {str(x): x for x in axis} for axis in axes]
    shortest = min(map(len, axes))
    cases = []
    for chosen in product(*(list(enumerate(axis.items())) for axis in axes)):
        quick = sum(position for position, _ in chosen) % shortest == 0
        cases.append(
            pytest.param(
                *(value for _, (_, value) in chosen),
                id="-".join(name for _, (name, _) in chosen),
                marks=() if quick else pytest.mark.slow,
            )
        )
    return cases
