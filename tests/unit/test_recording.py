"""What a recorder keeps of samples until their step is written."""

import asyncio
from pathlib import Path
from typing import Any

from asyncrl.events import SampleScored, SamplesDropped
from asyncrl.protocols.batch import RowRef
from asyncrl.protocols.messages import Score
from asyncrl.recording import Recorder
from asyncrl.rundir import RunDirectory

NO_FLEET: Any = None


def scored(member: int, attempt: int) -> SampleScored:
    return SampleScored(RowRef(0, member, attempt, 0, 1, 1, 0, 0, "stop", ()), Score(1.0, {"right": 1.0}))


async def test_nothing_is_kept_of_attempts_that_were_overtaken(tmp_path: Path) -> None:
    recorder = Recorder(RunDirectory(tmp_path), NO_FLEET, 0, 0, lambda line: None, lambda step, numbers: None)
    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(recorder.run())
        for attempt in range(3):
            for member in range(4):
                recorder.observe(scored(member, attempt))
        await recorder.drain()
        assert len(recorder._terms) == 4
        recorder.observe(SamplesDropped(0, (0, 1, 2, 3), "poison"))
        await recorder.drain()
        assert not recorder._terms
        running.cancel()
    recorder.close()
