"""Instances that are asked to leave, on virtual time, under the supervisor."""

import asyncio
from contextlib import suppress

import pytest

from tests.unit.fleet.test_supervisor import Stage, acting


@pytest.mark.parametrize(("works_for", "is_drained"), [(5.0, 1), (30.0, 0)])
def test_an_instance_that_is_to_leave_ends_when_its_work_or_its_time_does(works_for: float, is_drained: int) -> None:
    async def play(stage: Stage) -> None:
        await stage.wait_for_live()
        began, (replica,) = asyncio.get_running_loop().time(), stage.workers.replicas
        with replica:  # A call that chose it runs there.
            assert stage.supervisor.retire(stage.worker.instance, 20.0)
            assert not replica.free
            assert replica.alive
            with suppress(TimeoutError):
                async with asyncio.timeout(works_for):
                    await stage.connections[-1].lost.wait()
        await stage.connections[-1].lost.wait()
        assert asyncio.get_running_loop().time() - began == pytest.approx(min(works_for, 20), abs=0.2)
        await stage.wait_for_live()
        assert replica.free, "the next instance takes calls"

    stage = acting(play)
    assert (stage.left, stage.drained) == (1, is_drained)
    assert stage.processes[0].requests == ["stop"]
    assert not stage.supervisor.retire("echo0.0-0-0", 1.0), "it is gone"
