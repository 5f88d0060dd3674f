"""What a recorder keeps of samples until their step is written."""

import asyncio
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.concurrency import running_beside
from asyncrl.controller.checkpointing import READY_TERMS, read_terms, write_terms
from asyncrl.controller.journal.ledger import Dropped
from asyncrl.controller.observers import recorder as recorder_module
from asyncrl.controller.observers.evaluation import Evaluation
from asyncrl.controller.observers.events import SampleScored, StepBegan, StepDone
from asyncrl.controller.observers.recorder import Recorder
from asyncrl.errors import FleetFailed, PeerLost
from asyncrl.fleet.fleet import Fleet
from asyncrl.protocols.batch import BatchRef, Cuts, RowRef
from asyncrl.protocols.messages import Health, SampleText, Score, StepReport, TrainedSample
from asyncrl.simulation import virtual_loop
from asyncrl.telemetry.jsonl import read_lines
from asyncrl.telemetry.run_directory import RunDirectory
from tests.power_cut_disk import Disk

NO_FLEET: Any = None
HEALTH = Health("training", 0, 0, "training0.0-0-a", (), 0, {}, 1.0)


async def poll_health() -> list[Health]:
    return [HEALTH]


SERVICE: Any = SimpleNamespace()


def recorder_of(folder: Path, fleet: Any = NO_FLEET, **facts: Any) -> Recorder:
    """Returns a recorder; shown: takes the metrics of each step."""
    shown = facts.pop("shown", [])
    return Recorder(RunDirectory(folder), fleet, poll_health, 0, lambda metrics, _: shown.append(metrics), **facts)


def generation_with(texts: Any) -> Any:
    return SimpleNamespace(generation=SimpleNamespace(texts=texts), environment=None, critic=None)


def done(version: int, *trained: TrainedSample, rows: tuple[RowRef, ...] = (), skipped: str = "") -> StepDone:
    """Returns the end of the step from the version before; a skipped one leads to none."""
    report = StepReport(0, version, 0 if skipped else 1, skipped, "00", {}, trained, None)
    return StepDone(Cuts(0, version - (not skipped), BatchRef(rows), 1, 1), report, {}, 1.0)


def text_of(row: RowRef) -> SampleText:
    return SampleText(row.group, row.member, "1+1?", "two")


def scored(member: int, attempt: int) -> SampleScored:
    return SampleScored(RowRef(0, member, attempt, 0, 1, 1, 0, 0, "stop", ()), Score(1.0, {"right": 1.0}))


async def test_nothing_is_kept_of_attempts_that_were_overtaken(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(recorder.run())
        for attempt in range(3):
            for member in range(4):
                recorder.observe(scored(member, attempt))
        await recorder.drain()
        assert len(recorder._terms) == 4
        recorder.observe(Dropped(0, (0, 1, 2, 3), "poison"))
        await recorder.drain()
        assert not recorder._terms
        running.cancel()
    recorder.close()


async def test_terms_of_samples_that_wait_outlive_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    before = recorder_of(tmp_path)
    after = recorder_of(tmp_path)
    for member in range(3):
        before.observe(scored(member, 0))
    files = write_terms(str(tmp_path), before.terms_of([(0, 0), (0, 2), (7, 7)]))
    assert files == {READY_TERMS: sha256((tmp_path / READY_TERMS).read_bytes()).hexdigest()}
    assert disk.has(tmp_path / READY_TERMS), "they outlive a power cut too"
    after.restore_terms(read_terms(str(tmp_path)))
    assert after._term_means(BatchRef((scored(0, 0).sample,))) == {"reward/right": 1.0}
    assert after.terms_of([(0, 0), (0, 1), (0, 2)]) == {(0, 0): {"right": 1.0}, (0, 2): {"right": 1.0}}
    assert read_terms(str(tmp_path / "older")) == {}
    for recorder in (before, after):
        recorder.close()


@pytest.mark.parametrize(("critic", "advantage"), [(None, 0.25), (SimpleNamespace(), None)])
async def test_where_a_critic_judges_tokens_a_sample_has_no_advantage(
    critic: Any, advantage: float | None, tmp_path: Path
) -> None:
    recorder = recorder_of(tmp_path, Fleet(SERVICE, SERVICE, SERVICE, critic=critic))
    recorder._texts[0, 0] = SampleText(0, 0, "1+1?", "two")
    row = RowRef(0, 0, 0, 0, 1, 1, 0, 0, "stop", (), reward=1.0, advantage=0.25)
    (record,) = recorder._records(done(1, rows=(row,)))
    assert (record.reward, record.advantage) == (1.0, advantage)
    recorder.close()


async def test_what_a_step_that_trained_nothing_told_is_told_again_by_the_next_try(tmp_path: Path) -> None:
    told: list[Any] = []
    recorder = recorder_of(tmp_path, Fleet(SERVICE, SERVICE, SERVICE), shown=told)
    recorder._dropped["not finite"] += 3
    for each in (done(5, skipped="not finite"), done(6), done(7)):
        await recorder._step(each, 0.0)
    assert [line["step"] for line in told] == [6, 6, 7]
    assert [line.get("data/dropped/not finite") for line in told] == [3, 3, None]
    assert [line.get("skipped/not finite") for line in told] == [1, None, None]
    recorder.close()


def test_steps_that_are_written_late_keep_their_times_and_the_evaluations_before_them(tmp_path: Path) -> None:
    told: list[Any] = []

    async def play() -> None:
        recorder = recorder_of(tmp_path, Fleet(SERVICE, SERVICE, SERVICE), shown=told)
        recorder.evaluated(Evaluation(2, 8, 0.5, 0.1, None, 0, 1.0))
        for version in range(1, 5):
            await asyncio.sleep(10)
            recorder.observe(done(version, TrainedSample(0, 0, 0, 100, 0)))
        running = asyncio.create_task(recorder.run())
        await recorder.drain()
        running.cancel()
        recorder.close()

    virtual_loop.run(play())
    assert [line.get("eval/version") for line in told] == [None, None, 2, None], "version 2 is that before step 3"
    assert [line["perf/tokens_per_s"] for line in told] == pytest.approx([10] * 4)


@pytest.mark.parametrize("answers", [True, False], ids=["others-live", "none-answers"])
def test_steps_before_a_death_are_written_once_with_what_living_workers_answer(tmp_path: Path, answers: bool) -> None:
    told: list[str] = []
    row = scored(0, 0).sample
    asked = asyncio.Event()

    async def texts(batch: BatchRef) -> list[SampleText]:
        asked.set()
        await asyncio.sleep(1 if answers else 600)
        return [text_of(row) for row in batch.rows]

    async def die() -> None:
        await asked.wait()
        raise FleetFailed("training0.1 died")

    async def play() -> None:
        recorder = recorder_of(tmp_path, generation_with(texts), warn=told.append)
        with closing(recorder):
            await train(recorder)

    async def train(recorder: Recorder) -> None:
        async with recorder.recording(), running_beside({"a worker that learns": die()}):
            for version in (10, 11):
                step = done(version, TrainedSample(0, 0, 0, 1, 0), rows=(row,))
                recorder.observe(StepBegan(step.cuts, (row,)))
                recorder.observe(step)
            await asyncio.Event().wait()

    with pytest.raises(FleetFailed, match=r"training0\.1 died"):
        virtual_loop.run(play())
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [10, 11]
    samples = [line["step"] for line in read_lines(tmp_path / "samples.jsonl")]
    assert samples == ([10, 11] if answers else [])
    lacks = "samples.jsonl lacks samples of step {}: the workers that had their texts did not answer"
    assert told == ([] if answers else [lacks.format(10), lacks.format(11)])


async def test_a_recorder_that_failed_is_not_waited_for(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path)

    async def train() -> None:
        async with asyncio.timeout(60), recorder.recording():
            recorder.observe(done(1))
            recorder.observe(Dropped(0, (4,), "stale"))
            await asyncio.Event().wait()

    with pytest.raises(AttributeError):
        await train()
    recorder.close()


async def test_events_that_nothing_writes_end_the_run_and_say_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "WAITING_EVENTS", 4)
    recorder = recorder_of(tmp_path)
    for member in range(4):
        recorder.observe(Dropped(0, (member,), "stale"))
    with pytest.raises(FleetFailed, match=f"4 events wait to be written below {tmp_path}"):
        recorder.observe(Dropped(0, (4,), "stale"))
    recorder.close()


@pytest.mark.parametrize("dies", [False, True])
async def test_rows_are_kept_from_the_beginning_of_a_step_until_their_texts_are_read(
    tmp_path: Path, dies: bool
) -> None:
    asked = asyncio.Event()
    answer = asyncio.Event()

    async def texts(batch: BatchRef) -> list[SampleText]:
        asked.set()
        await answer.wait()
        if dies:
            raise PeerLost("generation0.0 died")
        return [text_of(row) for row in batch.rows]

    released: list[Any] = []
    recorder = recorder_of(tmp_path, generation_with(texts))
    recorder.shown.released_by(released.extend)
    row = scored(0, 0).sample
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(recorder.run())
        recorder.observe(StepBegan(Cuts(0, 0, BatchRef((row,)), 1, 1), (row,)))
        assert recorder.shown.take([row.name]) == [], "before the recorder has come to this event"
        await asked.wait()
        assert not released
        answer.set()
        await recorder.drain()
        assert released == [row.name]
        assert list(recorder._texts) == ([] if dies else [row.key])
        running.cancel()
    recorder.close()
