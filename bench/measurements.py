"""Statistics and text that all measurements share: rounds, medians with their range, goals, load of the machine."""

import argparse
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import TypeVar

T = TypeVar("T")
LOADED = 0.1
"""Share of the machine that other programs use, above which wall clock times are not reliable."""
T_95 = {2: 6.314, 3: 2.920, 4: 2.353, 5: 2.132, 6: 2.015, 7: 1.943, 8: 1.895, 9: 1.860, 10: 1.833}
"""Student's t, one-sided 95 %, by number of values. The entry for ten serves all larger numbers, which is cautious."""


def at_least(least: int) -> Callable[[str], int]:
    """Returns the type of a flag of argparse with a whole number that is not smaller."""

    def parse(text: str) -> int:
        with suppress(ValueError):
            if (value := int(text)) >= least:
                return value
        raise argparse.ArgumentTypeError(f"must be a whole number of {least} or more, not {text!r}")

    return parse


@dataclass(frozen=True, slots=True)
class RoundValues:
    """Holds the values of one side of a comparison, one per round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.values)

    def __str__(self) -> str:
        return f"{number(self.median)} [{number(min(self.values))} - {number(max(self.values))}]"


def in_turn(sides: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Runs every side once per round, in reverse order every other round: all sides see the same changes of load."""
    found: dict[str, list[T]] = {name: [] for name in sides}
    for turn in range(rounds):
        for name in list(sides)[:: -1 if turn % 2 else 1]:
            found[name].append(sides[name]())
    return found


def round_values(found: Mapping[str, Sequence[float]]) -> dict[str, RoundValues]:
    return {name: RoundValues(tuple(values)) for name, values in found.items()}


def ratios(above: RoundValues, below: RoundValues) -> RoundValues:
    """Divides round by round, so that a slow moment of the machine affects both sides of a ratio."""
    return RoundValues(tuple(one / other for one, other in zip(above.values, below.values, strict=True)))


# ---- values by seed ----------------------------------------------------------------------------------------

BySeed = Mapping[int, float]
"""The values of one side: {0: 0.97, 1: 0.98}. Sides are compared over the seeds of all of them."""


def upper_bound(values: Sequence[float]) -> float:
    """Returns the one-sided upper 95 % bound on the mean (Student's t); inf for fewer than two values."""
    if len(values) < 2:
        return math.inf
    return fmean(values) + T_95[min(len(values), 10)] * stdev(values) / math.sqrt(len(values))


def differences(first: BySeed, second: BySeed) -> list[float]:
    """Returns first - second, seed by seed, over the seeds of both."""
    return [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]


def recovered_share(synchronous: BySeed, uncorrected: BySeed, corrected: BySeed) -> float:
    """Returns (corrected - uncorrected) / (synchronous - uncorrected), means over the seeds of all three: 0 if the
    correction had no effect, 1 if it recovered the whole loss, nan if there was no loss."""
    seeds = sorted(synchronous.keys() & uncorrected.keys() & corrected.keys())
    lost = sum(synchronous[seed] - uncorrected[seed] for seed in seeds)
    gained = sum(corrected[seed] - uncorrected[seed] for seed in seeds)
    return gained / lost if lost > 0 else math.nan


# ---- text ------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Formats three significant digits, and all digits before the decimal point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def goal_line(label: str, value: float, goal: float, *, at_most: bool = False) -> str:
    """Compares a value with its goal. at_most: the goal is an upper bound, else a lower bound."""
    met = value <= goal if at_most else value >= goal
    bound = f"at {'most' if at_most else 'least'} {goal:g}"
    return f"  {'met   ' if met else 'MISSED'}  {label}: {number(value)}, goal {bound}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligns columns to their widest cell."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in (head, *rows)]
    return "\n".join(f"  {'  '.join(cells).rstrip()}" for cells in padded)


# ---- load of the machine ---------------------------------------------------------------------------------


class MachineLoad:
    """Measures the load average before and after, and the share of the CPU that other programs use in between."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._busy = _busy_seconds()
        self._own = own_seconds()
        self._load_before = os.getloadavg()[0]

    @property
    def others(self) -> float:
        """Returns the share of all cores that other programs used so far."""
        span = time.monotonic() - self._began
        cores = os.cpu_count() or 1
        return max(0.0, _busy_seconds() - self._busy - (own_seconds() - self._own)) / (span * cores)

    def __str__(self) -> str:
        others = self.others
        warning = " (UNDER LOAD: wall clock times are not reliable)" if others > LOADED else ""
        return (
            f"load average {self._load_before:.2f} before, {os.getloadavg()[0]:.2f} after, {os.cpu_count() or 1} "
            f"cores; other programs used {others:.0%} of them{warning}"
        )


def _busy_seconds() -> float:
    """Returns the CPU seconds of all programs since boot, without idle time and waits for disks."""
    with open("/proc/stat") as stat:
        fields = [int(field) for field in stat.readline().split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Returns the CPU seconds of this process and of all its descendants, including those that have ended."""
    parents = dict[int, int]()
    ticks = dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # The process has ended meanwhile.
            fields = path.read_text().rpartition(")")[2].split()  # A process name may hold blanks and brackets.
            parents[int(path.parent.name)] = int(fields[1])
            ticks[int(path.parent.name)] = sum(map(int, fields[11:15]))  # With those of children that have ended.
    family = {os.getpid()}
    while born := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= born
    return sum(ticks[pid] for pid in family) / os.sysconf("SC_CLK_TCK")
