"""Messages and batches between processes, with everything that a call passes, beside limits and other systems.

A call goes handle, link, worker process (host, dispatcher, tracing), and back. A rollout batch is 64 samples of 1,024
tokens: six tensors, 852,480 bytes; receivers look at the last value of each, in every system. By reference it is put
into shared memory and looked at where it lies; as frames it crosses the socket. Rounds take all systems in turn; the
first is thrown away. Other systems run in environments made by `bench/peers/setup`, and are skipped without them.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

from asyncrl.bench.channel_fleet import ours
from asyncrl.bench.channel_goals import Results, Round, table, verdicts
from asyncrl.bench.limits import Limits
from asyncrl.deploy.local import FRAME_MALLOC

SCRIPTS = {"ray": "ray_calls.py", "xoscar": "xoscar_calls.py", "transferqueue": "transferqueue_calls.py"}
START_DEADLINE, ROUND_DEADLINE, STOP_DEADLINE = 120.0, 60.0, 15.0
"""Seconds for another system to start (TransferQueue needs 40), for one round of it, and to end."""

PEERS = Path(__file__).resolve().parent / "peers"
LINE_BYTES = 2**20


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("asyncrl-bench channels", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="the first is thrown away")
    parser.add_argument("--peers", nargs="*", default=list(SCRIPTS), choices=list(SCRIPTS))
    parser.add_argument("--json", type=Path, help="write every round to this file")
    asked = parser.parse_args(arguments)
    _with_frame_malloc(arguments)
    found = asyncio.run(measure(asked.rounds, asked.peers))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join([*table(found), "", *verdicts(found)]))


def _with_frame_malloc(arguments: Sequence[str]) -> None:
    """Start again with the memory settings of processes that receive rows as frames: malloc reads them at the start."""
    if any(os.environ.get(name) != value for name, value in FRAME_MALLOC.items()):
        command = [sys.executable, "-c", "from asyncrl.bench.cli import main; main()", "channels", *arguments]
        os.execve(sys.executable, command, {**os.environ, **FRAME_MALLOC})
    for name in FRAME_MALLOC:
        del os.environ[name]  # of this process only, not of those that it starts


async def measure(rounds: int, peers: Sequence[str]) -> list[Round]:
    """Every round but the first."""
    found: list[Round] = []
    async with AsyncExitStack() as scope:
        folder = Path(scope.enter_context(tempfile.TemporaryDirectory(prefix="asyncrl-bench-")))
        others = await _started(scope, peers)
        limits = await scope.enter_async_context(Limits(folder, os.environ))
        mine = await scope.enter_async_context(ours(folder, FRAME_MALLOC))
        for number in range(rounds):
            began = time.perf_counter()
            each: dict[str, Results] = {"limits": await limits.measure()}
            each["asyncrl"] = {**await mine.measure(), **await limits.flood_ours()}
            for name, process in list(others.items()):
                if (results := await _round_of(name, process)) is not None:
                    each[name] = results
                else:
                    del others[name]
            took, load = time.perf_counter() - began, os.getloadavg()[0]
            print(f"round {number}: {took:.1f} s, load average {load:.2f} on {os.cpu_count()} cores", flush=True)
            found.append(each)
    return found[1:] or found


# ---- other systems -------------------------------------------------------------------------------------------


async def _started(scope: AsyncExitStack, peers: Sequence[str]) -> dict[str, Process]:
    """Those that came up. One after the other: two Ray clusters that start at once find each other."""
    others = {}
    for name in peers:
        python = PEERS.parents[1] / ".venvs" / name / "bin" / "python"
        if not python.exists():
            print(f"{name} skipped: no {python}; bench/peers/setup {name} makes it", flush=True)
            continue
        process = await scope.enter_async_context(_process(python, SCRIPTS[name]))
        ready = await _line(process, START_DEADLINE)
        if ready is None:
            print(f"{name} skipped: it did not start within {START_DEADLINE:g} s", flush=True)
            continue
        print(f"{name} is up: {ready['ready']}", flush=True)
        others[name] = process
    return others


@asynccontextmanager
async def _process(python: Path, script: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *(str(python), script), stdin=PIPE, stdout=PIPE, stderr=DEVNULL, cwd=PEERS, limit=LINE_BYTES
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


async def _round_of(name: str, process: Process) -> Results | None:
    assert process.stdin is not None
    with suppress(ConnectionError):
        process.stdin.write(b"round\n")
        await process.stdin.drain()
    results = await _line(process, ROUND_DEADLINE)
    if results is None:
        print(f"{name} is left out from here: no results within {ROUND_DEADLINE:g} s", flush=True)
    return results


async def _line(process: Process, deadline: float) -> dict[str, float] | None:
    """The next line of JSON; other lines are its system's chatter."""
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
