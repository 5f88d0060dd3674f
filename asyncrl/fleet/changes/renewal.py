"""Takes the workers of a fleet into the next incarnation of the run, after one that learns died.

trainer and critics     are killed, and start again from the checkpoint once all others are ready
others that `renew`     forget the samples of the incarnation before; processes, models and engines stay
others that refuse      or do not answer in time, are killed and started again
"""

import asyncio

from asyncrl.concurrency import gather
from asyncrl.errors import AsyncrlError
from asyncrl.fleet.fleet import RunningFleet
from asyncrl.fleet.supervisor import DRAIN_CHECK, RunningInstance
from asyncrl.fleet.worker.service import RENEW
from asyncrl.fleet.worker.worker_spec import RunFacts
from asyncrl.lanes.shared_memory import unlink_segment
from asyncrl.protocols.service_contracts import Contract, Lane

HEALTH = Contract.endpoints["health"]
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
    awaited = [slot for learning in (True, False) for slot in running.supervisor.slots(learning=learning)]
    # Each start has its deadline, after which the worker counts as dead.
    while not learners.lost.done():
        if all(slot.worker.alive for slot in awaited if slot.is_awaited and slot.wanted.is_set()):
            return
        await asyncio.sleep(DRAIN_CHECK)


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
