"""A test for each property: `pytest --attention my_package:attend --dialect fa`.

Changes to a dialect follow its name: --dialect "fa corner=top_left". A property that does not
apply is skipped.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attn-conform")
    group.addoption("--attention", metavar="NAME", help="pkg.module:NAME, a test a property")
    group.addoption(
        "--dialect", default="", help="how it is called; `attn-conform probe NAME` finds out"
    )


class PropertyItem(pytest.Item):
    examine: Callable[[], Any]

    def runtest(self) -> None:
        cell = self.examine()
        if cell.status == "n/a":
            pytest.skip(cell.note)
        if not cell.ok:
            said = cell.note or "green, but the backend documents it as red"
            pytest.fail(said, pytrace=False)

    def reportinfo(self) -> tuple[Any, None, str]:
        return self.path, None, self.name


@pytest.hookimpl(tryfirst=True)  # so that -k selects among these too
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    text = session.config.option.attention
    if text is None:
        return
    from conformance.cases import SHORT
    from conformance.outside.command import prepare
    from conformance.outside.properties import properties_of
    from conformance.properties import examine

    given = session.config.option.dialect.split()
    words = [word if "=" in word else f"dialect={word}" for word in given]
    try:
        _, found, subjects = prepare("run", [text, *words])
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    for subject in subjects:
        for name, check in properties_of(found.backend).items():
            item = PropertyItem.from_parent(session, name=f"{name}[{SHORT[subject.dtype]}]")
            item.examine = partial(examine, subject, name, check)
            items.append(item)
