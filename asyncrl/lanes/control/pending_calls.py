"""What a caller waits for: one reply, or the items of a stream; and errors as they cross a wire."""

import asyncio
from collections import deque
from typing import Any

from asyncrl import errors
from asyncrl.errors import AsyncrlError, PeerLost, RemoteError, WireError
from asyncrl.protocols.messages import Failure
from asyncrl.wire.ends import Signal

STREAM_WINDOW = 64
"""Items of one stream that may be on their way or wait for the consumer; then the worker waits for `More`."""


class Single:
    """The answer of a call. settled: the worker has nothing more to send for it."""

    def __init__(self) -> None:
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.settled = False

    def item(self, value: Any) -> None:
        raise WireError("an item of a stream came for a call that has one reply")

    def reply(self, value: Any) -> None:
        self.settled = True
        if not self.future.done():
            self.future.set_result(value)

    def fail(self, error: AsyncrlError) -> None:
        self.settled = True
        self.expire(error)

    def expire(self, error: AsyncrlError) -> None:
        """The caller waits no longer, while the worker may still answer."""
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # Looked at: a caller that is cancelled now leaves it unread, which is no mistake.

    def lose(self, reason: str) -> None:
        self.fail(PeerLost(reason))


class Items:
    """The answer of a stream, at most STREAM_WINDOW items. An error comes after them, a lost peer at once."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._changed = Signal()
        self._error: AsyncrlError | None = None
        self._taken = 0
        self.settled = False

    def item(self, value: Any) -> None:
        if len(self._items) >= STREAM_WINDOW:
            raise WireError(f"more than {STREAM_WINDOW} items of a stream came unasked")
        self._items.append(value)
        self._changed.wake()

    def reply(self, value: Any) -> None:
        self.settled = True
        self._changed.wake()

    def fail(self, error: AsyncrlError) -> None:
        self._error, self.settled = error, True
        self._changed.wake()

    def lose(self, reason: str) -> None:
        self._items.clear()
        self.fail(PeerLost(reason))

    async def more(self) -> bool:
        """Whether there is another item to `take`, once that is known. Raises what ended the stream."""
        while not self._items and not self.settled:
            await self._changed.wait()
        if not self._items and self._error is not None:
            raise self._error
        return bool(self._items)

    def take(self) -> Any:
        self._taken += 1
        return self._items.popleft()

    @property
    def due_grant(self) -> bool:
        """Half a window was consumed since the last grant: time to let the worker send on."""
        return self._taken >= STREAM_WINDOW // 2

    def grant(self) -> int:
        granted, self._taken = self._taken, 0
        return granted


def error_of(failure: Failure) -> AsyncrlError:
    """The error to raise: the class of asyncrl.errors with that name, caused by a RemoteError, or that itself."""
    remote = RemoteError(failure.kind, failure.message, failure.service, failure.rank, failure.traceback)
    cls = getattr(errors, failure.kind, None)
    if not (isinstance(cls, type) and issubclass(cls, AsyncrlError)) or cls is RemoteError:
        return remote
    error: AsyncrlError = cls(f"{failure.service}[{failure.rank}]: {failure.message}")
    error.__cause__ = remote
    return error
