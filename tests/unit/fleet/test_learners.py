"""Workers that learn, over processes that end when the test says so: after a death they start again together."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.controller.recovery import why_lost
from asyncrl.errors import FleetFailed
from asyncrl.fleet.supervisor import Learners
from tests.unit.fleet.test_supervisor import Stage, acting


def test_workers_that_learn_wait_for_each_other_after_a_death() -> None:
    async def play(stage: Stage) -> None:
        stage.supervisor.learners = learners = Learners()
        await stage.wait_for_live()
        await stage.kill()
        with pytest.raises(FleetFailed, match="killed by SIGKILL"):
            await stage.wait_for_live()
        await stage.supervisor.end_learners()
        assert await learners.lost == "echo0.0 died: killed by SIGKILL"
        assert len(stage.processes) == 1
        learners.start_again()
        assert not learners.lost.done()
        await asyncio.sleep(0)
        await stage.wait_for_live()
        await stage.supervisor.end_learners()
        assert [process.dead for process in stage.processes] == [True, True]
        learners.give_up()
        await asyncio.Event().wait()

    with pytest.RaisesGroup(pytest.RaisesExc(FleetFailed, match="echo0.0 died: .* Resume with: asyncrl run")):
        acting(play, restart=False)


def test_a_return_waits_for_the_death_of_a_worker_that_was_killed_because_it_hung() -> None:
    async def play(stage: Stage) -> None:
        stage.supervisor.learners = learners = Learners()
        running: Any = SimpleNamespace(supervisor=stage.supervisor)
        await stage.wait_for_live()
        assert await why_lost(running) is None, "it lives, so a failed call has another cause"
        stage.processes[0].kill = lambda: None  # type: ignore[method-assign]
        stage.supervisor.kill(stage.worker.instance)
        assert stage.worker.alive, "the kernel takes its time"
        waiting = asyncio.ensure_future(why_lost(running))
        await asyncio.sleep(0)
        await stage.kill()
        assert await waiting == "echo0.0 died: killed by SIGKILL"
        learners.start_again()
        assert not learners.killed
        await asyncio.sleep(0)
        await stage.wait_for_live()

    acting(play, restart=False)
