"""Answers receivers that pull versions of the weights: at the trainer, and at every receiver for those below it.

trainer ── receiver 0 ── receivers 2, 3        The trainer answers `open_weights` with the parent in this tree; a
   └────── receiver 1 ── receivers 4, 5        receiver passes on each part as soon as it has it.
"""

import asyncio
from collections.abc import Awaitable
from typing import Any

from asyncrl.errors import Refused
from asyncrl.lanes.control.server import Server
from asyncrl.lanes.control.wire import Wire
from asyncrl.lanes.weights.codec.chunk import EncodedChunk, WireCodec
from asyncrl.lanes.weights.plan.balance import CHILDREN, parent
from asyncrl.lanes.weights.transports.held_version import HeldVersion
from asyncrl.protocols.messages import Call, Hello

OPEN, CHUNK, DONE = "open_weights", "weights_chunk", "close_weights"

Packed = tuple[int, int, Any, int, int, float]
"""A chunk as a message: kind, size, data, digest of the data, digest of the result, error."""


class WeightServer:
    """Serves versions at an address of its own, in a task of the group. held: versions that can be pulled, by number;
    the owner replaces the mapping, on any thread."""

    def __init__(
        self, wire: Wire, address: str, hello: Hello, tasks: asyncio.TaskGroup, *, heartbeat: float | None = None
    ) -> None:
        self.held: dict[int, HeldVersion] = {}
        listener = wire.listen(address)
        self.address = listener.address
        self._server = Server(listener, self._dispatch, hello, queued=False, heartbeat=heartbeat)
        self._serving = tasks.create_task(self._server.serve(), name="weights lane")

    def close(self) -> None:
        self._serving.cancel()

    def _dispatch(self, call: Call) -> Awaitable[Any]:
        if call.method in _ARGUMENTS and tuple(map(type, call.args)) in _ARGUMENTS[call.method]:
            answer: Awaitable[Any] = getattr(self, f"_{call.method}")(*call.args)
            return answer
        raise Refused(
            f"the weights lane answers {', '.join(_ARGUMENTS)}, not {call.method} with {len(call.args)} values"
        )

    async def _open_weights(self, incarnation: int, version: int, plan: str, reader: str, address: str) -> str:
        """Returns the address of the parent from which the reader pulls, "" for this one."""
        held = self._find(incarnation, version)
        if plan != held.plan.digest:
            raise Refused(
                f"{reader} cuts the weights into other parts than their sender: start trainer and engine with the same "
                "model folder, model.dtype, weights.codec and version of asyncrl"
            )
        self._note(held, reader)
        held.receivers.setdefault(reader, address)
        order = list(held.receivers)
        above = parent(order.index(reader), CHILDREN)
        return "" if above is None else held.receivers[order[above]]

    async def _weights_chunk(
        self, incarnation: int, version: int, number: int, base: int | None, reader: str
    ) -> Packed:
        held = self._find(incarnation, version)
        if not 0 <= number < len(held.plan.parts):
            raise Refused(f"there is no part {number} of the weights; there are {len(held.plan.parts)}")
        self._note(held, reader)
        return packed(await held.chunk(number, base))

    async def _close_weights(self, incarnation: int, version: int, reader: str) -> None:
        """Notes that a reader has the version, or gives it up."""
        if (held := self.held.get(version)) is not None and held.incarnation == incarnation:
            held.pulled_at.pop(reader, None)

    def _note(self, held: HeldVersion, reader: str) -> None:
        held.pulled_at[reader] = asyncio.get_running_loop().time()

    def _find(self, incarnation: int, version: int) -> HeldVersion:
        held = self.held.get(version)
        if held is None or held.incarnation != incarnation:
            have = ", ".join(str(number) for number in sorted(self.held)) or "none"
            raise Refused(f"weights of version {version} of incarnation {incarnation} are not here; versions: {have}")
        return held


_ARGUMENTS: dict[str, tuple[tuple[type, ...], ...]] = {
    OPEN: ((int, int, str, str, str),),
    CHUNK: ((int, int, int, int, str), (int, int, int, type(None), str)),
    DONE: ((int, int, str),),
}


def packed(chunk: EncodedChunk) -> Packed:
    return int(chunk.kind), chunk.size, chunk.data, chunk.data_digest, chunk.result_digest, chunk.error


def unpacked(message: Any) -> EncodedChunk:
    """Returns the chunk of a message. Raises Refused for any other message."""
    if type(message) is not tuple or tuple(map(type, message[:2])) != (int, int) or len(message) != 6:
        raise Refused(f"no chunk of weights: {message!r:.100}")
    kind, size, data, own, result, error = message
    if kind not in set(WireCodec) or getattr(data, "dtype", None) != "u1" or getattr(data, "ndim", 0) != 1:
        raise Refused(f"no chunk of weights: kind {kind}")
    return EncodedChunk(WireCodec(kind), size, data, own, result, error)
