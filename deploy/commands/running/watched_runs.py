"""Looks at runs: in a directory that this host sees, or where they listen."""

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.config.install_hints import program
from asyncrl.deploy.join_address import join_address
from asyncrl.errors import ConfigError, PeerLost, Refused
from asyncrl.fleet.launching.key_folder import WorkerKey
from asyncrl.fleet.launching.run_access import MONITOR, watched_run
from asyncrl.lanes.control.auth import KEY_REFUSED
from asyncrl.lanes.control.zmq_wire import ZmqWire
from asyncrl.telemetry.jsonl import newest_line
from asyncrl.telemetry.run_directory import NO_RUN, RunDirectory, missing_run
from asyncrl.telemetry.run_status import RunStatus, parse_status, read_status


class Look(NamedTuple):
    """One look at a run. metrics: of the last step, {} before the first. now: Unix time in seconds where it runs."""

    status: RunStatus
    metrics: Mapping[str, Any]
    now: float


Looking = Callable[[], Awaitable[Look]]


@asynccontextmanager
async def looking_at(run: str, key: Path | None) -> AsyncIterator[Looking]:
    """Returns what looks at a run. Raises ConfigError, as looking does, where there is none."""
    if not run.startswith("tcp://"):
        yield _looking_into(RunDirectory(Path(run)))
        return
    if key is None:
        raise ConfigError(f"{run}: write --key with a key that `{program()} admit FOLDER {MONITOR}` made for that run")
    read = WorkerKey.read(key)
    if read.role != MONITOR:
        raise ConfigError(f"{key} is a key of {read.role} workers: make one with `{program()} admit FOLDER {MONITOR}`")
    address = join_address(run, "asyncrl monitor")
    with closing(ZmqWire(read.keys)) as wire:
        try:
            async with watched_run(wire, address, read) as look:

                async def at_address() -> Look:
                    seen = await look()
                    if not seen.status:
                        raise ConfigError(f"the run at {address} has not begun to train: look again in a while")
                    return Look(parse_status(seen.status, f"the state of {address}"), parsed(seen.metrics), seen.now)

                yield at_address
        except Refused as refused:
            raise ConfigError(f"{address} refuses to be watched: {refused}") from refused
        except PeerLost as lost:
            if KEY_REFUSED not in str(lost):
                raise
            raise ConfigError(f"{address} does not accept {key}: name a key of its own folder of keys") from lost


def _looking_into(directory: RunDirectory) -> Looking:
    async def look() -> Look:
        if (status := read_status(directory.status)) is None:
            waits = "has no status.json: this run has not begun to train"
            raise missing_run(directory.path, waits if directory.started_before else NO_RUN)
        return Look(status, parsed(newest_line(directory.metrics), str(directory.metrics)), time.time())

    return look


def parsed(line: str, where: str = "metrics.jsonl") -> Mapping[str, Any]:
    """Returns the metrics in the newest line. Raises ConfigError when it holds something else."""
    try:
        metrics: dict[str, Any] = json.loads(line) if line else {}
    except ValueError as error:
        raise ConfigError(f"the last line of {where} is damaged: {error}") from error
    return metrics
