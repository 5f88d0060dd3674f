"""Our side of `asyncrl-bench channels`: a handle, a link, a worker process, and the way back."""

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

from asyncrl.bench.channel_service import RANKS, ROW, Channels, as_batch, reference
from asyncrl.bench.peers import rounds
from asyncrl.config import Config, Model, Task
from asyncrl.deploy.local import LocalLauncher
from asyncrl.fleet import RunningFleet, ServiceSpec, running_fleet
from asyncrl.launch import RunFacts
from asyncrl.memory import segment_name
from asyncrl.protocols.batch import Array, Batch, Place
from asyncrl.protocols.layout import Layout
from asyncrl.row_reader import RowReader
from asyncrl.rows import SharedRows, bytes_of_slot
from asyncrl.wire.socket import ZmqWire
from asyncrl.worker import identity

SERVICE = "asyncrl.bench.channel_service:ChannelService"
SMALL = 2**20
SLOT = 1024
"""Bytes for the rows of a worker that makes none."""


@dataclass(frozen=True, slots=True)
class Site:
    """One worker, and RANKS workers of one service, called by frames or by reference."""

    one: Channels
    all: Channels


@asynccontextmanager
async def site(folder: Path) -> AsyncIterator[tuple[Site, RunFacts]]:
    """Worker processes that get the environment of this moment."""
    config = Config(model=Model(name="none"), task=Task(prompts="none"))
    facts = RunFacts(secrets.token_hex(4), str(folder), str(folder), 0, "none", config)
    specs = [
        ServiceSpec("one", Channels, SERVICE, options={"slot_bytes": SLOT}),
        ServiceSpec("all", Channels, SERVICE, layout=Layout(dp=RANKS), options={"slot_bytes": rounds.LARGE // RANKS}),
    ]
    with LocalLauncher(run=facts.run) as launcher:
        async with running_fleet(specs, facts, launcher=launcher) as running:
            yield _site(running), facts


def _site(running: RunningFleet) -> Site:
    return Site(running.handle("one", Channels), running.handle("all", Channels))


class Ours:
    """Measures over shared memory at one site, as frames at the other."""

    def __init__(self, shared: Site, frames: Site, facts: RunFacts, reader: RowReader) -> None:
        self._shared, self._frames, self._reader = shared, frames, reader
        self._tensors = rounds.rollout()
        self._large = np.ones(rounds.LARGE, np.uint8)
        self._stores = AsyncExitStack()
        row = {name: self._tensors[name][: rounds.LENGTH] for name in ROW}
        self._rows = self._store(facts, "rows", 4 * rounds.SAMPLES, row)
        self._batches = self._store(facts, "batches", rounds.WINDOW + 2, self._tensors)
        self._larges = self._store(facts, "larges", 2, {"data": self._large})
        self._parts = self._store(facts, "parts", 2 * RANKS, {"data": self._large[: rounds.LARGE // RANKS]})

    def _store(self, facts: RunFacts, name: str, slots: int, row: dict[str, Array]) -> SharedRows:
        size = bytes_of_slot({column: (values.dtype, len(values)) for column, values in row.items()})
        store = SharedRows(segment_name(facts.run, facts.epoch, name, "rows"), slots, size)
        self._stores.callback(store.close)
        return store

    async def close(self) -> None:
        await self._stores.aclose()

    async def measure(self) -> dict[str, float]:
        return {**await self._small(), **await self._by_reference(), **await self._by_frames(), **await self._many()}

    async def _small(self) -> dict[str, float]:
        echo, payload = self._shared.one.echo, b"x" * 64
        spent = time.process_time()
        found = await rounds.percentiles_async(lambda: echo(payload), 1000)
        found["cpu_us"] = (time.process_time() - spent) * 1e3
        found["calls_per_s"] = 3200 / await rounds.in_window(lambda: echo(payload), 3200, 64)
        return found

    # ---- one worker ------------------------------------------------------------------------------------------

    async def _by_reference(self) -> dict[str, float]:
        seconds = await rounds.in_window(self._give_batch, rounds.PIPELINED)
        return {
            "batch_ms": await rounds.milliseconds_async(self._give_batch, 30),
            "rows_ms": await rounds.milliseconds_async(self._give_rows, 30),
            "piped_gb_s": rounds.PIPELINED * rounds.size(self._tensors) / seconds / 1e9,
            "large_gb_s": rounds.LARGE / await rounds.milliseconds_async(self._give_large, 5) / 1e6,
        }

    async def _by_frames(self) -> dict[str, float]:
        batch, large = as_batch(self._tensors), as_batch({"data": self._large})
        seconds = await rounds.in_window(lambda: self._frames.one.take(batch), rounds.PIPELINED)
        return {
            "frames_batch_ms": await rounds.milliseconds_async(lambda: self._frames.one.take(batch), 20),
            "frames_piped_gb_s": rounds.PIPELINED * rounds.size(self._tensors) / seconds / 1e9,
            "frames_large_gb_s": rounds.LARGE
            / await rounds.milliseconds_async(lambda: self._frames.one.take(large), 3)
            / 1e6,
        }

    async def _give_batch(self) -> None:
        await self._given(self._batches, [self._tensors], self._shared.one.look)

    async def _give_rows(self) -> None:
        """The same batch as a run has it: a row for each sample."""
        cut = [slice(start, start + rounds.LENGTH) for start in range(0, rounds.SAMPLES * rounds.LENGTH, rounds.LENGTH)]
        rows = [{name: self._tensors[name][part] for name in ROW} for part in cut]
        await self._given(self._rows, rows, self._shared.one.look)

    async def _give_large(self) -> None:
        await self._given(self._larges, [{"data": self._large}], self._shared.one.look)

    async def _given(self, store: SharedRows, rows: Sequence[dict[str, Array]], take: Callable[..., Any]) -> None:
        with _stored(store, rows) as places:
            await take(reference(places), list(rows[0]))

    # ---- several workers -------------------------------------------------------------------------------------

    async def _many(self) -> dict[str, float]:
        """Milliseconds to hand a part to each of RANKS workers, and to have one from each."""
        found = {}
        for name, size, times in (("small", SMALL, 10), ("large", rounds.LARGE, 3)):
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
                found[f"{way}_{name}_ms"] = await rounds.milliseconds_async(call, times)
        return found

    async def _scatter(self, rows: Sequence[dict[str, Array]]) -> None:
        with _stored(self._parts, rows) as places:
            await self._shared.all.scatter(reference(places))

    async def _gather(self, part: int) -> int:
        refs = await self._shared.all.gather(part)
        async with self._reader.borrowed(refs, ["data"]) as found:
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
async def ours(folder: Path, frame_malloc: dict[str, str]) -> AsyncIterator[Ours]:
    """Two sites; only that of frames has the memory settings that the runtime gives where rows are frames."""
    (folder / "shared").mkdir()
    (folder / "frames").mkdir()
    async with AsyncExitStack() as scope:
        shared, facts = await scope.enter_async_context(site(folder / "shared"))
        os.environ.update(frame_malloc)
        frames, _ = await scope.enter_async_context(site(folder / "frames"))
        for name in frame_malloc:
            del os.environ[name]
        wire = ZmqWire()
        scope.callback(wire.close)
        reader = await scope.enter_async_context(RowReader(wire, identity(facts, "controller", 0, "bench")))
        measuring = Ours(shared, frames, facts, reader)
        scope.push_async_callback(measuring.close)
        yield measuring
