"""Reads the last seconds of a run from the traces of its workers, as slices of rows and arrows between them.

generation0.0  calls    [generate]------.                      [use_weights]
training0.0    compute         [step] <-'  samples ----------------^ the version that the step made
"""

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.telemetry.trace import SUFFIX

TAIL = 1 << 20
"""Bytes that are read from the end of each file, some 8,000 events, so that long runs cost no more than short ones."""
MAX_SLICES = 3000
MAX_ARROWS = 1500
"""The newest of each are kept, which bounds the size of the report."""
MAX_ROWS = 12
"""Rows of a worker; slices of more calls at the same time than these are left out and counted."""
MAX_NESTED = 16
"""Slices of a row among which the innermost around a time is looked for."""
CLOCK_ERROR = 1e-3
"""Seconds by which the clocks of two workers may differ."""
STEP = "step"
NEW_WEIGHTS = "flip"
"""Spans of the trainer, and of whoever takes over a version."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A span of one worker. begin, end: seconds since 1970. row: of the worker, from 0. version: None without one."""

    worker: str
    row: int
    name: str
    begin: float
    end: float
    version: int | None = None


@dataclass(frozen=True, slots=True)
class Arrow:
    """From the slice where something began to the slice that took it. what: samples or weights."""

    what: str
    begin: Slice
    end: Slice


@dataclass(frozen=True, slots=True)
class WorkerTrace:
    """slices: by their begin. left_out: slices in the time shown for which there was no row."""

    slices: list[Slice]
    arrows: list[Arrow]
    left_out: int

    @property
    def workers(self) -> list[str]:
        """Returns the workers in the order in which a sample meets them, evaluation last."""
        return sorted({each.worker for each in self.slices}, key=_place)


def _place(worker: str) -> tuple[int, str]:
    order = ("environment", "generation", "reward", "cost", "reference", "critic", "training", "cost_critic", "")
    service = worker.rstrip("0123456789.[]")
    return order.index(service if service in order else ""), worker


@dataclass(slots=True)
class _File:
    """The newest events of one worker. cut: whether earlier ones were not read. sent, taken: ends of arrows of samples,
    by the id of the sample, as row and time."""

    cut: bool
    slices: list[Slice] = field(default_factory=list)
    sent: dict[str, tuple[int, float]] = field(default_factory=dict)
    taken: dict[str, tuple[int, float]] = field(default_factory=dict)
    left_out: list[float] = field(default_factory=list)


def read_trace(logs: Path) -> WorkerTrace:
    """Reads the newest slices of all workers of a run. logs: folder of its logs; without traces there are no slices."""
    files = [_read_file(path) for path in sorted(logs.glob(f"*{SUFFIX}"))]
    files = [file for file in files if file.slices]
    every = sorted((each for file in files for each in file.slices), key=lambda each: each.begin)
    # Before the first event of a file that was cut, its worker would look idle.
    shown_from = max((min(each.begin for each in file.slices) for file in files if file.cut), default=0.0)
    kept = [each for each in every if each.begin >= shown_from][-MAX_SLICES:]
    begin = kept[0].begin if kept else 0.0
    left_out = sum(at >= begin for file in files for at in file.left_out)
    arrows = [*_sample_arrows(files, begin), *_version_arrows(kept)]
    return WorkerTrace(kept, arrows, left_out)


def _read_file(path: Path) -> _File:
    """Reads the end of a file; a torn first or last line is left out."""
    worker = path.name.removesuffix(SUFFIX).partition("-")[0]
    rows: dict[int, int] = {}
    found = _File(cut=path.stat().st_size > TAIL)
    for event in _last_events(path):
        row = rows.setdefault(event["tid"], len(rows))
        begin = event["ts"] / 1e6
        match event["ph"]:
            case "X" if row >= MAX_ROWS:
                found.left_out.append(begin)
            case "X":
                version = event.get("args", {}).get("version")
                found.slices.append(Slice(worker, row, event["name"], begin, begin + event["dur"] / 1e6, version))
            case "s" if row < MAX_ROWS:
                found.sent[event["id"]] = row, begin
            case "f" if row < MAX_ROWS:
                found.taken[event["id"]] = row, begin
    return found


def _last_events(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - TAIL))
        lines = file.read().split(b"\n")
    for line in lines[int(size > TAIL) : -1]:
        event = json.loads(line)
        if event["ph"] in "Xsf":
            yield event


def _sample_arrows(files: list[_File], begin: float) -> Iterator[Arrow]:
    """Yields an arrow for each pair of slices between which samples went; the newest, where there are too many."""
    rows = [_by_row(file.slices) for file in files]
    taken = {sample: (of, end) for file, of in zip(files, rows, strict=True) for sample, end in file.taken.items()}
    pairs: dict[Arrow, None] = {}
    for file, of_sender in zip(files, rows, strict=True):
        for sample, (row, at) in file.sent.items():
            if at < begin or sample not in taken:
                continue
            of_taker, (taker_row, taken_at) = taken[sample]
            source = _around(of_sender[row], at)
            target = _around(of_taker[taker_row], taken_at)
            if source is not None and target is not None:
                pairs[Arrow("samples", source, target)] = None
    yield from sorted(pairs, key=lambda arrow: arrow.end.begin)[-MAX_ARROWS:]


def _version_arrows(slices: list[Slice]) -> Iterator[Arrow]:
    """Yields an arrow from the step that ended last before a worker took over a version to that take-over."""
    steps = [each for each in slices if each.name == STEP]
    for taken in slices:
        if taken.name == NEW_WEIGHTS and taken.version is not None:
            before = [step for step in steps if step.end <= taken.begin + CLOCK_ERROR]
            if before:
                yield Arrow("weights", max(before, key=lambda step: step.end), taken)


def _by_row(slices: list[Slice]) -> dict[int, list[Slice]]:
    """Returns the slices of each row, by their begin."""
    rows: dict[int, list[Slice]] = defaultdict(list)
    for each in sorted(slices, key=lambda each: each.begin):
        rows[each.row].append(each)
    return rows


def _around(slices: list[Slice], at: float) -> Slice | None:
    """Returns the innermost slice of a row that is open at a time."""
    last = bisect_right(slices, at, key=lambda each: each.begin)
    nested = slices[max(0, last - MAX_NESTED) : last]
    return next((each for each in reversed(nested) if each.end >= at), None)
