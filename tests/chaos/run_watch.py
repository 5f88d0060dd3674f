"""Follows a run from outside, by the files of its directory: when steps were trained, and which workers take calls."""

import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class GrowingFile:
    """A file of JSON lines that others append to, and may cut."""

    path: Path
    read: int = 0

    def new_lines(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(0, 2)
            self.read = min(self.read, file.tell())
            file.seek(self.read)
            whole, end, _ = file.read().rpartition(b"\n")
        self.read += len(whole) + len(end)
        return [line for text in whole.splitlines() if (line := _parsed(text)) is not None]


def _parsed(text: bytes) -> dict[str, Any] | None:
    """Returns None for a line that a full disk or a death cut off."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of an instance. host: where it ran."""

    at: float
    host: str


@dataclass
class RunWatch:
    """Holds what a run printed and logged; times are of the monotonic clock. alive: the instance of each worker that
    takes calls. started: when, by worker. lost: by worker. places: host and process id on it, by instance. steps: when
    each was trained."""

    run_dir: Path
    expected: int
    alive: dict[str, str] = field(default_factory=dict)
    places: dict[str, tuple[str, int]] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lost: dict[str, list[Loss]] = defaultdict(list)
        self.started: dict[str, list[float]] = defaultdict(list)
        self._metrics = GrowingFile(self.run_dir / "metrics.jsonl")
        self._events = GrowingFile(self.run_dir / "logs" / "controller.jsonl")
        self._fleet = GrowingFile(self.run_dir / "fleet.jsonl")

    @property
    def is_whole(self) -> bool:
        return len(self.alive) == self.expected

    def look(self) -> None:
        """Reads what is new. Called every few hundredths of a second, which is how exact the times are."""
        now = time.monotonic()
        for line in self._fleet.new_lines():
            if "pid" in line:
                self.places[line["instance"]] = (line["host"], line["pid"])
        for line in self._events.new_lines():
            self._take(line.get("event", ""), line.get("instance", ""), now)
        self.steps += [now for _ in self._metrics.new_lines()]

    def _take(self, event: str, instance: str, now: float) -> None:
        worker = instance.partition("-")[0]
        if event == "WorkerStarted":
            self.alive[worker] = instance
            self.started[worker].append(now)
        elif event == "WorkerLost" and self.alive.get(worker) == instance:
            del self.alive[worker]
            self._note_loss(worker, instance, now)

    def controller_died(self) -> None:
        """Notes that with it every connection to a worker is dead."""
        self.look()
        now = time.monotonic()
        for worker, instance in self.alive.items():
            self._note_loss(worker, instance, now)
        self.alive.clear()

    def _note_loss(self, worker: str, instance: str, now: float) -> None:
        host, _ = self.places.get(instance, ("", 0))
        self.lost[worker].append(Loss(now, host))

    def next_step(self, since: float) -> float | None:
        """Returns the seconds from a moment to the next trained step."""
        return next((at - since for at in self.steps if at >= since), None)

    def replaced(self, since: float, is_its_doing: Callable[[Loss], bool]) -> float | None:
        """Returns the seconds from `since` until the workers of these losses took calls again; 0 if there are none,
        None if one does not yet."""
        longest = 0.0
        for worker, losses in self.lost.items():
            if its := [loss for loss in losses if is_its_doing(loss)]:
                back = next((at for at in self.started[worker] if at >= its[-1].at), None)
                if back is None:
                    return None
                longest = max(longest, back - since)
        return longest
