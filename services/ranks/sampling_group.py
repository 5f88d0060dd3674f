"""Opens the engines of ranks that sample together, in the processes of the trainer: one leads, the others follow it.

controller ── generate ──> rank 0 ── announces each call ──> rank 1
                              └──── states and sums of layers ─┘
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from asyncrl.engines.generation.ranked_generation import FollowingGeneration, LeadingEngine
from asyncrl.engines.generation.scheduling.sample_requests import Completion
from asyncrl.engines.generation.torch_generation import TorchGeneration
from asyncrl.engines.training.ranks.announcements import Announcements
from asyncrl.errors import PeerLost
from asyncrl.fleet.remote_worker import DEATH_NOTICE
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.services.ranks.led_ranks import next_announced
from asyncrl.services.ranks.meeting import find_meeting, open_mesh_beside


class SamplingGroup:
    """Connects one rank with the others of its replica. engine: of this rank, which its worker runs. follows: whether
    another rank leads."""

    def __init__(
        self, announcements: Announcements, engine: TorchGeneration | FollowingGeneration, *, follows: bool
    ) -> None:
        self.engine = engine
        self.follows = follows
        self._announcements = announcements

    @classmethod
    async def open(cls, context: WorkerContext) -> "SamplingGroup":
        """Connects the ranks and loads the engine of this one. Raises PeerLost when another rank did not start, and
        ConfigError for a model that ranks cannot share out."""
        mesh = await context.compute.run(open_mesh_beside, context, await find_meeting(context))
        announcements = mesh.announcements
        assert announcements is not None, "rank 0 announces what all of them compute"
        if mesh.rank > 0:
            calls = partial(next_announced, announcements)
            timeout = context.config.fleet.call_deadline
            follower = await FollowingGeneration.open(context, ranks=mesh, calls=calls, timeout=timeout)
            return cls(announcements, follower, follows=True)
        engine = partial(LeadingEngine, ranks=mesh, tell=announcements.tell)
        return cls(announcements, await TorchGeneration.open(context, copies=False, engine=engine), follows=False)

    async def run(self, deliver: Callable[[Sequence[Completion]], None]) -> None:
        """Samples until cancelled. Raises PeerLost once the death of another rank had time to be noticed, because the
        ranks have no common position any more."""
        try:
            await self.engine.run(deliver)
        except PeerLost:
            await asyncio.sleep(DEATH_NOTICE)
            raise

    async def stop(self) -> None:
        """Ends the waits for announcements."""
        with suppress(RuntimeError):  # The store is gone, or a rank that is dead reads nothing.
            await asyncio.to_thread(self._announcements.end)
