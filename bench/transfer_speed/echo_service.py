"""Serves the worker processes of `asyncrl-bench channels`: an ordinary service that receives and replies."""

from collections.abc import Mapping, Sequence

import numpy as np

from asyncrl.bench.rivals.timed_rounds import LARGE, LENGTH, last_values
from asyncrl.fleet.worker.service import Service, WorkerContext
from asyncrl.protocols.batch import Array, Batch, BatchRef, Column, Place, RowRef
from asyncrl.protocols.service_contracts import Contract, Idempotent, endpoint
from asyncrl.protocols.transfer import DP_PROTO, ONE_OF, ONE_TO_ALL

RANKS = 4
ROW = ("ids", "logp", "mask", "versions")
"""Columns of a rollout batch that hold a value per token; the others hold a value per sample."""


def as_batch(tensors: Mapping[str, Array], parts: int = 1) -> Batch:
    """Splits each tensor into `parts` equal rows."""
    return Batch({name: Column.of(np.split(values, parts)) for name, values in tensors.items()})


def reference(places: Sequence[Place]) -> BatchRef:
    rows = (RowRef(number, 0, 0, 0, 64, LENGTH, 0, 0, "length", (place,)) for number, place in enumerate(places))
    return BatchRef(tuple(rows))


class Echo(Contract):
    """Declares endpoints that only receive and reply."""

    @endpoint(ONE_OF, idempotent=Idempotent.PURE)
    async def echo(self, payload: bytes) -> bytes:
        raise NotImplementedError

    @endpoint(ONE_OF, idempotent=Idempotent.PURE)
    async def take(self, batch: Batch) -> int:
        """Receives a batch as frames and returns the sum of its last values."""
        raise NotImplementedError

    @endpoint(ONE_OF, idempotent=Idempotent.PURE)
    async def read_in_place(self, refs: BatchRef, columns: list[str]) -> int:
        """Reads rows by reference in shared memory and returns the sum of their last values, as the rivals do."""
        raise NotImplementedError

    @endpoint(DP_PROTO, idempotent=Idempotent.PURE)
    async def scatter_frames(self, batch: Batch) -> None:
        raise NotImplementedError

    @endpoint(DP_PROTO, idempotent=Idempotent.PURE)
    async def scatter(self, refs: BatchRef) -> None:
        raise NotImplementedError

    @endpoint(ONE_TO_ALL, idempotent=Idempotent.PURE)
    async def gather_frames(self, size: int) -> Batch:
        raise NotImplementedError

    @endpoint(ONE_TO_ALL)
    async def gather(self, size: int) -> BatchRef:
        """Writes a row of `size` bytes into the store of each worker and frees the row of the call before."""
        raise NotImplementedError


class EchoService(Service, Echo):
    """Replies to every call, and stores rows of its own for `gather`."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._source = np.ones(LARGE // RANKS, np.uint8)
        self._last: list[Place] = []

    async def start(self) -> None:
        self.rows = self.context.open_rows(2, self.context.spec.options["slot_bytes"])

    async def echo(self, payload: bytes) -> bytes:
        return payload

    async def take(self, batch: Batch) -> int:
        return last_values(column.values for column in batch.columns.values())

    async def read_in_place(self, refs: BatchRef, columns: list[str]) -> int:
        async with self.context.reader.views(refs, columns) as rows:
            return last_values(values[-1] for values in rows.values())

    async def scatter_frames(self, batch: Batch) -> None:
        await self.take(batch)

    async def scatter(self, refs: BatchRef) -> None:
        await self.read_in_place(refs, ["data"])

    async def gather_frames(self, size: int) -> Batch:
        return as_batch({"data": self._source[:size]})

    async def gather(self, size: int) -> BatchRef:
        assert self.rows is not None, "calls come after start"
        self.rows.free(self._last)
        self._last = [self.rows.put({"data": self._source[:size]})]
        return reference(self._last)
