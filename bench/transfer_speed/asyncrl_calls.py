"""Measures the calls of asyncrl: through a handle, a client and a worker process, and back."""

import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.bench.rivals import timed_rounds
from asyncrl.bench.rivals.timed_rounds import LARGE, LENGTH, PIPELINED, SAMPLES, WINDOW
from asyncrl.bench.transfer_speed.echo_service import RANKS, ROW, Echo, as_batch, reference
from asyncrl.config.schema import Config, ModelConfig, TaskConfig
from asyncrl.deploy.process.local_launcher import LocalLauncher
from asyncrl.fleet.fleet import ServiceSpec, running_fleet
from asyncrl.fleet.worker.worker_spec import RunFacts
from asyncrl.lanes.control.zmq_wire import ZmqWire
from asyncrl.lanes.data.row_reader import RowReader
from asyncrl.lanes.data.row_store import SharedRows, bytes_of_slot
from asyncrl.lanes.shared_memory import segment_name
from asyncrl.protocols.batch import Array, Batch, Place
from asyncrl.protocols.layout import Layout

SERVICE = "asyncrl.bench.transfer_speed.echo_service:EchoService"
SMALL = 2**20
SLOT = 1024
"""Bytes of a slot in the store of a worker that makes no rows."""


@dataclass(frozen=True, slots=True)
class EchoFleet:
    """Holds the handles of a service with one worker and of a service with RANKS workers."""

    one: Echo
    all: Echo


@asynccontextmanager
async def echo_fleet(folder: Path) -> AsyncIterator[tuple[EchoFleet, RunFacts]]:
    """Starts the worker processes, which inherit the present environment."""
    config = Config(model=ModelConfig(name="none"), task=TaskConfig(prompts="none"))
    facts = RunFacts(secrets.token_hex(4), str(folder), str(folder), 0, "none", config)
    specs = [
        ServiceSpec("one", Echo, SERVICE, options={"slot_bytes": SLOT}),
        ServiceSpec("all", Echo, SERVICE, layout=Layout(dp=RANKS), options={"slot_bytes": LARGE // RANKS}),
    ]
    with LocalLauncher(run=facts.run) as launcher:
        async with running_fleet(specs, facts, launcher=launcher) as running:
            yield EchoFleet(running.handle("one", Echo), running.handle("all", Echo)), facts


class AsyncrlCalls:
    """Measures rows in shared memory with one fleet, and rows as frames with the other."""

    def __init__(self, shared: EchoFleet, frames: EchoFleet, facts: RunFacts, reader: RowReader) -> None:
        self._shared = shared
        self._frames = frames
        self._reader = reader
        self._tensors = timed_rounds.rollout()
        self._large = np.ones(LARGE, np.uint8)
        self._stores = AsyncExitStack()
        row = {name: self._tensors[name][:LENGTH] for name in ROW}
        self._rows = self._store(facts, "rows", 4 * SAMPLES, row)
        self._batches = self._store(facts, "batches", WINDOW + 2, self._tensors)
        self._larges = self._store(facts, "larges", 2, {"data": self._large})
        self._parts = self._store(facts, "parts", 2 * RANKS, {"data": self._large[: LARGE // RANKS]})

    def _store(self, facts: RunFacts, name: str, slots: int, row: dict[str, Array]) -> SharedRows:
        size = bytes_of_slot({column: (values.dtype, len(values)) for column, values in row.items()})
        store = SharedRows(segment_name(facts.run, facts.incarnation, name, "rows"), slots, size)
        self._stores.callback(store.close)
        return store

    async def close(self) -> None:
        await self._stores.aclose()

    async def measure(self) -> dict[str, float]:
        return {**await self._small(), **await self._by_reference(), **await self._by_frames(), **await self._many()}

    async def _small(self) -> dict[str, float]:
        echo, payload = self._shared.one.echo, b"x" * 64
        spent = time.process_time()
        results = await timed_rounds.percentiles_async(lambda: echo(payload), 1000)
        results["cpu_us"] = (time.process_time() - spent) * 1e3
        results["calls_per_s"] = 3200 / await timed_rounds.in_window(lambda: echo(payload), 3200, 64)
        return results

    # ---- one worker ------------------------------------------------------------------------------------------

    async def _by_reference(self) -> dict[str, float]:
        seconds = await timed_rounds.in_window(self._send_batch, PIPELINED)
        return {
            "batch_ms": await timed_rounds.milliseconds_async(self._send_batch, 30),
            "rows_ms": await timed_rounds.milliseconds_async(self._send_rows, 30),
            "piped_gb_s": PIPELINED * timed_rounds.size(self._tensors) / seconds / 1e9,
            "large_gb_s": LARGE / await timed_rounds.milliseconds_async(self._send_large, 5) / 1e6,
        }

    async def _by_frames(self) -> dict[str, float]:
        batch, large = as_batch(self._tensors), as_batch({"data": self._large})
        seconds = await timed_rounds.in_window(lambda: self._frames.one.take(batch), PIPELINED)
        return {
            "frames_batch_ms": await timed_rounds.milliseconds_async(lambda: self._frames.one.take(batch), 20),
            "frames_piped_gb_s": PIPELINED * timed_rounds.size(self._tensors) / seconds / 1e9,
            "frames_large_gb_s": LARGE
            / await timed_rounds.milliseconds_async(lambda: self._frames.one.take(large), 3)
            / 1e6,
        }

    async def _send_batch(self) -> None:
        await self._send(self._batches, [self._tensors], self._shared.one.read_in_place)

    async def _send_rows(self) -> None:
        """Sends the batch as a run does, with a row per sample."""
        cut = [slice(start, start + LENGTH) for start in range(0, SAMPLES * LENGTH, LENGTH)]
        rows = [{name: self._tensors[name][part] for name in ROW} for part in cut]
        await self._send(self._rows, rows, self._shared.one.read_in_place)

    async def _send_large(self) -> None:
        await self._send(self._larges, [{"data": self._large}], self._shared.one.read_in_place)

    async def _send(self, store: SharedRows, rows: Sequence[dict[str, Array]], call: Callable[..., Any]) -> None:
        with _stored(store, rows) as places:
            await call(reference(places), list(rows[0]))

    # ---- several workers -------------------------------------------------------------------------------------

    async def _many(self) -> dict[str, float]:
        """Returns the milliseconds to send a part to each of RANKS workers, and to fetch one from each."""
        found = {}
        for name, size, times in (("small", SMALL, 10), ("large", LARGE, 3)):
            whole, part = self._large[:size], size // RANKS
            batch = as_batch({"data": whole}, RANKS)
            rows = [{"data": values} for values in np.split(whole, RANKS)]
            ways: dict[str, Callable[[], Any]] = {
                "scatter": partial(self._scatter, rows),
                "frames_scatter": partial(self._frames.all.scatter_frames, batch),
                "gather": partial(self._gather, part),
                "frames_gather": partial(self._gather_frames, part),
            }
            for way, call in ways.items():
                found[f"{way}_{name}_ms"] = await timed_rounds.milliseconds_async(call, times)
        return found

    async def _scatter(self, rows: Sequence[dict[str, Array]]) -> None:
        with _stored(self._parts, rows) as places:
            await self._shared.all.scatter(reference(places))

    async def _gather(self, part: int) -> int:
        refs = await self._shared.all.gather(part)
        async with self._reader.views(refs, ["data"]) as found:
            return sum(int(values[-1]) for values in found["data"])

    async def _gather_frames(self, part: int) -> int:
        batch: Batch = await self._frames.all.gather_frames(part)
        return sum(int(values[-1]) for values in batch["data"])


@contextmanager
def _stored(store: SharedRows, rows: Sequence[dict[str, Array]]) -> Any:
    places: list[Place] = []
    try:
        places += [store.put(row) for row in rows]
        yield places
    finally:
        store.free(places)


@asynccontextmanager
async def asyncrl_calls(folder: Path, frame_malloc: dict[str, str]) -> AsyncIterator[AsyncrlCalls]:
    """Starts two fleets; only the fleet of frames gets the malloc settings that the runtime uses for rows as frames."""
    (folder / "shared").mkdir()
    (folder / "frames").mkdir()
    async with AsyncExitStack() as scope:
        shared, facts = await scope.enter_async_context(echo_fleet(folder / "shared"))
        os.environ.update(frame_malloc)
        frames, _ = await scope.enter_async_context(echo_fleet(folder / "frames"))
        for name in frame_malloc:
            del os.environ[name]
        wire = ZmqWire()
        scope.callback(wire.close)
        reader = await scope.enter_async_context(RowReader(wire, facts.hello("controller", 0, "bench")))
        calls = AsyncrlCalls(shared, frames, facts, reader)
        scope.push_async_callback(calls.close)
        yield calls
