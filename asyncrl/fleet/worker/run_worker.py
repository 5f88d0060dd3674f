"""Runs one worker on the current event loop, from its specification to its end."""

import asyncio
import importlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from structlog.typing import FilteringBoundLogger

from asyncrl import __version__
from asyncrl.errors import ConfigError
from asyncrl.fleet.worker.compute_thread import Compute, Occupancy
from asyncrl.fleet.worker.dispatcher import Dispatcher
from asyncrl.fleet.worker.service import Service, WorkerContext
from asyncrl.fleet.worker.worker_spec import RunFacts, WorkerSpec
from asyncrl.lanes.control.server import Dispatch, Server
from asyncrl.lanes.control.wire import Wire
from asyncrl.lanes.data.row_reader import RowReader, serve_rows
from asyncrl.lanes.data.row_store import HeapRows, RowStore, open_rows
from asyncrl.lanes.shared_memory import segment_name
from asyncrl.protocols.contracts import Lane
from asyncrl.protocols.messages import PROTOCOL, Hello
from asyncrl.telemetry.logs import open_log
from asyncrl.telemetry.state_clock import StateClock
from asyncrl.telemetry.trace import Tracer


@dataclass(frozen=True, slots=True)
class Instruments:
    """Clock, tracer and log of one worker."""

    clock: StateClock
    tracer: Tracer
    log: FilteringBoundLogger


@contextmanager
def instruments(spec: WorkerSpec) -> Iterator[Instruments]:
    """Opens trace and log in the run directory's `logs`, named after the instance, for the block."""
    facts, logs = spec.facts, Path(spec.facts.run_dir) / "logs"
    trace = logs / f"{spec.instance}.trace.jsonl" if facts.config.telemetry.trace else None
    ids = {"service": spec.service, "rank": spec.rank, "instance": spec.instance, "incarnation": facts.incarnation}
    with ExitStack() as scope:
        tracer = Tracer(trace, f"{spec.service}{spec.replica}.{spec.rank}")
        scope.callback(tracer.close)
        log = scope.enter_context(open_log(logs / f"{spec.instance}.jsonl", **ids))
        yield Instruments(StateClock(time.monotonic), tracer, log)


OpenInstruments = Callable[[WorkerSpec], AbstractContextManager[Instruments]]


class _Finished(Exception):
    """Leaves the worker's task group, which cancels the tasks that still run."""


def identity(facts: RunFacts, service: str, rank: int, instance: str) -> Hello:
    """Returns the hello that a worker or the controller sends on a new connection."""
    return Hello(facts.run, facts.incarnation, service, rank, instance, PROTOCOL, __version__)


async def run_worker(
    spec: WorkerSpec,
    wire: Wire,
    make_compute: Callable[[Occupancy], Compute],
    stop: asyncio.Event,
    open_instruments: OpenInstruments = instruments,
) -> None:
    """Serves until `stop` is set, then stops the service. Raises what the tasks of the service raise."""
    make_service = load(spec.implementation)
    try:
        async with asyncio.TaskGroup() as tasks, _context(spec, wire, make_compute, tasks, open_instruments) as context:
            service = make_service(context)
            try:
                await _serve(spec, wire, service, tasks, stop)
            finally:
                await service.stop()
            raise _Finished
    except* _Finished:
        pass


async def _serve(spec: WorkerSpec, wire: Wire, service: Service, tasks: asyncio.TaskGroup, stop: asyncio.Event) -> None:
    servers = {
        lane: _server(spec, wire, getattr(spec.addresses, lane.value), Dispatcher(service, lane)) for lane in Lane
    }
    serving = [tasks.create_task(server.serve(), name=f"{lane.value} lane") for lane, server in servers.items()]
    starting = tasks.create_task(service.begin(), name="start")
    await stop.wait()
    for task in (starting, *serving):
        task.cancel()
    await asyncio.wait([starting, *serving])


def _server(spec: WorkerSpec, wire: Wire, address: str, dispatch: Dispatch) -> Server:
    hello = identity(spec.facts, spec.service, spec.rank, spec.instance)
    return Server(wire.listen(address), dispatch, hello, heartbeat=spec.facts.heartbeat)


@asynccontextmanager
async def _context(
    spec: WorkerSpec,
    wire: Wire,
    make_compute: Callable[[Occupancy], Compute],
    tasks: asyncio.TaskGroup,
    open_instruments: OpenInstruments,
) -> AsyncIterator[WorkerContext]:
    facts = spec.facts
    hello = identity(facts, spec.service, spec.rank, spec.instance)
    async with RowReader(wire, hello, heartbeat=facts.heartbeat) as reader:
        with ExitStack() as scope:
            used = scope.enter_context(open_instruments(spec))
            occupancy = Occupancy(used.clock)
            compute = make_compute(occupancy)
            scope.callback(compute.close)
            yield WorkerContext(
                config=facts.config,
                run=facts.run,
                run_dir=Path(facts.run_dir),
                model_dir=Path(facts.model_dir),
                checkpoint_dir=Path(facts.checkpoint_dir) if facts.checkpoint_dir else None,
                incarnation=facts.incarnation,
                service=spec.service,
                replica=spec.replica,
                rank=spec.rank,
                layout=spec.layout,
                instance=spec.instance,
                weights_arena=facts.weights_arena,
                reader=reader,
                compute=compute,
                clock=used.clock,
                occupancy=occupancy,
                tracer=used.tracer,
                log=used.log,
                tasks=tasks,
                row_store=_row_store(spec, wire, tasks),
                options=spec.options,
            )


def _row_store(spec: WorkerSpec, wire: Wire, tasks: asyncio.TaskGroup) -> Callable[[int, int], RowStore]:
    """Returns what opens the rows of this worker: in shared memory when its socket is for readers on this host."""

    def open_store(slots: int, slot_bytes: int) -> RowStore:
        data = spec.addresses.data
        owner = f"{data}#{spec.instance}"
        if data.startswith("ipc://"):
            name = segment_name(spec.facts.run, spec.facts.incarnation, spec.instance, "rows")
            store = open_rows(name, slots, slot_bytes, owner)
        else:
            store = HeapRows(owner, slots, slot_bytes)
        if store.address == owner:
            tasks.create_task(_server(spec, wire, data, serve_rows(store)).serve(), name="data lane")
        return store

    return open_store


def load(implementation: object) -> Callable[[WorkerContext], Service]:
    """Returns the factory of a service: imports "module:Class", returns a callable as it is.

    Raises:
        ConfigError: there is no such module or class.
    """
    if not isinstance(implementation, str):
        assert callable(implementation), implementation
        return implementation
    module, _, name = implementation.partition(":")
    try:
        made: Callable[[WorkerContext], Service] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"no service {implementation!r}: {error}") from error
    return made
