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
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np

from asyncrl.bench.measurements import MachineLoad, at_least, goal_line
from asyncrl.bench.message_flood import TICK, receive_messages, serve_calls, ticking
from asyncrl.bench.rivals.call_timing import seconds_of_async
from asyncrl.config.sources import load
from asyncrl.deploy.process.local_launcher import LocalLauncher
from asyncrl.engines.models.model_preparation import prepare
from asyncrl.fleet.fleet import RunningFleet, ServiceSpec, running_fleet
from asyncrl.fleet.worker.service import Service
from asyncrl.fleet.worker.worker_spec import RunFacts
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.wire import CREDIT
from asyncrl.lanes.control.zmq_wire import ZmqWire
from asyncrl.protocols.distribute_collect import ONE_OF, ONE_TO_ALL
from asyncrl.protocols.messages import Boundary
from asyncrl.protocols.service_contracts import Contract, Lane, endpoint

# Serves the worker that `asyncrl-bench lanes` loads: work calls that train, and control calls that overtake them.
#
# Worker processes import this module.


ROWS = 32
PROMPT = 16
RESPONSE = 48
"""A training step of about a quarter of a second on one core with the quickstart's model."""
BUSY_SECONDS = 0.25


class Busy(Contract):
    """Declares endpoints of the work lane and of the control lane."""

    @endpoint(ONE_OF)
    async def step(self) -> None:
        """Runs one step on the compute thread, after the steps that were queued before."""
        raise NotImplementedError

    @endpoint(ONE_OF, stream=True)
    def samples(self, number: int) -> AsyncIterator[int]:
        """Yields `number` once and then waits until the caller closes the stream."""
        raise NotImplementedError

    @endpoint(ONE_TO_ALL, lane=Lane.CONTROL)
    async def aborted(self, number: int) -> Boundary:
        """Returns once stream `number` is closed."""
        raise NotImplementedError

    @endpoint(ONE_TO_ALL, lane=Lane.CONTROL)
    async def pause(self) -> Boundary:
        """Begins no further step."""
        raise NotImplementedError

    @endpoint(ONE_TO_ALL, lane=Lane.CONTROL)
    async def resume(self) -> Boundary:
        raise NotImplementedError


class BusyService(Service, Busy):
    """Runs queued steps. options: `load`: "torch" for steps of the training engine, "python" for a thread that does not
    release the GIL."""

    async def start(self) -> None:
        self._steps = 0
        self._may_run = threading.Event()
        self._may_run.set()
        self._closed: dict[int, asyncio.Event] = {}
        make = {"torch": self._training, "python": lambda: _busy}[self.context.spec.options["load"]]
        self._work: Callable[[int], None] = await self.context.compute.run(make)

    def _training(self) -> Callable[[int], None]:
        """Makes a function that runs one step of the training engine on random rows."""
        from asyncrl.engines.training.policy_trainer import PolicyTrainer
        from asyncrl.engines.training.train_rows import TrainRow
        from asyncrl.engines.training.training_step import run_step

        engine = PolicyTrainer(self.context.config, self.context.facts.model_dir)
        tokens = np.random.default_rng(0).integers(1, 8, (ROWS, PROMPT + RESPONSE))

        def step(number: int) -> None:
            logprobs = np.full(RESPONSE, -2.0, np.float32)
            versions = np.full(RESPONSE, number)
            rows = [
                TrainRow(index, 0, 0, 0, row[:PROMPT], row[PROMPT:], logprobs, versions, float(index % 2) - 0.5)
                for index, row in enumerate(tokens)
            ]
            run_step(engine, rows, 0, number)

        return step

    async def step(self) -> None:
        def run() -> None:
            self._may_run.wait(timeout=10.0)
            self._work(self._steps)
            self._steps += 1

        await self.context.compute.run(run)

    async def samples(self, number: int) -> AsyncIterator[int]:
        closed = self._closed[number] = asyncio.Event()
        try:
            yield number
            await asyncio.Event().wait()
        finally:
            closed.set()

    async def aborted(self, number: int) -> Boundary:
        await self._closed[number].wait()
        del self._closed[number]
        return Boundary("call", self._steps)

    async def pause(self) -> Boundary:
        self._may_run.clear()
        return Boundary("training step", self._steps)

    async def resume(self) -> Boundary:
        self._may_run.set()
        return Boundary("training step", self._steps)


def _busy(number: int) -> None:
    """Computes in Python, so that the thread holds the GIL until the interpreter switches threads."""
    until = time.monotonic() + BUSY_SECONDS
    while time.monotonic() < until:
        number = number * 5 % 7


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
    spec = ServiceSpec("loaded", Busy, "asyncrl.bench.control_calls:BusyService", options={"load": kind})
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
