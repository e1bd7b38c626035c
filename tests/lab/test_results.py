"""results/README.md is what its command writes, and README's table says what it says."""

import re

import pytest

from lab.results import FOLDER, PLACE, TABLES, written

PAGE = (FOLDER / "README.md").read_text()
README = (FOLDER.parent / "README.md").read_text()
# the rows of README's table: what, figure, file
ROWS = [line.strip("|").split("|") for line in README.splitlines() if line.endswith(".json` |")]


def test_the_page_is_what_the_command_writes():
    assert PLACE.sub(written, PAGE) == PAGE
    assert [place[1] for place in PLACE.finditer(PAGE)] == list(TABLES) and len(ROWS) == 6


@pytest.mark.parametrize(("what", "figure", "names"), ROWS, ids=[row[0].strip() for row in ROWS])
def test_a_figure_of_the_readme_was_measured(what, figure, names):
    files = [file for name in re.findall(r"`(.+?)`", names) for file in FOLDER.glob(name)]
    assert files and all((FOLDER / x).exists() for x in re.findall(r"`(\w+\.json)`", names))
    printed = PAGE + "".join(file.read_text() for file in files)
    for number in re.findall(r"(?<![-\w])\d+(?:,\d{3})*(?:\.\d+)?", f"{what} {figure}"):
        assert re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d]|[.,]\d)", printed), number
