"""The runs behind the dashboard: those of directories, which take commands here, and one at an address, to watch."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from asyncrl.deploy.report.dashboard.recorded_samples import RecordedSamples
from asyncrl.deploy.report.dashboard.run_view import Curves, RunView, seen_run, state_of
from asyncrl.errors import ConfigError
from asyncrl.fleet.launching.run_access import send_command
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.telemetry.run_status import RunStatus

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
