"""Messages between a reward worker and its children: a length of four bytes, then MessagePack."""

from asyncio import StreamReader
from typing import Any

import msgpack

from asyncrl.errors import WireError

LARGEST = 64 * 2**20
"""Bytes; a group of a thousand samples of 16k characters fits twice."""


def packed(message: Any) -> bytes:
    """Returns the frame of a message; raises WireError when it is too large."""
    body: bytes = msgpack.packb(message, use_bin_type=True)
    if len(body) > LARGEST:
        raise WireError(f"a message to or from a reward child has {len(body)} bytes; at most {LARGEST} are sent")
    return len(body).to_bytes(4, "little") + body


async def receive(reader: StreamReader) -> Any:
    """Reads the next message; raises asyncio.IncompleteReadError at the end, WireError for anything malformed."""
    size = int.from_bytes(await reader.readexactly(4), "little")
    if size > LARGEST:
        raise WireError(f"a frame of {size} bytes was announced; at most {LARGEST} are sent")
    body = await reader.readexactly(size)
    try:
        return msgpack.unpackb(body, raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"a frame of {size} bytes that is no MessagePack: {error!r:.200}") from error
