"""What mkdocs does for `make docs` beyond its own: the pages keep their places in the repository,
so that a link works here as it does there, and the replays are made while the site is built.
"""

import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
REPLAY = re.compile(r"(?:!\[.*\]\(.*\)\n)?<!-- replay: (.*) -->")


def on_files(files: Files, config) -> Files:
    """Every tracked file of the repository that a page may link to, instead of docs/ alone."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    theme = [file for file in files if file.src_dir != config.docs_dir]
    names = [name for name in names.split("\0") if name and (ROOT / name).is_file()]
    own = [File.generated(config, name, abs_src_path=str(ROOT / name)) for name in names]
    pages = [file for file in own if file.is_documentation_page()]
    replays = [
        File.generated(config, f"docs/{address(arguments)}", content=replay(arguments))
        for page in pages
        for arguments in REPLAY.findall(page.content_string)
    ]
    return Files([*theme, *own, *replays])


def on_page_markdown(markdown: str, **_) -> str:
    """The replay itself in the place of its picture."""
    frame = '<iframe class="replay" title="replay: {0}" src="{1}" loading="lazy"></iframe>'
    return REPLAY.sub(lambda found: frame.format(found[1], address(found[1])), markdown)


def address(arguments: str) -> str:
    return f"replay/{re.sub(r'[^a-z0-9]+', '-', arguments.lower())}.html"


def replay(arguments: str) -> str:
    """The page that scripts.trace writes."""
    with TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        command = [sys.executable, "-m", "scripts.trace", *arguments.split(), f"out={page}"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return page.read_text()
