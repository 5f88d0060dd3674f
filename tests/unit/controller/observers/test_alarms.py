"""Alarms report trouble once, or end a run that would go on for ever."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncrl.config.schema import GuardsConfig, MismatchConfig
from asyncrl.controller.journal.ledger import Dropped
from asyncrl.controller.observers.alarms import (
    REPORTED,
    Alarm,
    AlgorithmDrops,
    PoisonedGroups,
    PolicyMismatchAlarm,
    RewardFailures,
)
from asyncrl.controller.observers.events import DroppedByAlgorithm, Event, GroupPoisoned, SampleScored
from asyncrl.engines.canary_logprobs import canary_distance
from asyncrl.errors import (
    AlgorithmError,
    AsyncrlError,
    NonFiniteLoss,
    OnlyTruncated,
    PolicyMismatch,
    RewardError,
    TrainingStopped,
)
from asyncrl.protocols.batch import Cuts, RowRef
from asyncrl.protocols.messages import Canary, Score, StepReport
from asyncrl.simulation.fakes.training import FakeTraining, StepCost
from tests import golden
from tests.unit.scene import Scene

FINE, APART, FAR = ({"mismatch/kl": kl, "mismatch/ess": ess} for kl, ess in ((0.01, 0.9), (0.2, 0.9), (2.0, 0.1)))
WARN = MismatchConfig(warn_kl=0.1, warn_ess=0.5)


def checked(bounds: MismatchConfig, *steps: dict[str, float]) -> list[str]:
    """Returns what an alarm says of each step; "" of nothing."""
    alarm = PolicyMismatchAlarm(bounds)
    return [alarm.check(metrics, version) or "" for version, metrics in enumerate(steps)]


@pytest.mark.trap("engines_disagree")
def test_a_warning_is_given_once_and_again_after_a_step_within_the_bounds() -> None:
    said = checked(WARN, FINE, APART, APART, FINE, FAR)
    assert [bool(text) for text in said] == [False, True, False, False, True]
    golden.says(said[1])
    golden.says(said[4])


@pytest.mark.parametrize("bounds", [MismatchConfig(stop_kl=1.0), MismatchConfig(stop_ess=0.2, warn_ess=0.5)])
@pytest.mark.trap("engines_disagree")
def test_beyond_the_last_bound_the_run_ends(bounds: MismatchConfig) -> None:
    assert checked(bounds, APART) == [""]
    with golden.raises(PolicyMismatch):
        checked(bounds, APART, FAR)


@pytest.mark.trap("engines_disagree")
def test_of_several_readers_the_one_that_is_furthest_away_is_told_once() -> None:
    alarm = PolicyMismatchAlarm(MismatchConfig())
    assert alarm.take_canary() == {}
    for difference in (0.1, 0.3, 0.2):
        alarm.add_canary(difference)
    assert alarm.take_canary() == {"mismatch/canary": 0.3}
    assert alarm.take_canary() == {}
    for difference in (0.1, math.nan, 0.2):
        alarm.add_canary(difference)
    assert math.isnan(alarm.take_canary()["mismatch/canary"])


@pytest.mark.trap("engines_disagree")
def test_a_canary_over_a_nat_is_told_unless_asked_otherwise() -> None:
    off, near = ({"mismatch/canary": distance} for distance in (1.5, 0.5))
    (said,) = checked(MismatchConfig(), off)
    golden.says(said)
    assert checked(MismatchConfig(), near) == checked(MismatchConfig(warn_canary=None), off) == [""]
    for difference in (0.3, math.nan):
        with golden.raises(PolicyMismatch):
            checked(MismatchConfig(stop_canary=0.2), {"mismatch/canary": difference})


def test_each_bound_has_a_warning_of_its_own() -> None:
    both = {"mismatch/kl": 0.2, "mismatch/ess": 0.1}
    said = checked(WARN, APART, both, both)
    assert ["mismatch/kl" in text for text in said] == [True, False, False]
    assert ["ess is" in text for text in said] == [False, True, False]


def test_an_engine_is_as_far_away_as_its_worst_token() -> None:
    canary = Canary((5, 6), (2, 0), (-0.5, -1.5))
    assert canary_distance(canary, np.array([-1.25, -9.0, -0.5], np.float32)) == 0.25


def test_without_bounds_and_without_a_trained_token_nothing_is_said() -> None:
    assert checked(MismatchConfig(warn_kl=None), FAR) == [""]
    assert "mismatch.warn_kl = 1" in checked(MismatchConfig(), FAR)[0]
    assert [bool(text) for text in checked(WARN, APART, {}, APART)] == [True, False, False]


def observed(make: Callable[[Alarm], Any], *events: Event, **reactions: Any) -> list[str]:
    """Returns what an observer has its alarm say."""
    said: list[str] = []
    observer = make(Alarm(GuardsConfig(**reactions), said.append))
    for event in events:
        observer.observe(event)
    return said


def test_groups_are_told_of_once_with_their_prompts_why_and_what_to_do_and_do_not_flood_the_screen() -> None:
    hung = GroupPoisoned(17, "spell " + "x" * 500, "reward0.0[0] did not answer score within 12 s")
    said = observed(PoisonedGroups, hung, *(GroupPoisoned(group, "p", "it died") for group in range(100)))
    assert len(said) == REPORTED + 1
    for text in (*said[:2], said[-1]):
        golden.says(text)
    assert len(said[0].splitlines()[1]) < 300


ROW = RowRef(0, 0, 0, 0, 1, 1, 0, 0, "stop", ())


def scored(score: Score) -> SampleScored:
    return SampleScored(ROW, score)


def unscored(service: str = "reward") -> SampleScored:
    return scored(Score(None, {}, f"{service} function f on member 0 of group 0: it returned None"))


FAILED = unscored()
GOOD = scored(Score(1.0, {}))


def failures(limit: int, **facts: Any) -> Callable[[Alarm], RewardFailures]:
    return lambda alarm: RewardFailures(limit, alarm, **facts)


@pytest.mark.parametrize("service", ["reward", "cost"])
def test_the_first_failure_is_said_once_with_the_logs_of_its_service(service: str) -> None:
    (said,) = observed(failures(10), *[unscored(service)] * 3)
    golden.says(said)


@pytest.mark.parametrize("reward", [None, 0.0])
@pytest.mark.parametrize("rewards_fail", [False, True])
def test_the_first_failure_of_an_environment_is_said_once_with_its_cause(
    reward: float | None, rewards_fail: bool
) -> None:
    cause = "environment my.py:Game on member 1 of group 0: `step` raised KeyError: 'a'\n  File \"my.py\", line 3"
    failed = SampleScored(ROW._replace(finish="environment"), Score(reward, {}, cause))
    said = observed(failures(100), *[*[FAILED] * rewards_fail, failed] * 3)
    assert len(said) == 1 + rewards_fail
    golden.says(said[-1])


def test_a_run_that_can_score_nothing_ends() -> None:
    few = (FAILED, FAILED, GOOD, FAILED, FAILED)
    observed(failures(3), *few)
    with golden.raises(RewardError):
        observed(failures(3), *few, FAILED)


def test_a_run_whose_groups_are_all_given_up_ends() -> None:
    first, *more = (GroupPoisoned(group, "one two", "`reset` hung") for group in range(3))
    observed(failures(8, members=4), first, GOOD, more[0])
    with golden.raises(RewardError):
        observed(failures(8, members=4), first, GOOD, *more)


TROUBLES: tuple[tuple[str, Callable[[Alarm], Any], Event, type[AsyncrlError]], ...] = (
    ("first_failure", failures(9), FAILED, TrainingStopped),
    ("unscored", failures(1), FAILED, RewardError),
    ("poison", PoisonedGroups, GroupPoisoned(3, "p", "it died"), TrainingStopped),
    (
        "algorithm_drops",
        lambda alarm: AlgorithmDrops(1, 2, 0, alarm),
        DroppedByAlgorithm(0, (0,), "mine"),
        AlgorithmError,
    ),
)


@pytest.mark.parametrize(("key", "make", "trouble", "error"), TROUBLES)
def test_every_alarm_warns_stops_or_is_silent_as_its_key_says(
    key: str, make: Callable[[Alarm], Any], trouble: Event, error: type[AsyncrlError]
) -> None:
    silent = {name: "off" for name in GuardsConfig.model_fields}
    assert observed(make, trouble, **silent) == []
    with pytest.raises(error, match=f'guards.{key} = "stop" ends the run: '):
        observed(make, trouble, **{**silent, key: "stop"})
    (text,) = observed(make, trouble, **{**silent, key: "warn"})
    assert text.startswith(f"guards.{key}: ")
    assert text.endswith(f'(guards.{key} = "stop" ends such a run, "off" silences this)')


@pytest.mark.trap("not_finite")
def test_three_steps_that_are_not_finite_end_the_run_and_name_the_samples() -> None:
    scene = Scene()
    scene.training.cost = StepCost(1.0, not_finite=1.0)
    with golden.raises(NonFiniteLoss):
        scene.play()
    assert scene.gate.version == 0
    assert {event.reason for event in scene.told(Dropped)} == {"not finite"}


class NoEnds(FakeTraining):
    async def step(self, cuts: Cuts) -> StepReport:
        report = await super().step(cuts)
        samples = tuple(replace(sample, reason="truncated") for sample in report.samples)
        return replace(report, skipped="truncated", samples=samples)


@pytest.mark.trap("truncated")
def test_three_steps_of_answers_without_an_end_end_the_run_and_name_the_key() -> None:
    scene = Scene()
    scene.training = NoEnds(StepCost(1, not_finite=1), 1, [scene.generation], seed=0)
    with golden.raises(OnlyTruncated):
        scene.play()
    assert {event.reason for event in scene.told(Dropped)} == {"truncated"}


def test_rows_that_cannot_be_scored_are_named_once_each_and_end_no_run() -> None:
    bad = [
        SampleScored(ROW._replace(group=group), Score(None, {}, f"no number in group {group}", bad_row=True))
        for group in [0, 0, 1, *range(20)]
    ]
    reactions: dict[str, Any] = {"first_failure": "stop", "unscored": "stop"}
    said = observed(failures(3, where="rows.jsonl, line {}".format), *bad, **reactions)
    assert len(said) == 6
    golden.says(said[1])
    golden.says(said[5])
    with pytest.raises(TrainingStopped):
        observed(failures(3), *bad, FAILED, **reactions)
