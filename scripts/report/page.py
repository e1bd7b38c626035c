"""Write a report's blocks as one self-contained HTML page.

The page needs no network. It works on a phone and a large screen, in light and dark mode, and in
print. All text is escaped.
"""

import re
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from training.record.palette import ON_DARK, mixed


@dataclass
class Text:
    text: str
    warning: bool = False


@dataclass
class Figure:
    title: str  # description for readers who cannot see it
    caption: str
    panels: list[str]  # as SVG
    legend: dict[str, str] = field(default_factory=dict)  # SVG samples by their labels


@dataclass
class Table:
    head: list[str]
    rows: list[list[str]]
    words: int = 1  # how many columns at the left are words; the others are numbers
    notes: bool = False  # whether the last column is a sentence

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


def _style(body: str) -> str:
    """page.css, with the figures' colours as variables, for light and for dark mode."""
    colors = sorted(set(re.findall(r"var\(--c-([0-9a-f]{6})\)", body)))
    light = " ".join(f"--c-{color}: #{color};" for color in colors)
    dark = " ".join(f"--c-{color}: {mixed(f'#{color}', ON_DARK)};" for color in colors)
    rules = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    on_dark = f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    return f"{rules}:root {{ {light} }}\n{on_dark}\n"


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
        f"<title>{escape(title)}</title><style>{_style(body)}</style></head>"
        f"<body>\n<h1>{escape(title)}</h1>\n{body}</body></html>\n"
    )


def _html(block: Text | Figure | Table | Card) -> str:
    match block:
        case Text():
            return f"<p{' class=warn' * block.warning}>{escape(block.text)}</p>"
        case Figure():
            caption = f"<figcaption>{escape(block.caption)}</figcaption>" if block.caption else ""
            return f"<figure>{_panels(block)}{caption}</figure>"
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
            figure = _panels(block.figure) if block.figure else ""
            return f'<div class="card"><div>{text}</div>{figure}</div>'


def _panels(figure: Figure) -> str:
    """The panels and the legend. In a narrow window the panels stand below one another."""
    panels = []
    for number, svg in enumerate(figure.panels, 1):
        # never larger than drawn, so that text keeps its size
        width = re.search(r'width="([\d.]+)pt"', svg)[1]
        title = figure.title + (f", panel {number}" if len(figure.panels) > 1 else "")
        shown = f'role="img" aria-label="{escape(title)}" style="max-width: {width}pt"'
        panels.append(svg.replace("<svg", f"<svg {shown}", 1))
    samples = "".join(
        f"<li>{svg.replace('<svg', '<svg aria-hidden=true', 1)}{escape(words)}</li>"
        for words, svg in figure.legend.items()
    )
    legend = f'<ul class="legend">{samples}</ul>' if samples else ""
    return f'<div class="panels">{"".join(panels)}</div>{legend}'


def _html_table(table: Table) -> str:
    head = "".join(
        f'<th scope="col"{table.kind(i)}>{escape(text)}</th>' for i, text in enumerate(table.head)
    )
    lines = []
    for row in table.rows:
        cells = (f"<td{table.kind(i)}>{escape(text)}</td>" for i, text in enumerate(row))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="wide"><table>{body}</table></div>'
