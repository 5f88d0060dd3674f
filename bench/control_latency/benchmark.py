"""Lanes under load: how soon control calls are answered beside queued work, and how long a flood stalls a loop.

Queued work: calls that each train for a quarter of a second wait at one worker, by the hundreds on each of several
links, while pauses, health and aborts are asked for and timed by the caller. An abort counts from closing a stream to
the worker's word that it did. Flood: small messages and small calls drain through one socket, while a task of the same
loop wakes every millisecond; beside it the same task with nothing to drain, which is what this machine does by itself.
"""

import argparse
import asyncio
import os
import secrets
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from asyncrl.bench.flood import RUN
from asyncrl.bench.loaded import Loaded
from asyncrl.bench.ticking import TICK, Ticks, ticking
from asyncrl.deploy.local import LocalLauncher
from asyncrl.fleet import RunningFleet, ServiceSpec, running_fleet
from asyncrl.launch import RunFacts
from asyncrl.models import prepare
from asyncrl.protocols.messages import Call
from asyncrl.settings import load
from asyncrl.wire.ends import CREDIT, Listener
from asyncrl.wire.host import Host
from asyncrl.wire.link import Link
from asyncrl.wire.socket import ZmqWire
from asyncrl.worker import identity

ACKNOWLEDGED, STALL = 0.050, 0.010
"""Seconds: the goals."""
DEADLINE = 600.0
"""Seconds for the queued calls to be made and answered, and for a flood to be over."""
PAUSE_BETWEEN = 0.005
"""Seconds between two probes, so that they meet the compute thread at different moments."""

Measured = dict[str, list[float]]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("asyncrl-bench lanes", description=__doc__)
    parser.add_argument("--calls", type=int, default=1000, help="work calls that wait at the worker")
    parser.add_argument("--probes", type=int, default=300, help="of each kind")
    parser.add_argument("--messages", type=int, default=60_000)
    parser.add_argument("--loads", nargs="*", default=["torch", "python"], choices=["torch", "python"])
    asked = parser.parse_args(arguments)
    print(f"load average before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        for each in asked.loads:
            asyncio.run(queued_work(Path(folder), each, asked.calls, asked.probes))
        asyncio.run(floods(Path(folder), asked.messages))
    print(f"load average after: {os.getloadavg()[0]:.2f}")


# ---- control calls beside queued work ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Site:
    """The fleet of one worker, and where it listens."""

    running: RunningFleet
    launcher: LocalLauncher

    @property
    def handle(self) -> Loaded:
        return self.running.handle("loaded", Loaded)


async def queued_work(folder: Path, kind: str, calls: int, probes: int) -> None:
    async with _loaded_worker(folder, kind) as site, _queued(site, calls) as queued:
        measured = await _probed(site.handle, probes)
        print(f"{kind} steps, {queued} work calls queued at the worker, {probes} probes of each kind:")
        for what, seconds in measured.items():
            _show(what, seconds)
        steps = (await site.handle.pause()).at
        print(f"  the worker did {steps} steps meanwhile")


@asynccontextmanager
async def _loaded_worker(folder: Path, kind: str) -> AsyncIterator[Site]:
    config = load("quickstart").config
    model = folder / "model"
    if kind == "torch" and not model.exists():
        await prepare(config, model, lambda text: None)
    facts = RunFacts(secrets.token_hex(4), str(folder), str(model), 0, "none", config)
    spec = ServiceSpec("loaded", Loaded, "asyncrl.bench.loaded:LoadedService", options={"load": kind})
    with LocalLauncher(run=facts.run) as launcher:
        async with running_fleet([spec], facts, launcher=launcher) as running:
            yield Site(running, launcher)


@asynccontextmanager
async def _queued(site: Site, calls: int) -> AsyncIterator[int]:
    """Callers beside the fleet's own keep this many calls waiting at the worker; one link takes CREDIT of them."""
    facts, instance = site.running.facts, site.running.workers["loaded"].worker(0, 0).instance
    async with AsyncExitStack() as scope:
        wire = ZmqWire()
        scope.callback(wire.close)
        waiting: list[asyncio.Future[Any]] = []
        scope.callback(lambda: [call.cancel() for call in waiting])
        for start in range(0, calls, CREDIT):
            hello = identity(facts, "controller", start, f"caller-{start}")
            caller = wire.connect(site.launcher.addresses(instance).work)
            link = await scope.enter_async_context(Link(caller, hello, "loaded", instance=instance))
            share = min(CREDIT, calls - start)
            waiting += [asyncio.ensure_future(link.call("step", (), DEADLINE)) for _ in range(share)]
        async with asyncio.timeout(DEADLINE):
            while (queued := (await site.handle.health())[0].queued) < 0.9 * calls:
                continue  # each look lets the worker take more of them
        yield queued
        for call in waiting:
            call.cancel()
        await asyncio.wait(waiting)


async def _probed(handle: Loaded, probes: int) -> Measured:
    measured: Measured = {"pause": [], "resume": [], "health": [], "abort": []}
    for number in range(probes):
        measured["pause"].append(await _timed(handle.pause))
        measured["resume"].append(await _timed(handle.resume))
        measured["health"].append(await _timed(handle.health))
        async with aclosing(cast(Any, handle.samples(number))) as samples:
            await anext(samples)
            measured["abort"].append(await _timed(partial(_abort, handle, samples, number)))
        await asyncio.sleep(PAUSE_BETWEEN)
    return measured


async def _abort(handle: Loaded, samples: Any, number: int) -> None:
    await samples.aclose()
    await handle.aborted(number)


async def _timed(ask: Callable[[], Awaitable[Any]]) -> float:
    loop = asyncio.get_running_loop()
    began = loop.time()
    await ask()
    return loop.time() - began


def _show(what: str, seconds: Sequence[float]) -> None:
    median, late, worst = (1e3 * np.percentile(seconds, share) for share in (50, 99, 100))
    verdict = "reached" if late <= 1e3 * ACKNOWLEDGED else "MISSED"
    print(
        f"  {what:7} p50 {median:6.2f} ms   p99 {late:6.2f} ms   longest {worst:6.2f} ms   "
        f"goal p99 {1e3 * ACKNOWLEDGED:.0f} ms: {verdict}"
    )


# ---- a flood through one socket ------------------------------------------------------------------------------


async def floods(folder: Path, messages: int) -> None:
    print(f"{messages} small messages through one socket, a tick every {1e3 * TICK:.0f} ms beside it:")
    for kind, drain in (("messages", _taken), ("calls", _served)):
        wire = ZmqWire()
        listener = wire.listen(f"ipc://{folder}/{kind}")
        try:
            sending = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "asyncrl.bench.flood", listener.address, str(messages), kind)
            )
            async with asyncio.timeout(DEADLINE):
                await drain(listener, messages, sending)
        finally:
            wire.close()


async def _taken(listener: Listener, messages: int, sending: Process) -> None:
    """The first one says that the sender is up."""
    await listener.receive()
    with ticking() as drain:
        for _ in range(messages - 1):
            peer, _ = await listener.receive()
    await listener.send(peer, [b"all of them"])
    await sending.wait()
    await _compared("messages", messages, drain)


async def _served(listener: Listener, messages: int, sending: Process) -> None:
    begun = asyncio.Event()

    async def echo(call: Call) -> Any:
        begun.set()
        return call.args[0]

    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(Host(listener, echo, RUN).serve())
        await begun.wait()
        with ticking() as drain:
            await sending.wait()
        serving.cancel()
    await _compared("calls", messages, drain)


async def _compared(kind: str, messages: int, drain: Ticks) -> None:
    """Beside the same ticker in the same process for as long, with nothing to drain."""
    with ticking() as alone:
        await asyncio.sleep(drain.seconds)
    worst = 1e3 * drain.stall
    print(
        f"  {kind:8} {messages / drain.seconds:6.0f} a second   longest stall {worst:6.2f} ms (p99 "
        f"{1e3 * (np.percentile(drain.wall, 99) - TICK):.2f})   goal {1e3 * STALL:.0f} ms: "
        f"{'reached' if worst <= 1e3 * STALL else 'MISSED'}\n"
        f"           of it computing {1e3 * max(drain.computing):.2f} ms at most; with nothing to drain, what other "
        f"programs cost: {1e3 * alone.stall:.2f} ms"
    )
