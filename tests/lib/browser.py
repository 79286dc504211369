"""A browser without a screen, for tests of pages."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def browse(
    text: str, tmp_path: Path, *more: str, query: str = ""
) -> subprocess.CompletedProcess[str]:
    """What a browser makes of a page. In CI there is one, or this fails."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None and not os.environ.get("CI"):
        pytest.skip("there is no browser: apt-get install chromium")
    assert browser, "CI has no browser: apt-get install chromium"
    (tmp_path / "r.html").write_text(text, "utf-8")
    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", *quiet]
    options += [f"--user-data-dir={tmp_path / 'me'}", "--enable-logging=stderr", "--dump-dom"]
    command = [browser, *options, *more, (tmp_path / "r.html").as_uri() + query]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
