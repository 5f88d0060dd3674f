"""Says in words which service a run waits for, with the number that this rests on, and draws curves of one line."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from operator import attrgetter
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

SMOOTHED = 5
"""Steps whose shares are averaged."""
SLOWEST = 0.6
"""Share of busy time from which on the others wait for a service."""
WAITING = 0.25
"""Share of the trainer's time without samples from which on another service is called the slowest."""
MOST = 8
"""Times as many workers as there are that are proposed at most."""
LEVELS = "▁▂▃▄▅▆▇█"
BESIDE = ("evaluation",)
"""Services that no step waits for."""
KEYS = {
    "generation": "generation.replicas",
    "reward": "reward.workers",
    "cost": "cost.workers",
    "reference": "reference.replicas",
    "environment": "environment.workers",
    "training": "training.layout.dp",
}
"""Key that adds workers to each service."""

Shares = Mapping[str, Mapping[str, float]]
"""Share of time by service and state."""


def shares_of(metrics: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Returns the shares in the metrics of one step."""
    found: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        match name.split("/"):
            case ["time", service, state] if isinstance(value, float):
                found.setdefault(service, {})[state] = value
    return found


class ServiceLoad:
    """Averages the shares of the last steps. workers: number of workers by the key that adds some."""

    def __init__(self, workers: Mapping[str, int]) -> None:
        self._workers = workers
        self._steps: deque[Shares] = deque(maxlen=SMOOTHED)
        self._queued: dict[str, float] = {}

    def observe(self, metrics: Mapping[str, Any]) -> None:
        if shares := shares_of(metrics):
            self._steps.append(shares)
            self._queued = {service: float(metrics.get(f"perf/queued/{service}") or 0.0) for service in shares}

    def share(self, service: str, state: str) -> float:
        return fmean([step.get(service, {}).get(state, 0.0) for step in self._steps] or [0.0])

    def queue(self, service: str) -> str:
        """Returns the calls that wait for a service; "" for none."""
        return f", {self._queued[service]:.0f} queued" if self._queued.get(service) else ""

    def services(self) -> list[str]:
        return [service for service in (self._steps[-1] if self._steps else {}) if service not in BESIDE]

    def lines(self) -> list[str]:
        """Returns who is busy, and who waits for whom; empty before the first step."""
        if not (services := self.services()):
            return []
        busy = [f"{service} {self.share(service, 'busy'):.0%} busy{self.queue(service)}" for service in services]
        waits = [
            f"{service} {share:.0%} {text}"
            for service in services
            for state, text in (("starved", "waits for work"), ("blocked", "held back"), ("sync", "waits for weights"))
            if (share := self.share(service, state)) >= 0.05
        ]
        return [", ".join(busy), ", ".join(waits)] if waits else [", ".join(busy)]

    def bottleneck(self) -> str:
        """Returns which service is the slowest, and what would help; "" before the first step."""
        if not (services := self.services()):
            return ""
        busy = {service: self.share(service, "busy") for service in services}
        slowest = max(busy, key=lambda service: busy[service])
        starved = self.share("training", "starved")
        if busy[slowest] < SLOWEST:
            return (
                f"no service is the slowest: {slowest} is busy most, {busy[slowest]:.0%} of the time; a larger "
                "staleness.limit lets more of them work at once"
            )
        why = f"it is busy {busy[slowest]:.0%} of the time"
        if slowest == "training" or starved < WAITING:
            others = ", ".join(f"{name} {share:.0%}" for name, share in busy.items() if name != slowest)
            return f"{slowest} is the slowest: {why}{f', {others}' if others else ''}"
        waits = f"training waits {starved:.0%} for samples"
        return f"{slowest} is the slowest: {why}, and {waits}{self._advice(slowest, busy)}"

    def _advice(self, slowest: str, busy: Mapping[str, float]) -> str:
        """Returns how many workers would make the service as fast as the next one."""
        key = KEYS.get(slowest, "")
        if key not in self._workers:
            return ""
        next_one = max([0.05, *(share for service, share in busy.items() if service != slowest)])
        wanted = math.ceil(self._workers[key] * min(MOST, busy[slowest] / next_one))
        return f"; {key} = {wanted} would help" if wanted > self._workers[key] else ""


def sparkline(values: Sequence[float], width: int) -> str:
    """Draws values on one line: means of as many parts as there is room for."""
    known = [value for value in values if math.isfinite(value)]
    count = min(width, len(known))
    if count < 1:
        return ""
    parts = [fmean(known[part * len(known) // count : (part + 1) * len(known) // count]) for part in range(count)]
    low = min(parts)
    span = max(parts) - min(parts)
    return "".join(LEVELS[round((part - low) / span * (len(LEVELS) - 1)) if span else 0] for part in parts)


class LongCurve:
    """The values of a metric over a run of any length: every second one is left out each time there are too many."""

    MOST = 1024

    def __init__(self) -> None:
        self._values: list[float] = []
        self._every = 1
        self._seen = 0

    def add(self, value: float) -> None:
        if self._seen % self._every == 0:
            self._values.append(value)
        self._seen += 1
        if len(self._values) >= self.MOST:
            self._values = self._values[::2]
            self._every *= 2

    def line(self, width: int) -> str:
        """Returns the curve with its first and last value; "" before there are two."""
        if len(self._values) < 2:
            return ""
        ends = f"{self._values[0]:.3f} ", f" {self._values[-1]:.3f}"
        return f"{ends[0]}{sparkline(self._values, max(8, width - sum(map(len, ends))))}{ends[1]}"


def workers_of(config: "Config") -> dict[str, int]:
    """Returns the number of workers by the key that adds some."""
    return {key: attrgetter(key)(config) for key in KEYS.values()}
