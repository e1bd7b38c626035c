"""Every relative link of a page leads to a file of the repository, and to a heading of it."""

import re
import subprocess
from collections import Counter
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[1]
LISTED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
FILES = {ROOT / name for name in LISTED.stdout.splitlines()}
PAGES = sorted(file for file in FILES if file.suffix == ".md")
FENCED = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r'\]\(([^)\s]+)|^\[[^]]+\]: *(\S+)|(?:href|src|srcset)="(.+?)"', re.MULTILINE)


def links(page: str) -> list[str]:
    found = ("".join(groups) for groups in LINK.findall(FENCED.sub("", page)))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def anchors(page: str) -> set[str]:
    """What GitHub makes of the headings. A heading that comes again gets a number."""
    found, times = set(), Counter()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", FENCED.sub("", page), re.MULTILINE):
        words = re.sub(r"\[(.+?)\]\(.+?\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found.add(f"{slug}-{times[slug]}" if times[slug] else slug)
        times[slug] += 1
    return found


def leads_somewhere(page: Path, link: str) -> bool:
    path, _, anchor = unquote(link).partition("#")
    target = (page.parent / path).resolve() if path else page
    if anchor:
        return target in FILES and anchor in anchors(target.read_text())
    return any(target in (file, *file.parents) for file in FILES)  # or to a folder


def test_every_link_leads_somewhere():
    found = [(page, link) for page in PAGES for link in links(page.read_text())]
    assert len(found) > 50
    assert not [(str(page), link) for page, link in found if not leads_somewhere(page, link)]
