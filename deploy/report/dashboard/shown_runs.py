"""The runs behind the dashboard, each as the page shows it: those of directories, which take commands here, and one at
an address, to watch."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from asyncrl.config.schema import Config
from asyncrl.config.sources import read
from asyncrl.deploy.report.dashboard.recorded_samples import LineTail, RecordedSamples
from asyncrl.deploy.report.run_record import binned, policy_of
from asyncrl.errors import ConfigError
from asyncrl.fleet.launching.run_access import send_command
from asyncrl.telemetry.display import ACTS, shown, skipped
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.telemetry.run_status import SECONDS, RunStatus, read_status

# Shows one run on the dashboard, from the files in its directory. Pure but for reading them.


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
        """Returns the curves that have a number, with values of four digits."""
        found = []
        for number, (title, metric) in enumerate(ALL_CURVES):
            if (number >= len(CURVES)) != self.acts:
                continue
            pairs = zip(self.steps, self.values, strict=True)
            points = [(step, value) for step, values in pairs if (value := values[number]) is not None]
            if points:
                binned_points = [[x, float(f"{y:.4g}")] for x, y in binned(points, MAX_POINTS)]
                found.append({"title": title, "metric": metric, "points": binned_points})
        return found


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


SHORTEST = 1.0
"""Seconds between two looks at the files of a run, however many pages are open."""
Found = dict[str, Any]
MAX_RUNS = 200
"""Runs of the list, those that were touched last."""


class ShownRun(Protocol):
    """One run of the page."""

    async def row(self) -> Found: ...

    async def look(self) -> Found: ...

    async def page(self, before: int | None) -> Found:
        """Returns a page of the list of recorded groups."""

    async def group(self, step: int, group: int) -> Found | None: ...

    async def command(self, method: str, *args: Any) -> str:
        """Sends the run a command; returns its answer. Raises ConfigError when it refuses, or none answers."""


@dataclass
class DirectoryRun:
    """Reads on a thread, one look at a time; looks that come close together share one."""

    view: RunView
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _seen: Found = field(default_factory=dict)
    _seen_at: float = -SHORTEST

    async def row(self) -> Found:
        async with self._lock:
            return await asyncio.to_thread(self.view.row)

    async def look(self) -> Found:
        async with self._lock:
            if (now := asyncio.get_running_loop().time()) - self._seen_at >= SHORTEST:
                self._seen = await asyncio.to_thread(self.view.look)
                self._seen_at = now
            return self._seen

    async def page(self, before: int | None) -> Found:
        return await self._of_samples(lambda samples: samples.page(before)) or {}

    async def group(self, step: int, group: int) -> Found | None:
        return await self._of_samples(lambda samples: samples.group(step, group))

    async def _of_samples(self, read: Callable[[RecordedSamples], Found | None]) -> Found | None:
        def work() -> Found | None:
            samples = self.view.samples()
            if samples is None:
                return None
            samples.look()
            return read(samples)

        async with self._lock:
            return await asyncio.to_thread(work)

    async def command(self, method: str, *args: Any) -> str:
        return await send_command(self.view.directory.commands, method, *args)


Watching = Callable[[], Awaitable[tuple[RunStatus, Mapping[str, Any], float]]]
"""Looks at a run elsewhere: its status, its last metrics, and Unix time there. Raises ConfigError."""


@dataclass
class AddressRun:
    """A run that is watched over the network: state and last numbers, without samples and commands."""

    name: str
    watch: Watching
    _curves: Curves = field(default_factory=lambda: Curves([], []))

    async def row(self) -> Found:
        status, _, now = await self.watch()
        return {"name": self.name, "state": state_of(status, now), "version": status.version, "steps": status.steps}

    async def look(self) -> Found:
        status, last, now = await self.watch()
        if "step" in last and last["step"] not in self._curves.steps[-1:]:
            self._curves.add(last)
        where = {"path": self.name, "experiment": "", "problem": ""}
        seen = {"curves": self._curves.shown(), "groups": 0, "takes_commands": False}
        return {**await self.row(), **seen_run(status, last, now), **where, **seen}

    async def page(self, before: int | None) -> Found:
        return {"groups": [], "next": 0, "all": 0, "damaged": 0}

    async def group(self, step: int, group: int) -> Found | None:
        return None

    async def command(self, method: str, *args: Any) -> str:
        raise ConfigError(f"a run that is watched at {self.name} takes no commands: open its directory on its host")


class ShownRuns:
    """All runs of the page by name. roots: run directories and folders of them, which are searched again each time, so
    that new runs appear. watched: a run at an address in place of these."""

    def __init__(self, roots: Sequence[Path], now: Callable[[], float], watched: AddressRun | None = None) -> None:
        self._roots = roots
        self._now = now
        self._runs: dict[str, ShownRun] = {watched.name: watched} if watched else {}
        self._paths: dict[str, Path] = {}
        if not watched:
            find_runs(roots)

    async def named(self, name: str) -> ShownRun | None:
        await self._find()
        return self._runs.get(name)

    async def rows(self) -> list[Found]:
        """Returns the list of runs, newest first."""
        await self._find()
        return [await run.row() for run in self._runs.values()]

    async def _find(self) -> None:
        if not self._roots:
            return
        try:
            found = await asyncio.to_thread(find_runs, self._roots)
        except ConfigError:  # The folder was removed while the page is open: the list is empty until it is back.
            found = {}
        self._runs = {name: self._run(name, path) for name, path in found.items()}
        self._paths = found

    def _run(self, name: str, path: Path) -> ShownRun:
        """Returns the run that is followed already, or follows it from now on."""
        if self._paths.get(name) == path and name in self._runs:
            return self._runs[name]
        return DirectoryRun(RunView(path, name, self._now))


def find_runs(roots: Sequence[Path]) -> dict[str, Path]:
    """Returns run directories by the name that the page shows, newest first. A root that is no run is a folder of runs.
    Raises ConfigError when a root does not exist, or holds no run."""
    found: dict[Path, float] = {}
    for root in roots:
        if not root.is_dir():
            raise ConfigError(f"{root} is no folder: name a run directory, or a folder that holds some, such as runs")
        for path in [root] if _is_run(root) else [each for each in root.iterdir() if _is_run(each)]:
            found[path.absolute()] = _touched_at(path)
    if not found:
        named = ", ".join(map(str, roots))
        raise ConfigError(f"{named} holds no run yet: start one with `asyncrl run`, or name where its directory is")
    newest = sorted(found, key=lambda path: found[path], reverse=True)[:MAX_RUNS]
    return {_name(path, newest): path for path in newest}


def _is_run(path: Path) -> bool:
    return path.is_dir() and RunDirectory(path).started_before


def _touched_at(path: Path) -> float:
    status = RunDirectory(path).status
    return max(each.stat().st_mtime for each in (path, status) if each.exists())


def _name(path: Path, others: Sequence[Path]) -> str:
    """Returns the name of the folder; the whole path where two runs have the same."""
    return str(path) if sum(other.name == path.name for other in others) > 1 else path.name
