"""The controller's links to one instance of a worker: one for each lane, that break together."""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Self

from asyncrl.launch import WorkerSpec
from asyncrl.protocols.contracts import Lane
from asyncrl.protocols.messages import Hello
from asyncrl.wire.ends import Wire
from asyncrl.wire.link import Link


class Links:
    """`async with links:` greets the instance, within `start_deadline` seconds: it may still be starting.

    Raises PeerLost, Refused, DeadlineExceeded from there.
    """

    def __init__(self, spec: WorkerSpec, wire: Wire, hello: Hello, start_deadline: float) -> None:
        self.lost, self.reason = asyncio.Event(), ""
        self.channels: Mapping[Lane, Link] = {
            lane: Link(
                wire.connect(getattr(spec.addresses, lane.value)),
                hello,
                f"{spec.service}{spec.replica}[{spec.rank}]",
                instance=spec.instance,
                heartbeat=spec.facts.heartbeat,
            )
            for lane in Lane
        }
        self._start_deadline = start_deadline
        self._tasks = asyncio.TaskGroup()
        self._watches: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.__aexit__)
            for link in self.channels.values():
                await link.open(self._tasks, self._start_deadline)
                self._watches.append(self._tasks.create_task(self._watch(link), name=f"watch of {link.peer}"))
            undo.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        for watch in self._watches:
            watch.cancel()
        for link in self.channels.values():
            link.close()
        await self._tasks.__aexit__(None, None, None)

    async def _watch(self, link: Link) -> None:
        await link.lost.wait()
        self.fail(link.reason)

    def fail(self, reason: str) -> None:
        """Every outstanding call on either lane raises PeerLost now."""
        if not self.lost.is_set():
            self.reason = reason
            self.lost.set()
        for link in self.channels.values():
            link.fail(reason)
