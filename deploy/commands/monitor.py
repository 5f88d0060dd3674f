"""`asyncrl monitor` shows what a running run does: each worker's state, load and restarts, and the last step."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from asyncrl.config.install_hints import program
from asyncrl.deploy.commands.command_parser import CommandParser
from asyncrl.deploy.join_address import join_address
from asyncrl.errors import ConfigError, PeerLost, Refused
from asyncrl.fleet.launching.key_folder import MONITOR, WorkerKey
from asyncrl.fleet.launching.run_access import watched_run
from asyncrl.lanes.control.auth import KEY_REFUSED
from asyncrl.lanes.control.zmq_wire import ZmqWire
from asyncrl.telemetry.display import ACTS, CleanConsole, shown, skipped
from asyncrl.telemetry.jsonl import newest_line
from asyncrl.telemetry.run_directory import NO_RUN, RunDirectory, missing_run
from asyncrl.telemetry.run_status import SECONDS, RunStatus, WorkerStatus, parse_status, read_status
from asyncrl.telemetry.sample_panel import filled

# Looks at runs: in a directory that this host sees, or where they listen.


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


LATE = 10 * SECONDS
"""Seconds after which a state that was not replaced is called old: a loaded machine is late by some of them."""
SHARES = ("busy", "starved", "blocked", "sync")
HEADINGS = ("worker", *SHARES, "cores", "memory", "queue", "starts")
FURTHER = ("version", "samples per s", "GPU memory")
SHORTEST_RUNS = 12
"""Columns of the screen that the calls of a worker need: with less, the further columns have a table of their own."""


def main(arguments: list[str]) -> int:
    parser = CommandParser("asyncrl monitor", description=__doc__)
    text = "Name the directory of a run, or tcp://HOST:PORT where it listens; Ctrl-C ends the view."
    parser.add_argument("run", metavar="RUN_DIR|ADDRESS", help=text)
    parser.add_argument("--once", action="store_true", help="Print the newest state and end.")
    text = "Key of the role monitor, for an address: `asyncrl admit FOLDER monitor` makes one."
    parser.add_argument("--key", type=Path, metavar="FILE", help=text)
    text = "Record the torch operators of a service, or of one of its workers, and print what took longest."
    parser.add_argument("--profile", metavar="SERVICE", help=text)
    text = "Seconds that --profile records, 1 to 600; default: 60."
    parser.add_argument("--duration", type=float, default=60.0, help=text)
    asked = parser.parse_args(arguments)
    if asked.profile is not None:
        print(_profile(asked.run, asked.profile, asked.duration))
        return 0
    console = CleanConsole(sys.stdout)
    with suppress(KeyboardInterrupt):
        asyncio.run(_follow(asked.run, asked.key, console, once=asked.once or not console.is_terminal))
    return 0


def _profile(run: str, wanted: str, seconds: float) -> str:
    """Has a run record a profile; returns its summary."""
    from asyncrl.controller.observers.inspection import MARGIN
    from asyncrl.fleet.launching.run_access import DEADLINE, send_command

    if run.startswith("tcp://"):
        raise ConfigError(f"--profile: name the run directory on the host of its controller, and not {run}")
    commands = RunDirectory(Path(run).absolute()).commands
    deadline = seconds + MARGIN + DEADLINE
    return asyncio.run(send_command(commands, "profile", wanted, float(seconds), deadline=deadline))


async def _follow(run: str, key: Path | None, console: Console, *, once: bool) -> None:
    """Shows a run until it ends, or once."""
    async with looking_at(run, key) as look:
        seen = await look()
        if once:
            console.print(view(*seen, console.width))
            return
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(view(*seen, console.width), refresh=True)
                if seen.status.ended:
                    return
                await asyncio.sleep(SECONDS)
                seen = await look()


def view(status: RunStatus, metrics: Mapping[str, Any], now: float, width: int) -> Group:
    """Returns what the screen shows. now: Unix time in seconds. width: columns of the screen."""
    age = now - status.written_at
    lines = [f"version {status.version} of {status.steps} steps"]
    lines += filled([f"{count:,} {stage}" for stage, count in status.samples.items()] or ["none"], width, "samples: ")
    if status.ended:
        lines.append("The run has ended; logs/controller.jsonl says how.")
    elif age > LATE:
        lines.append(f"This state is {age:.0f} s old: the run has ended, or its machine is overloaded.")
    elif status.paused:
        lines.append("The run is paused until `asyncrl unpause` on its host.")
    if metrics:
        lines += _step(metrics, status, width)
    if status.ended:
        return Group(*lines)
    problems = [
        Text(line)
        for worker in status.workers
        if worker.problem
        for line in wrap(f"{worker.name}: {worker.problem}", width, subsequent_indent="  ")
    ]
    since = ["starts: since the run was resumed"] if status.incarnation else []
    unit = "transitions" if ACTS in metrics else "tokens"
    return Group(*lines, "", *_tables(status, width, unit), *since, *problems)


def _step(metrics: Mapping[str, Any], status: RunStatus, width: int) -> list[str]:
    """Returns the lines about the last step. Metrics may be newer than the state, which comes every few seconds."""
    step = int(metrics["step"])
    began = metrics.get("incarnation", 0)
    is_void = began < status.incarnation and step > status.version + bool(skipped(metrics))
    void = " before the resume, to be trained again" if is_void else ""
    if reason := skipped(metrics):
        return [f"step {step}{void}: {reason}"]
    return filled([f"{name} {number}" for name, number in shown(metrics)], width, f"step {step}{void}: ")


def _tables(status: RunStatus, width: int, unit: str) -> Iterator[Table | str]:
    """Yields a row for each worker, in one table, or in two where the screen is narrow. Columns in which no worker has
    anything are left out. unit: what samples are made of."""
    cells = [HEADINGS, *map(_cells, status.workers)]
    further = [(*FURTHER[:2], f"{unit} per s", *FURTHER[2:]), *(_further(each, status) for each in status.workers)]
    used = [column for column in zip(*further, strict=True) if any(cell != "-" for cell in column[1:])]
    runs = ["runs", *map(_runs, status.workers)]
    side_by_side = [*zip(*cells, strict=True), *used]
    if width - _width(side_by_side) >= SHORTEST_RUNS:
        yield _table(side_by_side, runs, width)
        return
    yield _table([*zip(*cells, strict=True)], runs, width)
    if used:
        yield ""
        yield _table([next(zip(*cells, strict=True)), *used], [""] * len(runs), width)


def _width(columns: Sequence[Sequence[str]]) -> int:
    return sum(max(map(len, column)) + 1 for column in columns)


def _table(columns: Sequence[Sequence[str]], runs: Sequence[str], width: int) -> Table:
    """Returns a table; its last column has the columns of the screen that the others leave."""
    left = width - _width(columns)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=False)
    for *cells, last in zip(*columns, runs, strict=True):
        table.add_row(*cells, last if len(last) <= left else f"{last[: left - 1]}…")
    return table


def _cells(worker: WorkerStatus) -> tuple[str, ...]:
    shares = (f"{worker.shares[name]:.0%}" if name in worker.shares else "-" for name in SHARES)
    return (
        worker.name,
        *shares,
        f"{worker.cores:.2f}",
        f"{worker.memory / 1e9:.3g} GB" if worker.memory else "-",
        f"{worker.queued}",
        f"{worker.starts}",
    )


def _further(worker: WorkerStatus, status: RunStatus) -> tuple[str, ...]:
    behind = 0 if worker.version is None else status.version - worker.version
    rates = (f"{worker.rates[name]:,.4g}" if name in worker.rates else "-" for name in ("samples", "tokens"))
    gpu = worker.gpu
    return (
        "-" if worker.version is None else f"{worker.version}{f' (-{behind})' if behind > 0 else ''}",
        *rates,
        f"{gpu['own'] / 1e9:.3g} of {gpu['total'] / 1e9:.3g} GB" if gpu else "-",
    )


def _runs(worker: WorkerStatus) -> str:
    runs = "; ".join(worker.doing[:2]) + (f" and {len(worker.doing) - 2} more" if len(worker.doing) > 2 else "")
    return "down" if worker.problem else runs
