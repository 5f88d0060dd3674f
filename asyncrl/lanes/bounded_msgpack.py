"""Decodes MessagePack of others within a budget of objects: an empty list is a byte on the wire, and 64 in memory."""

from typing import Any

import msgpack

COUNTED_BYTES = 256 * 1024
"""Size from which objects are counted: what a smaller one declares takes some 20 MB at most."""


def unpacked(body: bytes | bytearray | memoryview, containers: int, items: int, **options: Any) -> Any:
    """Returns the value in a body with at most so many lists and tables, and so many items in all of them. Raises
    ValueError for more, as soon as they are met, and the errors of msgpack for what is none."""
    hooks: dict[str, Any] = {}
    if len(body) > COUNTED_BYTES:
        left = [containers, items]

        def count(found: Any) -> Any:
            left[0] -= 1
            left[1] -= len(found)
            if left[0] < 0 or left[1] < 0:
                raise ValueError(f"it has more than {containers} lists and tables, or {items} items in them")
            return found

        hooks = {"list_hook": count, "object_hook": count}
    return msgpack.unpackb(body, max_array_len=items, max_map_len=items, **hooks, **options)
