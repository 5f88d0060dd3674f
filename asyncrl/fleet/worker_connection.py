"""The controller's connection to one instance of a worker: a client for each lane, which are lost together."""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Self

from asyncrl.fleet.worker.worker_spec import WorkerSpec
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.wire import Wire
from asyncrl.protocols.contracts import Lane
from asyncrl.protocols.messages import Hello


class WorkerConnection:
    """`async with connection:` greets the instance within `start_deadline` seconds, as it may still be starting.

    lost: set when a client lost its connection, with the reason in `reason`.

    Raises:
        PeerLost, Refused, DeadlineExceeded: on entering.
    """

    def __init__(self, spec: WorkerSpec, wire: Wire, hello: Hello, start_deadline: float) -> None:
        self.lost = asyncio.Event()
        self.reason = ""
        self.channels: Mapping[Lane, Client] = {
            lane: Client(
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
            for client in self.channels.values():
                await client.open(self._tasks, self._start_deadline)
                self._watches.append(self._tasks.create_task(self._watch(client), name=f"watch of {client.peer}"))
            undo.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        for watch in self._watches:
            watch.cancel()
        for client in self.channels.values():
            client.close()
        await self._tasks.__aexit__(None, None, None)

    async def _watch(self, client: Client) -> None:
        await client.lost.wait()
        self.fail(client.reason)

    def fail(self, reason: str) -> None:
        """Makes every outstanding call on all lanes raise PeerLost now."""
        if not self.lost.is_set():
            self.reason = reason
            self.lost.set()
        for client in self.channels.values():
            client.fail(reason)
