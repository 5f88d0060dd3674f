"""Rows that are read before they are asked for."""

import asyncio
from collections.abc import Sequence

from asyncrl.errors import LostRows
from asyncrl.protocols.batch import Batch, BatchRef, SampleName
from asyncrl.row_reader import RowReader


class RowsAhead:
    """Reads these columns; keeps the rows of one batch, which the next `foresee` replaces."""

    def __init__(self, reader: RowReader, columns: Sequence[str]) -> None:
        self._reader, self._columns = reader, columns
        self._numbers: dict[SampleName, int] = {}
        self._rows = Batch({})
        self._reading = asyncio.Lock()

    async def foresee(self, samples: BatchRef) -> list[bool]:
        """Read these ahead; whether each is held now: all or none."""
        async with self._reading:
            self._numbers, self._rows = {}, Batch({})
            try:
                self._rows = await self._reader.read(samples, self._columns)
            except LostRows:
                return [False] * len(samples)
            self._numbers = {row.name: number for number, row in enumerate(samples)}
            return [True] * len(samples)

    async def read(self, samples: BatchRef) -> Batch:
        """Copies, in the order of `samples`. Raises LostRows when a row is gone, or one without a place is not held."""
        async with self._reading:
            numbers = [self._numbers.get(row.name, -1) for row in samples]
            if numbers and -1 not in numbers:
                return self._rows if numbers == list(range(len(self._rows))) else self._rows.take(numbers)
        strange = next((row for row in samples if not row.places), None)
        if strange is not None:
            raise LostRows(f"sample {strange.key} came without a place, and was not read ahead")
        return await self._reader.read(samples, self._columns)
