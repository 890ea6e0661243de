"""Line charts and histograms as SVG text: pure, no library, no script, no reference to anything outside."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bridge.errors import printable

Point = tuple[float, float]

WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 76, 16, 14, 44
MOST_POINTS = 1500
"""Points of one line in the picture; of more, the lowest and highest of each stretch are kept."""
COLORS = ("#0b62c4", "#d1480f", "#2a8a3e", "#8a3fb0", "#b8860b", "#0f8b8d", "#c2255c", "#5c5c5c")


@dataclass(frozen=True)
class Series:
    """A line: what it is called and its points; what is not finite leaves a gap."""

    label: str
    points: tuple[Point, ...]
    color: int = 0
    dashed: bool = False
    dots: bool = False


@dataclass(frozen=True)
class Chart:
    """A picture of several lines on one pair of axes."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_y: bool = False
    limit: float | None = None
    """A horizontal line, for a tolerance."""


def text(value: object) -> str:
    """Any text, safe inside HTML and SVG."""
    return html.escape(printable(str(value)), quote=True)


def number(value: float) -> str:
    """A number for people: small whole ones as they are, others with four digits at most."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.4g}" if math.isfinite(value) else str(value)


def line_chart(chart: Chart) -> str:
    """The chart as an `<svg>` element; a note where there is no finite point."""
    finite = [point for series in chart.series for point in series.points if _drawable(point, chart.log_y)]
    if not finite:
        return f'<p class="none">{text(chart.title)}: nothing was recorded</p>'
    x_low, x_high = _spread(min(x for x, _ in finite), max(x for x, _ in finite))
    values = [_scaled(y, chart.log_y) for _, y in finite]
    if chart.limit is not None and _drawable((0, chart.limit), chart.log_y):
        values.append(_scaled(chart.limit, chart.log_y))
    y_low, y_high = _spread(min(values), max(values))

    def place(point: Point) -> Point:
        x = LEFT + (point[0] - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - (_scaled(point[1], chart.log_y) - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        return x, y

    parts = [_open(chart.title)]
    for tick in (log_ticks if chart.log_y else ticks)(y_low, y_high):
        value = 10**tick if chart.log_y else tick
        y = place((x_low, value))[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>')
    for tick in ticks(x_low, x_high):
        x = place((tick, finite[0][1]))[0]
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{number(tick)}</text>'
        )
    if chart.limit is not None and _drawable((0, chart.limit), chart.log_y):
        y = place((x_low, chart.limit))[1]
        parts.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    for series in chart.series:
        parts += _line(series, chart.log_y, place)
    parts.append(_labels(chart.x_label, chart.y_label))
    return "".join([*parts, "</svg>", _legend(chart.series)])


def histogram(title: str, x_label: str, values: Sequence[float], bins: int = 40) -> str:
    """How often values occur, on a logarithmic axis where all are positive; zeros count in the first bin."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return f'<p class="none">{text(title)}: nothing was recorded</p>'
    floor = min((value for value in finite if value > 0), default=1.0)
    scaled = [math.log10(max(value, floor)) for value in finite]
    low, high = _spread(min(scaled), max(scaled))
    counts = [0] * bins
    for value in scaled:
        counts[min(int((value - low) / (high - low) * bins), bins - 1)] += 1
    inner = WIDTH - LEFT - RIGHT
    parts = [_open(title)]
    for index, count in enumerate(counts):
        tall = count / max(counts) * (HEIGHT - TOP - BOTTOM)
        x, y = LEFT + index * inner / bins, HEIGHT - BOTTOM - tall
        between = " to ".join(number(10 ** (low + (index + end) / bins * (high - low))) for end in (0, 1))
        parts.append(
            f'<rect class="bar" x="{x + 0.5:.1f}" y="{y:.1f}" width="{inner / bins - 1:.1f}" height="{tall:.1f}">'
            f"<title>{between}: {count}</title></rect>"
        )
    for tick in log_ticks(low, high):
        x = LEFT + (tick - low) / (high - low) * inner
        label = f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">'
        parts.append(f"{label}{number(10**tick)}</text>")
    for count in sorted({0, max(counts)}):
        y = HEIGHT - BOTTOM - count / max(counts) * (HEIGHT - TOP - BOTTOM)
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{count}</text>')
    return "".join([*parts, _labels(x_label, "tokens"), "</svg>"])


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round numbers within [low, high]: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    found = [round(index * step, 12) for index in range(first, first + 2 * about + 1)]
    return [tick for tick in found if tick <= high + step * 1e-9]


def log_ticks(low: float, high: float) -> list[float]:
    """Logarithms of 1, 2 and 5 times powers of ten within [low, high]; powers alone over three decades and more."""
    factors = (1, 2, 5) if high - low < 3 else (1,)
    decades = range(math.floor(low), math.ceil(high) + 1)
    found = [decade + math.log10(factor) for decade in decades for factor in factors]
    inside = [tick for tick in found if low - 1e-9 <= tick <= high + 1e-9]
    return inside if len(inside) > 1 else ticks(low, high)


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most `most` points: the lowest and highest of each stretch, so that no peak is lost."""
    if len(points) <= most:
        return list(points)
    kept: list[Point] = []
    size = math.ceil(len(points) / (most // 2))
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        kept += sorted({min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])})
    return kept


def _open(title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(title)}">'
    )


def _labels(x_label: str, y_label: str) -> str:
    middle = TOP + (HEIGHT - TOP - BOTTOM) / 2
    base = HEIGHT - BOTTOM
    return (
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>'
        f'<line class="axis" x1="{LEFT}" x2="{LEFT}" y1="{TOP}" y2="{base}"/>'
        f'<text class="label" x="{(WIDTH + LEFT - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{text(x_label)}</text>"
        f'<text class="label" transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">'
        f"{text(y_label)}</text>"
    )


def _line(series: Series, log_y: bool, place: Callable[[Point], Point]) -> Iterator[str]:
    color = COLORS[series.color % len(COLORS)]
    dash = ' stroke-dasharray="6 4"' if series.dashed else ""
    for stretch in _stretches(series.points, log_y):
        kept = thinned(stretch)
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, kept))
        yield f'<polyline fill="none" stroke="{color}" stroke-width="1.8"{dash} points="{path}"/>'
        if series.dots or len(kept) == 1:
            for point in kept:
                x, y = place(point)
                label = f"{text(series.label)}: {number(point[1])} at {number(point[0])}"
                yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"><title>{label}</title></circle>'


def _stretches(points: Sequence[Point], log_y: bool) -> Iterator[list[Point]]:
    stretch: list[Point] = []
    for point in points:
        if _drawable(point, log_y):
            stretch.append(point)
        elif stretch:
            yield stretch
            stretch = []
    if stretch:
        yield stretch


def _legend(series: Sequence[Series]) -> str:
    if len(series) < 2:
        return ""
    items = []
    for line in series:
        color, dash = COLORS[line.color % len(COLORS)], ' stroke-dasharray="6 4"' if line.dashed else ""
        sample = f'<line x1="0" x2="24" y1="6" y2="6" stroke="{color}" stroke-width="2"{dash}/>'
        items.append(f'<span><svg class="key" viewBox="0 0 24 12">{sample}</svg> {text(line.label)}</span>')
    return f'<p class="legend">{"".join(items)}</p>'


def _drawable(point: Point, log_y: bool) -> bool:
    return all(map(math.isfinite, point)) and (not log_y or point[1] > 0)


def _scaled(value: float, log_y: bool) -> float:
    return math.log10(value) if log_y else value


def _spread(low: float, high: float) -> tuple[float, float]:
    """Ends of an axis: a single value gets some room around it."""
    if high - low > 1e-12 * max(abs(low), abs(high)):
        return low, high
    room = abs(low) * 0.1 or 1.0
    return low - room, high + room
