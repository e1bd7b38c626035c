"""How a report is written down: the same blocks as one self-contained HTML page and as Markdown.

The page holds everything in one file and asks nothing of a network: for a phone as for a screen,
light, dark or printed. All text passes through one function a language, which escapes it.
"""

import re
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from scripts.palette import ON_DARK
from scripts.report.drawing import Drawing


@dataclass
class Text:
    text: str
    warning: bool = False


@dataclass
class Figure:
    name: str  # of its file beside the Markdown
    title: str  # what it shows, for those who cannot see it
    caption: str
    drawing: Drawing


@dataclass
class Table:
    head: list[str]
    rows: list[list[str]]
    words: int = 1  # so many columns are words, on the left; the others are numbers
    notes: bool = False  # the last column is a sentence
    # a heat map: a share of 0 to 1 a cell below the head, None for a cell without a colour
    shares: list[list[float | None]] | None = None
    framed: list[set[int]] | None = None  # the places in each row of shares that get a frame

    def kind(self, column: int) -> str:
        """The HTML class of a column: a sentence, words, or numbers."""
        if self.notes and column == len(self.head) - 1:
            return ' class="note"'
        return ' class="word"' if column < self.words else ""


@dataclass
class Card:
    title: str
    sentence: str
    facts: dict[str, str]
    figure: Figure | None = None


@dataclass
class Section:
    title: str
    blocks: list[Text | Figure | Table | Card] = field(default_factory=list)


def _style() -> str:
    """page.css, and the colours of the figures as variables: on light paper, on dark."""
    light, dark = (
        ":root { " + " ".join(f"--series-{i}: {color};" for i, color in enumerate(colors)) + " }"
        for colors in (ON_DARK, ON_DARK.values())
    )
    rules = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return f"{rules}{light}\n@media screen and (prefers-color-scheme: dark) {{ {dark} }}\n"


def render_html(title: str, sections: list[Section]) -> str:
    body = "".join(
        (f"<section><h2>{escape(section.title)}</h2>" if section.title else "<section>")
        + "".join(map(_html, section.blocks))
        + "</section>\n"
        for section in sections
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_style()}</style></head>"
        f"<body>\n<h1>{escape(title)}</h1>\n{body}</body></html>\n"
    )


def _html(block: Text | Figure | Table | Card) -> str:
    match block:
        case Text():
            return f"<p{' class=warn' * block.warning}>{escape(block.text)}</p>"
        case Figure():
            caption = f"<figcaption>{escape(block.caption)}</figcaption>" if block.caption else ""
            return f"<figure>{_svg(block)}{caption}</figure>"
        case Table():
            return _html_table(block)
        case Card():
            facts = "".join(
                f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>"
                for key, value in block.facts.items()
            )
            text = f"<h3>{escape(block.title)}</h3><p>{escape(block.sentence)}</p>" + (
                f"<dl>{facts}</dl>" if facts else ""
            )
            figure = _svg(block.figure) if block.figure else ""
            return f'<div class="card"><div>{text}</div>{figure}</div>'


def _svg(figure: Figure) -> str:
    # never larger than drawn, so that letters keep their size; a large one scrolls rather than
    # shrink until nobody can read it
    width = float(re.search(r'width="([\d.]+)pt"', figure.drawing.svg)[1])
    attributes = (
        f'role="img" aria-label="{escape(figure.title)}" style="max-width: {width}pt; min-width: '
        f'{432 if width > 432 else 0}pt"'
    )
    return f'<div class="wide">{figure.drawing.svg.replace("<svg", f"<svg {attributes}", 1)}</div>'


def _html_table(table: Table) -> str:
    def attributes(row: int, column: int) -> str:
        """The class of a cell of the body, and its share of a heat map's colour."""
        place = column - table.words
        if table.shares is None or place < 0:
            return table.kind(column)
        share = table.shares[row][place]
        framed = ' class="framed"' if table.framed and place in table.framed[row] else ""
        return framed + (f' style="--share: {share:.3f}"' if share is not None else "")

    head = "".join(
        f'<th scope="col"{table.kind(i)}>{escape(text)}</th>' for i, text in enumerate(table.head)
    )
    lines = []
    for n, row in enumerate(table.rows):
        cells = (f"<td{attributes(n, i)}>{escape(text)}</td>" for i, text in enumerate(row))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    kind = ' class="heat"' if table.shares else ""
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="wide"><table{kind}>{body}</table></div>'


def render_markdown(title: str, sections: list[Section], figures: str) -> str:
    """The same blocks; `figures` is the folder of the PNG files beside the Markdown file."""
    parts = [f"# {_plain(title)}"]
    for section in sections:
        parts += [f"## {_plain(section.title)}"] if section.title else []
        parts += [_markdown(block, figures) for block in section.blocks]
    return "\n\n".join(parts) + "\n"


def _markdown(block: Text | Figure | Table | Card, figures: str) -> str:
    match block:
        case Text():
            return f"> {_plain(block.text)}" if block.warning else _plain(block.text)
        case Figure():
            return f"![{_plain(block.title)}](<{figures}/{block.name}.png>)" + (
                f"\n\n{_plain(block.caption)}" if block.caption else ""
            )
        case Table():
            rule = [":---" if block.kind(i) else "---:" for i in range(len(block.head))]
            rows = [[_plain(cell) for cell in row] for row in (block.head, *block.rows)]
            lines = [rows[0], rule, *rows[1:]]
            return "\n".join(f"| {' | '.join(line)} |" for line in lines)
        case Card():
            text = f"### {_plain(block.title)}\n\n{_plain(block.sentence)}"
            facts = [f"- {_plain(key)}: {_plain(value)}" for key, value in block.facts.items()]
            if facts:
                text += "\n\n" + "\n".join(facts)
            return f"{text}\n\n{_markdown(block.figure, figures)}" if block.figure else text


def _plain(text: str) -> str:
    """Text that no Markdown reader takes for a mark-up, a tag or the end of a cell."""
    text = " ".join(text.split())
    for sign in "\\`*_[]|":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
