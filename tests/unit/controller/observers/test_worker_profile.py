"""Profiles that a person asks a run for: who is asked, what is refused, and what is written and printed."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.controller.observers.inspection import MARGIN, PROFILE, WorkerProfiles
from asyncrl.errors import PeerLost, Refused
from asyncrl.protocols.messages import Profile
from tests import golden

FOUND = Profile(b"trace", 1.5, [("aten::mm", 1200, 0.75), ("aten::add", 10, 0.25)], [("gemm", 3, 0.001)])


class Worker:
    def __init__(self, name: str, *, alive: bool = True, answer: Any = FOUND) -> None:
        self.name, self.service, self.instance = name, name.rstrip("0123456789."), f"{name}-0-a"
        self.alive = alive
        self.status = "was killed"
        self.answer = answer
        self.asked: list[tuple[Any, ...]] = []

    async def call(self, spec: Any, args: tuple[Any, ...], deadline: float) -> list[Profile]:
        self.asked.append((spec, args, deadline))
        await asyncio.sleep(0)
        if isinstance(self.answer, Exception):
            raise self.answer
        return [self.answer]


def profiles_of(folder: Path, *workers: Worker) -> WorkerProfiles:
    return WorkerProfiles(SimpleNamespace(workers=workers), folder / "profiles")  # type: ignore[arg-type]


async def test_the_first_living_worker_of_a_service_is_profiled(tmp_path: Path) -> None:
    dead = Worker("generation0.0", alive=False)
    living = Worker("generation1.0")
    profiles = profiles_of(tmp_path, dead, living, Worker("training0.0"))
    text = await profiles.record("generation", 2.0)
    assert living.asked == [(PROFILE, (2.0,), 2.0 + MARGIN)]
    path = tmp_path / "profiles" / "generation1.0-0-a.1.trace.json.gz"
    assert path.read_bytes() == b"trace"
    golden.says(text)
    assert ".2.trace.json.gz" in await profiles.record("generation1.0", 2.0)


@pytest.mark.parametrize(
    ("wanted", "seconds"),
    [("generation", 0.5), ("generation", 601.0), ("generation", float("nan")), ("generator", 2.0), ("reward", 2.0)],
)
async def test_what_cannot_be_profiled_is_refused(wanted: str, seconds: float, tmp_path: Path) -> None:
    with golden.raises(Refused):
        await profiles_of(tmp_path, Worker("generation0.0"), Worker("reward0.0", alive=False)).record(wanted, seconds)


async def test_a_worker_that_dies_or_refuses_ends_the_profile_and_not_the_next_one(tmp_path: Path) -> None:
    worker = Worker("generation0.0", answer=PeerLost("it was killed"))
    profiles = profiles_of(tmp_path, worker)
    with golden.raises(Refused):
        await profiles.record("generation", 2.0)
    worker.answer = Refused("it computes without torch")
    with pytest.raises(Refused, match="it computes without torch"):
        await profiles.record("generation", 2.0)
    worker.answer = FOUND
    first = asyncio.create_task(profiles.record("generation", 2.0))
    await asyncio.sleep(0)
    with golden.raises(Refused):
        await profiles.record("generation", 2.0)
    assert "aten::mm" in await first


async def test_a_worker_that_did_nothing_says_so(tmp_path: Path) -> None:
    text = await profiles_of(tmp_path, Worker("reference0.0", answer=Profile(b"", 1.0, [], []))).record("reference", 2)
    assert text.splitlines()[1:] == ["no operator of torch ran on its compute thread in that time"]
