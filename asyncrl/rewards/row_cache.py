"""Decodes the row of a prompt once for all its samples."""

import asyncio
from collections import OrderedDict
from typing import Any

from asyncrl.protocols.prompt_row import PackedRow, PromptRow

CACHED_BYTES = 64 * 2**20
"""Bytes of packed rows whose decoded form is kept: rows of 100 kB of some 600 groups. The latest row is always kept."""

INLINE_BYTES = 64 * 1024
"""Size up to which a row is decoded on the event loop, in under a millisecond."""


class RowCache:
    """Keeps the decoded rows that were used last. decoded: how often a row was decoded."""

    def __init__(self) -> None:
        self.decoded = 0
        self._rows: OrderedDict[bytes, asyncio.Future[PromptRow]] = OrderedDict()
        self._sizes: dict[bytes, int] = {}
        self._bytes = 0

    async def row(self, row: dict[str, Any] | PackedRow) -> PromptRow:
        """Returns the decoded row. Raises ValueError for bytes that are no row."""
        if not isinstance(row, PackedRow):
            return PromptRow.of(row)
        if (found := self._rows.get(row.digest)) is None:
            found = self._begin(row)
        self._rows.move_to_end(row.digest)
        return await asyncio.shield(found)

    def _begin(self, row: PackedRow) -> "asyncio.Future[PromptRow]":
        loop = asyncio.get_running_loop()
        self.decoded += 1
        if len(row.data) > INLINE_BYTES:
            decoding = loop.run_in_executor(None, PromptRow.of, row)
        else:
            decoding = loop.create_future()
            decoding.set_result(PromptRow.of(row))
        self._rows[row.digest] = decoding
        self._sizes[row.digest] = len(row.data)
        self._bytes += len(row.data)
        while self._bytes > CACHED_BYTES and len(self._rows) > 1:
            digest, _ = self._rows.popitem(last=False)
            self._bytes -= self._sizes.pop(digest)
        return decoding
