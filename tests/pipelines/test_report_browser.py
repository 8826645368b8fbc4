"""The report in a real browser."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.dataset as ds
import pytest

from gristmill.pipelines.open_run import open_run
from gristmill.pipelines.report.compare import write_comparison
from gristmill.pipelines.report.figures import page_data
from gristmill.pipelines.report.write import write_report

sys.path.append(str(Path(__file__).parent))
from browser import Tabs, chromium, picture
from fake_run import FakeRun
from report_page import STAGES, funnel_of


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture
def tabs(browser, folder):
    path = Path(write_report(folder, stages=STAGES))
    opened = Tabs(browser, (path.as_uri(),))
    opened.address = path.as_uri()
    yield opened
    opened.close()


def test_the_page_works_in_chromium(tabs, folder, page, tmp_path):
    tab = tabs.open(tabs.address)
    data = page.data

    # a slider says what an independent count says
    measure = next(i for i, m in enumerate(data["measures"]) if m["measure"] == "fake_quality.words")
    limit = next(x for x in data["measures"][measure]["limits"] if x["reason"] == "too_few_words")
    at = next(i for i, x in enumerate(limit["limits"]) if x > 45)
    value = limit["limits"][at]
    kept = ds.dataset(folder / "01-extract/kept").to_table(columns=["fake_quality.words"])["fake_quality.words"]
    expected = int((kept.to_numpy() >= value).sum())
    panel = tab.locator(f'.what-if[data-measure="{measure}"][data-limit="0"]')
    panel.locator("input").fill(str(at))
    assert panel.locator(".answer").inner_text().startswith(f"keeps {expected:,} documents, −{len(kept) - expected}")
    assert f"- fake_quality: {{min_words: {int(np.ceil(value))}}}" in panel.locator(".yaml").inner_text()
    texts = ds.dataset(folder / "01-extract/kept").to_table(columns=["text", "fake_quality.words"]).to_pylist()
    chars = sum(len(row["text"]) for row in texts if row["fake_quality.words"] >= value)
    assert f"{chars:,} characters, −" in panel.locator(".answer").inner_text()

    # a looser limit gives bounds that hold what really comes back
    at = next(i for i, x in enumerate(limit["limits"]) if x > 8)
    back = [
        row
        for row in ds.dataset(folder / "01-extract/dropped").to_table().to_pylist()
        if row["reasons"] == ["too_few_words"] and row["fake_quality.words"] >= limit["limits"][at]
    ]
    assert back
    panel.locator("input").fill(str(at))
    for line, truth in zip(
        panel.locator(".answer").inner_text().split("\n"),
        (len(kept) + len(back), sum(len(row["text"]) for row in texts) + sum(row["chars"] for row in back)),
        strict=True,
    ):
        bounds = [
            int(n.replace(",", "")) for n in re.findall(r"[\d,]+", line.split(" documents")[0].split(" chara")[0])
        ]
        assert bounds[0] <= truth <= bounds[-1], line

    # samples: reasons, search, pages
    tab.select_option("[name=reason]", "too_few_words")
    few = [s for s in data["samples"] if "too_few_words" in s["reasons"]]
    assert tab.inner_text("#sample-count") == f"{len(few)} documents"
    assert tab.locator("#sample-list .sample").count() == min(10, len(few))
    tab.select_option("[name=reason]", "")
    tab.fill("[name=text]", "onerror=")
    assert tab.locator("#sample-list pre").first.inner_text().startswith("</script><img src=x onerror=")
    assert tab.locator("#sample-list mark.hit").first.inner_text() == "onerror="
    tab.fill("[name=text]", "")
    tab.select_option("[name=measure]", "fake_quality.words")
    tab.fill("[name=low]", "10")
    tab.fill("[name=high]", "40")
    between = [s for s in data["samples"] if 10 <= (s["measures"].get("fake_quality.words") or 0) <= 40]
    assert tab.inner_text("#sample-count") == f"{len(between)} documents"
    lowest = min(s["measures"]["fake_quality.words"] for s in between)
    assert f"fake_quality.words {lowest:.0f}" in tab.locator("#sample-list .sample").first.text_content()
    tab.select_option("[name=measure]", "")
    assert tab.locator("[name=low]").is_hidden()
    first = tab.locator("#sample-list .sample").first.inner_text()
    tab.click("#sample-after")
    assert tab.inner_text("#sample-page").startswith("page 2 of")
    assert tab.locator("#sample-list .sample").first.inner_text() != first

    # the funnel of one source, a sorted table, logarithmic counts
    tab.select_option("#funnel-source", "news")
    assert f"{funnel_of(data, 'news')['exact']['documents']}" in tab.inner_text("#funnel-table tbody tr:nth-child(5)")
    tab.click("#reasons-table th:nth-child(3) button")
    booked = [int(t.replace(",", "")) for t in tab.locator("#reasons-table td:nth-child(3)").all_inner_texts()]
    assert booked == sorted(booked, reverse=True)
    tab.check("#log-counts")
    assert tab.locator(".histogram .linear").first.is_hidden()

    # what each rule removes, of one source and language, counted again from the files
    gone = ds.dataset(folder / "01-extract/dropped").to_table(columns=["source", "language", "reasons"]).to_pylist()
    few = Counter((r["source"], r["language"]) for r in gone if "too_few_words" in r["reasons"])
    (source, language), count = few.most_common(1)[0]
    tab.select_option("#removals-source", source)
    tab.select_option("#removals-language", language)
    row = tab.locator("#removals-table tr", has_text="too few words")
    assert row.locator("td").nth(1).inner_text() == str(count)
    assert count < sum(few.values())

    assert tab.title() == "fake · Gristmill report"
    assert tab.evaluate("document.querySelectorAll('img').length") == 0
    assert tabs.wrong == []
    picture(tab, tmp_path, "light")


def test_every_table_sorts(tabs):
    tab = tabs.open(tabs.address)
    tab.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    sorted_by = """(table) => {
      const out = [];
      for (const [column, heading] of [...table.tHead.rows[0].cells].entries()) {
        const button = heading.querySelector("button");
        for (const direction of ["descending", "ascending"]) {
          button.click();
          if (heading.getAttribute("aria-sort") !== direction) out.push(heading.textContent + " is not " + direction);
          const values = [...table.tBodies[0].rows].map((row) => row.cells[column].dataset.v).filter((v) => v !== undefined).map(Number);
          const sign = direction === "descending" ? -1 : 1;
          if (values.some((v, i) => i && sign * (v - values[i - 1]) < 0)) out.push(heading.textContent + " is not sorted");
        }
      }
      return out;
    }"""  # noqa: E501
    tables = tab.locator("table.sortable")
    assert tables.count() > 12
    for i in range(tables.count()):
        assert tables.nth(i).evaluate(sorted_by) == []
    assert tabs.wrong == []


def test_dark_and_narrow_screens(tabs, tmp_path):
    dark = tabs.open(tabs.address, scheme="dark")
    colour = dark.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, re.findall(r"\d+", colour)[:3])) < 120
    picture(dark, tmp_path, "dark")
    narrow = tabs.open(tabs.address, width=375, height=800)
    assert narrow.evaluate("document.documentElement.scrollWidth") == 375
    assert narrow.locator("#funnel-picture .step").first.is_visible()
    narrow.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    narrow.fill("[name=text]", "grain grain grain grain grain")  # a line of 12,000 characters
    assert narrow.locator("#sample-list .sample").first.is_visible()
    assert narrow.evaluate("document.documentElement.scrollWidth") == 375
    picture(narrow, tmp_path, "narrow")
    assert tabs.wrong == []


def test_scripts_that_run_from_the_right(tabs, tmp_path):
    tab = tabs.open(tabs.address)
    direction = "getComputedStyle(document.querySelector('#sample-list pre')).direction"
    for language, word, expected in (("ar", "طاحونة", "rtl"), ("zh", "面粉", "ltr"), ("en", "flour", "ltr")):
        tab.select_option("[name=language]", language)
        tab.fill("[name=text]", word)
        assert tab.locator("#sample-list mark.hit").first.inner_text() == word
        assert tab.evaluate(direction) == expected
        picture(tab, tmp_path, f"samples-{language}")
    assert tabs.wrong == []


def test_with_the_keyboard_alone(tabs):
    tab = tabs.open(tabs.address)
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.textContent") == "To the content"
    tab.keyboard.press("Enter")
    assert tab.url.endswith("#main")
    heading = tab.locator("#reasons-table th button").nth(2)
    heading.focus()
    tab.keyboard.press("Enter")
    assert tab.locator("#reasons-table th").nth(2).get_attribute("aria-sort") == "descending"
    slider = tab.locator(".what-if input").first
    slider.focus()
    before = tab.locator(".what-if .answer").first.inner_text()
    tab.keyboard.press("ArrowRight")
    assert tab.locator(".what-if .answer").first.inner_text() != before
    assert slider.get_attribute("aria-valuetext")
    unnamed = (
        "[...document.querySelectorAll('svg[role=img]')].filter((s) => !s.querySelector('title')?.textContent).length"
    )
    assert tab.evaluate(unnamed) == 0
    assert tabs.wrong == []


@pytest.mark.parametrize("what", ["nothing", "no documents", "one document", "no tokens, models, ablation"])
def test_runs_of_odd_sizes(browser, tmp_path, what):
    folder = tmp_path / "run"
    if what == "nothing":
        folder.mkdir()
    elif what.startswith("no tokens"):
        FakeRun(documents=20, parts=frozenset()).build(folder)
    else:
        FakeRun(documents=int(what == "one document"), sources=("docs",)).build(folder)
    address = Path(write_report(folder, stages=STAGES)).as_uri()
    tabs = Tabs(browser, (address,))
    tab = tabs.open(address)
    assert tab.locator("h1").is_visible()
    assert tab.locator("#operations").count() == 1
    assert tabs.wrong == []
    tabs.close()


def test_the_comparison_of_two_runs(browser, folder, tmp_path):
    other = FakeRun(documents=200).build(tmp_path / "other")
    address = Path(write_comparison(folder, other, tmp_path / "comparison.html")).as_uri()
    tabs = Tabs(browser, (address,))
    tab = tabs.open(address, width=375)
    assert tab.evaluate("document.documentElement.scrollWidth") == 375
    tab.locator("#measures th button").nth(3).click()
    picture(tab, tmp_path, "comparison")
    assert tabs.wrong == []
    tabs.close()


def test_page_data_is_the_same_twice(folder):
    run = open_run(folder)
    first, second = page_data(run, STAGES), page_data(open_run(folder), STAGES)
    first["header"].pop("written"), second["header"].pop("written")
    assert first == second
