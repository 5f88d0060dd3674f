"""vLLM behind asyncrl's interface of engines, as a side of a measurement."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

import numpy as np
import structlog

from asyncrl.config.schema import Config
from asyncrl.engines.generation.engine_interface import Completion, SampleRequest
from asyncrl.engines.generation.vllm.vllm_generation import VllmGeneration
from asyncrl.fleet.worker.compute_thread import ThreadCompute
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.fleet.worker.worker_spec import Addresses, RunFacts, WorkerSpec
from asyncrl.lanes.control.inproc_wire import InprocWire
from asyncrl.lanes.data.row_reader import RowReader
from asyncrl.lanes.data.row_store import RowStore
from asyncrl.protocols.rank_layout import Layout
from asyncrl.telemetry.state_clock import Occupancy, StateClock
from asyncrl.telemetry.trace import Tracer

DEADLINE = 600.0
"""Seconds that vLLM may take to start, or to sample all requests once."""


class VllmSide:
    """Samples requests to their full lengths with vLLM, which runs on while other sides are measured. It is started
    when it is made; `close` ends it."""

    def __init__(self, folder: Path, config: Config) -> None:
        self._runner = asyncio.Runner()
        self._done = list[Completion]()
        self._runner.run(self._open(folder, config))

    def complete(self, work: Sequence[SampleRequest]) -> list[Completion]:
        """Submits all requests at once; returns them when all are finished."""
        done: list[Completion] = self._runner.run(self._complete(work))
        return done

    def close(self) -> None:
        self._engine.close()
        self._runner.close()

    async def _open(self, folder: Path, config: Config) -> None:
        loop = asyncio.get_running_loop()
        clock = StateClock(monotonic)
        facts = RunFacts("bench", folder, folder, 0, "", config)
        addresses = Addresses.inproc("generation")
        options = {"own_version": 0}
        spec = WorkerSpec("generation", 0, 0, Layout(), "generation0.0", "", addresses, facts, options)
        occupancy = Occupancy(clock)
        context = WorkerContext(
            spec=spec,
            reader=RowReader(InprocWire(), spec.hello),
            compute=ThreadCompute(occupancy),
            clock=clock,
            occupancy=occupancy,
            tracer=Tracer(None, "bench"),
            log=structlog.get_logger(),
            tasks=asyncio.TaskGroup(),
            open_rows=lambda slots, row_bytes: RowStore.private("inproc://bench", slots, row_bytes),
        )
        async with asyncio.timeout(DEADLINE):
            self._engine = await VllmGeneration.open(context)
        self._engine.end_ids = np.zeros(0, np.int64)
        self._wakeup = asyncio.Event()
        self._loop = loop.create_task(self._engine.run(self._deliver), name="vllm")

    def _deliver(self, completions: Sequence[Completion]) -> None:
        self._done += completions
        self._wakeup.set()

    async def _complete(self, work: Sequence[SampleRequest]) -> list[Completion]:
        self._done = []
        await self._engine.submit(work)
        async with asyncio.timeout(DEADLINE):
            while len(self._done) < len(work):
                await self._wakeup.wait()
                self._wakeup.clear()
        return self._done
