"""A picture of a mixture over the run: how the shares of the sources change, on a terminal or as one HTML file.

show(plan, console())                         # a line a stretch of the run
publish_bytes("plan.html", page(plan))        # opens offline, no scripts: SVG as in the report
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files

from markupsafe import Markup
from rich.console import Console
from rich.text import Text

from gristmill.mixtures.plan import Plan
from gristmill.pipelines.report import charts

COLOURS = ("blue", "yellow", "green", "magenta", "cyan", "red", "white", "bright_black")  # one a source, in turn
LETTERS = "abcdefghijklmnopqrstuvwxyz"  # in the bars, for terminals and eyes without colours
BAR_COLUMNS = 60
LEAST_WINDOWS = 16  # of a stretch: with fewer the picture shows rounding
Rate = Callable[[int], float]  # windows consumed -> learning rate of the step that follows


@dataclass(frozen=True)
class Stretch:
    """A part of the run, from one position to another, in one phase."""

    phase: str
    begin: int  # windows
    end: int
    windows: Mapping[str, int]  # that each source gives in it: what comes, not what is asked for

    @property
    def shares(self) -> dict[str, float]:
        return {name: count / (self.end - self.begin) for name, count in self.windows.items()}


def stretches(plan: Plan, about: int) -> list[Stretch]:
    """The run in about so many parts, fewer where a phase has few windows; each phase has at least one."""
    out = []
    for phase in plan.phases:
        parts = min(max(1, round(about * phase.windows / plan.windows)), max(1, phase.windows // LEAST_WINDOWS))
        marks = [phase.begin + phase.windows * i // parts for i in range(parts + 1)]
        counts = [plan.counts(mark) for mark in marks]
        for i in range(parts):
            here = {name: counts[i + 1][name] - counts[i][name] for name in plan.sources}
            out.append(Stretch(phase.name, marks[i], marks[i + 1], here))
    return out


def show(plan: Plan, to: Console, rate: Rate | None = None, lines: int = 24) -> None:
    """Prints a bar for each stretch, with the tokens at its end, the phase where one begins, and the learning rate."""
    to.print(f"{plan.mixture}: {plan.budget_tokens:,} tokens, plan {plan.hash}", highlight=False)
    legend = Text()
    for s, name in enumerate(plan.sources):
        legend.append(f" {LETTERS[s % len(LETTERS)]} ", style=f"black on {COLOURS[s % len(COLOURS)]}")
        legend.append(f" {name}  ")
    to.print(legend)
    wide = len(f"{plan.budget_tokens:,}")
    before = ""
    for stretch in stretches(plan, lines):
        line = Text(f"{stretch.end * plan.seq_len:>{wide},} ")
        at, share = 0, 0.0
        for s, value in enumerate(stretch.shares.values()):
            share += value
            columns = round(share * BAR_COLUMNS) - at
            line.append(LETTERS[s % len(LETTERS)] * columns, style=f"black on {COLOURS[s % len(COLOURS)]}")
            at += columns
        if rate is not None:
            line.append(f" lr {rate(stretch.end - 1):.3g}")
        if stretch.phase != before:
            line.append(f" {stretch.phase}")
            before = stretch.phase
        to.print(line, no_wrap=True, overflow="crop")


def page(plan: Plan, rate: Rate | None = None) -> bytes:
    """The picture, and the plan's table below it, as HTML."""
    parts = stretches(plan, 120)
    ends = [part.end * plan.seq_len for part in parts]
    shares = {name: [part.shares[name] for part in parts] for name in plan.sources}
    colours = {name: s for s, name in enumerate(plan.sources)}
    tag = charts.tag
    keys = [
        tag("span", tag("span", "", class_=f"key c{colours[name] % 8}"), f" {name} ", class_="source")
        for name in plan.sources
    ]
    body = [
        tag("h1", f"Mixture {plan.mixture}"),
        tag("p", f"{plan.budget_tokens:,} tokens, {plan.windows:,} windows of {plan.seq_len:,}, plan {plan.hash}"),
        tag("h2", "Share of each source over the run"),
        tag("p", *keys, class_="legend"),
        charts.areas(f"Share of each source over {plan.mixture}", ends, shares, colours),
    ]
    if rate is not None:
        line = [(end, rate(part.end - 1)) for end, part in zip(ends, parts, strict=True)]
        body += [tag("h2", "Learning rate"), charts.curves("Learning rate over the run", {"rate": line}, {"rate": 0})]
    body += [tag("h2", "Plan"), tag("pre", plan.table(learning_rate=rate))]
    head = (
        tag("meta", charset="utf-8"),
        tag("title", f"Mixture {plan.mixture}"),
        tag("style", Markup(files("gristmill.pipelines.report").joinpath("page.css").read_text("utf-8"))),  # noqa: S704
        tag("style", "svg.areas { width: 100%; max-width: 44rem; } pre { overflow-x: auto; }"),
    )
    return f"<!doctype html>{tag('html', tag('head', *head), tag('body', tag('main', *body)), lang='en')}\n".encode()
