import asyncio
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.errors import RewardError
from asyncrl.protocols.messages import Score
from asyncrl.rewards import Sample
from asyncrl.rewards.execution.scoring import FunctionChoice, GroupBarrier, score_of
from asyncrl.rewards.functions import FunctionSpec
from asyncrl.rewards.sample import FunctionResult
from tests import golden

SAMPLE = Sample("p", "wrong " * 100, {}, group=12, member=3, finish="stop", tokens=1)
SPECS = [FunctionSpec("exact_match", "match", weight=2.0), FunctionSpec("my.py:shape", "shape", weight=0.5)]
BROKEN = [FunctionResult(1.0), FunctionResult(reason="it raised KeyError: 'x'", traceback="Traceback ...\n")]


def test_the_weighted_sum_with_each_functions_own_values() -> None:
    for given, reward, terms in (
        (-1.0, 1.5, {"shape": -1.0}),
        ({"a": 1.0, "b": 3.0}, 4.0, {"shape/a": 1.0, "shape/b": 3.0}),
    ):
        found = score_of(SAMPLE, SPECS, [FunctionResult(1.0), FunctionResult(given)], "fail")
        assert found == Score(reward, {"match": 1.0, **terms})


def test_fail_names_function_sample_and_traceback() -> None:
    with pytest.raises(RewardError) as raised:
        score_of(SAMPLE, SPECS, BROKEN, "fail")
    message = str(raised.value)
    assert "reward function my.py:shape on member 3 of group 12: it raised KeyError: 'x'" in message
    assert "completion: 'wrong wrong" in message
    assert "Traceback ..." in message
    assert message.endswith(
        'correct my.py:shape first; where single samples cannot be scored, reward.on_error = "zero" or "ignore" lets '
        "the run go on"
    )
    assert len(message) < 600


def test_what_no_code_of_the_user_did_has_no_advice_to_correct_it() -> None:
    with pytest.raises(RewardError, match=r'\nreward\.on_error = "zero"'):
        score_of(SAMPLE, SPECS, [FunctionResult(reason="there is no answer"), FunctionResult(1.0)], "fail")


@pytest.mark.parametrize(("samples", "named"), [(16, "the 16 samples"), (1, "the only sample")])
def test_a_group_that_failed_together_is_named_without_a_member(samples: int, named: str) -> None:
    broken = [FunctionResult(1.0), FunctionResult(reason="it hung", failed_together=samples)]
    message = score_of(SAMPLE, SPECS, broken, "zero", "held-out prompt 33").error
    golden.says(message, "my.py:shape", f"{named}")


@pytest.mark.trap("unscorable")
def test_zero_counts_the_function_as_zero_and_says_so() -> None:
    score = score_of(SAMPLE, SPECS, BROKEN, "zero")
    assert (score.reward, score.terms) == (2.0, {"match": 1.0, "shape": 0.0})
    assert "my.py:shape" in score.error


@pytest.mark.trap("unscorable")
def test_ignore_makes_the_sample_unscorable_not_zero() -> None:
    score = score_of(SAMPLE, SPECS, BROKEN, "ignore")
    assert score.reward is None
    assert score.terms == {"match": 1.0}
    assert "my.py:shape" in score.error


@pytest.mark.parametrize(("weight", "turns"), [(2.0, (0.0, 0.5)), (0.0, ())])
def test_the_rewards_of_an_environment_are_parts_of_the_score(weight: float, turns: tuple[float, ...]) -> None:
    specs = [FunctionSpec("exact_match", "right"), FunctionSpec("environment", "environment", weight)]
    episode = replace(SAMPLE, turn_rewards=[0.0, 0.25])
    score = score_of(episode, specs, [FunctionResult(1.0), FunctionResult(0.25)], "fail")
    assert (score.reward, score.turns) == (1.0 + weight * 0.25, turns)
    assert score_of(episode, specs[:1], [FunctionResult(1.0)], "fail").turns == ()
    failed = [FunctionResult(1.0), FunctionResult(reason="raised")]
    assert score_of(episode, specs, failed, "zero").turns == ()


@pytest.mark.parametrize("on_error", ["fail", "zero", "ignore"])
@pytest.mark.parametrize("own", ["", "fail", "zero"])
def test_a_row_that_cannot_be_scored_leaves_the_run_whatever_a_key_says_of_errors(on_error: Any, own: str) -> None:
    specs = [replace(SPECS[0], on_error=own), SPECS[1]]
    bad = [FunctionResult(reason="the row's answer holds no number", of_row=True), FunctionResult(1.0)]
    score = score_of(SAMPLE, specs, bad, on_error)
    assert (score.reward, score.bad_row, score.terms) == (None, True, {"shape": 1.0})
    assert "exact_match on member 3 of group 12: the row's answer holds no number" in score.error
    assert not score_of(SAMPLE, SPECS, [FunctionResult(1.0), FunctionResult(1.0)], on_error).bad_row


def test_an_error_of_the_users_function_still_ends_the_run_beside_a_bad_row() -> None:
    with pytest.raises(RewardError, match="it raised KeyError"):
        score_of(SAMPLE, SPECS, [FunctionResult(reason="no number", of_row=True), BROKEN[1]], "fail")


# Groups are named in errors as a person knows them: by their number, or by the prompt of a held-out set.


@pytest.mark.parametrize(
    ("group", "place", "members", "own"),
    [
        (0, "group 0", 4, False),
        (7, "group 7", 4, False),
        (-1, "held-out prompt 0", 3, False),
        (-2, "held-out prompt 1", 3, False),
        (-3, "held-out prompt 0 of evaluate.sets.hard", 5, True),
    ],
)
def test_the_first_group_is_of_the_run_and_negative_ones_of_held_out_sets(
    group: int, place: str, members: int, own: bool
) -> None:
    hard = {"hard": {"prompts": "hard.jsonl", "samples": 5}}
    held = {"prompts": "held.jsonl", "size": 2, "samples": 3, "temperature": 1.0, "sets": hard}
    sections = {"model": {"name": "m"}, "task": {"prompts": "p", "samples_per_prompt": 4}, "evaluate": held}
    spec = FunctionSpec("numeric", "numeric")
    choice = FunctionChoice.of(Config.model_validate(sections), [spec], {"hard": [spec]})
    assert (choice.place(group), choice.members(group), choice.of_group(group).is_own) == (place, members, own)


def sample(member: int, group: int = 7) -> Sample:
    return Sample("p", f"text {member}", {}, group, member, "stop", 1)


class Judge:
    """Each sample's value is how many were judged together."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    async def __call__(self, samples: list[Sample]) -> list[list[FunctionResult]]:
        self.calls.append([each.member for each in samples])
        return [[FunctionResult(float(len(samples))), FunctionResult(float(each.member))] for each in samples]


async def test_all_members_are_valued_at_once_in_order() -> None:
    judge = Judge()
    async with asyncio.TaskGroup() as tasks:
        barrier = GroupBarrier(judge, 60, tasks)
        waiting = [tasks.create_task(barrier.results((7, 0), 3, sample(member))) for member in (2, 0, 1)]
    assert judge.calls == [[0, 1, 2]]
    assert [task.result()[1].value for task in waiting] == [2, 0, 1]
    assert len(barrier) == 0


async def test_attempts_and_groups_are_kept_apart() -> None:
    judge = Judge()
    async with asyncio.TaskGroup() as tasks:
        barrier = GroupBarrier(judge, 60, tasks)
        for key in ((7, 0), (7, 1), (8, 0)):
            tasks.create_task(barrier.results(key, 2, sample(0)))
        assert judge.calls == []
        for key in ((7, 1), (8, 0), (7, 0)):
            tasks.create_task(barrier.results(key, 2, sample(1)))
    assert judge.calls == [[0, 1]] * 3


async def test_those_that_came_are_judged_when_the_rest_does_not_come() -> None:
    judge = Judge()
    async with asyncio.TaskGroup() as tasks:
        barrier = GroupBarrier(judge, 0.05, tasks)
        waiting = [tasks.create_task(barrier.results((7, 0), 4, sample(member))) for member in (1, 3)]
    assert judge.calls == [[1, 3]]
    assert [task.result()[0].value for task in waiting] == [2, 2]
    assert len(barrier) == 0


async def test_a_group_whose_members_were_all_abandoned_is_forgotten() -> None:
    async with asyncio.TaskGroup() as tasks:
        barrier = GroupBarrier(Judge(), 60, tasks)
        for member in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await barrier.results((7, 0), 4, sample(member))
        assert len(barrier) == 0


async def test_one_abandoned_member_does_not_take_the_verdicts_of_the_others() -> None:
    judge = Judge()
    async with asyncio.TaskGroup() as tasks:
        barrier = GroupBarrier(judge, 60, tasks)
        stays = tasks.create_task(barrier.results((7, 0), 3, sample(0)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await barrier.results((7, 0), 3, sample(1))
        assert (await barrier.results((7, 0), 3, sample(2)))[0].value == 3
        assert (await stays)[0].value == 3
