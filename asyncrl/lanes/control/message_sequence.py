"""What both sides of a link share: numbered messages, and the codec under them.

The number stands before the header, in the same frame: a small message is one frame, and each frame costs the I/O
threads of ZeroMQ more than what is in it. The numbers only detect: a message that was lost, repeated or overtaken ends
the link, and whoever needs the answer asks again in a new attempt.
"""

import asyncio
import struct
from collections.abc import Awaitable, Callable
from typing import Any

from asyncrl.errors import WireError
from asyncrl.wire.codec import decode, encode
from asyncrl.wire.ends import LIMIT_BYTES, Frame, Frames

_NUMBER = struct.Struct("<Q")


def numbered(number: int, frames: list[Frame]) -> list[Frame]:
    """What is sent as message `number`."""
    return [b"".join((_NUMBER.pack(number), frames[0])), *frames[1:]]


class Line:
    """Numbers what one side sends and checks the numbers of what it receives, each from 0."""

    def __init__(self, offer: Callable[[Frames], bool], send: Callable[[Frames], Awaitable[None]]) -> None:
        self._offer, self._send = offer, send
        self._order = asyncio.Lock()
        self.sent = self.received = 0

    async def send(self, message: Any) -> None:
        """Raises WireError (nothing was sent), PeerLost, DeadlineExceeded."""
        frames = encode(message)
        if self._offer_now(frames):
            return
        async with self._order:
            await self._send(numbered(self.sent, frames))
            self.sent += 1

    def offer(self, message: Any) -> bool:
        """Send without waiting; False when the queue is full or others wait for it."""
        return not self._order.locked() and self._offer_now(encode(message))

    def _offer_now(self, frames: list[Frame]) -> bool:
        if self._order.locked() or not self._offer(numbered(self.sent, frames)):
            return False
        self.sent += 1
        return True

    def accept(self, frames: list[Frame], limit_bytes: int = LIMIT_BYTES) -> Any:
        """The message in these frames. Raises WireError for strange bytes and for a gap in the numbers."""
        if not frames or len(frames[0]) < _NUMBER.size:
            raise WireError("a message without a number")
        (number,) = _NUMBER.unpack_from(frames[0])
        if number != self.received:
            raise WireError(f"a gap: message {number} came where {self.received} was next")
        self.received += 1
        frames[0] = frames[0][_NUMBER.size :]
        return decode(frames, limit_bytes)
