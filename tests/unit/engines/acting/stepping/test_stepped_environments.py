"""Environments in real children: one that raises, lies, crashes or hangs loses its own episode, and is named."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.config.sections.task_config import ActingConfig
from asyncrl.engines.acting.stepping import stepped_environments
from asyncrl.engines.acting.stepping.answers import Answers, read_answers
from asyncrl.engines.acting.stepping.one_environment import OneEnvironment
from asyncrl.engines.acting.stepping.stepped_environments import SteppedEnvironments
from asyncrl.errors import ConfigError, EnvironmentFailed, WireError
from tests import golden
from tests.unit.children.running import running
from tests.unit.engines.acting.line_walk import Troubled, Walk
from tests.unit.engines.acting.scene import ENVIRONMENTS, until

Open = Callable[..., AbstractAsyncContextManager[SteppedEnvironments]]
RIGHT = 1.0
STAY = 0.0


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    @asynccontextmanager
    async def make(
        name: str, options: dict[str, Any] | None = None, **settings: Any
    ) -> AsyncIterator[SteppedEnvironments]:
        section = ActingConfig(env=f"{ENVIRONMENTS}:{name}", options=options or {}, **{"environments": 2, **settings})

        def environments(tasks: asyncio.TaskGroup) -> SteppedEnvironments:
            return SteppedEnvironments(section, tasks, seed=7, start_deadline=20, printed=tmp_path / "printed")

        async with running(environments) as started:
            yield started

    return make


async def stepped(environments: SteppedEnvironments, actions: dict[int, float]) -> list[Answers]:
    """Acts in some environments, and returns all their answers."""
    places = np.array(sorted(actions))
    environments.act(places, np.array([[actions[place]] for place in sorted(actions)], np.float32))
    found: list[Answers] = []
    async with asyncio.timeout(60):
        while sum(len(each.places) for each in found) < len(places):
            found += await environments.answers()
    return found


async def until_lost(environments: SteppedEnvironments, places: list[int]) -> tuple[Answers, int]:
    """Stays where it is until an episode is lost; returns that answer, and the steps before."""
    for steps in range(1, 10):
        for answers in await stepped(environments, dict.fromkeys(places, STAY)):
            if answers.errors:
                return answers, steps
    raise AssertionError("no episode was lost")


async def killed(environments: SteppedEnvironments) -> None:
    """Kills the child from outside, and returns once its worker knows."""
    os.killpg(environments._children[0].process.pid, signal.SIGKILL)
    await until(lambda: not environments._ready)


async def test_environments_step_and_begin_their_next_episode(opened: Open) -> None:
    async with opened("Walk", {"goal": 2}) as environments:
        first = environments.states
        assert first.shape == (2, 2)
        (answers,) = await stepped(environments, {0: RIGHT, 1: STAY})
        np.testing.assert_array_equal(answers.observations[:, 0], first[:, 0] + [1, 0])
        for _ in range(3):
            (answers,) = await stepped(environments, {0: RIGHT, 1: STAY})
            if answers.terminated[0]:
                break
        assert answers.terminated.tolist() == [True, False]
        assert answers.rewards.tolist() == pytest.approx([1.0, -0.1])
        assert answers.observations[0, 0] == 2
        assert answers.following[0, 0] < 2


@pytest.mark.parametrize("trouble", ["raise", "shape", "outside", "nan", "reward", "overflow", "text", "exit"])
def test_what_an_environment_raises_or_lies_ends_its_episode(trouble: str) -> None:
    one = OneEnvironment(lambda: Troubled(trouble, at=1), 0, seed=7)
    first = one.begin(0)
    ended = one.step(np.array([STAY], np.float32), 0)
    golden.says(ended.error)
    assert (ended.reward, ended.terminated, ended.truncated) == (0.0, False, True)
    np.testing.assert_array_equal(ended.observation, first)
    np.testing.assert_array_equal(ended.following, OneEnvironment(Walk, 0, seed=7).begin(1))


@pytest.mark.parametrize(("trouble", "why"), [("raise", "the floor gave way"), ("exit", "SystemExit: 0")])
async def test_an_environment_that_raises_loses_its_episode_alone(
    opened: Open, tmp_path: Path, trouble: str, why: str
) -> None:
    async with opened("Troubled", {"trouble": trouble, "flag": str(tmp_path / "flag")}, children=1) as environments:
        lost, steps = await until_lost(environments, [0, 1])
        assert steps == 2
        (place,) = lost.errors
        assert lost.truncated.tolist() == [each == place for each in lost.places]
        assert lost.rewards[lost.places == place] == 0
        assert why in lost.errors[place]
        assert environments.lost == 1
        (answers,) = await stepped(environments, {0: STAY, 1: STAY})
        assert not answers.errors


@pytest.mark.parametrize(
    ("trouble", "why"), [("crash", "was ended by SIGSEGV"), ("hang", "it hung: no answer within 0.6 s")]
)
@pytest.mark.parametrize("feedback", ["synchronous", "asynchronous"])
async def test_one_that_crashes_or_hangs_is_found_and_the_others_go_on_where_they_were(
    opened: Open, tmp_path: Path, trouble: str, why: str, feedback: str
) -> None:
    options = {"trouble": trouble, "at": 3, "flag": str(tmp_path / "flag"), "moving": True, "goal": 9}
    async with opened("Troubled", options, environments=3, deadline=0.6, feedback=feedback) as environments:
        began = environments.states[:, 0]
        for _ in range(2):
            await stepped(environments, {0: RIGHT, 1: STAY, 2: STAY})
        found = await stepped(environments, {0: RIGHT, 1: STAY, 2: STAY})
        lost = {place: why for each in found for place, why in each.errors.items()}
        assert len(lost) == environments.lost
        guilty = 0
        assert why in lost[guilty]
        # Of threads that ran as the process crashed none is known to be innocent.
        suspected = [place for place in lost if place != guilty]
        assert not suspected or (trouble, feedback) == ("crash", "asynchronous")
        assert all("one of the environments" in lost[place] for place in suspected)
        moved = {0: 3, 1: 0, 2: 0}
        for each in found:
            for index, place in enumerate(each.places.tolist()):
                if place not in lost:
                    assert each.observations[index, 0] == began[place] + moved[place]
                    assert not each.truncated[index]
        after = await stepped(environments, {0: STAY, 1: STAY, 2: STAY})
        assert not any(each.errors for each in after)


async def test_a_child_that_is_killed_from_outside_costs_no_episode(opened: Open) -> None:
    async with opened("Walk", {"goal": 9}) as environments:
        await stepped(environments, {0: RIGHT, 1: STAY})
        before = environments.states
        await killed(environments)
        (answers,) = await stepped(environments, {0: RIGHT, 1: RIGHT})
        np.testing.assert_array_equal(answers.observations[:, 0], before[:, 0] + 1)
        assert environments.lost == 0


async def test_answers_that_nobody_can_read_cost_the_episodes_that_wait(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first end of a child may be an accident; the second one after the same actions is none."""
    async with opened("Walk", {"goal": 9}, children=1) as environments:
        read = read_answers
        refused = iter(["refused", "refused"])

        def read_later(message: dict[str, Any], *more: Any) -> Answers:
            if message["rewards"].strip(bytes(1)) and next(refused, ""):  # A first state has the reward 0.
                raise WireError("nobody can read this")
            return read(message, *more)

        monkeypatch.setattr(stepped_environments, "read_answers", read_later)
        found = await stepped(environments, {0: RIGHT, 1: STAY})
        assert sorted(place for each in found for place in each.errors) == [0, 1]
        assert all("nobody can read this" in why for each in found for why in each.errors.values())
        assert environments.lost == 2
        (answers,) = await stepped(environments, {0: STAY, 1: STAY})
        assert not answers.errors


async def test_a_deadline_is_that_of_one_step_when_a_long_episode_is_played_again(opened: Open) -> None:
    async with opened("Slow", {"seconds": 0.1, "goal": 9}, environments=1, deadline=0.5) as environments:
        for _ in range(8):
            await stepped(environments, {0: STAY})
        before = environments.states
        await killed(environments)
        (answers,) = await stepped(environments, {0: STAY})
        np.testing.assert_array_equal(answers.observations, before)
        assert environments.lost == 0


async def test_an_environment_that_does_not_do_the_same_again_loses_its_episode(opened: Open) -> None:
    async with opened("Walk", {"goal": 9, "noise": 0.5}, environments=1) as environments:
        await stepped(environments, {0: RIGHT})
        await killed(environments)
        (answers,) = await stepped(environments, {0: RIGHT})
        assert "it cannot be played again" in answers.errors[0]
        assert answers.truncated.all()
        np.testing.assert_array_equal(answers.following, environments.states)


async def test_asynchronous_environments_step_at_the_same_time_and_answer_for_themselves(opened: Open) -> None:
    async with opened("Meets", environments=4, children=1, feedback="asynchronous") as environments:
        answers = await stepped(environments, dict.fromkeys(range(4), STAY))
        assert sorted(place for each in answers for place in each.places.tolist()) == [0, 1, 2, 3]
        assert environments.lost == 0


async def test_an_environment_that_cannot_begin_is_refused(opened: Open) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(EnvironmentFailed, match="0 cannot begin an episode: no start")):
        async with opened("NoStart"):
            pass


async def test_an_environment_whose_reset_hangs_at_the_start_is_named(opened: Open) -> None:
    said = "HangingStart: environment 0 cannot begin an episode: it hung: no answer within 0.5 s"
    with pytest.RaisesGroup(pytest.RaisesExc(EnvironmentFailed, match=said)):
        async with opened("HangingStart", deadline=0.5):
            pass


async def test_episodes_that_are_all_lost_end_the_run(opened: Open) -> None:
    async with opened("Troubled", {"trouble": "raise", "at": 1}, failures=5, environments=1) as environments:
        for _ in range(4):
            await stepped(environments, {0: STAY})
        with pytest.raises(EnvironmentFailed, match=r"5 episodes in a row were lost.*the floor gave way"):
            await stepped(environments, {0: STAY})


async def test_a_wrong_name_is_refused_with_the_closest_one(opened: Open) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match="line_walk.py has no Wlak.*Walk")):
        async with opened("Wlak"):
            pass
