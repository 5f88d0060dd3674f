"""The acting service with real environments in children: samples, stamps, pauses, failures."""

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.engines.acting.acting_loop import ActingPolicy
from asyncrl.engines.acting.acting_trainer import ActingTrainer
from asyncrl.engines.acting.stepping.spaces import SPACES, write_spaces
from asyncrl.engines.acting.transitions import COLUMNS
from asyncrl.errors import DeadlineExceeded, EnvironmentFailed, Refused
from asyncrl.fleet.worker.compute_thread import ThreadCompute
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.protocols.batch import BatchRef
from asyncrl.protocols.messages import PromptGroup
from asyncrl.services import acting_generation
from asyncrl.services.acting_generation import ActingService
from tests.unit.engines.acting.scene import ENVIRONMENTS, acting_config, spaces_of_walk, until

Serving = Callable[..., AbstractAsyncContextManager[ActingService]]
LONG = 20


@pytest.fixture
def serving(worker_context: Callable[..., WorkerContext], tmp_path: Path) -> Serving:
    @asynccontextmanager
    async def serve(
        name: str = "Walk", compute: dict[str, Any] | None = None, **acting: Any
    ) -> AsyncIterator[ActingService]:
        write_spaces(tmp_path / SPACES, spaces_of_walk())
        settings = {"environments": 2, "transitions": 5, "hidden_size": [8], **acting}
        config = acting_config(f"{ENVIRONMENTS}:{name}", **settings)
        config = config.model_copy(update={"children": config.children.model_copy(update={"sandbox": "none"})})
        async with asyncio.TaskGroup() as tasks:
            before = asyncio.all_tasks()
            service = ActingService(worker_context("generation", config, tasks, **(compute or {})))
            try:
                await service.start()
                yield service
            finally:
                await service.stop()
                for task in asyncio.all_tasks() - before:
                    task.cancel() if task.get_name() == "acting loop" else None

    return serve


def group(number: int = 0, members: tuple[int, ...] = (0, 1), **changes: Any) -> PromptGroup:
    asked = {"incarnation": 1, "not_before": 0, **changes}
    return PromptGroup(number, 0, asked["incarnation"], "", members, 0, asked["not_before"], 1.0, 1, 10.0)


def publish(service: ActingService, version: int) -> None:
    """Gives the service weights, as `use_weights` does."""
    trainer = ActingTrainer(service.context.config, service._spaces)
    service._policy.load(trainer.named_tensors(), version)
    service._loop.changed()


async def samples_of(service: ActingService, asked: PromptGroup) -> BatchRef:
    async with asyncio.timeout(LONG):
        return BatchRef.join([samples async for samples in service.generate(asked)])


async def test_a_group_has_a_sample_of_each_environment_with_whole_columns(serving: Serving) -> None:
    async with serving() as service:
        publish(service, 3)
        samples = await samples_of(service, group())
        assert sorted(row.key for row in samples) == [(0, 0), (0, 1)]
        for row in samples:
            assert (row.tokens, row.first, row.last, row.incarnation) == (5, 3, 3, 1)
            assert service.rows is not None
            columns = dict(zip(COLUMNS, service.rows.read(row.places[0], COLUMNS), strict=True))
            assert [len(columns[name]) for name in ("observations", "actions", "rewards")] == [10, 5, 5]
            seen = columns["observations"].reshape(5, 2)
            then = columns["next_observations"].reshape(5, 2)
            goes_on = (columns["terminated"] + columns["truncated"] == 0)[:-1]
            np.testing.assert_array_equal(seen[1:][goes_on], then[:-1][goes_on])
            assert (columns["logprobs"] < 0).all()
        assert service.counters["tokens"] == 10


async def test_transitions_have_the_version_that_acted_and_episodes_go_on(serving: Serving) -> None:
    async with serving("endless") as service:
        publish(service, 0)
        first = await samples_of(service, group(0))
        publish(service, 1)
        second = await samples_of(service, group(1))
        assert {(row.first, row.last) for row in second} == {(1, 1)}
        assert service.rows is not None
        for before, after in zip(sorted(first), sorted(second), strict=True):
            (then,) = service.rows.read(before.places[0], ["next_observations"])
            (seen,) = service.rows.read(after.places[0], ["observations"])
            np.testing.assert_array_equal(then[-2:], seen[:2])


async def test_a_sample_begins_with_weights_that_are_new_enough(serving: Serving) -> None:
    async with serving() as service:
        publish(service, 4)
        waits = asyncio.create_task(samples_of(service, group(not_before=5)))
        await until(lambda: service._loop.running > 0)
        assert (service._loop.running, service._loop.steps) == (2, 0)
        service._count()
        assert service.counters["running"] == 2
        publish(service, 5)
        assert {row.first for row in await waits} == {5}
        assert service.counters["running"] == 0


@pytest.mark.parametrize("feedback", ["synchronous", "asynchronous"])
async def test_a_paused_worker_acts_no_more_until_it_resumes(serving: Serving, feedback: str) -> None:
    async with serving(feedback=feedback) as service:
        publish(service, 0)
        paused = await service.pause()
        waits = asyncio.create_task(samples_of(service, group()))
        assert (await service.pause()).at == paused.at == 0
        await service.resume()
        assert len(await waits) == 2
        assert (await service.pause()).at == 10


async def test_a_call_that_ends_early_leaves_nothing(serving: Serving) -> None:
    async with serving() as service:
        asked = asyncio.create_task(samples_of(service, group()))
        await until(lambda: service._loop.running > 0)
        asked.cancel()
        await asyncio.wait({asked})
        publish(service, 0)
        assert service._loop.running == 0
        assert len(await samples_of(service, group(1))) == 2


async def test_environments_that_lose_every_episode_fail_the_call(serving: Serving) -> None:
    async with serving("Troubled", options={"trouble": "raise", "at": 1}, failures=3) as service:
        publish(service, 0)
        with pytest.raises(EnvironmentFailed, match=r"3 episodes in a row were lost.*the floor gave way"):
            await samples_of(service, group())
        with pytest.raises(EnvironmentFailed):
            await samples_of(service, group(1))
        assert service.counters["environment/lost_episodes"] >= 2


async def test_a_group_of_another_incarnation_is_refused(serving: Serving) -> None:
    async with serving() as service:
        with pytest.raises(Refused, match=r"group 0 has incarnation 9; .* has incarnation 1"):
            await samples_of(service, group(incarnation=9))


async def test_a_call_whose_samples_are_never_full_ends_with_what_it_waits_for(serving: Serving) -> None:
    async with serving() as service:  # It never gets weights.
        asked = dataclasses.replace(group(), deadline=0.2)
        with pytest.raises(DeadlineExceeded, match=r"was full within 0\.3 s: it acts for 2 samples, .* of group 0"):
            await samples_of(service, asked)
        assert service._loop.running == 0


async def test_the_policy_computes_on_the_compute_thread_only(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()
    act = ActingPolicy.act

    def noted(policy: ActingPolicy, *arguments: Any, **options: Any) -> Any:
        threads.add(threading.current_thread().name)
        return act(policy, *arguments, **options)

    monkeypatch.setattr(ActingPolicy, "act", noted)
    async with serving(compute={"make_compute": ThreadCompute}) as service:
        with closing(service.context.compute):
            publish(service, 0)
            await samples_of(service, group())
    assert threads == {"compute"}


async def test_a_sample_is_described_for_a_person(serving: Serving) -> None:
    async with serving(transitions=20) as service:
        publish(service, 0)
        samples = await samples_of(service, group())
        (text, _) = await service.texts(samples)
        assert text.prompt.endswith("line_walk.py:Walk")
        assert text.text.startswith("20 transitions with a reward of ")
        assert "returns of episodes that ended: " in text.text
        assert len(text.transitions) == 20
        first = text.transitions[0]
        ended = [each for each in text.transitions if "ended" in each]
        assert first.keys() == {"observation", "action", "logprob", "reward", "version"}
        assert first["action"] in (-1, 0, 1), first
        assert {each["ended"] for each in ended} <= {"terminated", "truncated"}, ended
        assert len(ended) == text.text.partition("ended: ")[2].count(" after ")
        gained = sum(each["reward"] for each in text.transitions)
        assert text.text.startswith(f"20 transitions with a reward of {gained:g}")


async def test_transitions_for_a_person_are_bounded(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acting_generation, "SHOWN_TRANSITIONS", 25)
    async with serving(transitions=20) as service:
        publish(service, 0)
        texts = await service.texts(await samples_of(service, group()))
        assert [len(text.transitions) for text in texts] == [20, 5]
