"""Finds the workers that still hold the whole state of all that learn, after one of them died.

Of a trainer with copies of its weights one living rank is enough, if it is at the version that the journal says and no
optimizer step from there was taken: a step counts once all ranks have reported it, and is undone on none. Of a trainer
whose ranks share out the weights, and of a critic, all ranks have to live.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.concurrency import gather
from asyncrl.errors import AsyncrlError
from asyncrl.fleet.fleet import RunningFleet
from asyncrl.fleet.remote_worker import RemoteWorker
from asyncrl.protocols.messages import Checkpointed
from asyncrl.protocols.service_contracts import Critic, Training

HOLD_DEADLINE = 60.0
"""Seconds for a rank to end the step that it is in: at most one pass, because its next exchange fails."""


@dataclass(frozen=True, slots=True)
class LivingState:
    """Workers that hold the state of a version together. trainers: one rank that holds all, or all ranks.
    critics: all of their ranks. deadline: of a call, in seconds. left: names of ranks that have left the
    others, each with the whole state of the trainer."""

    trainers: Sequence[RemoteWorker]
    critics: Sequence[RemoteWorker]
    incarnation: int
    version: int
    deadline: float
    left: Sequence[str] = ()

    async def write(self, directory: str) -> Checkpointed:
        """Writes the files of a checkpoint. Raises what the workers raise."""
        position = (self.incarnation, self.version)
        found: list[Checkpointed] = []
        for contract, workers in ((Training, self.trainers), (Critic, self.critics)):
            copy, write = contract.endpoints["copy_state"], contract.endpoints["checkpoint"]
            await gather(*(worker.call(copy, position, self.deadline) for worker in workers))
            calls = (worker.call(write, (directory, *position), self.deadline) for worker in workers)
            found += await gather(*calls)
        return Checkpointed.merge(found)


async def living_state(running: RunningFleet, incarnation: int, version: int) -> LivingState | None:
    """Returns the workers that hold the state of this version; None where what one of them held is lost."""
    workers = [slot.worker for slot in running.supervisor.slots(learning=True)]
    contracts = {spec.name: spec.contract for spec in running.specs.values()}
    ranks = [worker for worker in workers if issubclass(contracts[worker.service], Training)]
    critics = [worker for worker in workers if issubclass(contracts[worker.service], Critic)]
    if not all(worker.alive for worker in critics):
        return None
    living = [worker for worker in ranks if worker.alive]
    holds = await gather(*(_holds(worker, incarnation, version) for worker in living))
    holders = [worker for worker, held in zip(living, holds, strict=True) if held]
    if not holders and len(living) < len(ranks):
        return None
    deadline, left = running.facts.config.fleet.call_deadline, [worker.name for worker in holders]
    return LivingState(holders[:1] or ranks, critics, incarnation, version, deadline, left)


async def _holds(worker: RemoteWorker, incarnation: int, version: int) -> bool:
    """Returns whether a rank holds the state of a version, and will write it alone."""
    try:
        await worker.call(Training.endpoints["leave_ranks"], (incarnation, version), HOLD_DEADLINE)
    except AsyncrlError:
        return False
    return True
