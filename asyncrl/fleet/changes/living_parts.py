"""Saves the state of a trainer whose ranks share it out, after one of them died, where others have copies of all parts.

    rank 0: part 0 ──> leaves ──> writes part 0 ──> is killed
    rank 1: part 1     died                           │ rank 2 waited for it in an exchange, which fails
    rank 2: part 0 ──> leaves <───────────────────────┘ is killed, because part 0 is there
    rank 3: part 1 ──> leaves ──> writes part 1 ──> is killed

Torch has other objects hold connections of gloo, so that only the end of a process closes them.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from asyncrl.errors import AsyncrlError, JournalError, Refused
from asyncrl.fleet.remote_worker import RemoteWorker
from asyncrl.fleet.supervisor import RunningInstance
from asyncrl.protocols.messages import Checkpointed
from asyncrl.protocols.service_contracts import Training

HOLD_DEADLINE = 60.0
"""Seconds for a rank to end the step that it is in: at most one pass, because its next exchange fails."""


@dataclass(slots=True)
class LivingParts:
    """Living ranks that have copies of all parts of the state of a version. holders: the part of each rank, from 0, and
    the rank. parts: their number. position: incarnation and version. deadline: of a call, in seconds. instances: what
    runs, by the name of its worker."""

    holders: Sequence[tuple[int, RemoteWorker]]
    parts: int
    position: tuple[int, int]
    deadline: float
    instances: Mapping[str, RunningInstance]
    _taken: set[int] = field(default_factory=set)
    _made: dict[int, Checkpointed] = field(default_factory=dict)
    _refused: dict[int, str] = field(default_factory=dict)

    async def write(self, directory: str) -> list[Checkpointed]:
        """Has the first rank that leaves the others with a part write it, and ends each rank once it has answered.
        Raises Refused when no rank gives a part, and JournalError when ranks trained different samples."""
        async with asyncio.TaskGroup() as tasks:
            giving = {
                tasks.create_task(self._give(part, rank, directory), name=f"part of {rank.name}")
                for part, rank in self.holders
            }
            while giving and len(self._made) < self.parts:
                _, giving = await asyncio.wait(giving, return_when=asyncio.FIRST_COMPLETED)
            for each in giving:
                each.cancel()
        if missing := sorted(set(range(self.parts)) - self._made.keys()):
            part, why = missing[0], self._refused.get(missing[0], "none answered")
            raise Refused(f"no living rank gave part {part} of the {self.parts} parts of the trainer's state: {why}")
        if len(chains := {each.chain[:16] for each in self._made.values()}) > 1:
            version = self.position[1]
            raise JournalError(f"ranks of the trainer are at version {version} with different chains {sorted(chains)}")
        return [self._made[part] for part in range(self.parts)]

    async def _give(self, part: int, rank: RemoteWorker, directory: str) -> None:
        try:
            # The rank may wait for one that ends only when its own part is written.
            await rank.call(Training.endpoints["leave_ranks"], self.position, HOLD_DEADLINE + self.deadline)
            if part not in self._taken:
                await self._write(part, rank, directory)
        except AsyncrlError as error:
            self._refused[part] = str(error)  # A rank that leaves later may give this part.
        finally:
            if (instance := self.instances.get(rank.name)) is not None:
                instance.launched.kill()

    async def _write(self, part: int, rank: RemoteWorker, directory: str) -> None:
        endpoints, position = Training.endpoints, self.position
        self._taken.add(part)
        try:
            await rank.call(endpoints["copy_state"], position, self.deadline)
            self._made[part] = await rank.call(endpoints["checkpoint"], (directory, *position), self.deadline)
        except AsyncrlError:
            self._taken.discard(part)
            raise
