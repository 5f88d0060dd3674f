"""The inside of a worker: a service, what it is given, and how calls reach it.

    control socket ── Host ──┐
                             ├── Dispatcher ── one task a call ── Service method ── compute thread
    work socket    ── Host ──┘   (span, log ids, time booking)

Lanes have a socket and a receiving task each, so health and pause are answered while work is busy.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from structlog.contextvars import bind_contextvars
from structlog.typing import FilteringBoundLogger

from asyncrl.compute import Compute, Occupancy
from asyncrl.config import Config
from asyncrl.errors import UnknownEndpoint
from asyncrl.kept import Kept
from asyncrl.protocols.batch import Array, Place, SampleName, is_divisible
from asyncrl.protocols.contracts import EndpointSpec, Lane
from asyncrl.protocols.layout import Layout
from asyncrl.protocols.messages import Call, Health, PromptGroup
from asyncrl.telemetry.clock import STATES, StateClock
from asyncrl.telemetry.trace import Tracer

if TYPE_CHECKING:
    from asyncrl.row_reader import RowReader
    from asyncrl.rows import RowStore


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a service is given.

    run, epoch, service, replica, rank, layout, instance: who it is. run_dir, model_dir, checkpoint_dir, weights_arena:
    see RunFacts. options: of this service, from whoever set up the fleet.
    reader: reads rows of other workers. compute: where torch calls belong. clock, occupancy: where its time goes.
    tasks: owns what the service runs beside calls; an error there ends the worker, and all are cancelled at its end.
    """

    config: Config
    run: str
    run_dir: Path
    model_dir: Path
    checkpoint_dir: Path | None
    epoch: int
    service: str
    replica: int
    rank: int
    layout: Layout
    instance: str
    weights_arena: str
    reader: "RowReader"
    compute: Compute
    clock: StateClock
    occupancy: Occupancy
    tracer: Tracer
    log: FilteringBoundLogger
    tasks: asyncio.TaskGroup
    row_store: "Callable[[int, int], RowStore]"
    options: Mapping[str, Any] = field(default_factory=dict)

    def open_rows(self, slots: int, slot_bytes: int) -> "RowStore":
        """The store of the rows that this worker makes, once a worker; its memory is taken at once.

        Raises:
            ArenaFull: this machine has not enough memory for it.
        """
        return self.row_store(slots, slot_bytes)


class Service:
    """Base of all services: `class GenerationService(Service, Generation)`.

    Endpoints run as tasks on the event loop; whatever takes longer than a few milliseconds goes through
    `context.compute.run`. rows: set it in `start` with `context.open_rows` if the service makes rows.
    counters: numbers for health.
    """

    endpoints: ClassVar[dict[str, EndpointSpec]]

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.rows: RowStore | None = None
        self._kept = Kept()
        self.counters: dict[str, float] = {}
        self.running: dict[int, tuple[str, float]] = {}
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def begin(self) -> None:
        """Start, and let `started` tell how that went: the supervised boundary of everything a start may raise."""
        try:
            await self.start()
        except Exception as error:  # any failure to start is told to who asked for the fleet
            self.context.log.error("could not start", error=repr(error))
            self.ready.set_exception(error)
        else:
            self.ready.set_result(None)

    async def start(self) -> None:
        """Load what calls need. Calls wait until this is done; what it raises is raised where the fleet is started."""

    async def stop(self) -> None:
        """Let go of everything; no call runs any more, and `start` may not have come to its end."""
        if self.rows is not None:
            self.rows.close()

    @property
    def is_ready(self) -> bool:
        """Whether it has started well."""
        return self.ready.done() and not self.ready.cancelled() and self.ready.exception() is None

    @property
    def queued(self) -> int:
        """Work that has not begun, for health."""
        return max(0, self.context.compute.queued - 1)

    # ---- endpoints of every contract ---------------------------------------------------------------------

    async def started(self) -> None:
        await asyncio.shield(self.ready)

    async def health(self) -> list[Health]:
        context, now = self.context, asyncio.get_running_loop().time()
        spent = context.clock.spent()
        doing = [f"{label} for {now - since:.1f} s" for label, since in self.running.values()]
        mine = Health(
            service=context.service,
            replica=context.replica,
            rank=context.rank,
            instance=context.instance,
            doing=tuple(doing if self.ready.done() else ["starting", *doing]),
            queued=self.queued,
            seconds=spent.seconds,
            wall=spent.wall,
            counters=dict(self.counters),
        )
        return [mine]

    async def release(self, samples: list[SampleName], oldest: int) -> None:
        if self.rows is not None:
            self.rows.free(self._kept.let_go(samples, oldest))

    def keep(self, sample: SampleName, columns: Mapping[str, Array]) -> Place:
        """Store a row where readers find it until its sample is released. An overtaken attempt's is freed at once.

        Raises:
            ArenaFull: more rows were admitted than fit.
        """
        assert self.rows is not None, "opened in `start`"
        place = self.rows.put(columns)
        self.rows.free(self._kept.add(sample, place))
        return place

    async def idle_because(self, state: str) -> None:
        if state not in STATES:
            raise ValueError(f"{state!r} is no state of a worker's time; there are {', '.join(STATES)}")
        self.context.clock.idle_because(state)


class Dispatcher:
    """Turns the calls of one lane into method calls of a service; each is a span, and on the work lane booked."""

    _UNCOUNTED = frozenset({"health", "started"})

    def __init__(self, service: Service, lane: Lane) -> None:
        self._service, self._lane = service, lane
        self._lane_number = list(Lane).index(lane)
        self._booking = service.context.occupancy.serving if lane is Lane.WORK else nullcontext
        self._numbers = itertools.count()

    def __call__(self, call: Call) -> Awaitable[Any] | AsyncIterator[Any]:
        """Raises UnknownEndpoint for what the contract does not declare on this lane."""
        spec = self._service.endpoints.get(call.method)
        if spec is None or spec.lane is not self._lane:
            raise UnknownEndpoint(
                f"{type(self._service).__name__} has no {call.method!r} on its {self._lane.value} lane"
            )
        return self._stream(call) if spec.stream else self._answer(call)

    async def _answer(self, call: Call) -> Any:
        if call.method in self._UNCOUNTED:
            return await getattr(self._service, call.method)(*call.args)
        if not self._service.is_ready:
            await self._service.started()
        with self._attended(call):
            return await getattr(self._service, call.method)(*call.args)

    async def _stream(self, call: Call) -> AsyncIterator[Any]:
        if not self._service.is_ready:
            await self._service.started()
        with self._attended(call):
            async with aclosing(getattr(self._service, call.method)(*call.args)) as items:
                async for item in items:
                    yield item

    def _attended(self, call: Call) -> "_Attended":
        return _Attended(self._service, call, next(self._numbers) * len(Lane) + self._lane_number, self._booking())


class _Attended:
    """One `with` around a call that is being served: its span, its entry in what runs, where its time is booked."""

    __slots__ = ("_booking", "_number", "_running", "_span")

    def __init__(self, service: Service, call: Call, number: int, booking: AbstractContextManager[None]) -> None:
        subject = _subject(call.args)
        # Not unbound afterwards: these are variables of the call's own task, which ends with it.
        bind_contextvars(call=call.method, **subject)
        self._number, self._running, self._booking = number, service.running, booking
        self._running[number] = (_label(call, subject), asyncio.get_running_loop().time())
        self._span = service.context.tracer.span(call.method, **subject)

    def __enter__(self) -> None:
        self._booking.__enter__()
        self._span.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._span.__exit__(*raised)
        self._booking.__exit__(*raised)
        del self._running[self._number]


def _subject(args: tuple[Any, ...]) -> dict[str, int]:
    """What a call is about, in ids that can be searched for."""
    found: dict[str, int] = {}
    for arg in args:
        if isinstance(arg, PromptGroup):
            found.setdefault("group", arg.id)
        elif is_divisible(arg):
            found.setdefault("rows", len(arg))
    return found


def _label(call: Call, subject: dict[str, int]) -> str:
    if not subject:
        return call.method
    return f"{call.method} ({', '.join(f'{name} {value}' for name, value in subject.items())})"
