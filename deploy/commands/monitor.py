"""`asyncrl monitor` shows what a running run does: each worker's state, load and restarts, and the last step."""

import argparse
import json
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from asyncrl.errors import ConfigError
from asyncrl.telemetry.display import shown
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.telemetry.run_status import SECONDS, RunStatus, WorkerStatus, read_status

LATE = 10 * SECONDS
"""Seconds after which a state that was not replaced is called old: a loaded machine is late by some of them."""
LONGEST_LINE = 2**20
"""Bytes at the end of metrics.jsonl in which the newest line is searched for."""
HEADINGS = ("worker", "state", "busy", "starved", "blocked", "sync", "cores", "memory", "queue", "starts", "runs")
SHARES = HEADINGS[2:6]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("asyncrl monitor", description=__doc__)
    parser.add_argument("run", type=Path, help="Name the directory of a run on this machine; Ctrl-C ends the view.")
    parser.add_argument("--once", action="store_true", help="Print the newest state and end.")
    asked = parser.parse_args(arguments)
    directory = RunDirectory(asked.run)
    status = _needed(directory)
    console = Console()
    if asked.once or not console.is_terminal:
        console.print(view(status, newest_metrics(directory.metrics), time.time()))
        return 0
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while not status.ended:
            live.update(view(status, newest_metrics(directory.metrics), time.time()), refresh=True)
            time.sleep(SECONDS)
            status = _needed(directory)
        live.update(view(status, newest_metrics(directory.metrics), time.time()), refresh=True)
    return 0


def _needed(directory: RunDirectory) -> RunStatus:
    if (status := read_status(directory.status)) is None:
        raise ConfigError(
            f"{directory.status} does not exist: name the directory of a run that has begun to train, which a run "
            "prints first"
        )
    return status


def newest_metrics(path: Path) -> Mapping[str, Any]:
    """Returns the metrics of the last step, {} before the first one."""
    if not path.exists():
        return {}
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LONGEST_LINE))
        complete = file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
    try:
        metrics: dict[str, Any] = json.loads(complete) if complete else {}
    except ValueError as error:
        raise ConfigError(f"the last line of {path} is damaged: {error}") from error
    return metrics


def view(status: RunStatus, metrics: Mapping[str, Any], now: float) -> Group:
    """Returns what the screen shows. now: Unix time in seconds."""
    age = now - status.written_at
    lines = [f"version {status.version} of {status.steps} steps; samples: {_counts(status.samples)}"]
    if status.ended:
        lines.append("The run has ended; logs/controller.jsonl says how.")
    elif age > LATE:
        lines.append(f"This state is {age:.0f} s old: the run has ended, or its machine is overloaded.")
    if metrics:
        numbers = "  ".join(f"{name} {number}" for name, number in shown(metrics))
        lines.append(f"step {metrics['step']}: {numbers}")
    return Group(*lines) if status.ended else Group(*lines, "", _table(status.workers))


def _table(workers: Iterable[WorkerStatus]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, no_wrap=True, overflow="ellipsis" if heading == HEADINGS[-1] else "fold")
    for worker in workers:
        table.add_row(*_cells(worker))
    return table


def _counts(samples: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {stage}" for stage, count in samples.items()) or "none"


def _cells(worker: WorkerStatus) -> tuple[str, ...]:
    shares = (f"{worker.shares[name]:.0%}" if name in worker.shares else "-" for name in SHARES)
    return (
        worker.name,
        worker.problem or "serves",
        *shares,
        f"{worker.cores:.2f}",
        f"{worker.memory / 1e6:,.0f} MB" if worker.memory else "-",
        f"{worker.queued}",
        f"{worker.starts}",
        "; ".join(worker.doing[:2]) + (f" and {len(worker.doing) - 2} more" if len(worker.doing) > 2 else ""),
    )
