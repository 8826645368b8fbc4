"""Charts as SVG, made here and not in the browser: they print, they follow the page's colours, they need no script.

Bokeh would be the obvious choice and was weighed: its scripts alone are 4 to 5 MB of the 6 MB that a page may have, its
callbacks need `unsafe-eval`, which would open the page's content policy, and its canvases follow neither dark mode
nor a screen reader. These few charts are what the page needs.

All functions give `Markup`; every text that goes in is escaped. Colours come from classes, so the page decides them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

PLOT_WIDTH, PLOT_HEIGHT = 360, 170  # a card of the page at about its natural size
LEFT, RIGHT, TOP, BOTTOM = 8, 8, 16, 22


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """An element. Attributes: `class_` for class, "_" for "-"; None leaves one out."""
    pairs = (
        (key.rstrip("_").replace("_", "-") if key != "viewBox" else key, value)
        for key, value in attributes.items()
        if value is not None
    )
    start = "".join(f' {key}="{escape(str(value))}"' for key, value in pairs)
    inner = "".join(escape(child) for child in children)  # Markup stays as it is; names are ours
    return Markup(f"<{name}{start}>{inner}</{name}>")  # noqa: S704


def number(value: float | int | None) -> str:
    """1234567 -> 1,234,567; fractions with four significant digits."""
    if value is None:
        return "–"
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    if not math.isfinite(value):
        return str(value)
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    if digits > 7:
        return f"{value:.3g}"
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def short(value: float) -> str:
    """Tick labels: 20000 -> 20k."""
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}"


@dataclass(frozen=True)
class Scale:
    """Values to pixels, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            low, high, at = math.log(self.low), math.log(self.high), math.log(max(value, 1e-300))
        else:
            low, high, at = self.low, self.high, value
        share = (at - low) / (high - low) if high > low else 0.5
        return round(self.start + share * (self.end - self.start), 2)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values inside the scale."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            every = max(1, math.ceil((last - first + 1) / (count + 1)))
            found = [10.0**power for power in range(first, last + 1, every)]
            if len(found) >= 2:
                return found
        span = self.high - self.low
        if span <= 0:
            return [self.low]
        raw = span / count
        unit = 10.0 ** math.floor(math.log10(raw))
        step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw * 0.999)
        first_tick = math.ceil(self.low / step - 1e-9)
        return [round(i * step, 12) for i in range(first_tick, math.floor(self.high / step + 1e-9) + 1)]


def value_scale(edges: Sequence[float]) -> Scale:
    """The horizontal scale of a histogram: logarithmic where its edges are. Room is left for under and over."""
    ratio = edges[-1] / edges[0] if edges[0] > 0 else 0
    log = (
        ratio > 1
        and len(edges) > 2
        and math.isclose(edges[1] / edges[0], edges[-1] / edges[-2], rel_tol=1e-6)
        and not math.isclose(edges[1] - edges[0], edges[-1] - edges[-2], rel_tol=1e-6)
    )
    return Scale(edges[0], edges[-1], LEFT + 14, PLOT_WIDTH - RIGHT - 14, log)


def bin_positions(edges: Sequence[float]) -> list[float]:
    """Left and right borders of the bars (bins + 3,): under, bins, over."""
    scale = value_scale(edges)
    inner = [scale(edge) for edge in edges]
    return [inner[0] - 12, *inner, inner[-1] + 12]


def histogram(
    label: str, edges: Sequence[float], kept: Sequence[int], dropped: Sequence[int], limits: Iterable[tuple[float, str]]
) -> Markup:
    """Kept documents above the axis, dropped ones below it. limits: value and its text, drawn as lines.

    Counts are drawn twice, linear and logarithmic; the page shows one of the two.
    """
    borders = bin_positions(edges)
    scale = value_scale(edges)
    middle = TOP + (PLOT_HEIGHT - TOP - BOTTOM) * _above(kept, dropped)
    bars = [_bars(kind, kept, dropped, borders, middle) for kind in ("linear", "log")]
    lines = []
    for place, (value, text) in enumerate(limits):
        at = scale(min(max(value, edges[0]), edges[-1]))
        anchor = "start" if at < PLOT_WIDTH * 0.6 else "end"
        lines.append(tag("line", x1=at, x2=at, y1=TOP - 4, y2=PLOT_HEIGHT - BOTTOM, class_="limit"))
        shift = 3 if anchor == "start" else -3
        lines.append(
            tag("text", text, x=at + shift, y=TOP - 6 + 11 * (place % 2), text_anchor=anchor, class_="limit-text")
        )
    ticks = [
        tag("text", short(t), x=scale(t), y=PLOT_HEIGHT - 7, text_anchor="middle", class_="tick") for t in scale.ticks()
    ]
    marks = [
        tag("line", x1=scale(t), x2=scale(t), y1=PLOT_HEIGHT - BOTTOM, y2=PLOT_HEIGHT - BOTTOM + 4, class_="axis")
        for t in scale.ticks()
    ]
    axis = tag("line", x1=LEFT, x2=PLOT_WIDTH - RIGHT, y1=round(middle, 2), y2=round(middle, 2), class_="axis")
    tried = tag("line", x1=-9, x2=-9, y1=TOP, y2=PLOT_HEIGHT - BOTTOM, class_="try")
    return tag(
        "svg",
        tag("title", label),
        *bars,
        axis,
        *marks,
        *ticks,
        *lines,
        tried,
        viewBox=f"0 0 {PLOT_WIDTH} {PLOT_HEIGHT}",
        role="img",
        class_="plot histogram",
    )


def _above(kept: Sequence[int], dropped: Sequence[int]) -> float:
    """The share of the height above the axis: what the higher of the two needs, the lower one stays visible."""
    up, down = max(kept, default=0), max(dropped, default=0)
    return min(0.85, max(0.15, up / (up + down))) if up + down else 0.5


def _bars(kind: str, kept: Sequence[int], dropped: Sequence[int], borders: Sequence[float], middle: float) -> Markup:
    def height(count: int) -> float:
        return math.log10(1 + count) if kind == "log" else float(count)

    room_up, room_down = middle - TOP, PLOT_HEIGHT - BOTTOM - middle
    up = max((height(n) for n in kept), default=0.0)
    down = max((height(n) for n in dropped), default=0.0)
    unit = min(room_up / up if up else math.inf, room_down / down if down else math.inf)
    unit = 0.0 if math.isinf(unit) else unit
    paths = []
    for name, counts, sign in (("kept", kept, -1), ("dropped", dropped, 1)):
        steps = []
        for i, count in enumerate(counts):
            if count:
                end = round(middle + sign * max(unit * height(count), 0.7), 2)
                steps.append(f"M{borders[i]:g} {middle:.2f}V{end}H{borders[i + 1] - 0.5:g}V{middle:.2f}Z")
        paths.append(tag("path", d="".join(steps), class_=f"bar-{name}"))
    return tag("g", *paths, class_=kind)


def bar(parts: Sequence[tuple[str, float]], label: str) -> Markup:
    """A bar as wide as its place. parts: class and share (0 to 1), from the left."""
    rects, at = [], 0.0
    for name, width in parts:
        if width > 0:
            rects.append(tag("rect", x=f"{at * 100:.3f}%", width=f"{width * 100:.3f}%", height="100%", class_=name))
        at += width
    return tag("svg", tag("title", label), *rects, class_="bar", role="img", width="100%", height="16")


def curves(label: str, series: Mapping[str, Sequence[tuple[float, float]]], colours: Mapping[str, int]) -> Markup:
    """Lines over steps or tokens. colours: series -> number of its colour class, so that seeds share one.

    The highest values at the start are cut off, so that the ends can be told apart.
    """
    width, height, left = 760, 300, 48
    points = {name: [(x, y) for x, y in line if math.isfinite(x) and math.isfinite(y)] for name, line in series.items()}
    flat = [point for line in points.values() for point in line]
    if not flat:
        return tag("p", "No finite values.", class_="empty")
    values = sorted(y for _, y in flat)
    top = values[min(len(values) - 1, int(len(values) * 0.97))]
    low, high = values[0], top if top > values[0] else values[0] + 1
    pad = (high - low) * 0.05
    xs = Scale(min(x for x, _ in flat), max(x for x, _ in flat), left, width - 10)
    ys = Scale(low - pad, high + pad, height - 28, 10)
    grid = []
    for tick in ys.ticks():
        grid.append(tag("line", x1=left, x2=width - 10, y1=ys(tick), y2=ys(tick), class_="grid"))
        grid.append(tag("text", number(tick), x=left - 6, y=ys(tick) + 4, text_anchor="end", class_="tick"))
    for tick in xs.ticks(6):
        grid.append(tag("text", short(tick), x=xs(tick), y=height - 8, text_anchor="middle", class_="tick"))
    lines = []
    for name, line in points.items():
        smooth = running_mean(thin(line))
        for kind, drawn in (("raw", thin(line)), ("line", smooth)) if smooth else (("line", thin(line)),):
            path = "".join(
                f"{'L' if i else 'M'}{xs(x):g} {min(max(ys(y), 2), height - 26):g}" for i, (x, y) in enumerate(drawn)
            )
            lines.append(tag("path", tag("title", name), d=path, class_=f"{kind} c{colours.get(name, 0) % 8}"))
    lines.sort(key=lambda path: 'class="line' in path)  # the means on top
    return tag(
        "svg", tag("title", label), *grid, *lines, viewBox=f"0 0 {width} {height}", role="img", class_="plot wide"
    )


def areas(
    label: str, ends: Sequence[float], shares: Mapping[str, Sequence[float]], colours: Mapping[str, int]
) -> Markup:
    """Shares stacked to 1 over stretches. ends (n,): where each stretch ends, the first begins at 0; shares (n,)."""
    if not ends:
        return tag("p", "Too few steps.", class_="empty")
    width, height = PLOT_WIDTH, PLOT_HEIGHT
    scale = Scale(0, ends[-1], LEFT, width - RIGHT)
    top, bottom = 4, height - BOTTOM
    drawn = []
    for i, end in enumerate(ends):
        left, right, at = scale(ends[i - 1] if i else 0), scale(end), 0.0
        for name, values in shares.items():
            tall = values[i] * (bottom - top)
            if tall > 0:
                y = round(bottom - at - tall, 2)
                shade = f"fill c{colours.get(name, 0) % 8}"
                size = {"x": left, "width": round(right - left, 2), "y": y, "height": round(tall, 2)}
                drawn.append(tag("rect", tag("title", f"{name}: {values[i]:.1%}"), **size, class_=shade))
            at += tall
    ticks = [
        tag("text", short(t), x=scale(t), y=height - 7, text_anchor="middle", class_="tick") for t in scale.ticks(4)
    ]
    return tag(
        "svg", tag("title", label), *drawn, *ticks, viewBox=f"0 0 {width} {height}", role="img", class_="plot areas"
    )


def running_mean(line: Sequence[tuple[float, float]], least: int = 40) -> list[tuple[float, float]]:
    """Each point as the mean of those around it, a twelfth of the line wide, less at its ends; nothing for lines under
    `least` points."""
    if len(line) < least:
        return []
    reach = max(1, len(line) // 24)
    out = []
    for i, (x, _) in enumerate(line):
        around = [y for _, y in line[max(0, i - reach) : i + reach + 1]]
        out.append((x, sum(around) / len(around)))
    return out


def thin(line: Sequence[tuple[float, float]], limit: int = 240) -> list[tuple[float, float]]:
    """At most `limit` points: means of equal stretches."""
    if len(line) <= limit:
        return list(line)
    out = []
    for i in range(limit):
        part = line[i * len(line) // limit : (i + 1) * len(line) // limit]
        out.append((sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)))
    return out


@dataclass(frozen=True)
class Interval:
    """A mean with its interval and the single values behind it."""

    name: str
    mean: float
    low: float | None = None
    high: float | None = None
    points: tuple[float, ...] = ()


def intervals(label: str, rows: Sequence[Interval], colours: Mapping[str, int]) -> Markup:
    """One line a row: its interval, its mean, its single values."""
    width, step, left = 760, 34, 190
    height = step * len(rows) + 34
    known = [
        v for row in rows for v in (row.mean, row.low, row.high, *row.points) if v is not None and math.isfinite(v)
    ]
    if not known:
        return tag("p", "No finite values.", class_="empty")
    pad = (max(known) - min(known)) * 0.06 or 0.5
    scale = Scale(min(known) - pad, max(known) + pad, left, width - 16)
    drawn = []
    for tick in scale.ticks(6):
        drawn.append(tag("line", x1=scale(tick), x2=scale(tick), y1=6, y2=height - 24, class_="grid"))
        drawn.append(tag("text", number(tick), x=scale(tick), y=height - 8, text_anchor="middle", class_="tick"))
    for i, row in enumerate(rows):
        y, colour = 6 + step * i + step / 2, f"c{colours.get(row.name, 0) % 8}"
        name = row.name if len(row.name) <= 26 else row.name[:25] + "…"
        drawn.append(tag("text", name, x=left - 12, y=y + 4, text_anchor="end", class_="row-name"))
        if row.low is not None and row.high is not None and math.isfinite(row.low) and math.isfinite(row.high):
            drawn.append(tag("line", x1=scale(row.low), x2=scale(row.high), y1=y, y2=y, class_=f"interval {colour}"))
        for value in row.points:
            if math.isfinite(value):
                drawn.append(tag("circle", cx=scale(value), cy=y, r=3, class_=f"point {colour}"))
        if math.isfinite(row.mean):
            text = f"{row.name}: {number(row.mean)}"
            drawn.append(tag("circle", tag("title", text), cx=scale(row.mean), cy=y, r=6, class_=f"mean {colour}"))
    return tag("svg", tag("title", label), *drawn, viewBox=f"0 0 {width} {height}", role="img", class_="plot wide")


def timeline(label: str, rows: Sequence[Mapping[str, Any]], seconds: float) -> Markup:
    """One line a row: `segment`, `begun` to `ended` as a bar, `ends` as marks on it, in seconds since the start."""
    width, step, left = 760, 26, 150
    height = step * len(rows) + 30
    scale = Scale(0, seconds or 1, left, width - 12)
    drawn = []
    unit, name = next(
        (u, n) for u, n in ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")) if seconds >= 3 * u or u == 1
    )
    for tick in Scale(0, (seconds or 1) / unit, 0, 1).ticks(6):
        x = scale(tick * unit)
        drawn.append(tag("line", x1=x, x2=x, y1=4, y2=height - 24, class_="grid"))
        drawn.append(tag("text", f"{number(tick)} {name}", x=x, y=height - 8, text_anchor="middle", class_="tick"))
    for i, row in enumerate(rows):
        y, x = 6 + step * i, scale(row["begun"])
        said = f"{row['segment']}: {number(round(row['begun'], 1))} s to {number(round(row['ended'], 1))} s"
        text = row["segment"] if len(row["segment"]) <= 20 else row["segment"][:19] + "…"
        drawn.append(tag("text", text, x=left - 10, y=y + 14, text_anchor="end", class_="row-name"))
        thick = round(max(scale(row["ended"]) - x, 1), 2)
        drawn.append(tag("rect", tag("title", said), x=x, y=y, width=thick, height=step - 8, class_="span"))
        marks = "".join(f"M{scale(end):g} {y}v{step - 8}" for end in row["ends"])
        drawn.append(tag("path", d=marks, class_="mark"))
    return tag("svg", tag("title", label), *drawn, viewBox=f"0 0 {width} {height}", role="img", class_="plot wide")


def columns(label: str, bars: Sequence[tuple[str, int]]) -> Markup:
    """Columns of counts on a logarithmic scale, with their names below."""
    width, height = 760, 200
    tallest = max((math.log10(1 + count) for _, count in bars), default=0) or 1
    step = min(96.0, (width - 20) / max(1, len(bars)))
    drawn = []
    for i, (name, count) in enumerate(bars):
        x, tall = 10 + i * step, (height - 50) * math.log10(1 + count) / tallest
        thick = max(1.0, min(step - 4, 64))
        middle = round(x + 2 + thick / 2, 2)
        drawn.append(
            tag(
                "rect",
                tag("title", f"{name}: {number(count)}"),
                x=round(x + 2, 2),
                width=round(thick, 2),
                y=round(height - 24 - tall, 2),
                height=round(tall, 2),
                class_="bar-kept",
            )
        )
        if len(bars) <= 24 or i % (len(bars) // 12) == 0:
            drawn.append(tag("text", name, x=middle, y=height - 8, text_anchor="middle", class_="tick"))
        if len(bars) <= 16:
            drawn.append(
                tag("text", short(count), x=middle, y=round(height - 29 - tall, 2), text_anchor="middle", class_="tick")
            )
    return tag("svg", tag("title", label), *drawn, viewBox=f"0 0 {width} {height}", role="img", class_="plot wide")
