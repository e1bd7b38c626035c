"""Mistakes that the tests of Stanford's CS336, assignment 2, accept, for those who passed them.

The figures come from docs/public-suites.md. They count the single-edit mistakes that the course's
test could show but accepts, by the property that catches them.
"""

from collections.abc import Iterable

from conformance.properties import Cell

IN_REACH = 74
CAUGHT_BY = {
    "large logits": 10,
    "strides and views": 7,
    "call history": 5,
    "every length": 4,
    "no leak (outputs)": 1,
    "poisoned memory": 1,
    "row independence": 1,
}


def beyond_the_course(cells: Iterable[Cell]) -> str:
    """A line with the status of each property that catches mistakes the course's test accepts."""
    status = {cell.property: cell.status for cell in cells}
    head = (
        f"The course's test accepts {sum(CAUGHT_BY.values())} of {IN_REACH} mistakes that it could "
        "show. What catches them, how many, and yours:"
    )
    lines = [
        f"{count:>4}  {name:<20}  {status.get(name, 'not asked')}"
        for name, count in CAUGHT_BY.items()
    ]
    return "\n".join([head, *lines])
