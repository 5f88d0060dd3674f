"""One trial of chaos: brings a fleet up on hosts, does faults to it while it trains, and ends the run in order."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from asyncrl.concurrency import one_error
from tests.chaos.faults import KINDS, Fault, Kind, draw
from tests.chaos.fleet_on_hosts import FleetOnHosts
from tests.chaos.injection import Injected, inject

WHOLE = 120.0
"""Seconds that the fleet may take until all its workers take calls: at the start and after the last fault."""
AFTERWARDS = 20
"""Steps that it trains after that."""
AT_ONCE = 4
"""Faults that may overlap."""
TRAINS_AGAIN = 60.0
"""Seconds for which no other fault begins after an outage since which nothing was trained."""


@dataclass
class Trial:
    """faults: that were done. passed_over: drawn ones whose place was taken, or that found nobody."""

    fleet: FleetOnHosts
    seed: int
    seconds: float
    longest_pause: float
    kinds: tuple[Kind, ...] = KINDS
    faults: list[Injected] = field(default_factory=list)
    passed_over: int = 0
    began: float = 0.0

    def __post_init__(self) -> None:
        self._held: set[str] = set()
        self._under_way = 0
        self._has_outage = False

    async def run(self) -> None:
        """Raises RunEnded when the run ends by itself, or does not get whole again."""
        fleet = self.fleet
        watch = self.fleet.watch
        with one_error():
            async with asyncio.TaskGroup() as tasks:
                kept = [tasks.create_task(fleet.keep(each), name=each.name) for each in fleet.programs]
                looks = tasks.create_task(fleet.look(), name="look")
                await fleet.until(lambda: watch.is_whole and bool(watch.steps), "the first step", WHOLE)
                await self._do_faults()
                await fleet.until(lambda: watch.is_whole, "all workers after the last fault", WHOLE)
                steps = len(watch.steps)
                await fleet.until(lambda: len(watch.steps) >= steps + AFTERWARDS, "steps after that", WHOLE)
                await fleet.end()
                await asyncio.wait(kept)
                looks.cancel()

    async def _do_faults(self) -> None:
        self.began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for fault in self._in_time():
                while self._has_outage or self._under_way >= AT_ONCE:
                    await asyncio.sleep(0.1)
                if self._held & fault.holds:
                    self.passed_over += 1
                    continue
                self._held |= fault.holds
                self._has_outage = fault.kind.is_outage
                self._under_way += 1
                tasks.create_task(self._do(fault), name=str(fault))
                await asyncio.sleep(fault.pause)

    def _in_time(self) -> Iterator[Fault]:
        for fault in draw(self.seed, self.longest_pause, self.kinds):
            left = self.began + self.seconds - time.monotonic()
            if left <= min(kind.seconds[0] for kind in self.kinds):
                return
            if fault.seconds <= left:
                yield fault

    async def _do(self, fault: Fault) -> None:
        at = time.monotonic() - self.began
        print(f"{at:7.1f} s  {fault}", flush=True)
        try:
            if (done := await inject(fault, self.fleet)) is None:
                self.passed_over += 1
                print(f"{at:7.1f} s  nobody there: {fault}", flush=True)
                return
            self.faults.append(done)
            if fault.kind.is_outage:
                await self._until_it_trains(done.ended)
        finally:
            self._has_outage &= not fault.kind.is_outage
            self._held -= fault.holds
            self._under_way -= 1

    async def _until_it_trains(self, since: float) -> None:
        ended = time.monotonic() + TRAINS_AGAIN
        while self.fleet.watch.next_step(since) is None and time.monotonic() < ended:
            await asyncio.sleep(0.1)
