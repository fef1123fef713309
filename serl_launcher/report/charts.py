"""Draws curves with their intervals as SVG."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from serl_launcher.report.elements import Markup, element, number
from serl_launcher.training.tallies import Point

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 50, 12, 10, 30  # margins, in which the numbers stand


class Line(NamedTuple):
    """A curve: its points, its name, and the class that colours it: `one` (the accent) or `other`."""

    points: Sequence[Point]
    name: str
    kind: str = "one"


def chart(
    title: str, why: str, lines: Sequence[Line], *, x: str, unit: str = "", share: bool = False, says_last: bool = True
) -> Markup | None:
    """Return a figure with the curves; None without points.

    why: one sentence. x, unit: of the numbers on the axes. share: the values are from 0 to 1. says_last: the title
    tells the last values, and those of more than one line that have points are named.
    """
    is_named, lines = says_last and len(lines) > 1, [line for line in map(_finite, lines) if line.points]
    points = [point for line in lines for point in line.points]
    if not lines:
        return None
    right = max(max(point.x for point in points), 1)
    low, high = (0.0, 1.0) if share else _range(points)

    def place(at: float, value: float) -> str:
        across = LEFT + (WIDTH - LEFT - RIGHT) * at / right
        down = TOP + (HEIGHT - TOP - BOTTOM) * (high - min(max(value, low), high)) / (high - low)
        return f"{across:.1f},{down:.1f}"

    drawn = [*_axes(low, high, right, place, x, share=share)]
    for line in lines:
        band = [place(p.x, p.high) for p in line.points] + [place(p.x, p.low) for p in reversed(line.points)]
        path = [place(p.x, p.value) for p in line.points]
        drawn.append(element("polygon", points=" ".join(band), class_=f"band {line.kind}"))
        drawn.append(element("polyline", points=" ".join([*path, path[-1]]), class_=f"line {line.kind}"))
        drawn.append(_dot(path[-1], line.kind))
    newest = [line.points[-1] for line in lines]
    said = " / ".join(f"{point.value:.0%}" if share else number(point.value, unit) for point in newest) * says_last
    picture = element("svg", element("title", f"{title} {said}"), *drawn, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img")
    named = [element("span", line.name, class_=f"key {line.kind}") for line in lines if is_named]
    head = element("h3", title, " ", element("b", said), title=why)
    return element("figure", head, picture, *named, element("figcaption", why), class_="card")


def _finite(line: Line) -> Line:
    return line._replace(points=[point for point in line.points if all(map(math.isfinite, point))])


def _range(points: Sequence[Point]) -> tuple[float, float]:
    low, high = min(point.low for point in points), max(point.high for point in points)
    low, high = (min(low, 0.0), high) if low > 0 and low < 0.5 * high else (low, high)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _axes(
    low: float, high: float, right: float, place: Callable[[float, float], str], x: str, *, share: bool
) -> Iterator[Markup]:
    for value in (low, (low + high) / 2, high):
        down = place(0, value).partition(",")[2]
        yield element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=down, y2=down, class_="grid")
        label = f"{value:.0%}" if share else number(float(f"{value:.3g}"))
        yield element("text", label, x=LEFT - 6, y=float(down) + 4, text_anchor="end")
    yield element("text", "0", x=LEFT, y=HEIGHT - BOTTOM + 18)
    yield element("text", f"{right:,.0f} {x}", x=WIDTH - RIGHT, y=HEIGHT - BOTTOM + 18, text_anchor="end")


def _dot(place: str, kind: str) -> Markup:
    across, down = place.split(",")
    return element("circle", cx=across, cy=down, r=3, class_=f"dot {kind}")
