"""Measures the calls of asyncrl: through a handle, a client and a worker process of an echo service, and back.

Worker processes import this module.
"""

import os
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.bench.rivals.call_timing import (
    LARGE,
    LENGTH,
    PIPELINED,
    SAMPLES,
    WINDOW,
    gigabytes_per_second,
    in_window,
    last_values,
    milliseconds,
    percentiles,
    rollout,
    seconds_of_async,
    size,
)
from asyncrl.config.schema import Config, ModelConfig, TaskConfig
from asyncrl.deploy.process.fork_client import FRAME_MALLOC
from asyncrl.deploy.process.local_launcher import LocalLauncher
from asyncrl.fleet.fleet import RunningFleet, ServiceSpec, running_fleet
from asyncrl.fleet.worker.service import Service, WorkerContext
from asyncrl.fleet.worker.worker_spec import RunFacts
from asyncrl.lanes.control.zmq_wire import ZmqWire
from asyncrl.lanes.data.row_reader import RowReader
from asyncrl.lanes.data.row_store import RowStore, bytes_of_row
from asyncrl.lanes.shared_memory import segment_name
from asyncrl.protocols.batch import Array, Batch, BatchRef, Column, Place, RowRef
from asyncrl.protocols.distribute_collect import DP_PROTO, ONE_OF, ONE_TO_ALL
from asyncrl.protocols.rank_layout import Layout
from asyncrl.protocols.service_contracts import Contract, Idempotent, endpoint

RANKS = 4
ROW = ("ids", "logp", "mask", "versions")
"""Columns of a rollout batch that hold a value per token; the others hold a value per sample."""
SMALL = 2**20
SMALLEST_ROW = 1024
"""Bytes of a row in the store of a worker that makes none."""
PART = bytes_of_row({"data": (np.dtype(np.uint8), LARGE // RANKS)})
"""Bytes of a row with the part of a large batch that one rank gets."""


# ---- worker processes ------------------------------------------------------------------------------------


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
        self.rows = self.context.open_rows(2, self.context.spec.options["row_bytes"])

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


def as_batch(tensors: Mapping[str, Array], parts: int = 1) -> Batch:
    """Splits each tensor into `parts` equal rows."""
    return Batch({name: Column.of(np.split(values, parts)) for name, values in tensors.items()})


def reference(places: Sequence[Place]) -> BatchRef:
    rows = (RowRef(number, 0, 0, 0, 64, LENGTH, 0, 0, "length", (place,)) for number, place in enumerate(places))
    return BatchRef(tuple(rows))


# ---- calls -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def asyncrl_calls(folder: Path) -> AsyncIterator["AsyncrlCalls"]:
    """Starts two fleets; only the fleet of frames gets the malloc settings that the runtime uses for rows as frames."""
    async with AsyncExitStack() as scope:
        shared = await scope.enter_async_context(_echo_fleet(folder))
        os.environ.update(FRAME_MALLOC)  # Worker processes inherit the present environment.
        frames = await scope.enter_async_context(_echo_fleet(folder))
        for name in FRAME_MALLOC:
            del os.environ[name]
        wire = ZmqWire()
        scope.callback(wire.close)
        reader = await scope.enter_async_context(RowReader(wire, shared.facts.hello("controller", 0, "bench")))
        yield AsyncrlCalls(shared, frames, reader, scope)


@asynccontextmanager
async def _echo_fleet(folder: Path) -> AsyncIterator[RunningFleet]:
    """Starts a service with one worker and a service with RANKS workers."""
    run_dir = Path(tempfile.mkdtemp(dir=folder))
    config = Config(model=ModelConfig(name="none"), task=TaskConfig(prompts="none"))
    facts = RunFacts(secrets.token_hex(4), run_dir, run_dir, 0, "none", config)
    service = f"{__name__}:EchoService"
    specs = [
        ServiceSpec("one", Echo, service, options={"row_bytes": SMALLEST_ROW}),
        ServiceSpec("all", Echo, service, layout=Layout(dp=RANKS), options={"row_bytes": PART}),
    ]
    with LocalLauncher(run=facts.run) as launcher:
        async with running_fleet(specs, facts, launcher=launcher) as running:
            yield running


class AsyncrlCalls:
    """Measures rows in shared memory with one fleet, and rows as frames with the other. scope: closes the stores."""

    def __init__(self, shared: RunningFleet, frames: RunningFleet, reader: RowReader, scope: AsyncExitStack) -> None:
        self._one = shared.handle("one", Echo)
        self._all = shared.handle("all", Echo)
        self._one_by_frames = frames.handle("one", Echo)
        self._all_by_frames = frames.handle("all", Echo)
        self._reader = reader
        self._tensors = rollout()
        self._large = np.ones(LARGE, np.uint8)

        def store(name: str, slots: int, row: dict[str, Array]) -> RowStore:
            size = bytes_of_row({column: (values.dtype, len(values)) for column, values in row.items()})
            made = RowStore.shared(segment_name(shared.facts.run, shared.facts.incarnation, name, "rows"), slots, size)
            scope.callback(made.close)
            return made

        self._rows = store("rows", 4 * SAMPLES, {name: self._tensors[name][:LENGTH] for name in ROW})
        self._batches = store("batches", WINDOW + 2, self._tensors)
        self._larges = store("larges", 2, {"data": self._large})
        self._parts = store("parts", 2 * RANKS, {"data": self._large[: LARGE // RANKS]})

    async def measure(self) -> dict[str, float]:
        echo = self._one.echo
        payload = b"x" * 64
        spent = time.process_time()
        results = percentiles(await seconds_of_async(lambda: echo(payload), 1000))
        results["cpu_us"] = (time.process_time() - spent) * 1e3
        results["calls_per_s"] = 3200 / await in_window(lambda: echo(payload), 3200, 64)
        return {**results, **await self._by_reference(), **await self._by_frames(), **await self._several_workers()}

    async def _by_reference(self) -> dict[str, float]:
        async def send(store: RowStore, rows: Sequence[dict[str, Array]]) -> None:
            await _send(store, rows, lambda refs: self._one.read_in_place(refs, list(rows[0])))

        async def send_rows() -> None:
            """Sends the batch as a run does, with a row per sample."""
            cut = [slice(start, start + LENGTH) for start in range(0, SAMPLES * LENGTH, LENGTH)]
            await send(self._rows, [{name: self._tensors[name][part] for name in ROW} for part in cut])

        send_batch = partial(send, self._batches, [self._tensors])
        pipelined = await in_window(send_batch, PIPELINED)
        return {
            "batch_ms": milliseconds(await seconds_of_async(send_batch, 30)),
            "rows_ms": milliseconds(await seconds_of_async(send_rows, 30)),
            "piped_gb_s": PIPELINED * size(self._tensors) / pipelined / 1e9,
            "large_gb_s": gigabytes_per_second(
                await seconds_of_async(partial(send, self._larges, [{"data": self._large}]), 5)
            ),
        }

    async def _by_frames(self) -> dict[str, float]:
        take = self._one_by_frames.take
        batch = as_batch(self._tensors)
        large = as_batch({"data": self._large})
        pipelined = await in_window(lambda: take(batch), PIPELINED)
        return {
            "frames_batch_ms": milliseconds(await seconds_of_async(lambda: take(batch), 20)),
            "frames_piped_gb_s": PIPELINED * size(self._tensors) / pipelined / 1e9,
            "frames_large_gb_s": gigabytes_per_second(await seconds_of_async(lambda: take(large), 3)),
        }

    async def _several_workers(self) -> dict[str, float]:
        """Returns the milliseconds to send a part to each of RANKS workers, and to fetch one from each."""
        found = {}
        for name, whole, times in (("small", self._large[:SMALL], 10), ("large", self._large, 3)):
            rows = [{"data": values} for values in np.split(whole, RANKS)]
            ways: dict[str, Callable[[], Any]] = {
                "scatter": partial(_send, self._parts, rows, self._all.scatter),
                "frames_scatter": partial(self._all_by_frames.scatter_frames, as_batch({"data": whole}, RANKS)),
                "gather": partial(self._gather, len(whole) // RANKS),
                "frames_gather": partial(self._gather_frames, len(whole) // RANKS),
            }
            for way, call in ways.items():
                found[f"{way}_{name}_ms"] = milliseconds(await seconds_of_async(call, times))
        return found

    async def _gather(self, part: int) -> int:
        async with self._reader.views(await self._all.gather(part), ["data"]) as found:
            return last_values(found["data"])

    async def _gather_frames(self, part: int) -> int:
        batch = await self._all_by_frames.gather_frames(part)
        return last_values(batch["data"])


async def _send(
    store: RowStore, rows: Sequence[dict[str, Array]], call: Callable[[BatchRef], Awaitable[object]]
) -> None:
    """Writes rows into shared memory, calls with a reference to them, and frees them."""
    places = [store.put(row) for row in rows]
    try:
        await call(reference(places))
    finally:
        store.free(places)
