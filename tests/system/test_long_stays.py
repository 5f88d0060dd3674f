"""Six minutes of a run on three network hosts: two have been in it for longer than any timeout when its controller is
stopped, cut off, killed, and lost with its host. Each time both go on, or join again, and no program ends by itself."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from asyncrl.controller.journal.audit import audit
from tests.chaos.chaos_command import FLAGS
from tests.chaos.fleet_on_hosts import FleetOnHosts, fleet_on_hosts
from tests.chaos.trial import WHOLE
from tests.network_hosts import why_no_hosts

STAY = 310.0
"""Seconds, more than the 300 that a host waits for a controller, and than each other timeout of a fleet."""
STILL = 15.0
"""Seconds after which hosts have noticed that their controller stands still, and tried to reach it."""
pytestmark = [pytest.mark.fleet, pytest.mark.long, pytest.mark.timeout(STAY + 10 * WHOLE)]


@asynccontextmanager
async def running(fleet: FleetOnHosts) -> AsyncIterator[None]:
    """Keeps the run and its programs alive during the block, which begins once steps are trained, and ends the run."""
    async with asyncio.TaskGroup() as tasks:
        kept = [tasks.create_task(fleet.keep(each), name=each.name) for each in fleet.programs]
        looks = tasks.create_task(fleet.look(), name="look")
        await trains(fleet)
        yield
        await fleet.end()
        await asyncio.wait(kept)
        looks.cancel()


async def trains(fleet: FleetOnHosts) -> None:
    """Waits until all workers take calls, and a few more steps are trained."""
    watch = fleet.watch
    since = len(fleet.watch.steps)
    await fleet.until(lambda: watch.is_whole and len(watch.steps) > since + 3, "all workers, and steps", WHOLE)


async def passes(fleet: FleetOnHosts, seconds: float) -> None:
    until = time.monotonic() + seconds
    await fleet.until(lambda: time.monotonic() >= until, "the end of a time", 2 * seconds)


def controller_of(fleet: FleetOnHosts) -> int:
    assert fleet.controller is not None, "steps were trained a moment ago"
    return fleet.controller


async def replaced(fleet: FleetOnHosts, former: int) -> None:
    await fleet.until(lambda: fleet.controller not in (None, former), "the next controller", WHOLE)
    await trains(fleet)


async def play(fleet: FleetOnHosts) -> None:
    async with running(fleet):
        there = [each.process for each in fleet.programs]
        await passes(fleet, STAY)
        first = controller_of(fleet)
        os.kill(first, signal.SIGSTOP)
        await passes(fleet, STILL)
        os.kill(first, signal.SIGCONT)
        await trains(fleet)
        fleet.hosts.cut(1)
        await passes(fleet, STILL)
        fleet.hosts.heal(1)
        await trains(fleet)
        assert controller_of(fleet) == first, "it stood still, and went on"
        os.kill(first, signal.SIGKILL)
        await replaced(fleet, first)
        assert [each.process for each in fleet.programs] == there, "--restarts replaces it"
        second = controller_of(fleet)
        fleet.kill_hosts((1,))
        fleet.down.clear()
        await replaced(fleet, second)
        assert [each.process for each in fleet.programs[1:]] == there[1:]


def test_hosts_that_stayed_longer_than_any_timeout_join_each_controller(quickstart_model: Path, tmp_path: Path) -> None:
    if why := why_no_hosts():
        pytest.skip(why)
    with fleet_on_hosts(tmp_path, "quickstart", [*FLAGS, "--model.name", str(quickstart_model)]) as fleet:
        asyncio.run(play(fleet))
    assert fleet.failures == []
    assert fleet.stay >= STAY
    assert fleet.controllers == 3
    assert audit(tmp_path / "run").ok
