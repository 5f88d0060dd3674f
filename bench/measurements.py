"""What all measurements share: rounds in turn, medians with their range, goals beside what was seen."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Seen:
    """Values of one side, one a round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.values)

    def __str__(self) -> str:
        return f"{number(self.median)} [{number(min(self.values))} - {number(max(self.values))}]"


def in_turn(sides: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Every side once a round, in an order that turns around with each: what the machine does meanwhile hits all."""
    found: dict[str, list[T]] = {name: [] for name in sides}
    for turn in range(rounds):
        for name in list(sides)[:: -1 if turn % 2 else 1]:
            found[name].append(sides[name]())
    return found


def seen(found: Mapping[str, Sequence[float]]) -> dict[str, Seen]:
    """Values of several sides."""
    return {name: Seen(tuple(values)) for name, values in found.items()}


def stage_seconds(lines: Sequence[Mapping[str, float]], warm: int, stages: Iterable[str]) -> dict[str, float]:
    """Seconds a step that each stage was busy. lines: of `metrics.jsonl`, of which the first `warm` do not count."""
    counted = list(zip(lines[warm - 1 :], lines[warm:], strict=False))
    return {
        stage: sum(line[f"time/{stage}/busy"] * (line["time"] - before["time"]) for before, line in counted)
        / len(counted)
        for stage in stages
    }


def ratios(above: Seen, below: Seen) -> Seen:
    """Round by round, so that a slow moment of the machine is on both sides of the line."""
    return Seen(tuple(one / other for one, other in zip(above.values, below.values, strict=True)))


def number(value: float) -> str:
    """Three digits that matter, and all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def verdict(what: str, seen: float, goal: float, *, most: bool = False) -> str:
    """most: the goal is an upper bound."""
    met = seen <= goal if most else seen >= goal
    return (
        f"  {'met   ' if met else 'MISSED'}  {what}: {number(seen)}, goal {'at most' if most else 'at least'} {goal:g}"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    ]
    return "\n".join(f"  {line}" for line in lines)


class Load:
    """Load average at the start and the end, and how much of the machine others used in between."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = time.monotonic(), _busy_seconds(), own_seconds()
        self._before = os.getloadavg()[0]

    @property
    def others(self) -> float:
        """Share of all cores that others used so far."""
        span, cores = time.monotonic() - self._began, os.cpu_count() or 1
        return max(0.0, _busy_seconds() - self._busy - (own_seconds() - self._own)) / (span * cores)

    def __str__(self) -> str:
        """Others' share is of all cores; above a tenth, wall clock says little."""
        others = self.others
        marked = " (UNDER LOAD: wall clock says little)" if others > 0.1 else ""
        return (
            f"load average {self._before:.2f} before, {os.getloadavg()[0]:.2f} after, {os.cpu_count() or 1} cores; "
            f"others used {others:.0%} of them{marked}"
        )


def _busy_seconds() -> float:
    """CPU seconds of everybody since boot, idle and waiting left out."""
    with open("/proc/stat") as stat:
        fields = [int(field) for field in stat.readline().split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Of this process and all that it started, whether they have ended or not."""
    seen = dict(_processes())
    family = {os.getpid()}
    while born := {pid for pid, (parent, _) in seen.items() if parent in family} - family:
        family |= born
    return sum(seen[pid][1] for pid in family)


def _processes() -> Iterator[tuple[int, tuple[int, float]]]:
    """Of each process its parent, and the CPU seconds of it and of its children that have ended."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # It has ended meanwhile.
            fields = path.read_text().rpartition(")")[2].split()  # A name may have blanks and brackets.
            seconds = sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")
            yield int(path.parent.name), (int(fields[1]), seconds)
