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
from asyncrl.compute import Compute, Occupancy
from asyncrl.errors import ConfigError
from asyncrl.launch import RunFacts, WorkerSpec
from asyncrl.memory import segment_name
from asyncrl.protocols.contracts import Lane
from asyncrl.protocols.messages import PROTOCOL, Hello
from asyncrl.row_reader import RowReader, serve_rows
from asyncrl.rows import HeapRows, RowStore, open_rows
from asyncrl.service import Dispatcher, Service, WorkerContext
from asyncrl.telemetry.clock import StateClock
from asyncrl.telemetry.logs import open_log
from asyncrl.telemetry.trace import Tracer
from asyncrl.wire.ends import Wire
from asyncrl.wire.host import Dispatch, Host


@dataclass(frozen=True, slots=True)
class Instruments:
    """What a worker's time and doings are written with."""

    clock: StateClock
    tracer: Tracer
    log: FilteringBoundLogger


@contextmanager
def instruments(spec: WorkerSpec) -> Iterator[Instruments]:
    """Files in the run directory's `logs`, named by the instance; closed at the end of the block."""
    facts, logs = spec.facts, Path(spec.facts.run_dir) / "logs"
    trace = logs / f"{spec.instance}.trace.jsonl" if facts.config.telemetry.trace else None
    who = {"service": spec.service, "rank": spec.rank, "instance": spec.instance, "epoch": facts.epoch}
    with ExitStack() as scope:
        tracer = Tracer(trace, f"{spec.service}{spec.replica}.{spec.rank}")
        scope.callback(tracer.close)
        log = scope.enter_context(open_log(logs / f"{spec.instance}.jsonl", **who))
        yield Instruments(StateClock(time.monotonic), tracer, log)


OpenInstruments = Callable[[WorkerSpec], AbstractContextManager[Instruments]]


class _Finished(Exception):
    """Leaves the worker's task group, which cancels what still runs in it."""


def identity(facts: RunFacts, service: str, rank: int, instance: str) -> Hello:
    """How a worker or the controller introduces itself on a link."""
    return Hello(facts.run, facts.epoch, service, rank, instance, PROTOCOL, __version__)


async def run_worker(
    spec: WorkerSpec,
    wire: Wire,
    make_compute: Callable[[Occupancy], Compute],
    stop: asyncio.Event,
    open_instruments: OpenInstruments = instruments,
) -> None:
    """Serve until `stop` is set, then let the service finish. Raises what tasks of the service's own raise."""
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
    hosts = [tasks.create_task(_host(spec, wire, service, lane).serve(), name=f"{lane.value} lane") for lane in Lane]
    starting = tasks.create_task(service.begin(), name="start")
    await stop.wait()
    for task in (starting, *hosts):
        task.cancel()
    await asyncio.wait([starting, *hosts])


def _host(spec: WorkerSpec, wire: Wire, service: Service, lane: Lane) -> Host:
    return _listen(spec, wire, getattr(spec.addresses, lane.value), Dispatcher(service, lane))


def _listen(spec: WorkerSpec, wire: Wire, address: str, dispatch: Dispatch) -> Host:
    who = identity(spec.facts, spec.service, spec.rank, spec.instance)
    return Host(wire.listen(address), dispatch, who, heartbeat=spec.facts.heartbeat)


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
                epoch=facts.epoch,
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
    """Opens the rows of this worker: in shared memory where its socket says that readers are on this host."""

    def open_store(slots: int, slot_bytes: int) -> RowStore:
        data = spec.addresses.data
        owner = f"{data}#{spec.instance}"
        if data.startswith("ipc://"):
            name = segment_name(spec.facts.run, spec.facts.epoch, spec.instance, "rows")
            store = open_rows(name, slots, slot_bytes, owner)
        else:
            store = HeapRows(owner, slots, slot_bytes)
        if store.address == owner:
            tasks.create_task(_listen(spec, wire, data, serve_rows(store)).serve(), name="data lane")
        return store

    return open_store


def load(implementation: object) -> Callable[[WorkerContext], Service]:
    """What makes the service: "module:Class" imported, anything callable as it is.

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
