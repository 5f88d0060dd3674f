"""Runs the work of a service on all ranks of its replica, in the order in which the first of them begins it.

    rank 0     run("values", rows) ── announces ──> values(rows) ──> returns what it found
    rank 1                              └─────────> values(rows)

Every rank gets every call of the controller, but only rank 0 acts on it: see ranks/announcements.py.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

from asyncrl.concurrency import start_task
from asyncrl.engines.training.ranks.announcements import Announcements
from asyncrl.engines.training.ranks.rank_mesh import RankMesh
from asyncrl.errors import LostRows, PeerLost
from asyncrl.fleet.remote_worker import DEATH_NOTICE
from asyncrl.fleet.worker.service import WorkerContext

Work: TypeAlias = Callable[..., Awaitable[Any]]


class LedRanks:
    """The end of one rank. work: what all ranks can be asked for, by name, with plain values or messages. A worker ends
    when an exchange fails, because the ranks have no common position any more."""

    def __init__(self, context: WorkerContext, mesh: RankMesh, work: Mapping[str, Work]) -> None:
        self._context = context
        self._mesh = mesh
        self._work = work
        self._running = asyncio.Lock()
        if mesh.announcements is not None and mesh.rank > 0:
            start_task(context.tasks, self._follow(mesh.announcements), "work of rank 0")

    @property
    def follows(self) -> bool:
        """Returns whether this rank acts on nothing but what rank 0 announces."""
        return self._mesh.rank > 0

    async def run(self, name: str, *args: Any) -> Any:
        """Returns what this work gives at rank 0. Work that has begun goes on when its caller ends, because other ranks
        wait for this one. Raises LostRows of any rank."""
        if self._mesh.announcements is None:
            return await self._work[name](*args)
        task = start_task(self._context.tasks, self._lead(self._mesh.announcements, name, args), name)
        found = await asyncio.shield(task)
        if isinstance(found, LostRows):
            raise found
        return found

    async def idle(self) -> None:
        """Waits for the work that this rank has begun."""
        async with self._running:
            pass

    async def stop(self) -> None:
        """Ends the waits for announcements."""
        if self._mesh.announcements is not None:
            with suppress(RuntimeError):  # The store is gone, or a rank that is dead reads nothing.
                await asyncio.to_thread(self._mesh.announcements.end)

    async def _lead(self, announcements: Announcements, name: str, args: tuple[Any, ...]) -> Any:
        async with self._running:
            try:
                await self._context.compute.run(announcements.tell, (name, args))
                return await self._work[name](*args)
            except LostRows as lost:
                return lost
            except PeerLost:
                await asyncio.sleep(DEATH_NOTICE)  # The death of the other rank is reported first.
                raise

    async def _follow(self, announcements: Announcements) -> None:
        try:
            while (announced := await next_announced(announcements)) is not None:
                name, args = announced
                async with self._running:
                    with suppress(LostRows):  # Rank 0 says so.
                        await self._work[name](*args)
        except PeerLost:
            await asyncio.sleep(DEATH_NOTICE)
            raise


async def next_announced(announcements: Announcements) -> Any:
    """Waits for the next announcement on a thread that does not keep the process from ending. Raises PeerLost when rank
    0 is gone."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Any] = loop.create_future()

    def take() -> None:
        try:
            message = announcements.next()
            error = None
        except RuntimeError as lost:
            message = None
            error = PeerLost(f"rank 0 announces nothing any more: {lost}")
        with suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(_settle, found, message, error)

    threading.Thread(target=take, name="announcements", daemon=True).start()
    return await found


def _settle(found: "asyncio.Future[Any]", message: Any, error: PeerLost | None) -> None:
    if found.done():
        return
    if error is None:
        found.set_result(message)
    else:
        found.set_exception(error)
