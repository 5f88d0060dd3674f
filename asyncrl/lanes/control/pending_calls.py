"""Calls whose answer is awaited: one reply, or the items of a stream."""

import asyncio
from collections import deque
from typing import Any

from asyncrl.errors import AsyncrlError, PeerLost, WireError
from asyncrl.lanes.control.wire import Wakeup

STREAM_WINDOW = 64
"""Items of one stream that may be in flight or wait for the consumer; then the worker waits for `More`."""


class PendingReply:
    """A call with one reply. settled: whether the worker has nothing more to send for it."""

    def __init__(self) -> None:
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.settled = False

    def add_item(self, value: Any) -> None:
        raise WireError("an item of a stream came for a call that has one reply")

    def complete(self, value: Any) -> None:
        self.settled = True
        if not self.future.done():
            self.future.set_result(value)

    def fail(self, error: AsyncrlError) -> None:
        self.settled = True
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # Marks it as retrieved: a caller that is cancelled now never reads it.

    def lose_peer(self, reason: str) -> None:
        self.fail(PeerLost(reason))


class PendingStream:
    """A call with a stream, of which at most STREAM_WINDOW items wait here. Its error comes after its items; a lost
    peer discards them."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._changed = Wakeup()
        self._error: AsyncrlError | None = None
        self._taken = 0
        self.settled = False

    def add_item(self, value: Any) -> None:
        if len(self._items) >= STREAM_WINDOW:
            raise WireError(f"more than {STREAM_WINDOW} items of a stream came without being granted")
        self._items.append(value)
        self._changed.wake()

    def complete(self, value: Any) -> None:
        self.settled = True
        self._changed.wake()

    def fail(self, error: AsyncrlError) -> None:
        self._error = error
        self.complete(None)

    def lose_peer(self, reason: str) -> None:
        self._items.clear()
        self.fail(PeerLost(reason))

    async def has_item(self) -> bool:
        """Waits until it is known whether there is another item for `take_item`. Raises the error of the stream."""
        while not self._items and not self.settled:
            await self._changed.wait()
        if not self._items and self._error is not None:
            raise self._error
        return bool(self._items)

    def take_item(self) -> Any:
        self._taken += 1
        return self._items.popleft()

    def grant(self) -> int:
        """Returns how many more items the worker may send: 0 until half a window was consumed since the last grant."""
        granted = 0 if self.settled or self._taken < STREAM_WINDOW // 2 else self._taken
        self._taken -= granted
        return granted
