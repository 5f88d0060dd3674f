"""What a recorder keeps of samples until their step is written."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl import recording, virtual
from asyncrl.errors import FleetFailed
from asyncrl.events import SampleScored, SamplesDropped, StepDone
from asyncrl.fleet import Fleet
from asyncrl.protocols.batch import BatchRef, Cuts, RowRef
from asyncrl.protocols.messages import Health, SampleText, Score, StepReport
from asyncrl.recording import Recorder, StepLine
from asyncrl.rundir import RunDirectory
from asyncrl.staleness_report import StepStaleness

NO_FLEET: Any = None
HEALTH = Health("training", 0, 0, "training0.0-0-a", (), 0, {}, 1.0)


class Well:
    async def health(self) -> list[Health]:
        return [HEALTH]


class Away:
    """A service whose worker is being started again: calls wait for it."""

    def __init__(self, back: float) -> None:
        self._back = back

    async def health(self) -> list[Health]:
        await asyncio.sleep(max(0.0, self._back - asyncio.get_running_loop().time()))
        return [HEALTH]


def recorder_of(fleet: Any, folder: Path) -> Recorder:
    return Recorder(RunDirectory(folder), fleet, 0, 0, lambda line: None, lambda step, numbers: None)


def scored(member: int, attempt: int) -> SampleScored:
    return SampleScored(RowRef(0, member, attempt, 0, 1, 1, 0, 0, "stop", ()), Score(1.0, {"right": 1.0}))


async def test_nothing_is_kept_of_attempts_that_were_overtaken(tmp_path: Path) -> None:
    recorder = recorder_of(NO_FLEET, tmp_path)
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


@pytest.mark.parametrize(("critic", "advantage"), [(None, 0.25), (Well(), None)])
async def test_where_a_critic_judges_tokens_a_sample_has_no_advantage(
    critic: Any, advantage: float | None, tmp_path: Path
) -> None:
    well: Any = Well()
    recorder = recorder_of(Fleet(well, well, well, critic=critic), tmp_path)
    recorder._texts[0, 0] = SampleText(0, 0, "1+1?", "two")
    row = RowRef(0, 0, 0, 0, 1, 1, 0, 0, "stop", (), reward=1.0, advantage=0.25)
    done: Any = SimpleNamespace(
        report=SimpleNamespace(version=1, skipped="", samples=()), cuts=SimpleNamespace(batch=[row])
    )
    (record,) = recorder._records(done)
    assert (record.reward, record.advantage) == (1.0, advantage)
    recorder.close()


async def test_what_a_step_that_trained_nothing_told_is_told_again_by_the_next_try(tmp_path: Path) -> None:
    well: Any = Well()
    told: list[StepLine] = []
    recorder = Recorder(RunDirectory(tmp_path), Fleet(well, well, well), 0, 0, told.append, lambda step, numbers: None)
    recorder._dropped["not finite"] += 3
    for skipped, version in (("not finite", 5), ("", 6), ("", 7)):
        report = StepReport(0, version, 0 if skipped else 1, skipped, "00", {}, (), None)
        await recorder._step(StepDone(Cuts(0, 5, BatchRef(()), 0, 0), report, StepStaleness((), (), 0, ()), 0.0, 1.0))
    assert [line.metrics["step"] for line in told] == [6, 6, 7]
    assert [line.metrics.get("data/dropped/not finite") for line in told] == [3, 3, None]
    assert [line.metrics.get("skipped/not finite") for line in told] == [1, None, None]
    recorder.close()


async def test_events_that_nothing_writes_end_the_run_and_say_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "WAITING_EVENTS", 4)
    recorder = recorder_of(NO_FLEET, tmp_path)
    for member in range(4):
        recorder.observe(scored(member, 0))
    with pytest.raises(FleetFailed, match=f"4 events wait to be written below {tmp_path}"):
        recorder.observe(scored(4, 0))
    recorder.close()


def test_a_service_that_is_away_delays_the_lines_of_steps_but_a_little_and_is_asked_again(tmp_path: Path) -> None:
    async def main() -> tuple[float, int]:
        well: Any = Well()
        away: Any = Away(back=100.0)
        recorder, waited, lines = recorder_of(Fleet(well, well, well, None, away), tmp_path), 0.0, 0
        loop = asyncio.get_running_loop()
        while loop.time() < 120:
            began = loop.time()
            answers = len(await recorder._healths())
            waited += loop.time() - began
            lines += answers == 4
            assert answers >= 3
            await asyncio.sleep(0.2)
        recorder.close()
        return waited, lines

    waited, whole = virtual.run(main())
    assert waited <= 120 * 0.25
    assert whole >= 40
