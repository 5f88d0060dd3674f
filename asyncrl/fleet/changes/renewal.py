"""Takes the workers of a fleet into the next incarnation of the run, after one that learns died.

trainer and critics     are killed, and start again from the checkpoint once all others are ready
ranks that gave it      leave their engine and meet the ranks that start again; processes stay
others that `renew`     forget the samples of the incarnation before; processes, models and engines stay
others that refuse      or do not answer in time, are killed and started again
"""

import asyncio
from collections.abc import Collection

from asyncrl.concurrency import gather
from asyncrl.errors import AsyncrlError
from asyncrl.fleet.fleet import RunningFleet
from asyncrl.fleet.supervisor import DRAIN_CHECK, Learners, RunningInstance
from asyncrl.fleet.worker.service import RENEW
from asyncrl.fleet.worker.worker_spec import RunFacts
from asyncrl.lanes.shared_memory import unlink_segment
from asyncrl.protocols.service_contracts import Contract, Lane

HEALTH = Contract.endpoints["health"]
RENEWAL_DEADLINE = 10.0
"""Seconds for a worker to end the calls of an incarnation, which were cancelled, and to forget its samples."""


async def end_learners(running: RunningFleet, kept: Collection[str] = ()) -> None:
    """Kills all workers that learn, but those with these names, and forgets what the fleet knows of the samples in
    flight. No call runs."""
    await running.supervisor.end_learners(kept)
    unlink_segment(running.facts.weights_arena)
    running.meetings.forget({slot.worker.service for slot in running.supervisor.slots(learning=True)})
    running.fault_domains.isolated.clear()
    for replicas in running.workers.values():
        replicas.holders.clear()


async def begin_incarnation(running: RunningFleet, facts: RunFacts, kept: Collection[str] = ()) -> None:
    """Takes all workers into the incarnation of these facts, and returns once they take calls, or a worker that learns
    died again. kept: names of those that learn and were not killed."""
    running.facts = facts
    await _renew_others(running)
    renewed = await _renew_ranks(running, kept)
    learners = running.supervisor.learners
    assert learners is not None, "the run goes back to a checkpoint"
    learners.start_again()
    async with asyncio.TaskGroup() as tasks:
        meetings = [tasks.create_task(_meet(running, each), name="meeting of ranks") for each in renewed]
        await _await_start(running, learners)
        for each in meetings:
            each.cancel()


async def _await_start(running: RunningFleet, learners: Learners) -> None:
    awaited = [slot for learning in (True, False) for slot in running.supervisor.slots(learning=learning)]
    # Each start has its deadline, after which the worker counts as dead.
    while not learners.lost.done():
        if all(slot.worker.alive for slot in awaited if slot.is_awaited and slot.wanted.is_set()):
            return
        await asyncio.sleep(DRAIN_CHECK)


async def _renew_ranks(running: RunningFleet, kept: Collection[str]) -> list[RunningInstance]:
    """Returns the ranks that go on in the present incarnation; the others are killed, and wait for their start."""
    present = [found for name in kept if (found := running.supervisor.instances.get(name)) is not None]
    goes_on = await gather(*(_renew(running, each) for each in present))
    renewed = [each for each, may in zip(present, goes_on, strict=True) if may]
    await running.supervisor.end_learners({each.slot.worker.name for each in renewed})
    return renewed


async def _meet(running: RunningFleet, rank: RunningInstance) -> None:
    """Tells a rank that goes on where it meets those that start again; one that cannot be told is killed."""
    seconds = running.facts.config.fleet.start_deadline
    try:
        await running.meetings.bring(rank.spec, rank.connection.channels[Lane.CONTROL], seconds)
    except AsyncrlError:
        rank.launched.kill()


async def _renew_others(running: RunningFleet) -> None:
    """Returns once every worker that does not learn is of the present incarnation, or will be when it is started."""
    renewed: set[str] = set()
    slots = running.supervisor.slots(learning=False)
    while True:
        present = [found for slot in slots if (found := running.supervisor.instances.get(slot.worker.name)) is not None]
        old = [each for each in present if each.spec.facts is not running.facts and each.spec.instance not in renewed]
        if not old and all(slot.spawning is None for slot in slots):
            return
        for each, goes_on in zip(old, await gather(*(_renew(running, each) for each in old)), strict=True):
            if goes_on:
                renewed.add(each.spec.instance)
            else:
                each.launched.kill()
        await asyncio.sleep(DRAIN_CHECK)


async def _renew(running: RunningFleet, instance: RunningInstance) -> bool:
    """Returns whether an instance goes on in the present incarnation."""
    worker, facts = instance.slot.worker, running.facts
    if not worker.alive or worker.instance != instance.spec.instance:
        return False  # It is being started, or dead.
    try:
        await worker.call(HEALTH, (), RENEWAL_DEADLINE)  # Behind all calls of the control lane.
        checkpoint = str(facts.checkpoint_dir)
        await instance.connection.channels[Lane.WORK].call(RENEW, (facts.incarnation, checkpoint), RENEWAL_DEADLINE)
    except AsyncrlError:
        return False
    return True
