"""The services of a policy that acts, with real environments in children: samples, stamps, pauses, failures, and the
episodes of an evaluation, which are the same each time."""

import asyncio
import dataclasses
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file

from asyncrl.config.schema import Config
from asyncrl.engines.acting.acting_loop import ActingPolicy
from asyncrl.engines.acting.acting_trainer import WEIGHTS, ActingTrainer
from asyncrl.engines.acting.stepping.one_environment import OneEnvironment
from asyncrl.engines.acting.stepping.spaces import SPACES, ActionSpace, Spaces, write_spaces
from asyncrl.engines.acting.transitions import COLUMNS
from asyncrl.errors import ConfigError, DeadlineExceeded, EnvironmentFailed, PeerLost, Refused
from asyncrl.fleet.worker.compute_thread import ThreadCompute
from asyncrl.protocols.batch import BatchRef, RowRef
from asyncrl.protocols.messages import PromptGroup
from asyncrl.services import acting as acting_services
from asyncrl.services.acting import ActingEvaluationService, ActingService, PolicyWorker, shown_transitions
from asyncrl.telemetry.run_directory import RunDirectory
from tests.unit.engines.acting.line_walk import Push
from tests.unit.engines.acting.scene import ENVIRONMENTS, acting_config, spaces_of_walk, until
from tests.unit.services.conftest import Serve

LONG = 20
EPISODES = 5
Serving = Callable[..., AbstractAsyncContextManager[Any]]


def config_of(name: str, **acting: Any) -> Config:
    settings = {"environments": 2, "hidden_size": [8], **acting}
    config = acting_config(f"{ENVIRONMENTS}:{name}", **settings)
    children = config.children.model_copy(update={"sandbox": "none"})
    evaluate = config.evaluate.model_copy(update={"episodes": EPISODES})
    return config.model_copy(update={"children": children, "evaluate": evaluate})


@pytest.fixture
def serving(serve: Serve, tmp_path: Path) -> Serving:
    def acts(name: str = "Walk", compute: dict[str, Any] | None = None, **acting: Any) -> Any:
        write_spaces(tmp_path / SPACES, spaces_of_walk())
        config = config_of(name, **{"transitions": 5, **acting})
        return serve(ActingService, "generation", config, **(compute or {}))

    return acts


def group(number: int = 0, members: tuple[int, ...] = (0, 1), **changes: Any) -> PromptGroup:
    asked = {"incarnation": 1, "not_before": 0, **changes}
    return PromptGroup(number, 0, asked["incarnation"], "", members, 0, asked["not_before"], 1.0, 1, 10.0)


def publish(service: PolicyWorker, version: int = 0) -> None:
    """Gives the service weights, as `use_weights` does."""
    service._policy.load(ActingTrainer(service.context.config, service._spaces).named_tensors(), version)
    service._loaded()


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
        publish(service)
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
        publish(service)
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
        publish(service)
        assert service._loop.running == 0
        assert len(await samples_of(service, group(1))) == 2


async def test_environments_that_lose_every_episode_fail_the_call(serving: Serving) -> None:
    async with serving("Troubled", options={"trouble": "raise", "at": 1}, failures=3) as service:
        publish(service)
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
        publish(service)
        await samples_of(service, group())
    assert threads == {"compute"}


async def test_a_sample_is_described_for_a_person(serving: Serving) -> None:
    async with serving(transitions=20) as service:
        publish(service)
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
    monkeypatch.setattr(acting_services, "SHOWN_TRANSITIONS", 25)
    async with serving(transitions=20) as service:
        publish(service)
        texts = await service.texts(await samples_of(service, group()))
        assert [len(text.transitions) for text in texts] == [20, 5]


# ---- transitions as a person reads them --------------------------------------------------------------------------


SHOWN_COLUMNS = {
    "observations": np.array([1.23456, 2, 3, 4, 5, 6], np.float32),
    "actions": np.array([0.0, 9.0, -9.0], np.float32),
    "logprobs": np.array([-0.5, -1.0, -2.0], np.float32),
    "rewards": np.array([1.0, 0.0, 2.5], np.float32),
    "terminated": np.array([0, 1, 0], np.uint8),
    "truncated": np.array([0, 0, 1], np.uint8),
    "versions": np.array([3, 3, 4], np.int32),
}


def test_actions_of_a_box_are_shown_as_the_environment_got_them() -> None:
    spaces = Spaces(2, ActionSpace("box", 1, low=(-2.0,), high=(4.0,), shape=(1,)))
    first, second, third = shown_transitions(SHOWN_COLUMNS, spaces, 9)
    assert first == {"observation": [1.235, 2.0], "action": [1.0], "logprob": -0.5, "reward": 1.0, "version": 3}
    assert (second["action"], second["ended"]) == ([4.0], "terminated")
    assert (third["action"], third["ended"], third["version"]) == ([-2.0], "truncated", 4)


def test_discrete_actions_begin_where_their_space_does() -> None:
    columns = {**SHOWN_COLUMNS, "actions": np.array([0.0, 1.0, 2.0], np.float32)}
    shown = shown_transitions(columns, Spaces(2, ActionSpace("discrete", 3, start=-1)), 2)
    assert [each["action"] for each in shown] == [-1, 0]


# ---- evaluations: the same episodes each time, lost ones, and ones that never end -----------------------------------


@pytest.fixture
def evaluating(serve: Serve, tmp_path: Path) -> Serving:
    def plays(name: str = "Walk", own: int | None = None, **acting: Any) -> Any:
        write_spaces(tmp_path / SPACES, OneEnvironment(Push, 0, 0).spaces if name == "Push" else spaces_of_walk())
        options = {} if own is None else {"own_version": own}
        return serve(ActingEvaluationService, "evaluation", config_of(name, **acting), options=options)

    return plays


def episodes(version: int = 0, seconds: float = 20.0, incarnation: int = 1) -> PromptGroup:
    return PromptGroup(-1, version, incarnation, "", tuple(range(EPISODES)), 0, version, 0.0, 1, seconds)


async def played(service: ActingEvaluationService, asked: PromptGroup) -> list[RowRef]:
    async with asyncio.timeout(60):
        found = BatchRef.join([samples async for samples in service.generate(asked)])
    return sorted(found, key=lambda row: row.member)


def results(rows: list[RowRef]) -> list[tuple[float | None, int, str]]:
    return [(row.reward, row.tokens, row.finish) for row in rows]


async def test_the_same_weights_play_the_same_episodes_whatever_the_number_of_environments(evaluating: Serving) -> None:
    async with evaluating("Push", environments=2) as service:
        publish(service, 3)
        first = await played(service, episodes(3))
        again = await played(service, episodes(3))
    assert [row.name for row in first] == [(-1, member, 3) for member in range(EPISODES)]
    assert {(row.first, row.last, row.incarnation, row.places) for row in first} == {(3, 3, 1, ())}
    assert {row.finish for row in first} <= {"terminated", "truncated"}
    assert results(again) == results(first)
    assert len({row.reward for row in first}) == EPISODES, "each episode has a seed of its own"
    async with evaluating("Push", environments=3, children=2, feedback="asynchronous") as service:
        publish(service, 3)
        assert results(await played(service, episodes(3))) == results(first)


async def test_an_episode_that_its_environment_lost_has_no_return(evaluating: Serving, tmp_path: Path) -> None:
    options = {"trouble": "raise", "at": 1, "flag": str(tmp_path / "once")}
    async with evaluating("Troubled", options=options, environments=1) as service:
        publish(service)
        rows = await played(service, episodes())
        assert [(row.finish, row.reward is None) for row in rows].count(("lost", True)) == 1
        assert sum(row.reward is not None for row in rows) == EPISODES - 1
        assert service.counters["environment/lost_episodes"] == 1


async def test_a_child_that_dies_costs_one_episode_of_one_evaluation(evaluating: Serving, tmp_path: Path) -> None:
    options = {"trouble": "crash", "at": 1, "flag": str(tmp_path / "once")}
    async with evaluating("Troubled", options=options) as service:
        publish(service)
        assert [row.finish for row in await played(service, episodes())].count("lost") == 1
        assert "lost" not in {row.finish for row in await played(service, episodes())}


async def test_episodes_without_an_end_are_cut_off_at_the_deadline(evaluating: Serving) -> None:
    async with evaluating("endless", environments=5) as service:
        publish(service)
        for _ in range(2):  # The second one in new environments: the first ones have not answered.
            rows = await played(service, episodes(seconds=0.3))
            assert {row.finish for row in rows} == {"time_limit"}
            assert all(row.reward == pytest.approx(-0.1 * row.tokens, abs=0.11, rel=1e-3) for row in rows)
            assert len(rows) == EPISODES


async def test_the_first_episode_is_drawn_into_the_run_directory(evaluating: Serving, tmp_path: Path) -> None:
    async with evaluating("Seen") as service:
        publish(service, 3)
        rows = await played(service, episodes(3))
        (text,) = await service.texts(BatchRef(tuple(rows)))
        assert (text.member, text.text) == (0, "")
        folder = RunDirectory(service.context.facts.run_dir).answers
        assert [path.name for path in folder.iterdir()] == ["3.gif"]
        assert (folder / "3.gif").read_bytes().startswith(b"GIF89a")


async def test_an_environment_that_shows_nothing_costs_the_picture_only(evaluating: Serving) -> None:
    async with evaluating("Seen", options={"picture": "raises"}) as service:
        publish(service)
        rows = await played(service, episodes())
        assert len([row for row in rows if row.reward is not None]) == EPISODES
        (text,) = await service.texts(BatchRef(tuple(rows)))
        assert text.text == "RuntimeError: no screen"
        assert not RunDirectory(service.context.facts.run_dir).answers.exists()


async def test_a_worker_without_the_version_says_so(evaluating: Serving) -> None:
    async with evaluating() as service:
        publish(service, 1)
        with pytest.raises(PeerLost, match="has none to evaluate"):
            await played(service, episodes(2))
        with pytest.raises(Refused, match="group -1 has incarnation 9"):
            await played(service, episodes(1, incarnation=9))


async def test_the_policy_of_a_folder_is_evaluated_at_once(evaluating: Serving, tmp_path: Path) -> None:
    trainer = ActingTrainer(acting_config(f"{ENVIRONMENTS}:Walk", hidden_size=[8]), spaces_of_walk())
    save_file({name: each.detach() for name, each in trainer.named_tensors().items()}, tmp_path / WEIGHTS)
    async with evaluating(own=0) as service:
        assert len(await played(service, episodes())) == EPISODES
    with pytest.raises(BaseExceptionGroup) as failed:
        async with evaluating(own=0, hidden_size=[9]):
            pass
    assert failed.group_contains(ConfigError, match=r"holds no policy with acting.hidden_size = \[9\]: name the exper")
