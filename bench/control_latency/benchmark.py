"""Measures the latency of control calls beside queued work, and the loop stalls of a message flood.

Queued work: calls that each train for a quarter of a second wait at one worker, hundreds on each of several
connections, while the caller times pauses, health calls and aborts. An abort lasts from closing a stream until the
worker confirms that it stopped. Flood: small messages and small calls drain through one socket while a task of the same
loop wakes every millisecond; the same task without messages shows the stalls that the machine causes.
"""

import argparse
import asyncio
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np

from asyncrl.bench.control_latency.busy_service import Busy
from asyncrl.bench.control_latency.message_flood import TICK, receive_messages, serve_calls, ticking
from asyncrl.bench.measurements import MachineLoad, at_least, goal_line
from asyncrl.bench.rivals.call_timing import seconds_of_async
from asyncrl.config.sources import load
from asyncrl.deploy.process.local_launcher import LocalLauncher
from asyncrl.engines.models.model_preparation import prepare
from asyncrl.fleet.fleet import RunningFleet, ServiceSpec, running_fleet
from asyncrl.fleet.worker.worker_spec import RunFacts
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.wire import CREDIT
from asyncrl.lanes.control.zmq_wire import ZmqWire

LATENCY_GOAL = 0.050
STALL_GOAL = 0.010
"""Seconds, at most."""
DEADLINE = 600.0
"""Seconds for the queued calls to run."""
PAUSE_BETWEEN = 0.005
"""Seconds between two probes, so that they meet the compute thread at different moments."""


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("asyncrl-bench lanes", description=__doc__)
    parser.add_argument("--calls", type=at_least(1), default=1000, help="work calls that wait at the worker")
    parser.add_argument("--probes", type=at_least(1), default=300, help="number of calls of each kind that are timed")
    parser.add_argument("--messages", type=at_least(1), default=60_000, help="messages of a flood")
    loads = ["torch", "python"]
    parser.add_argument("--loads", nargs="*", default=loads, choices=loads, help="work that is queued")
    options = parser.parse_args(arguments)
    load_of_machine = MachineLoad()
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        for load_kind in options.loads:
            asyncio.run(queued_work(Path(folder), load_kind, options.calls, options.probes))
        asyncio.run(floods(Path(folder), options.messages))
    print(f"  {load_of_machine}")


# ---- control calls beside queued work ------------------------------------------------------------------------


async def queued_work(folder: Path, kind: str, calls: int, probes: int) -> None:
    config = load("quickstart").config
    model = folder / "model"
    if kind == "torch" and not model.exists():
        await prepare(config, model, lambda text: None)
    facts = RunFacts(secrets.token_hex(4), folder, model, 0, "none", config)
    spec = ServiceSpec("loaded", Busy, "asyncrl.bench.control_latency.busy_service:BusyService", options={"load": kind})
    with LocalLauncher(run=facts.run) as launcher:
        async with running_fleet([spec], facts, launcher=launcher) as running:
            handle = running.handle("loaded", Busy)
            async with _queued_calls(running, launcher, handle, calls) as queued:
                measured = await _time_probes(handle, probes)
                print(f"{kind} steps, {queued} work calls queued at the worker, {probes} calls of each kind:")
                for probe, seconds in measured.items():
                    _show(probe, seconds)
                print(f"  the worker ran {(await handle.pause()).at} steps meanwhile")


@asynccontextmanager
async def _queued_calls(running: RunningFleet, launcher: LocalLauncher, handle: Busy, calls: int) -> AsyncIterator[int]:
    """Keeps this many calls queued at the worker with additional clients; each client gets CREDIT calls in flight."""
    facts = running.facts
    instance = running.workers["loaded"].worker(0, 0).instance
    async with AsyncExitStack() as scope:
        wire = ZmqWire()
        scope.callback(wire.close)
        waiting: list[asyncio.Future[Any]] = []
        scope.callback(lambda: [call.cancel() for call in waiting])
        for start in range(0, calls, CREDIT):
            hello = facts.hello("controller", start, f"caller-{start}")
            connection = wire.connect(launcher.addresses(instance).work)
            client = await scope.enter_async_context(Client(connection, hello, "loaded", instance=instance))
            share = min(CREDIT, calls - start)
            waiting += [asyncio.ensure_future(client.call("step", (), DEADLINE)) for _ in range(share)]
        async with asyncio.timeout(DEADLINE):
            while (queued := (await handle.health())[0].queued) < 0.9 * calls:
                continue  # Each health call lets the worker receive more of them.
        yield queued
        for call in waiting:
            call.cancel()
        await asyncio.wait(waiting)


async def _time_probes(handle: Busy, probes: int) -> dict[str, list[float]]:
    measured: dict[str, list[float]] = {"pause": [], "resume": [], "health": [], "abort": []}
    for number in range(probes):
        for probe, call in (("pause", handle.pause), ("resume", handle.resume), ("health", handle.health)):
            measured[probe] += await seconds_of_async(call, 1)
        async with aclosing(cast(Any, handle.samples(number))) as samples:
            await anext(samples)
            began = time.perf_counter()
            await samples.aclose()
            await handle.aborted(number)
            measured["abort"].append(time.perf_counter() - began)
        await asyncio.sleep(PAUSE_BETWEEN)
    return measured


def _show(probe: str, seconds: Sequence[float]) -> None:
    median, late, worst = (1e3 * np.percentile(seconds, share) for share in (50, 99, 100))
    label = f"{probe:7} p50 {median:6.2f} ms, longest {worst:6.2f} ms, p99 in ms"
    print(goal_line(label, late, 1e3 * LATENCY_GOAL, at_most=True))


# ---- a flood through one socket ------------------------------------------------------------------------------


async def floods(folder: Path, messages: int) -> None:
    """Prints the stalls of each flood beside those of the same task, for as long, without messages."""
    print(f"{messages} small messages through one socket, while a task wakes every {1e3 * TICK:.0f} ms:")
    for kind, receive in (("messages", receive_messages), ("calls", serve_calls)):
        flooded = await receive(f"ipc://{folder}/{kind}", messages)
        with ticking() as alone:
            await asyncio.sleep(flooded.seconds)
        late = 1e3 * (np.percentile(flooded.wall, 99) - TICK)
        print(f"  {kind}: {messages / flooded.seconds:.0f} a second; stalls p99 {late:.2f} ms")
        print(goal_line("longest stall, ms", 1e3 * flooded.stall, 1e3 * STALL_GOAL, at_most=True))
        computing = f"at most {1e3 * max(flooded.computing):.2f} ms of it CPU time"
        print(f"          {computing}; longest stall without messages: {1e3 * alone.stall:.2f} ms")
