"""A page in a browser without a window, for tests that look at what it shows."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
# from the first line of the page on, so that no error goes unseen
BEFORE = (
    "<script>const failed = []; addEventListener('error', e => failed.push(e.message));</script>"
)
AFTER = """<script>(async () => {
  let found = null;
  try { found = await (async () => { %s })(); } catch (error) { failed.push(String(error)); }
  document.title = JSON.stringify({failed, found});
})()</script>"""


def in_browser(page: Path, script: str, *, size: str = "1280,900", dark: bool = False) -> Any:
    """What the body of an asynchronous JavaScript function returns in this page. Fails if any
    script fails. size: of the window, in pixels. Its clock runs as fast as it can.
    """
    content = page.read_text().replace("<head>", f"<head>{BEFORE}", 1)
    content = content.replace("</body>", f"{AFTER % script}</body>", 1)
    probe = page.with_name(f"probe_{page.name}")
    probe.write_text(content)
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={size}"]
    options += ["--virtual-time-budget=30000", "--dump-dom"] + ["--force-dark-mode"] * dark
    command = [CHROMIUM, *options, probe.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    told = json.loads(html.unescape(re.search(r"<title>(.*?)</title>", shown, re.DOTALL)[1]))
    assert not told["failed"], told["failed"]
    return told["found"]
