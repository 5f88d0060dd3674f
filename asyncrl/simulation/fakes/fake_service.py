"""The base of the fakes: rows, reading, time and death, inside a worker or called directly; instruments that write
nothing."""

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias, TypeVar, cast

import structlog

from asyncrl.config.gate_config import GateConfig
from asyncrl.controller.journal.run_storage import Store
from asyncrl.errors import ALL_SLOTS, LostRows, PeerLost
from asyncrl.fleet.worker.service import Service, WorkerContext
from asyncrl.fleet.worker.worker_runtime import Instruments
from asyncrl.fleet.worker.worker_spec import RunFacts, WorkerSpec
from asyncrl.lanes.data.row_store import RowRetention, RowStore
from asyncrl.protocols.batch import Array, Batch, BatchRef, Column, Place, SampleName
from asyncrl.telemetry.state_clock import StateClock
from asyncrl.telemetry.trace import Tracer

Pace: TypeAlias = Callable[[float], float]
"""Gives by how much longer work takes that begins at a time, in virtual seconds."""
T = TypeVar("T")

KEY = "key"
"""Column of every sampled row: group, member and attempt, so that a reader can tell that it read the right row."""
DIRECT_SLOTS = 4096
"""Rows that a fake without a worker can hold: more than any simulated run has in flight."""


class DirectContext:
    """Stands in for the context of a fake that runs in no worker; it reads rows out of the stores of other fakes."""

    def __init__(self, services: "tuple[FakeService, ...]") -> None:
        self.services = services
        self.reader = self
        self.clock = StateClock(lambda: 0.0)
        self.recorder = None

    async def read(self, samples: BatchRef, columns: Sequence[str]) -> Batch:
        """Returns these columns. Raises LostRows when any part of a row is gone, whatever its columns are."""
        rows: list[dict[str, Array]] = []
        for row in samples:
            rows.append({})
            for place in row.places:
                wanted = [name for name in columns if name in place.columns]
                rows[-1] |= zip(wanted, self._store(place).read(place, wanted), strict=True)
        return Batch({name: Column.of([row[name] for row in rows]) for name in columns})

    def _store(self, place: Place) -> RowStore:
        for service in self.services:
            if service.rows is not None and service.rows.address == place.owner:
                return service.rows
        raise LostRows(f"the owner {place.owner} of slot {place.slot} is gone", [(place.owner, ALL_SLOTS)])


class FakeService(Service):
    """Runs in the worker of `context`, or, without one, is called directly and reads the rows of `peers`.

    A fake that is called directly can die and come back as another instance.
    row_bytes: bytes of the longest row that it makes; 0: it makes none. deaths: how often it has died. disk: holds the
    files of checkpoints; None: they are real files.
    """

    renews = True
    row_bytes = 0
    disk: Store | None = None

    def __init__(self, service: str, context: WorkerContext | None, peers: "Iterable[FakeService]" = ()) -> None:
        self.is_direct = context is None
        self.service = service
        self.instance = "" if context is None else context.spec.instance
        self.incarnation = 0 if context is None else context.facts.incarnation
        self.deaths = 0
        self.pace: Pace = steady
        self._places: dict[int, Place] = {}
        self._alive = asyncio.Event()
        self._alive.set()
        super().__init__(context or cast(WorkerContext, DirectContext((*peers, self))))
        if self.is_direct:
            self._begin_instance()

    @property
    def row_slots(self) -> int:
        return GateConfig.of(self.context.config).row_slots

    async def start(self) -> None:
        if self.row_bytes:
            self.rows = self.context.open_rows(self.row_slots, self.row_bytes)

    async def renew(self, facts: RunFacts) -> None:
        await super().renew(facts)
        self._places.clear()
        self.incarnation = facts.incarnation

    async def read_checked(self, samples: BatchRef, columns: Sequence[str]) -> Batch:
        """Reads these columns and checks that every row is the one that its reference names."""
        rows = await self.read(samples, [*columns, KEY])
        for row, key in zip(samples, rows[KEY], strict=True):
            assert tuple(key.tolist()) == row.name, f"{row} led to the row of sample {tuple(key.tolist())}"
        return rows

    async def read(self, samples: BatchRef, columns: Sequence[str]) -> Batch:
        """Reads rows of other services. Raises LostRows when one is gone."""
        return await self.context.reader.read(samples, columns)

    def keep(self, sample: SampleName, columns: Mapping[str, Array]) -> Place:
        place = super().keep(sample, columns)
        self._places[place.slot] = place
        return place

    def lose_row(self, chance: random.Random) -> None:
        """Frees one of the stored rows, whoever still needs it."""
        if (rows := self.rows) is None:
            return
        stored = []
        for place in self._places.values():
            with suppress(LostRows):
                rows.read(place, ())
                stored.append(place)
        if stored:
            rows.free([chance.choice(stored)])

    @property
    def stored_rows(self) -> int:
        return 0 if self.rows is None else self.rows.used

    @property
    def stored_attempts(self) -> dict[tuple[int, int], int]:
        """Returns the attempt of each (group, member) that has a row here."""
        return self._retention.attempts()

    async def spend(self, seconds: float) -> None:
        """Spends the time of a pure call, which is repeated once. Raises PeerLost when the fake dies both times."""
        for _ in range(2):
            deaths = await self.wait_until_alive()
            await asyncio.sleep(seconds * self.pace(now()))
            if self.deaths == deaths and self._alive.is_set():
                return
        raise PeerLost(f"{self.service} died twice in one call")

    async def wait_until_alive(self) -> int:
        """Waits for the next instance, as a handle does; returns the number of deaths so far, for `check_alive`."""
        await self._alive.wait()
        return self.deaths

    def check_alive(self, deaths: int) -> None:
        """Raises PeerLost when the instance that a call went to has died since."""
        if self.deaths != deaths or not self._alive.is_set():
            raise PeerLost(f"{self.service} died during a call")

    def read_from(self, services: "Iterable[FakeService]") -> None:
        cast(DirectContext, self.context).services = tuple(services)

    def die(self) -> None:
        """Loses all rows; every running call fails."""
        self._retention = RowRetention()
        self.rows = None
        self._alive.clear()

    def come_back(self) -> None:
        self.deaths += 1
        self._begin_instance()
        self._alive.set()

    def _begin_instance(self) -> None:
        self.instance = f"{self.service}0.0-1-{self.deaths:08x}"
        if self.row_bytes:
            self.rows = RowStore.private(f"direct://{self.instance}", DIRECT_SLOTS, self.row_bytes)


async def inline(function: Callable[..., T], *args: Any) -> T:
    """Runs a function at once: work of a fake takes no time."""
    return function(*args)


def steady(now: float) -> float:
    return 1.0


def now() -> float:
    return asyncio.get_running_loop().time()


# Clock, trace and log of a simulated worker: on virtual time, and nothing is written.


@contextmanager
def quiet(spec: WorkerSpec) -> Iterator[Instruments]:
    """Opens instruments on virtual time that write nothing."""
    log = structlog.wrap_logger(None, wrapper_class=structlog.make_filtering_bound_logger("CRITICAL"))
    yield Instruments(StateClock(now), Tracer(None, spec.instance), log)
