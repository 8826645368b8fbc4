"""A report as a program reads it: shared by the tests of its parts."""

from __future__ import annotations

import json
import sys
from html.parser import HTMLParser
from pathlib import Path

from gristmill.pipelines.report.write import write_report

sys.path.append(str(Path(__file__).parent))
from fake_run import HOSTILE, FakeExact, FakeLanguage, FakeQuality, FakeRun

STAGES = {"fake_language": FakeLanguage, "fake_quality": FakeQuality, "exact": FakeExact}
LONG_LINE = "grain " * 2000


class Page(HTMLParser):
    """What a browser would find: elements with their attributes, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.json = ""
        self._inside: str | None = None
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else None
        if dict(attrs).get("id") == "data":
            self._inside = "data"

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, data):
        if self._inside == "data":
            self.json += data
        elif self._inside is None:
            self.text += data

    @property
    def data(self):
        return json.loads(self.json)


def report(folder: Path) -> tuple[Page, str]:
    path = write_report(folder, stages=STAGES)
    html = Path(path).read_text("utf-8")
    return Page(html), html


def build(folder: Path) -> Path:
    """A run with hostile, long and ordinary documents."""
    extra = (HOSTILE * 3, HOSTILE + " mill stone of the river " * 10, LONG_LINE)
    return FakeRun(extra_texts=extra).build(folder)


def funnel_of(data, source=None):
    rows = [dict(zip(data["funnel"]["columns"], row, strict=True)) for row in data["funnel"]["rows"]]
    return {row["stage"]: row for row in rows if row["source"] == source}
