"""Reads the rows of the next batch before a step asks for them."""

import asyncio
from collections.abc import Sequence

from asyncrl.errors import LostRows
from asyncrl.lanes.data.row_reader import RowReader
from asyncrl.lanes.data.row_thread import run_for_rows
from asyncrl.protocols.batch import Batch, BatchRef, SampleName


class RowPrefetch:
    """Holds these columns of the rows of the next batch until the next `prefetch`."""

    def __init__(self, reader: RowReader, columns: Sequence[str]) -> None:
        self._reader = reader
        self._columns = columns
        self._numbers: dict[SampleName, int] = {}
        self._rows = Batch({})
        self._reading = asyncio.Lock()

    async def prefetch(self, samples: BatchRef) -> list[bool]:
        """Reads these rows. Returns for each sample whether it is held now, which is true of all or of none."""
        async with self._reading:
            self._numbers = {}
            self._rows = Batch({})
            try:
                self._rows = await self._reader.read(samples, self._columns)
            except LostRows:
                return [False] * len(samples)
            self._numbers = {row.name: number for number, row in enumerate(samples)}
            return [True] * len(samples)

    async def read(self, samples: BatchRef) -> Batch:
        """Returns copies in the order of `samples`. Raises LostRows when a row is gone."""
        async with self._reading:
            numbers = [self._numbers.get(row.name, -1) for row in samples]
            if numbers and -1 not in numbers:
                if numbers == list(range(len(self._rows))):
                    return self._rows
                return await run_for_rows(samples, self._rows.take, numbers)
        return await self._reader.read(samples, self._columns)
