"""The committed measurements: compact, and each drawn from."""

import json

import pytest

from lab.results.tables import FOLDER
from training.files import layout

ROOT = FOLDER.parent
FILES = sorted(FOLDER.iterdir())


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.suffix == ".json"], ids=lambda path: path.name
)
def test_a_measurement_has_a_line_for_each_row(path):
    """write_json(path, load_json(path)) brings a file into this form and changes no value."""
    assert path.read_text() == layout(json.loads(path.read_text())) + "\n"


def test_every_file_is_drawn_from():
    code = [path for folder in ("lab", "tests") for path in (ROOT / folder).rglob("*.py")]
    pages = [ROOT / "README.md", FOLDER / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(path.read_text() for path in [*code, *pages])
    unread = [path.name for path in FILES if path.stem not in text]
    assert not unread, "no table, figure, page or test reads them"
