"""A picture of a run's report for the README: `python tools/picture.py out/demo/run docs/report.png`.

Opens report.html in Debian's Chromium and leaves out what does not fit on one screen: the figures, the funnel, some
measures, the ranking and the loss curves stay, as the page shows them. Needs the packages of the tests.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
from pathlib import Path

from PIL import Image

from gristmill.pipelines.report.write import write_report
from gristmill.stages.shards import publish_bytes

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
MEASURES = ("gopher_quality.alphabetic_words", "fineweb.short_lines", "gopher_repetition.duplicate_lines")
LEFT_OUT = """
.top { position: static !important; }
main { padding-bottom: .5rem !important; }
section { padding-top: .3rem !important; margin-bottom: .6rem !important; }
#summary details, #funnel .controls, #funnel .scroll, #funnel h3, #funnel .note, #rules > *, #quiet-measures,
#samples, #origins, #models, #dedupe, #contamination, #tokens, #operations, #ablation > *, footer {
  display: none !important;
}
#rules .chosen, #ablation .chosen { display: block !important; }
#rules .panels.chosen { display: grid !important; }
#rules .panels.chosen > .panel:not(.chosen) { display: none !important; }
"""
CHOOSE = """(measures) => {
  const show = (element) => {
    for (let e = element; e && e.tagName !== "SECTION"; e = e.parentElement) e.classList.add("chosen");
  };
  const data = JSON.parse(document.getElementById("data").textContent);
  for (const name of measures) {
    const at = data.measures.findIndex((m) => m.measure === name);
    const panel = document.querySelector(`.panel[data-measure="${at}"]`);
    if (panel) show(panel);
  }
  for (const heading of document.querySelectorAll("#rules > h2, #ablation > h2, #ablation > .lede")) show(heading);
  for (const heading of document.querySelectorAll("#ablation > h3")) {
    if (!/Ranking|Loss/.test(heading.textContent)) continue;
    show(heading);
    for (let e = heading.nextElementSibling; e && !/^H|DETAILS/.test(e.tagName); e = e.nextElementSibling) {
      const legend = e.matches(".legend") && /Loss/.test(heading.textContent);
      if (legend || e.matches(".scroll:has(svg.wide)")) e.classList.add("chosen");
    }
  }
}"""


def picture(run: str, out: str, width: int = 1200) -> int:
    """Writes the picture in 128 colours -> its bytes. Pillow comes with bokeh."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = Path(write_report(run, f"{folder}/report.html"))
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": width, "height": 800}, bypass_csp=True)
        tab.goto(page.as_uri())
        tab.evaluate(CHOOSE, list(MEASURES))
        tab.add_style_tag(content=LEFT_OUT)
        shot = tab.screenshot(full_page=True)
        browser.close()
    small = io.BytesIO()
    Image.open(io.BytesIO(shot)).quantize(128, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    publish_bytes(out, small.getvalue())
    return len(small.getvalue())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="a finished run")
    parser.add_argument("out", help="PNG file to write")
    given = parser.parse_args()
    if not Path(CHROMIUM).exists():
        sys.exit(f"There is no {CHROMIUM}. Install Debian's package chromium, or name another one in CHROMIUM.")
    print(f"{given.out}: {picture(given.run, given.out):,} bytes")
