"""Runs one worker on the current event loop, from its specification to its end.

    control socket ── Server ──┐
                               ├── Dispatcher ── one task per call ── Service method ── compute thread
    work socket    ── Server ──┘   (span, log ids, time booking)

Each lane has a socket and a receiving task of its own, so health and pause are answered while work is busy.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from structlog.contextvars import bind_contextvars
from structlog.typing import FilteringBoundLogger

from asyncrl.errors import Refused, UnknownEndpoint
from asyncrl.fleet.worker.compute_thread import ThreadCompute
from asyncrl.fleet.worker.lane_access import ADMIT, Admit
from asyncrl.fleet.worker.rank_meeting import MEET, RankMeeting
from asyncrl.fleet.worker.service import RENEW, Service, WorkerContext, load_implementation
from asyncrl.fleet.worker.worker_spec import WorkerSpec
from asyncrl.lanes.control.server import Dispatch, Server
from asyncrl.lanes.control.wire import Wire
from asyncrl.lanes.data.recorder import REPLAYED, LaneRecorder, RecordFiles, RecordingReader
from asyncrl.lanes.data.row_reader import RowReader, serve_rows
from asyncrl.lanes.data.row_store import RowStore, open_rows
from asyncrl.lanes.shared_memory import segment_name
from asyncrl.lanes.weights.handover import WeightHandover
from asyncrl.protocols.batch import BatchRef, is_divisible
from asyncrl.protocols.messages import Call, PromptGroup
from asyncrl.protocols.service_contracts import Lane
from asyncrl.telemetry.logs import open_log
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.telemetry.state_clock import Occupancy, StateClock
from asyncrl.telemetry.trace import Tracer

# ---- calls, turned into method calls of the service ----------------------------------------------------------------


class Dispatcher:
    """Runs the calls of one lane. Each call is a span; on the work lane its time is booked as well."""

    _UNTRACED = frozenset({"health", "started"})

    def __init__(self, service: Service, lane: Lane) -> None:
        self._service = service
        self._lane = lane
        self._booking = service.context.occupancy.serving if lane is Lane.WORK else nullcontext

    def __call__(self, call: Call) -> Awaitable[Any] | AsyncIterator[Any]:
        """Runs one call. Raises UnknownEndpoint when the contract declares no such endpoint on this lane."""
        spec = self._service.endpoints.get(call.method)
        if spec is None or spec.lane is not self._lane:
            raise UnknownEndpoint(
                f"{type(self._service).__name__} has no {call.method!r} on its {self._lane.value} lane"
            )
        return self._stream(call) if spec.stream else self._answer(call)

    async def _answer(self, call: Call) -> Any:
        if call.method in self._UNTRACED:
            return await getattr(self._service, call.method)(*call.args)
        if not self._service.ready.done():
            await self._service.started()
        with self._traced(call):
            return await getattr(self._service, call.method)(*call.args)

    async def _stream(self, call: Call) -> AsyncIterator[Any]:
        if not self._service.ready.done():
            await self._service.started()
        with self._traced(call):
            async with aclosing(getattr(self._service, call.method)(*call.args)) as items:
                async for item in items:
                    yield item

    def _traced(self, call: Call) -> "_TracedCall":
        ids = _ids_in(call.args)
        # Never unbound: these variables belong to the call's own task, which ends with it.
        bind_contextvars(call=call.method, **ids)
        shown = f" ({', '.join(f'{name} {value}' for name, value in ids.items())})" if ids else ""
        span = self._service.context.tracer.span(call.method, **ids)
        return _TracedCall(self._service.running, call.method + shown, self._booking(), span)


@dataclass(slots=True, eq=False)
class _TracedCall(AbstractContextManager[None]):
    """Surrounds a call with its span, its entry in the service's running calls, and the booking of its time."""

    running: dict[object, tuple[str, float]]
    shown: str
    booking: AbstractContextManager[None]
    span: AbstractContextManager[None]

    def __enter__(self) -> None:
        self.running[self] = (self.shown, asyncio.get_running_loop().time())
        self.booking.__enter__()
        self.span.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self.span.__exit__(*raised)
        self.booking.__exit__(*raised)
        del self.running[self]


def _ids_in(args: tuple[Any, ...]) -> dict[str, int]:
    """Returns the group and the number of rows that a call is about, for logs and traces."""
    found: dict[str, int] = {}
    for arg in args:
        if isinstance(arg, PromptGroup):
            found.setdefault("group", arg.id)
        elif is_divisible(arg):
            found.setdefault("rows", len(arg))
            if isinstance(arg, BatchRef) and len({row.group for row in arg}) == 1:
                found.setdefault("group", arg.rows[0].group)
    return found


MISSED_HEARTBEATS = 30
"""Heartbeats that the controller may miss before its calls are given up: 300 s, while its file system hangs. The calls
of one that died end with the worker, which its host ends for the next controller."""


class Instruments(NamedTuple):
    """Clock, tracer and log of one worker."""

    clock: StateClock
    tracer: Tracer
    log: FilteringBoundLogger


@contextmanager
def instruments(spec: WorkerSpec) -> Iterator[Instruments]:
    """Opens trace and log in the run directory's `logs`, named after the instance, for the block."""
    facts = spec.facts
    logs = spec.facts.run_dir / "logs"
    trace = logs / f"{spec.instance}.trace.jsonl" if facts.config.telemetry.trace else None
    ids = {"service": spec.service, "rank": spec.rank, "instance": spec.instance, "incarnation": facts.incarnation}
    with (
        closing(Tracer(trace, f"{spec.service}{spec.replica}.{spec.rank}")) as tracer,
        open_log(logs / f"{spec.instance}.jsonl", **ids) as log,
    ):
        yield Instruments(StateClock(time.monotonic), tracer, log)


OpenInstruments = Callable[[WorkerSpec], AbstractContextManager[Instruments]]


class _Finished(Exception):
    """Leaves the worker's task group, which cancels the tasks that still run."""


async def run_worker(
    spec: WorkerSpec,
    wire: Wire,
    stop: asyncio.Event,
    open_instruments: OpenInstruments = instruments,
    admit: Admit = lambda callers: None,
    handover: WeightHandover | None = None,
) -> None:
    """Serves until `stop` is set, then stops the service. Raises what the tasks of the service raise. admit: has the
    listeners of this worker accept other callers. handover: shared with another worker of this process."""
    spec = spec.on_own_device()
    make_service = load_implementation(spec.implementation)
    try:
        with recording(spec) as recorder:
            async with asyncio.TaskGroup() as tasks, _reader(spec, wire, recorder) as reader:
                with (
                    open_instruments(spec) as (clock, tracer, log),
                    closing(ThreadCompute(Occupancy(clock))) as compute,
                    closing(RankMeeting.at(spec.addresses.control)) as ranks,
                ):
                    rows = partial(_open_rows, spec, wire, tasks)
                    beside = (tracer, log, tasks, rows, ranks, recorder, handover)
                    service = make_service(WorkerContext(spec, reader, compute, clock, compute.occupancy, *beside))
                    try:
                        await _serve(service, wire, tasks, stop, admit)
                    finally:
                        await service.stop()
                    raise _Finished
    except* _Finished:
        pass


@contextmanager
def recording(spec: WorkerSpec) -> Iterator[LaneRecorder | None]:
    """Opens the records of this instance for the block, where the run is recorded and its service can be replayed."""
    gigabytes = spec.facts.config.telemetry.record_gb
    if gigabytes == 0 or spec.service not in REPLAYED:
        yield None
        return
    folder = RunDirectory(spec.facts.run_dir).recorded
    first = ("worker", spec.without_secrets())
    with closing(RecordFiles(folder, spec.instance, int(gigabytes * (1 << 30)), first)) as files:
        yield LaneRecorder(files)


def _reader(spec: WorkerSpec, wire: Wire, recorder: LaneRecorder | None) -> RowReader:
    if recorder is None:
        return RowReader(wire, spec.hello, heartbeat=spec.facts.heartbeat)
    return RecordingReader(wire, spec.hello, heartbeat=spec.facts.heartbeat, recorder=recorder)


async def _serve(service: Service, wire: Wire, tasks: asyncio.TaskGroup, stop: asyncio.Event, admit: Admit) -> None:
    spec = service.context.spec
    own: dict[Lane, dict[str, Any]] = {
        Lane.CONTROL: {"queued": False},
        Lane.WORK: {"finished": lambda: service.finished},
    }
    listeners = {lane: wire.listen(getattr(spec.addresses, lane.value)) for lane in Lane}
    serving = []
    for lane, listener in listeners.items():
        calls = _with_own_calls(_dispatch(service, lane), lane, service, admit)
        seen = {"heartbeat": spec.facts.heartbeat, "may_miss": MISSED_HEARTBEATS, **own[lane]}
        server = Server(listener, calls, spec.hello, **seen)
        serving.append(tasks.create_task(server.serve(), name=f"{lane.value} lane"))
    starting = tasks.create_task(service.begin(), name="start")
    await stop.wait()
    for task in (starting, *serving):
        task.cancel()
    await asyncio.wait([starting, *serving])


def _dispatch(service: Service, lane: Lane) -> Dispatch:
    """Returns what runs the calls of one lane, and records them where the run is recorded."""
    dispatcher = Dispatcher(service, lane)
    recorder = service.context.recorder
    if recorder is None:
        return dispatcher
    return recorder.around(dispatcher, REPLAYED[service.context.spec.service], service.tensor_digests)


OWN_CALLS = {
    Lane.CONTROL: {ADMIT: "the callers of each lane", MEET: "the address at which ranks meet"},
    Lane.WORK: {RENEW: "a number and a folder"},
}
"""Calls of each lane that are the worker's own, with what they take."""


def _with_own_calls(dispatch: Dispatch, lane: Lane, service: Service, admit: Admit) -> Dispatch:
    """Returns what runs the calls of a lane: those of the service, and the worker's own. The one that takes it into the
    next incarnation of the run comes behind all calls and cancellations that were sent before."""
    context = service.context

    async def own(call: Call) -> Any:
        match call.method, call.args:
            case "admit", (dict(callers),):
                return admit(callers)
            case "meet", (str(address),):
                return context.rank_meeting.take(address)
            case "renew", (int(incarnation), str(checkpoint)) if not isinstance(incarnation, bool):
                await service.started()
                return await service.renew(service.context.facts.renewed(incarnation, Path(checkpoint)))
        raise Refused(f"{call.method} takes {OWN_CALLS[lane][call.method]}, not {call.args!r:.100}")

    return lambda call: own(call) if call.method in OWN_CALLS[lane] else dispatch(call)


def _open_rows(spec: WorkerSpec, wire: Wire, tasks: asyncio.TaskGroup, slots: int, row_bytes: int) -> RowStore:
    """Opens the rows of this worker: in shared memory when it has room and the socket is for readers on this host."""
    data = spec.addresses.data
    owner = f"{spec.reached_at('data')}#{spec.instance}"
    if data.startswith("ipc://") and spec.facts.shared_rows:
        name = segment_name(spec.facts.run, spec.facts.incarnation, spec.instance, "rows")
        store = open_rows(name, slots, row_bytes, owner)
    else:
        store = RowStore.private(owner, slots, row_bytes)
    if store.address == owner:
        server = Server(wire.listen(data), serve_rows(store), spec.hello, heartbeat=spec.facts.heartbeat)
        tasks.create_task(server.serve(), name="data lane")
    return store
