"""The base class of all services, and the context that a worker gives its service."""

import asyncio
import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from structlog.typing import FilteringBoundLogger

from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError, Refused
from asyncrl.fleet.worker.compute_thread import ThreadCompute, record_profile
from asyncrl.fleet.worker.process_memory import gpu_use, resident_bytes
from asyncrl.fleet.worker.rank_meeting import LOOPBACK, NETWORK, RankMeeting
from asyncrl.fleet.worker.worker_spec import Implementation, RunFacts, WorkerSpec
from asyncrl.lanes.bound_socket import host_of, on_tcp
from asyncrl.lanes.data.recorder import LaneRecorder
from asyncrl.lanes.data.row_file import READY_ROWS, store_again
from asyncrl.lanes.data.row_store import RowRetention, RowStore
from asyncrl.lanes.weights.handover import WeightHandover
from asyncrl.protocols.batch import Array, BatchRef, Place, SampleName
from asyncrl.protocols.messages import Health, Profile
from asyncrl.protocols.service_contracts import EndpointSpec
from asyncrl.telemetry.state_clock import STATES, Occupancy, StateClock
from asyncrl.telemetry.trace import Tracer

if TYPE_CHECKING:
    from asyncrl.lanes.data.row_reader import RowReader
    from asyncrl.lanes.weights.transports.transport_ends import WeightNetwork


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Everything that a service gets from its worker.

    reader: reads rows of other workers. compute: runs torch calls. clock, occupancy: book the worker's time. tasks: for
    what the service runs beside calls; an error in one ends the worker, and all are cancelled at its end. open_rows:
    makes the store for rows of this worker, once per worker, from the number of slots and the bytes of the longest row;
    rows take the memory that they have. rank_meeting: where the ranks of a layout with several of them meet.
    recorder: records what crosses the lanes, where the run is recorded. handover: of weights within this process, where
    trainer and generation share it.
    """

    spec: WorkerSpec
    reader: "RowReader"
    compute: ThreadCompute
    clock: StateClock
    occupancy: Occupancy
    tracer: Tracer
    log: FilteringBoundLogger
    tasks: asyncio.TaskGroup
    open_rows: Callable[[int, int], RowStore]
    rank_meeting: RankMeeting = field(default_factory=RankMeeting)
    recorder: LaneRecorder | None = None
    handover: WeightHandover | None = None

    @property
    def facts(self) -> RunFacts:
        return self.spec.facts

    @property
    def config(self) -> Config:
        return self.spec.facts.config

    def weight_network(self) -> "WeightNetwork":
        """Returns what this worker's end of the weight lane needs of a network. It listens where the worker listens for
        readers of rows."""
        from asyncrl.lanes.weights.chunk_codec import WireCodec
        from asyncrl.lanes.weights.transports.transport_ends import WeightNetwork  # It imports torch.

        data = self.spec.addresses.data
        host = host_of(data) if data.startswith(NETWORK) else LOOPBACK
        codec = WireCodec[self.config.weights.codec.upper()]
        device = (self.config.training if self.spec.service == "training" else self.config.generation).device
        wire = self.reader.wire
        return WeightNetwork(wire, on_tcp(host, "*"), self.spec.hello, self.tasks, codec, self.facts.heartbeat, device)


RENEW = "renew"
"""Call of the controller on the work lane, which takes the next incarnation of the run and its checkpoint folder."""

CALLS_CHECK = 0.01
"""Seconds between two looks at whether calls still run."""


class Service:
    """Base of all services: `class GenerationService(Service, Generation)`.

    Endpoints run as tasks on the event loop; work of more than a few milliseconds goes through `context.compute.run`.
    rows: to be set in `start`, with `context.open_rows`, by a service that makes rows. counters: numbers for health.
    running: label and start, in loop time, of each call being served. renews: whether the service can go on in the next
    incarnation of the run; a subclass whose state of samples `renew` does not forget says no, and is started again.
    """

    endpoints: ClassVar[dict[str, EndpointSpec]]
    renews: ClassVar[bool] = False

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.rows: RowStore | None = None
        self._retention = RowRetention()
        self.counters: dict[str, float] = {}
        self.running: dict[object, tuple[str, float]] = {}

    @cached_property
    def ready(self) -> asyncio.Future[None]:
        """Resolves when `start` has returned, and holds the error of a start that failed."""
        return asyncio.get_running_loop().create_future()

    async def begin(self) -> None:
        """Calls `start`; `started` then returns or raises what it raised, of any class: a supervised boundary."""
        handover = self.context.handover
        is_guest = self.context.spec.guest is None
        try:
            if handover is not None and is_guest:
                await handover.trainer_began.wait()
            await self.start()
        except Exception as error:  # every failure to start is raised where the fleet is started
            self.context.log.error("could not start", error=repr(error))
            self.ready.set_exception(error)
        else:
            self.ready.set_result(None)
        finally:
            if handover is not None and not is_guest:
                handover.trainer_began.set()

    async def start(self) -> None:
        """Loads what calls need; calls wait for it. Its errors are raised where the fleet is started."""

    async def stop(self) -> None:
        """Frees everything. No call runs any more; `start` may have been cancelled."""
        if self.rows is not None:
            self.rows.close()

    async def renew(self, facts: RunFacts) -> None:
        """Goes on in another incarnation of the run: waits for the calls of the one before, of which no more come, and
        forgets its samples. Raises Refused where the service has to be started again instead."""
        if not self.renews or self.context.recorder is not None:
            raise Refused(f"{self.context.spec.instance} goes on in no other incarnation")
        while True:  # Calls that end notify nobody.
            if not self.running:
                break
            await asyncio.sleep(CALLS_CHECK)
        if self.rows is not None:
            self.rows.clear()
        self._retention = RowRetention()
        log = self.context.log.bind(incarnation=facts.incarnation)
        self.context = replace(self.context, spec=replace(self.context.spec, facts=facts), log=log)

    @property
    def weights_version(self) -> int | None:
        """Returns the version of the policy's weights that the service has, for health; None: it has none."""
        return None

    def add_to_counters(self, **added: float) -> None:
        """Adds to counters, such as samples=8."""
        for name, number in added.items():
            self.counters[name] = self.counters.get(name, 0.0) + number

    @property
    def queued(self) -> int:
        """Functions that wait for the compute thread, for health."""
        return max(0, self.context.compute.queued - 1)

    @property
    def finished(self) -> int:
        """Parts of the work finished so far. A worker at which it rises, or which answers calls, does not hang."""
        return self.context.compute.finished

    async def started(self) -> None:
        await asyncio.shield(self.ready)

    async def health(self) -> list[Health]:
        spec = self.context.spec
        now = asyncio.get_running_loop().time()
        wall, seconds = self.context.clock.spent()
        doing = [f"{label} for {now - since:.1f} s" for label, since in self.running.values()]
        own = Health(
            service=spec.service,
            replica=spec.replica,
            rank=spec.rank,
            instance=spec.instance,
            doing=tuple(doing if self.ready.done() else ["starting", *doing]),
            queued=self.queued,
            seconds=seconds,
            wall=wall,
            counters=self.counters | self._row_counters(),
            cpu=time.process_time(),
            memory=resident_bytes(),
            version=self.weights_version,
            gpu=gpu_use(self.context.spec.device),
        )
        return [own]

    def _row_counters(self) -> dict[str, float]:
        found = {"row_bytes_read": float(self.context.reader.bytes_read)}
        return found if self.rows is None else found | {"rows_refused": float(self.rows.refused)}

    async def tensor_digests(self) -> Mapping[str, tuple[str, float]]:
        """Returns digest and norm of each tensor that calls change, for recordings; none by default."""
        return {}

    @property
    def unprofiled_because(self) -> str:
        """Returns why torch's profiler sees nothing of this service; "" where it does."""
        return "it computes without torch" if self.context.spec.origin == "plain" else ""

    async def profile(self, seconds: float) -> list[Profile]:
        if why := self.unprofiled_because:
            raise Refused(f"torch's profiler sees nothing of {self.context.spec.instance}: {why}")
        return [await record_profile(self.context.compute, seconds)]

    async def release(self, samples: list[SampleName], oldest: int) -> None:
        if self.rows is not None:
            self.rows.free(self._retention.release(samples, oldest))

    async def owner_lost(self, instance: str) -> None:
        self.context.reader.give_up(instance)

    def keep(self, sample: SampleName, columns: Mapping[str, Array]) -> Place:
        """Stores a row for readers until its sample is released; the row of an older attempt is freed at once. Raises
        ArenaFull, which health counts as `rows_refused`, when more rows were admitted than fit."""
        assert self.rows is not None, "`start` of a service with rows opens them"
        if self.context.recorder is not None:
            self.context.recorder.kept(sample, columns)
        place = self.rows.put(columns)
        self.rows.free(self._retention.add(sample, place))
        return place

    def check_incarnation(self, incarnation: int, subject: str) -> None:
        """Raises Refused for what belongs to another start of the run."""
        own = self.context.facts.incarnation
        if incarnation != own:
            raise Refused(
                f"{subject} has incarnation {incarnation}; {self.context.spec.instance} has incarnation {own}"
            )

    async def restored_rows(self, directory: str, samples: BatchRef) -> BatchRef:
        """Stores the rows of samples that a checkpoint has, and returns their references."""
        facts = self.context.facts
        folder = facts.checkpoint_dir or Path(directory)  # Both are the same, but this host may have a copy elsewhere.
        with await asyncio.to_thread(open, folder / READY_ROWS, "rb") as file:
            return await store_again(file, samples, facts.incarnation, self.keep)

    async def idle_because(self, state: str) -> None:
        if state not in STATES:
            raise ValueError(f"{state!r} is no state of a worker's time; the states are {', '.join(STATES)}")
        self.context.clock.idle_because(state)


def load_implementation(implementation: Implementation) -> Callable[[WorkerContext], Service]:
    """Returns the factory of a service: imports "module:Class", returns a callable as it is. Raises ConfigError when
    there is no such module or class."""
    if not isinstance(implementation, str):
        return implementation
    module, _, name = implementation.partition(":")
    try:
        made: Callable[[WorkerContext], Service] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"no service {implementation!r}: {error}") from error
    return made
