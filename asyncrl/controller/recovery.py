"""Takes a run back to its newest checkpoint when a worker that learns dies, while the other workers stay.

    trainer or critic dies ──> the controller ends ──> all that learn are killed ──> the journal is resumed
         ^                                                                                    │
         └──── the next controller <── trainer and critics load the checkpoint <── other workers are renewed

The journal, the gate and the workers see what they see when the command is run again after exit status 75: another
incarnation that goes on from the checkpoint. What becomes of each worker:

    trainer and critics     are killed, and start again once those of the others that answer are ready
    others that `renew`     forget the samples of the incarnation before; processes, models and engines stay
    others that refuse      or do not answer in time, are killed and started again
    others without a host   start when one joins: the run goes on with one replica of each service
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, TypeVar

from asyncrl.concurrency import running_beside
from asyncrl.controller.journal.checkpoints import ResumePlan, versions
from asyncrl.controller.journal.run_storage import Folders
from asyncrl.errors import AsyncrlError, FleetFailed, PeerLost
from asyncrl.fleet.fleet import FAILURE_NOTICE, RunningFleet
from asyncrl.fleet.health import HEALTH
from asyncrl.fleet.supervisor import DRAIN_CHECK, Learners, RunningInstance
from asyncrl.fleet.worker.service import RENEW
from asyncrl.fleet.worker.worker_spec import RunFacts
from asyncrl.lanes.shared_memory import unlink_segment
from asyncrl.protocols.service_contracts import Lane

# ---- workers, taken into the next incarnation ----------------------------------------------------------------------


PROMPT = 4.0
"""Seconds after which one of several replicas is given up that shows no sign of life, when another one has come along:
it may be stopped, or its host cut off."""
RENEWAL_DEADLINE = 10.0
"""Seconds for a worker to end the calls of an incarnation, which were cancelled, and to forget its samples."""


async def end_learners(running: RunningFleet) -> None:
    """Kills all workers that learn, and forgets what the fleet knows of the samples in
    flight. No call runs."""
    await running.supervisor.end_learners()
    unlink_segment(running.facts.weights_arena)
    running.meetings.forget({slot.worker.service for slot in running.supervisor.slots(learning=True)})
    running.fault_domains.isolated.clear()
    for replicas in running.workers.values():
        replicas.holders.clear()


async def begin_incarnation(running: RunningFleet, facts: RunFacts) -> None:
    """Takes all workers into the incarnation of these facts, and returns once they take calls, or a worker that learns
    died again."""
    running.facts = facts
    await _renew_others(running)
    learners = running.supervisor.learners
    assert learners is not None, "the run goes back to a checkpoint"
    learners.start_again()
    # Each start has its deadline, after which the worker counts as dead.
    while not learners.lost.done():
        if _is_complete(running):
            return
        await asyncio.sleep(DRAIN_CHECK)


def _is_complete(running: RunningFleet) -> bool:
    """Returns whether all workers that learn take calls, and at least one replica of each other service."""
    learning, others = (running.supervisor.slots(learning=each) for each in (True, False))
    wanted = {slot.worker.service for slot in others if slot.is_awaited and slot.wanted.is_set()}
    return all(slot.worker.alive for slot in learning) and all(
        any(replica.alive for replica in running.workers[each].replicas) for each in wanted
    )


async def _renew_others(running: RunningFleet) -> None:
    """Returns once every worker that does not learn is of the present incarnation, or will be when it is started. The
    end of one on another host, which may be cut off, is not waited for, nor another host that joins."""
    done: set[str] = set()
    slots = running.supervisor.slots(learning=False)
    for slot in slots:
        if slot.is_joined:
            slot.end_wait()  # For a host that starts an instance of the incarnation before.
    while True:
        present = [found for slot in slots if (found := running.supervisor.instances.get(slot.worker.name)) is not None]
        old = [each for each in present if each.spec.facts is not running.facts and each.spec.instance not in done]
        if not old and all(slot.spawning is None or slot.is_joined for slot in slots):
            return
        for each, problem in await _renew_all(running, old):
            if problem:
                running.supervisor.replace(each, f"the run went back to a checkpoint, and it did not: {problem}")
            if not problem or each.slot.is_joined:
                done.add(each.spec.instance)
        await asyncio.sleep(DRAIN_CHECK)


async def _renew_all(running: RunningFleet, old: list[RunningInstance]) -> list[tuple[RunningInstance, str]]:
    """Returns each instance with what kept it from going on, "" for nothing. One of several replicas that shows no sign
    of life is waited for until another one has come along, and for PROMPT seconds."""
    if not old:
        return []
    began = asyncio.get_running_loop().time()
    async with asyncio.TaskGroup() as tasks:
        work = {tasks.create_task(_problem_of_renewal(running, each), name="renewal"): each for each in old}
        _, late = await asyncio.wait(work, timeout=PROMPT)
        while late:
            ended = [task for task in work if task.done() and not task.cancelled()]
            served = {work[task].spec.service for task in ended if not task.result()}
            for task in late:
                if work[task].spec.service in served and work[task].slot.worker.last_answer_at < began:
                    task.cancel()
            _, late = await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED)
    silent = f"no sign of life within {PROMPT:g} s"
    return [(each, silent if task.cancelled() else task.result()) for task, each in work.items()]


async def _problem_of_renewal(running: RunningFleet, instance: RunningInstance) -> str:
    """Has an instance go on in the present incarnation; returns what keeps it from that."""
    worker = instance.slot.worker
    facts = running.facts
    if not worker.alive or worker.instance != instance.spec.instance:
        return "it takes no calls now"  # It is being started, or dead.
    try:
        await worker.call(HEALTH, (), RENEWAL_DEADLINE)  # Behind all calls of the control lane.
        checkpoint = str(facts.checkpoint_dir)
        await instance.connection.channels[Lane.WORK].call(RENEW, (facts.incarnation, checkpoint), RENEWAL_DEADLINE)
    except AsyncrlError as error:
        return str(error)
    return ""


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
