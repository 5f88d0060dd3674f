"""Finds the workers that still hold the whole state of all that learn, after one of them died.

Of a trainer one living rank with each part of the model is enough, if it is at the version that the journal says and
took no optimizer step from there: a step counts once all ranks have reported it, and is undone on none. Of a critic
one living rank with all of it is enough, if it is in the middle of no batch.

copies of the whole model   one rank saves the state; all that hold it stay, and meet the new ones
parts of it                 the first rank that holds a part saves it, and each ends once it is not needed
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from asyncrl.concurrency import gather
from asyncrl.errors import AsyncrlError
from asyncrl.fleet.changes.living_parts import HOLD_DEADLINE, LivingParts
from asyncrl.fleet.fleet import RunningFleet
from asyncrl.fleet.remote_worker import RemoteWorker
from asyncrl.protocols.messages import Checkpointed
from asyncrl.protocols.rank_layout import Layout
from asyncrl.protocols.service_contracts import Contract, Critic, Training

LATER_HOLDERS = 5.0
"""Seconds for other ranks once one holds the whole state. One that waits for a living rank in an exchange of gloo
answers only when that is over; it is killed, and starts again."""


@dataclass(frozen=True, slots=True)
class LivingState:
    """Workers that hold the state of a version together. trainers: one rank that holds all, or all ranks. parts: where
    ranks that share out the state lost one. critics: of each one rank that holds all, or all ranks. deadline: of a
    call, in seconds. left: names of ranks of the trainer that have left the others, each with the whole state."""

    trainers: Sequence[RemoteWorker]
    critics: Sequence[RemoteWorker]
    incarnation: int
    version: int
    deadline: float
    left: Sequence[str] = ()
    parts: LivingParts | None = None

    async def write(self, directory: str) -> Checkpointed:
        """Writes the files of a checkpoint. Raises what the workers raise."""
        position = (self.incarnation, self.version)
        found = [] if self.parts is None else await self.parts.write(directory)
        for contract, workers in ((Training, self.trainers), (Critic, self.critics)):
            copy, write = contract.endpoints["copy_state"], contract.endpoints["checkpoint"]
            await gather(*(worker.call(copy, position, self.deadline) for worker in workers))
            calls = (worker.call(write, (directory, *position), self.deadline) for worker in workers)
            found += await gather(*calls)
        return Checkpointed.merge(found)


async def living_state(running: RunningFleet, incarnation: int, version: int) -> LivingState | None:
    """Returns the workers that hold the state of this version; None where what one of them held is lost."""
    workers = [slot.worker for slot in running.supervisor.slots(learning=True)]
    specs = {spec.name: spec for spec in running.specs.values()}
    ranks = [worker for worker in workers if issubclass(specs[worker.service].contract, Training)]
    critics = [worker for worker in workers if issubclass(specs[worker.service].contract, Critic)]
    savers: list[RemoteWorker] = []
    for service in dict.fromkeys(worker.service for worker in critics):
        own = [worker for worker in critics if worker.service == service]
        savers += (found := await _savers_of_critic(own, specs[service].layout, incarnation, version))
        if not found:
            return None
    living = [worker for worker in ranks if worker.alive]
    layout = next((specs[worker.service].layout for worker in ranks), Layout())
    state = LivingState(ranks, savers, incarnation, version, running.facts.config.fleet.call_deadline)
    if layout.parts > 1:
        return state if len(living) == len(ranks) else _in_parts(state, living, layout, running)
    holders = await holders_of_all(living, Training, incarnation, version)
    if not holders:
        return state if len(living) == len(ranks) else None
    return replace(state, trainers=holders[:1], left=[worker.name for worker in holders])


def _in_parts(
    state: LivingState, living: Sequence[RemoteWorker], layout: Layout, running: RunningFleet
) -> LivingState | None:
    """Returns the state where each part was copied to a rank that lives; None where one is lost."""
    holders = [(layout.part(worker.rank), worker) for worker in living]
    if len({part for part, _ in holders}) < layout.parts:
        return None
    position = (state.incarnation, state.version)
    parts = LivingParts(holders, layout.parts, position, state.deadline, running.supervisor.instances)
    return replace(state, trainers=(), parts=parts)


async def _savers_of_critic(
    ranks: Sequence[RemoteWorker], layout: Layout, incarnation: int, version: int
) -> Sequence[RemoteWorker]:
    """Returns the ranks of a critic that save its state: all, or after a death one with a copy of all weights, if such
    a one is not in the middle of a batch; none where a part is lost."""
    living = [rank for rank in ranks if rank.alive]
    if len(living) == len(ranks):
        return ranks
    return (await holders_of_all(living, Critic, incarnation, version))[:1] if layout.parts == 1 else ()


async def holders_of_all(
    living: Sequence[RemoteWorker], contract: type[Contract], incarnation: int, version: int
) -> list[RemoteWorker]:
    """Returns the ranks that hold the whole state of a version, and have left the others."""
    async with asyncio.TaskGroup() as tasks:
        held = [
            tasks.create_task(_holds(rank, contract, incarnation, version), name=f"state of {rank.name}")
            for rank in living
        ]
        late = set(held)
        while late and not any(each.done() and each.result() for each in held):
            _, late = await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED)
        if late:
            _, late = await asyncio.wait(late, timeout=LATER_HOLDERS)
        for each in late:
            each.cancel()
    return [rank for rank, each in zip(living, held, strict=True) if not each.cancelled() and each.result()]


async def _holds(worker: RemoteWorker, contract: type[Contract], incarnation: int, version: int) -> bool:
    """Returns whether a rank holds the state of a version, and will write it alone."""
    try:
        await worker.call(contract.endpoints["leave_ranks"], (incarnation, version), HOLD_DEADLINE)
    except AsyncrlError:
        return False
    return True
