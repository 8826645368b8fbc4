"""Writes report.html: one file that opens offline, draws its figures from ledgers and samples, and asks for nothing.

    write_report("out/demo/run")          # -> out/demo/run/report.html

Text from the crawl is hostile. The template escapes all of it; the embedded JSON has no `<`, so nothing in it can end
its element; and the page's content policy allows the one script of this package by its hash and no request at all, so
that even a mistake of ours would not run what a document says.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import orjson
from markupsafe import Markup

from gristmill.pipelines.open_run import open_run
from gristmill.pipelines.report import charts
from gristmill.pipelines.report.ablation import colours
from gristmill.pipelines.report.figures import page_data
from gristmill.stages.shards import join, publish_bytes


def write_report(
    run_folder: str | Path, out: str | Path | None = None, *, stages: Mapping[str, type] | None = None
) -> str:
    """Writes the report of a run -> its path. `out` is report.html in the run folder where not given.

    stages: key in a recipe -> stage class, for the limits; those of `recipe.py` where not given. Raises RunError where
    there is no run, LedgerError where a ledger was damaged.
    """
    if stages is None:
        from gristmill.pipelines.recipe import STAGES

        stages = STAGES
    run = open_run(run_folder)
    path = join(run.path, "report.html") if out is None else str(out)
    publish_bytes(path, render(page_data(run, stages)).encode("utf-8", errors="replace"))
    return path


def render(page: dict[str, Any], template: str = "page.html") -> str:
    """The page's data -> HTML."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("gristmill.pipelines.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals.update(charts=charts, Interval=charts.Interval, colours=colours)
    environment.filters.update(
        number=charts.number,
        percent=percent,
        size=size,
        duration=duration,
        moment=moment,
        words=lambda name: str(name).replace("_", " "),
        pair=lambda row: (row["name"], row["kept"]),
    )
    # The two assets are the only text that goes in as it is: they are files of this package.
    script, style = _assets()
    return environment.get_template(template).render(
        page=page,
        funnel=_by_source(page["funnel"]) if "funnel" in page else {},
        data=embedded(page),
        script=Markup(script),  # noqa: S704
        style=Markup(style),  # noqa: S704
        policy=content_policy(connect=bool(page.get("served"))),
    )


def content_policy(*, connect: bool = False) -> str:
    """What the page may do: run the one script and take the one style of this package, by their hashes; with `connect`,
    ask the server that it came from."""
    script, style = _assets()
    own = " connect-src 'self';" if connect else ""
    return (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)};{own} base-uri 'none'; "
        "form-action 'none'"
    )


def _by_source(funnel: Mapping[str, Any]) -> dict[str | None, list[dict[str, Any]]]:
    """Source, or None for all -> its rows as dicts."""
    out: dict[str | None, list[dict[str, Any]]] = {}
    for row in funnel["rows"]:
        named = dict(zip(funnel["columns"], row, strict=True))
        out.setdefault(named["source"], []).append(named)
    return out


def embedded(page: Mapping[str, Any]) -> Markup:
    """JSON that stays inside its <script> element whatever the documents say: no `<`, `>`, `&` or line separator."""
    text = orjson.dumps(page, option=orjson.OPT_NON_STR_KEYS).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704


def _assets() -> tuple[str, str]:
    """The script and the style."""
    folder = files("gristmill.pipelines.report")
    script = "".join(folder.joinpath(name).read_text("utf-8") for name in ("page.js", "samples.js"))
    return script, folder.joinpath("page.css").read_text("utf-8")


def _hash(text: str) -> str:
    """The source expression of a content policy that allows exactly this script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def percent(value: float | None) -> str:
    """0.0374 -> 3.7 %; never 0 % for something and never 100 % for not all."""
    if value is None:
        return "–"
    if 0 < value < 0.0005:
        return "< 0.1 %"
    if 0.9995 <= value < 1:
        return "> 99.9 %"
    return f"{value * 100:.1f} %"


def size(count: float | None) -> str:
    """Bytes, in decimal units."""
    if count is None:
        return "–"
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(count) >= limit:
            return f"{count / limit:,.1f} {unit}"
    return f"{count:,.0f} B"


def duration(seconds: float | None) -> str:
    """Seconds as a person says them."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{seconds * 1000:,.0f} ms"
    if seconds < 60:
        return f"{seconds:,.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{int(seconds // 3600):,} h {int(seconds % 3600 // 60)} min"


def moment(seconds: float | None) -> str:
    """Seconds since 1970 -> UTC."""
    return "–" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
