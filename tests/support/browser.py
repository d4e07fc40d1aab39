"""A headless browser that looks at a page: Debian's chromium, where it is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")


def open_page(page: Path | str, picture: Path) -> str:
    """Open a page, write what it shows to ``picture`` (PNG) and return its elements after all scripts ran.

    Skips the test where there is no browser.
    """
    browser = next(filter(None, map(shutil.which, _NAMES)), None)
    if browser is None:
        pytest.skip("no browser: apt-get install chromium")
    address = page if isinstance(page, str) else page.resolve().as_uri()
    words = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    words += [f"--user-data-dir={picture.parent / 'browser'}", "--window-size=1300,2400"]
    for what in (["--dump-dom"], [f"--screenshot={picture}"]):
        done = subprocess.run(
            [*words, *what, address], capture_output=True, text=True, timeout=120, check=True
        )
        if what == ["--dump-dom"]:
            elements = done.stdout
    return elements
