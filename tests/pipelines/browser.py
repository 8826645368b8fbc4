"""Debian's Chromium for tests that look at pages; everything that a page should not do is written down."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
# A folder that keeps the screenshots of the tests, for a person to look at.
SHOTS = os.environ.get("GRISTMILL_SCREENSHOTS")


def missing_browser() -> str:
    """Why there is none; empty where there is one."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright for Python is not installed"
    return "" if Path(CHROMIUM).exists() else f"there is no {CHROMIUM} (Debian's package chromium)"


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; skips the test where there is none."""
    if why := missing_browser():
        pytest.skip(f"No browser to look at the page with: {why}.")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


class Tabs:
    """Opens pages. `wrong` has every message, error, dialog, and request that no page of the test may make."""

    def __init__(self, browser: Any, allowed: tuple[str, ...]) -> None:
        self._browser, self._allowed = browser, allowed
        self._open: list[Any] = []
        self.wrong: list[str] = []

    def open(self, address: str, width: int = 1280, height: int = 900, scheme: str = "light", **more: Any) -> Any:
        tab = self._browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme, **more)
        tab.set_default_timeout(8_000)
        self._open.append(tab)
        tab.on("console", lambda message: self.wrong.append(f"{message.type}: {message.text}"))
        tab.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        tab.on("dialog", lambda dialog: self.wrong.append(f"dialog: {dialog.message}"))
        tab.on("request", self._asked)
        tab.goto(address)
        return tab

    def _asked(self, request: Any) -> None:
        if not request.url.startswith(self._allowed):
            self.wrong.append(request.url)

    def close(self) -> None:
        for tab in self._open:
            tab.close()


def picture(tab: Any, folder: Path, name: str) -> None:
    """A screenshot of the whole page."""
    place = Path(SHOTS) if SHOTS else folder
    place.mkdir(parents=True, exist_ok=True)
    tab.screenshot(path=place / f"{name}.png", full_page=True)
