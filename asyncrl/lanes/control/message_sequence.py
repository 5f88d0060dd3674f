"""Numbers the messages of a connection, so that each side detects a message that was lost, repeated or overtaken.

Such a message breaks the connection; the caller asks again in a new attempt. The number stands in front of the header,
in the same frame, because a frame of its own costs the I/O threads of ZeroMQ more than its content.
"""

import asyncio
import struct
from collections.abc import Awaitable, Callable
from typing import Any

from asyncrl.errors import WireError
from asyncrl.lanes.control.message_codec import decode, encode
from asyncrl.lanes.control.wire import LIMIT_BYTES, Frame, Frames

_NUMBER = struct.Struct("<Q")


class MessageSequence:
    """Encodes and numbers what one side sends, and checks the numbers of what it receives, each from 0."""

    def __init__(self, offer: Callable[[Frames], bool], send: Callable[[Frames], Awaitable[None]]) -> None:
        self._offer = offer
        self._send = send
        self._order = asyncio.Lock()
        self.sent = 0
        self.received = 0

    async def send(self, message: Any) -> None:
        """Sends, waiting for room. Raises WireError (nothing was sent), PeerLost, DeadlineExceeded."""
        frames = encode(message)
        if self._offer_frames(frames):
            return
        async with self._order:
            await self._send(numbered(self.sent, frames))
            self.sent += 1

    def offer(self, message: Any) -> bool:
        """Sends without waiting; returns False when the queue is full or others wait for it."""
        return not self._order.locked() and self._offer_frames(encode(message))

    def _offer_frames(self, frames: list[Frame]) -> bool:
        if self._order.locked() or not self._offer(numbered(self.sent, frames)):
            return False
        self.sent += 1
        return True

    def accept(self, frames: list[Frame], limit_bytes: int = LIMIT_BYTES) -> Any:
        """Returns the message in these frames. Raises WireError for invalid bytes and for a gap in the numbers."""
        if not frames or len(frames[0]) < _NUMBER.size:
            raise WireError("a message without a number")
        (number,) = _NUMBER.unpack_from(frames[0])
        if number != self.received:
            raise WireError(f"a gap: message {number} came where {self.received} was next")
        self.received += 1
        frames[0] = frames[0][_NUMBER.size :]
        return decode(frames, limit_bytes)


def numbered(number: int, frames: list[Frame]) -> list[Frame]:
    return [b"".join((_NUMBER.pack(number), frames[0])), *frames[1:]]
