"""What tests of the replay share: the command, and its page in a browser."""

import sys
from pathlib import Path

import pytest
import torch

from scripts import trace


@pytest.fixture
def run_trace(monkeypatch, capsys, tmp_path):
    """run_trace("key=value", ...): what it printed and the page it wrote; SystemExit carries its
    complaint.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(*arguments: str) -> tuple[str, str]:
        page = tmp_path / "page.html"
        monkeypatch.setattr(sys, "argv", ["trace", *arguments, f"out={page}"])
        trace.main()
        return capsys.readouterr().out, page.read_text()

    return run


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = Path("/usr/bin/chromium")
    if not chromium.exists():
        pytest.skip("needs /usr/bin/chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=str(chromium),
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, run_trace, tmp_path):
    """open_page("key=value", ...): the page in a browser; the test fails where its console shows an
    error.
    """
    errors, pages = [], []

    def show(*arguments: str, **context):
        run_trace(*arguments)
        page = browser.new_page(**context)
        page.on(
            "console",
            lambda message: errors.append(message.text) if message.type == "error" else None,
        )
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on(
            "request",
            lambda request: None if request.url.startswith("file:") else errors.append(request.url),
        )
        page.goto((tmp_path / "page.html").as_uri())
        pages.append(page)
        return page

    yield show
    for page in pages:
        page.close()
    assert not errors
