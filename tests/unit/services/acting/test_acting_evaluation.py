"""The evaluation service of a policy that acts: the same episodes each time, lost ones, and ones that never end."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from asyncrl.engines.acting.acting_trainer import WEIGHTS, ActingTrainer
from asyncrl.engines.acting.stepping.one_environment import OneEnvironment
from asyncrl.engines.acting.stepping.spaces import SPACES, write_spaces
from asyncrl.errors import ConfigError, PeerLost, Refused
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.protocols.batch import BatchRef, RowRef
from asyncrl.protocols.messages import PromptGroup
from asyncrl.services.acting_evaluation import ActingEvaluationService
from asyncrl.telemetry.run_directory import RunDirectory
from tests.unit.engines.acting.line_walk import Push
from tests.unit.engines.acting.scene import ENVIRONMENTS, acting_config, spaces_of_walk

Serving = Callable[..., AbstractAsyncContextManager[ActingEvaluationService]]
EPISODES = 5


@pytest.fixture
def serving(worker_context: Callable[..., WorkerContext], tmp_path: Path) -> Serving:
    @asynccontextmanager
    async def serve(
        name: str = "Walk", own: int | None = None, **acting: Any
    ) -> AsyncIterator[ActingEvaluationService]:
        write_spaces(tmp_path / SPACES, OneEnvironment(Push, 0, 0).spaces if name == "Push" else spaces_of_walk())
        settings = {"environments": 2, "hidden_size": [8], **acting}
        config = acting_config(f"{ENVIRONMENTS}:{name}", **settings)
        evaluate = config.evaluate.model_copy(update={"episodes": EPISODES})
        children = config.children.model_copy(update={"sandbox": "none"})
        config = config.model_copy(update={"children": children, "evaluate": evaluate})
        async with asyncio.TaskGroup() as tasks:
            context = worker_context("evaluation", config, tasks)
            options = {} if own is None else {"own_version": own}
            service = ActingEvaluationService(replace(context, spec=replace(context.spec, options=options)))
            try:
                await service.start()
                yield service
            finally:
                await service.stop()

    return serve


def episodes(version: int = 0, seconds: float = 20.0, incarnation: int = 1) -> PromptGroup:
    return PromptGroup(-1, version, incarnation, "", tuple(range(EPISODES)), 0, version, 0.0, 1, seconds)


def publish(service: ActingEvaluationService, version: int = 0) -> None:
    """Gives the service weights, as `use_weights` does."""
    service._policy.load(ActingTrainer(service.context.config, service._spaces).named_tensors(), version)


async def played(service: ActingEvaluationService, asked: PromptGroup) -> list[RowRef]:
    async with asyncio.timeout(60):
        found = BatchRef.join([samples async for samples in service.generate(asked)])
    return sorted(found, key=lambda row: row.member)


def results(rows: list[RowRef]) -> list[tuple[float | None, int, str]]:
    return [(row.reward, row.tokens, row.finish) for row in rows]


async def test_the_same_weights_play_the_same_episodes_whatever_the_number_of_environments(serving: Serving) -> None:
    async with serving("Push", environments=2) as service:
        publish(service, 3)
        first = await played(service, episodes(3))
        again = await played(service, episodes(3))
    assert [row.name for row in first] == [(-1, member, 3) for member in range(EPISODES)]
    assert {(row.first, row.last, row.incarnation, row.places) for row in first} == {(3, 3, 1, ())}
    assert {row.finish for row in first} <= {"terminated", "truncated"}
    assert results(again) == results(first)
    assert len({row.reward for row in first}) == EPISODES, "each episode has a seed of its own"
    async with serving("Push", environments=3, children=2, feedback="asynchronous") as service:
        publish(service, 3)
        assert results(await played(service, episodes(3))) == results(first)


async def test_an_episode_that_its_environment_lost_has_no_return(serving: Serving, tmp_path: Path) -> None:
    options = {"trouble": "raise", "at": 1, "flag": str(tmp_path / "once")}
    async with serving("Troubled", options=options, environments=1) as service:
        publish(service)
        rows = await played(service, episodes())
        assert [(row.finish, row.reward is None) for row in rows].count(("lost", True)) == 1
        assert sum(row.reward is not None for row in rows) == EPISODES - 1
        assert service.counters["environment/lost_episodes"] == 1


async def test_a_child_that_dies_costs_one_episode_of_one_evaluation(serving: Serving, tmp_path: Path) -> None:
    options = {"trouble": "crash", "at": 1, "flag": str(tmp_path / "once")}
    async with serving("Troubled", options=options) as service:
        publish(service)
        assert [row.finish for row in await played(service, episodes())].count("lost") == 1
        assert "lost" not in {row.finish for row in await played(service, episodes())}


async def test_episodes_without_an_end_are_cut_off_at_the_deadline(serving: Serving) -> None:
    async with serving("endless", environments=5) as service:
        publish(service)
        for _ in range(2):  # The second one in new environments: the first ones have not answered.
            rows = await played(service, episodes(seconds=0.3))
            assert {row.finish for row in rows} == {"time_limit"}
            assert all(row.reward == pytest.approx(-0.1 * row.tokens, abs=0.11, rel=1e-3) for row in rows)
            assert len(rows) == EPISODES


async def test_the_first_episode_is_drawn_into_the_run_directory(serving: Serving, tmp_path: Path) -> None:
    async with serving("Seen") as service:
        publish(service, 3)
        rows = await played(service, episodes(3))
        (text,) = await service.texts(BatchRef(tuple(rows)))
        assert (text.member, text.text) == (0, "")
        folder = RunDirectory(service.context.facts.run_dir).answers
        assert [path.name for path in folder.iterdir()] == ["3.gif"]
        assert (folder / "3.gif").read_bytes().startswith(b"GIF89a")


async def test_an_environment_that_shows_nothing_costs_the_picture_only(serving: Serving) -> None:
    async with serving("Seen", options={"picture": "raises"}) as service:
        publish(service)
        rows = await played(service, episodes())
        assert len([row for row in rows if row.reward is not None]) == EPISODES
        (text,) = await service.texts(BatchRef(tuple(rows)))
        assert text.text == "RuntimeError: no screen"
        assert not RunDirectory(service.context.facts.run_dir).answers.exists()


async def test_a_worker_without_the_version_says_so(serving: Serving) -> None:
    async with serving() as service:
        publish(service, 1)
        with pytest.raises(PeerLost, match="has none to evaluate"):
            await played(service, episodes(2))
        with pytest.raises(Refused, match="group -1 has incarnation 9"):
            await played(service, episodes(1, incarnation=9))


async def test_the_policy_of_a_folder_is_evaluated_at_once(serving: Serving, tmp_path: Path) -> None:
    trainer = ActingTrainer(acting_config(f"{ENVIRONMENTS}:Walk", hidden_size=[8]), spaces_of_walk())
    save_file({name: each.detach() for name, each in trainer.named_tensors().items()}, tmp_path / WEIGHTS)
    async with serving(own=0) as service:
        assert len(await played(service, episodes())) == EPISODES
    with pytest.raises(BaseExceptionGroup) as failed:
        async with serving(own=0, hidden_size=[9]):
            pass
    assert failed.group_contains(ConfigError, match=r"holds no policy with acting.hidden_size = \[9\]: name the exper")
