"""Measures messages and batches between processes, beside limits of the machine and other systems.

A call passes the handle, the client and the worker process (server, dispatcher, tracing), and returns. A rollout batch
is 64 samples of 1,024 tokens: six tensors, 852,480 bytes; the receiver of every system reads the last value of each.
By reference, the batch is written into shared memory and read there; as frames, it crosses the socket. Each round
measures all systems in turn; the first round is discarded. `bench/rivals/setup` makes the environments of other
systems; a system without an environment is skipped.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from asyncrl.bench.measurements import RoundValues, at_least, goal_line
from asyncrl.bench.message_flood import Ticks, receive_messages, receive_messages_plainly
from asyncrl.bench.transfer_speed.asyncrl_calls import asyncrl_calls
from asyncrl.bench.transfer_speed.machine_limits import machine_limits
from asyncrl.deploy.process.fork_client import FRAME_MALLOC

SCRIPTS = {"ray": "ray_calls.py", "xoscar": "xoscar_calls.py", "transferqueue": "transferqueue_calls.py"}
START_DEADLINE = 120.0
ROUND_DEADLINE = 60.0
STOP_DEADLINE = 15.0
"""Seconds for another system to start (TransferQueue needs 40), to run one round, and to end."""

RIVALS = Path(__file__).resolve().parents[1] / "rivals"
LINE_BYTES = 2**20
FLOOD = 60_000
"""Messages of a flood."""
Results = Mapping[str, float]
Round = Mapping[str, Results]
"""The results of each system in one round; systems that do not run are missing."""

Metric = tuple[str, str]
"""A system and one of its results."""


@dataclass(frozen=True, slots=True)
class Goal:
    """Bounds the ratio above / below. at_most: the bound is an upper bound, else a lower bound. below is None where
    the value itself is bounded."""

    name: str
    label: str
    bound: float
    above: Metric
    below: Metric | None
    at_most: bool = False

    def ratios(self, rounds: Sequence[Round]) -> list[float]:
        """Returns the ratio of every round that has both values."""
        found = []
        for each in rounds:
            with suppress(KeyError):
                below = each[self.below[0]][self.below[1]] if self.below else 1.0
                found.append(each[self.above[0]][self.above[1]] / below)
        return found


def _slower(metric: str, than: str, theirs: str = "") -> tuple[Metric, Metric]:
    """Divides the time of the other system by ours."""
    return (than, theirs or metric), ("asyncrl", metric)


def _more(metric: str, than: str, theirs: str = "") -> tuple[Metric, Metric]:
    """Divides our value by that of the other system."""
    return ("asyncrl", metric), (than, theirs or metric)


def _frames_over_rows(way: str) -> tuple[Metric, Metric]:
    return _slower(f"{way}_ms", "asyncrl", f"frames_{way}_ms")


GOALS = (
    Goal("G1", "64 B round trip over an asyncio echo", 3.0, *_more("rtt_p50_us", "limits"), at_most=True),
    Goal("G1", "64 B round trip, Ray over ours", 5.0, *_slower("rtt_p50_us", "ray")),
    Goal("G2", "1 MB batch one at a time, Ray over ours", 10.0, *_slower("batch_ms", "ray")),
    Goal("G2", "1 MB batch one at a time, xoscar over ours", 5.0, *_slower("batch_ms", "xoscar")),
    Goal("G2", "1 MB batches pipelined over cold memcpy", 0.5, *_more("piped_gb_s", "limits", "memcpy_gb_s")),
    Goal("G3", "64 MB over cold memcpy", 0.8, *_more("large_gb_s", "limits", "memcpy_gb_s")),
    Goal("G3", "64 MB, ours over Ray", 2.0, *_more("large_gb_s", "ray")),
    Goal("G3", "64 MB, ours over xoscar", 20.0, *_more("large_gb_s", "xoscar")),
    Goal("G4", "64 MB frames over zmq.asyncio", 2.0, *_more("frames_large_gb_s", "limits", "zmq_gb_s")),
    Goal("G4", "64 MB frames over a Unix socket", 0.45, *_more("frames_large_gb_s", "limits", "unix_gb_s")),
    Goal("G5", "gather 64 MB, frames over rows in place", 3.0, *_frames_over_rows("gather_large")),
    Goal("G5", "gather 1 MB, frames over rows in place", 3.0, *_frames_over_rows("gather_small")),
    Goal("G5", "scatter 64 MB, frames over rows", 1.3, *_frames_over_rows("scatter_large")),
    Goal("G5", "scatter 1 MB, frames over rows", 1.3, *_frames_over_rows("scatter_small")),
    Goal("G7", "loop stall in a flood of 60,000, ms", 10.0, ("asyncrl", "stall_ours_ms"), None, at_most=True),
    Goal("G7", "CPU of a message, zmq.asyncio over ours", 5.0, *_slower("flood_ours_us", "limits", "flood_zmq_us")),
)


def result_lines(rounds: Sequence[Round]) -> Iterator[str]:
    """Yields the median and the range of each metric, system by system."""
    for system in dict.fromkeys(name for each in rounds for name in each):
        yield f"{system}:"
        results = [each[system] for each in rounds if system in each]
        for metric in results[0]:
            yield f"  {metric:26} {RoundValues(tuple(each[metric] for each in results if metric in each))}"


def goal_lines(rounds: Sequence[Round]) -> Iterator[str]:
    """Yields each goal beside the measured ratio."""
    for goal in GOALS:
        label = f"{goal.name}  {goal.label:40}"
        if ratios := goal.ratios(rounds):
            measured = RoundValues(tuple(ratios))
            yield goal_line(f"{label} {measured}", measured.median, goal.bound, at_most=goal.at_most)
        else:
            yield f"          {label} not measured"


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("asyncrl-bench channels", description=__doc__)
    parser.add_argument("--rounds", type=at_least(1), default=6, help="number of rounds; the first is discarded")
    names = list(SCRIPTS)
    parser.add_argument("--rivals", nargs="*", default=names, choices=names, help="other systems")
    parser.add_argument("--json", type=Path, help="write every round to this file")
    options = parser.parse_args(arguments)
    _with_frame_malloc(arguments)
    rounds = asyncio.run(measure(options.rounds, options.rivals))
    if options.json:
        options.json.write_text(json.dumps(rounds, indent=1) + "\n")
    print("\n".join([*result_lines(rounds), "", *goal_lines(rounds)]))


def _with_frame_malloc(arguments: Sequence[str]) -> None:
    """Restarts this process with the malloc settings of receivers of frames: malloc reads them when it starts."""
    if any(os.environ.get(name) != value for name, value in FRAME_MALLOC.items()):
        command = [sys.executable, "-c", "from asyncrl.bench.cli import main; main()", "channels", *arguments]
        os.execve(sys.executable, command, {**os.environ, **FRAME_MALLOC})
    for name in FRAME_MALLOC:
        del os.environ[name]  # The settings apply to this process, not to its children.


async def measure(rounds: int, rivals: Sequence[str]) -> list[Round]:
    """Returns the results of every round except the first."""
    found: list[Round] = []
    async with AsyncExitStack() as scope:
        folder = Path(scope.enter_context(tempfile.TemporaryDirectory(prefix="asyncrl-bench-")))
        others = await _start_rivals(scope, rivals)
        limits = await scope.enter_async_context(machine_limits(folder))
        calls = await scope.enter_async_context(asyncrl_calls(folder))
        plain, ours = (f"ipc://{folder}/flood-{name}" for name in ("zmq", "ours"))
        for number in range(rounds):
            began = time.perf_counter()
            flooded = _of_flood("zmq", await receive_messages_plainly(plain, FLOOD))
            each: dict[str, Results] = {"limits": {**await limits.measure(), **flooded}}
            flooded = _of_flood("ours", await receive_messages(ours, FLOOD))
            each["asyncrl"] = {**await calls.measure(), **flooded}
            for name, process in list(others.items()):
                if (results := await _run_round(name, process)) is not None:
                    each[name] = results
                else:
                    del others[name]
            took = time.perf_counter() - began
            load = os.getloadavg()[0]
            print(f"round {number}: {took:.1f} s, load average {load:.2f} on {os.cpu_count()} cores", flush=True)
            found.append(each)
    return found[1:] or found


def _of_flood(name: str, ticks: Ticks) -> Results:
    """Returns CPU microseconds per message, and the longest delay in ms of a task that wakes every TICK."""
    return {f"flood_{name}_us": 1e6 * ticks.process / (FLOOD - 1), f"stall_{name}_ms": 1e3 * ticks.stall}


# ---- other systems -------------------------------------------------------------------------------------------


async def _start_rivals(scope: AsyncExitStack, rivals: Sequence[str]) -> dict[str, Process]:
    """Returns the systems that started. They start one by one, because two Ray clusters that start together connect
    to each other."""
    others = {}
    for name in rivals:
        python = RIVALS.parents[1] / ".venvs" / name / "bin" / "python"
        if not python.exists():
            print(f"{name} is skipped: {python} does not exist; run bench/rivals/setup {name}", flush=True)
            continue
        process = await scope.enter_async_context(_process(python, SCRIPTS[name]))
        ready = await _next_results(process, START_DEADLINE)
        if ready is None:
            print(f"{name} is skipped: it did not start within {START_DEADLINE:g} s", flush=True)
            continue
        print(f"{name} runs: {ready['ready']}", flush=True)
        others[name] = process
    return others


@asynccontextmanager
async def _process(python: Path, script: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *(str(python), script), stdin=PIPE, stdout=PIPE, stderr=DEVNULL, cwd=RIVALS, limit=LINE_BYTES
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), STOP_DEADLINE)
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _run_round(name: str, process: Process) -> Results | None:
    assert process.stdin is not None
    with suppress(ConnectionError):
        process.stdin.write(b"round\n")
        await process.stdin.drain()
    results = await _next_results(process, ROUND_DEADLINE)
    if results is None:
        print(f"{name} is skipped from here on: it reported no results within {ROUND_DEADLINE:g} s", flush=True)
    return results


async def _next_results(process: Process, deadline: float) -> dict[str, float] | None:
    """Returns the next line of JSON; other lines are log output of the system."""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(deadline):
            while line := await process.stdout.readline():
                if line.startswith(b"{"):
                    values: dict[str, float] = json.loads(line)
                    return values
    except TimeoutError:
        return None
    return None
