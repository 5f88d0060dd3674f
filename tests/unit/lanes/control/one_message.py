"""Takes one message from an endpoint, and sends with waiting, as tests of wires need it."""

from contextlib import suppress
from typing import Any

from asyncrl.lanes.control.message_codec import MessageSequence


class _Taken(Exception):
    """The message has come."""


async def receive(endpoint: Any) -> Any:
    """The next message; those behind it stay in the queue."""
    received: list[Any] = []

    def take(message: Any) -> None:
        received.append(message)
        raise _Taken

    with suppress(_Taken):
        await endpoint.pump(take)
    return received[0]


def sequence(caller: Any) -> MessageSequence:
    return MessageSequence(caller.offer, caller.room, caller.address)
