"""A line chart as SVG text: axes, ticks, lines with whiskers, a legend. Enough for a measurement's page. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 56, 176, 34, 44
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#000000", "#bb8866", "#777777", "#4444cc")
"""Told apart by most people (after Paul Tol's scheme `bright`)."""

Tick = tuple[float, str]


@dataclass(frozen=True, slots=True)
class Point:
    """low, high: ends of its whisker; equal to y for none."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Chart:
    """lines: points by name, in the order of x. ticks: positions with what is written there, the ends among them."""

    title: str
    across: str
    upwards: str
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    lines: Mapping[str, Sequence[Point]]

    def svg(self) -> str:
        opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ground = '<rect width="100%" height="100%" fill="white"/>'
        parts = [f'{opening} font-family="sans-serif" font-size="12">', ground]
        return "\n".join([*parts, *self._frame(), *self._drawn(), *self._legend(), "</svg>\n"])

    def _x(self, value: float) -> float:
        low, high = self.x_ticks[0][0], self.x_ticks[-1][0]
        return round(LEFT + (value - low) / ((high - low) or 1) * (WIDTH - LEFT - RIGHT), 1)

    def _y(self, value: float) -> float:
        low, high = self.y_ticks[0][0], self.y_ticks[-1][0]
        return round(HEIGHT - BOTTOM - (value - low) / ((high - low) or 1) * (HEIGHT - TOP - BOTTOM), 1)

    def _frame(self) -> Iterator[str]:
        right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
        yield f'<text x="{LEFT}" y="20" font-size="14">{escape(self.title)}</text>'
        yield f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(self.across)}</text>'
        middle = (TOP + bottom) / 2
        turned = f'transform="rotate(-90 14 {middle})"'
        yield f'<text x="14" y="{middle}" text-anchor="middle" {turned}>{escape(self.upwards)}</text>'
        for value, text in self.y_ticks:
            yield f'<path d="M{LEFT} {self._y(value)}H{right}" stroke="#dddddd"/>'
            yield f'<text x="{LEFT - 6}" y="{self._y(value) + 4}" text-anchor="end">{escape(text)}</text>'
        for value, text in self.x_ticks:
            yield f'<path d="M{self._x(value)} {bottom}v4" stroke="black"/>'
            yield f'<text x="{self._x(value)}" y="{bottom + 18}" text-anchor="middle">{escape(text)}</text>'
        yield f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="black"/>'

    def _drawn(self) -> Iterator[str]:
        for number, points in enumerate(self.lines.values()):
            colour = COLOURS[number % len(COLOURS)]
            places = " ".join(f"{self._x(point.x)},{self._y(point.y)}" for point in points)
            yield f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"/>'
            for point in points:
                x = self._x(point.x)
                yield f'<circle cx="{x}" cy="{self._y(point.y)}" r="3" fill="{colour}"/>'
                if point.low != point.high:
                    yield f'<path d="M{x} {self._y(point.low)}V{self._y(point.high)}" stroke="{colour}"/>'

    def _legend(self) -> Iterator[str]:
        x = WIDTH - RIGHT + 14
        for number, name in enumerate(self.lines):
            y = TOP + 18 * number + 6
            yield f'<path d="M{x} {y}h16" stroke="{COLOURS[number % len(COLOURS)]}" stroke-width="3"/>'
            yield f'<text x="{x + 22}" y="{y + 4}">{escape(name)}</text>'


def steps_of(lowest: float, highest: float, step: float) -> list[Tick]:
    """Ticks at multiples of `step` that hold both ends between them."""
    first, last = int(lowest // step), -int(-highest // step)
    return [(number * step, f"{number * step:g}") for number in range(first, max(last, first + 1) + 1)]
