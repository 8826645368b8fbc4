"""The made-up run that the tests of the report look at, and its page."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # importlib mode puts no folder of tests on the path
from report_page import Page, build, report


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("run") / "run")


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return report(folder)[0]
