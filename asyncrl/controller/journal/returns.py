"""Takes a run back to its newest checkpoint when a worker that learns dies, while the other workers stay.

    trainer or critic dies ──> the controller ends ──> all that learn are killed ──> the journal is resumed
         ^                                                                                    │
         └──── the next controller <── trainer and critics load the checkpoint <── other workers are renewed

The journal, the gate and the workers see what they see when the command is run again after exit status 75: another
incarnation that goes on from the checkpoint.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, TypeVar

from asyncrl.concurrency import running_beside
from asyncrl.controller.journal.checkpoints import ResumePlan, versions
from asyncrl.controller.journal.run_storage import Folders
from asyncrl.errors import FleetFailed, PeerLost
from asyncrl.fleet.changes.renewal import begin_incarnation, end_learners
from asyncrl.fleet.fleet import FAILURE_NOTICE, RunningFleet
from asyncrl.fleet.supervisor import Learners


class Incarnation(Protocol):
    """State of a run from its beginning, or from a checkpoint."""

    @property
    def plan(self) -> ResumePlan | None: ...

    @property
    def incarnation(self) -> int: ...


State = TypeVar("State", bound=Incarnation)


def can_return(running: RunningFleet) -> bool:
    """Returns whether the other workers of a fleet can outlive those that learn, which start again: none is inside
    their processes, and none that learns has to wait for a host that joins."""
    return not any(spec.inside or (spec.joined and not spec.restart) for spec in running.specs.values())


async def train_with_returns(
    running: RunningFleet,
    state: State,
    train: Callable[[State], Awaitable[None]],
    resumed: Callable[[State], Awaitable[State]],
    store: Folders,
    *,
    most: int,
    may_return: Callable[[], bool] = lambda: True,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Trains to the end; after the death of a worker that learns from what `resumed` returns, the next incarnation.

    store: of the run. most: returns to one checkpoint; the next death without a newer one ends the run as FleetFailed.
    So does any while `may_return` is false.
    """
    supervisor = running.supervisor
    returns = Counter[int]()
    if most and can_return(running):
        supervisor.learners = Learners()
    while True:
        subscribers = list(running.subscribers)
        try:
            return await _train(running, state, train)
        except (PeerLost, FleetFailed):
            running.subscribers[:] = subscribers
            learners = supervisor.learners
            lost = await why_lost(running)
            if learners is None or lost is None:
                raise
            made = versions(store)
            if not made or returns[made[-1]] == most or not may_return():
                learners.give_up()
                raise
        await end_learners(running)
        state = await resumed(state)
        assert state.plan is not None, "it has checkpoints"
        returns[state.plan.version] += 1
        say(f"{lost}; the run goes on from its checkpoint of step {state.plan.version}, and its other workers stay")
        await begin_incarnation(running, running.facts.renewed(state.incarnation, Path(state.plan.directory)))


async def _train(running: RunningFleet, state: State, train: Callable[[State], Awaitable[None]]) -> None:
    learners = running.supervisor.learners
    if learners is not None and learners.lost.done():
        raise FleetFailed(learners.lost.result())  # Already while it started.
    async with running_beside({} if learners is None else {"workers that learn": learners.watch()}):
        await train(state)


async def why_lost(running: RunningFleet) -> str | None:
    """Returns why a worker that learns died, which is known a moment after calls to it failed; None: none did."""
    learners = running.supervisor.learners
    if learners is None:
        return None
    if not learners.killed and all(slot.worker.alive for slot in running.supervisor.slots(learning=True)):
        return None
    await asyncio.wait([learners.lost], timeout=FAILURE_NOTICE)
    return learners.lost.result() if learners.lost.done() else None
