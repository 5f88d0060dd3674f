"""Calls that are recorded wait for a disk that cannot follow, so that no more than a bound is in memory."""

import asyncio
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from asyncrl.lanes.data import recorder
from asyncrl.lanes.data.recorder import LaneRecorder, RecordFiles
from asyncrl.protocols.messages import Call


async def test_a_call_is_answered_once_the_disk_has_room_for_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = threading.Event()
    monkeypatch.setattr(recorder, "MOST_WAITING", 10)
    monkeypatch.setattr(RecordFiles, "_write", lambda self, data: written.wait(20))
    answered = asyncio.Event()

    async def answer() -> str:
        answered.set()
        return "answer"

    async def digests() -> dict[str, Any]:
        return {}

    with closing(RecordFiles(tmp_path, "reward0.0-0-a", 1000, ("worker", "{}"))) as files:
        recorded = LaneRecorder(files).around(lambda call: answer(), ["score"], digests)
        calling = asyncio.ensure_future(recorded(Call(0, "score", (), 5.0)))
        await answered.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not calling.done(), "its records wait for the disk"
        written.set()
        assert await calling == "answer"
        assert files.failure == ""
