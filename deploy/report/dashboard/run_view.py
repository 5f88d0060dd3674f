"""Shows one run on the dashboard, from the files in its directory. Pure but for reading them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.config.sources import read
from asyncrl.deploy.report.acting_facts import policy_of
from asyncrl.deploy.report.dashboard.line_tail import LineTail
from asyncrl.deploy.report.dashboard.recorded_samples import RecordedSamples
from asyncrl.errors import ConfigError
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.telemetry.run_status import SECONDS, RunStatus, read_status
from asyncrl.telemetry.screen.display import ACTS, shown, skipped

LATE = 10 * SECONDS
"""Seconds after which a state that was not replaced is called silent: a loaded machine is late by some of them."""
MAX_POINTS = 200
"""Points of a curve; more are averaged in bins."""
CURVES = (
    ("Reward", "reward/mean"),
    ("Held-out reward", "eval/reward/mean"),
    ("Length of completions, tokens", "completions/length_mean"),
    ("Staleness of trained tokens, versions", "staleness/mean"),
    ("Trained tokens per second", "perf/tokens_per_s"),
    ("Sampler against trainer, KL", "mismatch/kl"),
)
"""Titles and metrics of the curves of a language model."""
CURVES_OF_ACTING = (
    ("Return of episodes, mean of the last 20", "acting/return_last20"),
    ("Return of evaluated episodes", "eval/return/mean"),
    ("Length of episodes, steps", "acting/length_mean"),
    ("Staleness of trained transitions, versions", "staleness/mean"),
    ("Transitions per second", "perf/tokens_per_s"),
    ("Entropy of the policy", "policy/entropy"),
)
"""Titles and metrics of the curves of a policy that acts."""
ALL_CURVES = (*CURVES, *CURVES_OF_ACTING)


@dataclass(slots=True)
class Curves:
    """The numbers of the curves by step. The latest line of a step counts, as for a report. acts: they are of a policy
    that acts."""

    steps: list[int]
    values: list[tuple[float | None, ...]]
    acts: bool = False

    def add(self, metrics: Mapping[str, Any]) -> None:
        while self.steps and self.steps[-1] >= metrics["step"]:
            self.steps.pop()
            self.values.pop()
        self.acts = ACTS in metrics
        self.steps.append(int(metrics["step"]))
        self.values.append(tuple(_number(metrics.get(metric)) for _, metric in ALL_CURVES))

    def shown(self) -> list[dict[str, Any]]:
        """Returns the curves that have a number."""
        found = []
        for number, (title, metric) in enumerate(ALL_CURVES):
            if (number >= len(CURVES)) != self.acts:
                continue
            pairs = zip(self.steps, self.values, strict=True)
            points = [(step, value) for step, values in pairs if (value := values[number]) is not None]
            if points:
                found.append({"title": title, "metric": metric, "points": binned(points)})
        return found


def binned(points: Sequence[tuple[float, float]]) -> list[list[float]]:
    """Returns at most MAX_POINTS points, each the mean of as many that follow each other, to four digits."""
    size = math.ceil(len(points) / MAX_POINTS)
    bins = [points[start : start + size] for start in range(0, len(points), size)]
    return [[sum(x for x, _ in part) / len(part), float(f"{sum(y for _, y in part) / len(part):.4g}")] for part in bins]


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def state_of(status: RunStatus | None, now: float) -> str:
    """Returns what a run does, in a word: starting, training, paused, ended or silent."""
    if status is None:
        return "starting"
    if status.ended:
        return "ended"
    if now - status.written_at > LATE:
        return "silent"
    return "paused" if status.paused else "training"


class RunView:
    """Follows the files of one run. name: of the run on the page. Its methods block, and run one at a time."""

    def __init__(self, path: Path, name: str, now: Callable[[], float]) -> None:
        self.name = name
        self.directory = RunDirectory(path)
        self._now = now
        self._metrics = LineTail(self.directory.metrics)
        self._curves = Curves([], [])
        self._last: Mapping[str, Any] = {}
        self._restarts = 0
        self._config: Config | None = None
        self._samples: RecordedSamples | None = None

    def row(self) -> dict[str, Any]:
        """Returns the line of the run in the list of runs."""
        status, problem = self._status()
        state = "damaged" if problem else state_of(status, self._now())
        version, steps = (status.version, status.steps) if status else (0, 0)
        return {"name": self.name, "state": state, "version": version, "steps": steps}

    def look(self) -> dict[str, Any]:
        """Reads what is new; returns all that the page shows of the run but its samples."""
        for _, _, line in self._metrics.new():
            if self._metrics.restarts != self._restarts:
                self._curves = Curves([], [])
                self._restarts = self._metrics.restarts
            if "step" in line:
                self._curves.add(line)
                self._last = line
        status, problem = self._status()
        samples = self.samples()
        return {
            **self.row(),
            **seen_run(status, self._last, self._now()),
            "problem": problem,
            "path": str(self.directory.path),
            "experiment": f"{self._config.name}, {policy_of(self._config)}" if self._config else "",
            "curves": self._curves.shown(),
            "groups": samples.look() if samples else 0,
            "takes_commands": self.directory.commands.exists() and bool(status and not status.ended),
        }

    def samples(self) -> RecordedSamples | None:
        """Returns the samples; None while the config cannot be read."""
        if self._samples is None:
            try:
                self._config = read(self.directory.config)
            except ConfigError:
                return None
            self._samples = RecordedSamples(self.directory, self._config)
        return self._samples

    def _status(self) -> tuple[RunStatus | None, str]:
        try:
            return read_status(self.directory.status), ""
        except ConfigError as error:
            return None, str(error)


def seen_run(status: RunStatus | None, last: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Returns what status and newest metrics say. now: Unix time in seconds where the run is."""
    numbers = [*shown(last)]
    return {
        "silent_s": round(now - status.written_at) if state_of(status, now) == "silent" and status else 0,
        "incarnation": status.incarnation if status else 0,
        "samples": dict(status.samples) if status else {},
        "workers": [asdict(worker) for worker in status.workers] if status and not status.ended else [],
        "step": last.get("step"),
        "skipped": skipped(last),
        "numbers": numbers,
    }
