"""What answers in the worker processes of `asyncrl-bench channels`: a service as any other."""

from collections.abc import Mapping, Sequence

import numpy as np

from asyncrl.bench.peers import rounds
from asyncrl.protocols.batch import Array, Batch, BatchRef, Column, Place, RowRef
from asyncrl.protocols.contracts import Contract, Idempotent, endpoint
from asyncrl.protocols.transfer import DP_PROTO, ONE_OF, ONE_TO_ALL
from asyncrl.service import Service, WorkerContext

RANKS = 4

ROW = ("ids", "logp", "mask", "versions")
"""Columns of a rollout batch that have a value a token; the others have one a sample."""


def as_batch(tensors: Mapping[str, Array], parts: int = 1) -> Batch:
    """The same tensors as `parts` equal rows."""
    return Batch({name: Column.of(np.split(values, parts)) for name, values in tensors.items()})


def reference(places: Sequence[Place]) -> BatchRef:
    rows = (RowRef(number, 0, 0, 0, 64, rounds.LENGTH, 0, 0, "length", (place,)) for number, place in enumerate(places))
    return BatchRef(tuple(rows))


class Channels(Contract):
    """Endpoints that do nothing but receive and answer."""

    @endpoint(ONE_OF, idempotent=Idempotent.PURE)
    async def echo(self, payload: bytes) -> bytes:
        raise NotImplementedError

    @endpoint(ONE_OF, idempotent=Idempotent.PURE)
    async def take(self, batch: Batch) -> int:
        """A batch that travelled as frames."""
        raise NotImplementedError

    @endpoint(ONE_OF, idempotent=Idempotent.PURE)
    async def look(self, refs: BatchRef, columns: list[str]) -> int:
        """Rows by reference, looked at where they lie; answers their last value, as the peers do."""
        raise NotImplementedError

    @endpoint(ONE_OF, idempotent=Idempotent.PURE)
    async def copy(self, refs: BatchRef, columns: list[str]) -> int:
        """Rows by reference, copied and joined."""
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
        """A row of `size` bytes of each worker's, written into its store during the call; the one before is freed."""
        raise NotImplementedError


class ChannelService(Service, Channels):
    """Holds rows of its own for `gather`."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._source = np.ones(rounds.LARGE // RANKS, np.uint8)
        self._last: list[Place] = []

    async def start(self) -> None:
        self.rows = self.context.open_rows(2, self.context.options["slot_bytes"])

    async def echo(self, payload: bytes) -> bytes:
        return payload

    async def take(self, batch: Batch) -> int:
        return _last_values([column.values for column in batch.columns.values()])

    async def look(self, refs: BatchRef, columns: list[str]) -> int:
        async with self.context.reader.borrowed(refs, columns) as rows:
            return _last_values([values[-1] for values in rows.values()])

    async def copy(self, refs: BatchRef, columns: list[str]) -> int:
        batch = await self.context.reader.read(refs, columns)
        return _last_values([column.values for column in batch.columns.values()])

    async def scatter_frames(self, batch: Batch) -> None:
        await self.take(batch)

    async def scatter(self, refs: BatchRef) -> None:
        await self.look(refs, ["data"])

    async def gather_frames(self, size: int) -> Batch:
        return as_batch({"data": self._source[:size]})

    async def gather(self, size: int) -> BatchRef:
        assert self.rows is not None, "calls come after start"
        self.rows.free(self._last)
        self._last = [self.rows.put({"data": self._source[:size]})]
        return reference(self._last)


def _last_values(arrays: Sequence[Array]) -> int:
    return sum(int(values[-1]) for values in arrays)
