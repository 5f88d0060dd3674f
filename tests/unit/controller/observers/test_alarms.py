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
from tests.unit.scene import Scene

FINE, APART, FAR = ({"mismatch/kl": kl, "mismatch/ess": ess} for kl, ess in ((0.01, 0.9), (0.2, 0.9), (2.0, 0.1)))
WARN = MismatchConfig(warn_kl=0.1, warn_ess=0.5)


@pytest.mark.trap("engines_disagree")
def test_a_warning_is_given_once_and_again_after_a_step_within_the_bounds() -> None:
    alarm = PolicyMismatchAlarm(WARN)
    said = [alarm.check(metrics, version) for version, metrics in enumerate([FINE, APART, APART, FINE, FAR])]
    assert [bool(text) for text in said] == [False, True, False, False, True]
    assert said[1] is not None
    assert said[1].startswith("step 1: mismatch/kl (kl to engine, k3) is 0.2, over mismatch.warn_kl = 0.1; ")
    assert "mismatch/ess is 0.1, under mismatch.warn_ess = 0.5" in (said[4] or "")


@pytest.mark.parametrize(
    ("bounds", "says"),
    [
        (MismatchConfig(stop_kl=1.0), r"mismatch/kl \(kl to engine, k3\) is 2, over mismatch.stop_kl = 1"),
        (MismatchConfig(stop_ess=0.2, warn_ess=0.5), "mismatch/ess is 0.1, under mismatch.stop_ess = 0.2"),
    ],
)
@pytest.mark.trap("engines_disagree")
def test_beyond_the_last_bound_the_run_ends(bounds: MismatchConfig, says: str) -> None:
    alarm = PolicyMismatchAlarm(bounds)
    assert alarm.check(APART, 1) is None
    with pytest.raises(PolicyMismatch, match=says):
        alarm.check(FAR, 2)


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
    said = PolicyMismatchAlarm(MismatchConfig()).check({"mismatch/canary": 1.5}, 4)
    assert said is not None
    assert said.startswith("step 4: mismatch/canary is 1.5, over mismatch.warn_canary = 1; engine and trainer do not")
    assert PolicyMismatchAlarm(MismatchConfig()).check({"mismatch/canary": 0.5}, 4) is None
    assert PolicyMismatchAlarm(MismatchConfig(warn_canary=None)).check({"mismatch/canary": 1.5}, 4) is None
    for difference in (0.3, math.nan):
        with pytest.raises(PolicyMismatch, match=r"over mismatch\.stop_canary = 0\.2"):
            PolicyMismatchAlarm(MismatchConfig(stop_canary=0.2)).check({"mismatch/canary": difference}, 4)


def test_each_bound_has_a_warning_of_its_own() -> None:
    alarm = PolicyMismatchAlarm(WARN)
    kl = {"mismatch/kl": 0.2, "mismatch/ess": 0.9}
    both = {"mismatch/kl": 0.2, "mismatch/ess": 0.1}
    said = [alarm.check(metrics, version) or "" for version, metrics in enumerate([kl, both, both])]
    assert ["mismatch/kl" in text for text in said] == [True, False, False]
    assert ["ess is" in text for text in said] == [False, True, False]


def test_an_engine_is_as_far_away_as_its_worst_token() -> None:
    canary = Canary((5, 6), (2, 0), (-0.5, -1.5))
    assert canary_distance(canary, np.array([-1.25, -9.0, -0.5], np.float32)) == 0.25


def test_without_bounds_and_without_a_trained_token_nothing_is_said() -> None:
    assert PolicyMismatchAlarm(MismatchConfig(warn_kl=None)).check(FAR, 1) is None
    assert "mismatch.warn_kl = 1" in str(PolicyMismatchAlarm(MismatchConfig()).check(FAR, 1))
    alarm = PolicyMismatchAlarm(WARN)
    said = [alarm.check(metrics, version) for version, metrics in enumerate([APART, {}, APART])]
    assert [bool(text) for text in said] == [True, False, False]


def test_a_group_is_told_of_once_with_its_prompt_why_and_what_to_do() -> None:
    said: list[str] = []
    poisoned = PoisonedGroups(Alarm(GuardsConfig(), said.append))
    poisoned.observe(GroupPoisoned(17, "spell " + "x" * 500, "reward0.0[0] did not answer score within 12 s"))
    poisoned.observe(GroupPoisoned(18, "another", "it died"))
    first, second = said
    what, prompt, advice = first.splitlines()
    assert what == (
        "guards.poison: group 17 is given up as poison, its open samples will not train: "
        "reward0.0[0] did not answer score within 12 s"
    )
    assert prompt.startswith("  prompt: 'spell xxx")
    assert len(prompt) < 300
    assert "take it out of the task" in advice
    assert "fleet.call_deadline" in advice
    assert second.splitlines() == [
        "guards.poison: group 18 is given up as poison, its open samples will not train: it died",
        "  prompt: 'another'",
    ]


def test_many_groups_do_not_flood_the_screen() -> None:
    said: list[str] = []
    poisoned = PoisonedGroups(Alarm(GuardsConfig(), said.append))
    for group in range(100):
        poisoned.observe(GroupPoisoned(group, "p", "it died"))
    assert len(said) == REPORTED + 1
    assert "data/dropped/poison in metrics.jsonl" in said[-1]
    assert poisoned.total == 100


ROW = RowRef(0, 0, 0, 0, 1, 1, 0, 0, "stop", ())


def scored(score: Score) -> SampleScored:
    return SampleScored(ROW, score)


FAILED = scored(Score(None, {}, "reward function f on member 0 of group 0: it returned None"))


def test_the_first_failure_is_said_once() -> None:
    said: list[str] = []
    failures = RewardFailures(10, Alarm(GuardsConfig(), said.append))
    for _ in range(3):
        failures.observe(FAILED)
    assert failures.failed == {"reward": 3}
    assert len(said) == 1
    assert "function f on member 0" in said[0]


@pytest.mark.parametrize("reward", [None, 0.0])
@pytest.mark.parametrize("rewards_fail", [False, True])
def test_the_first_failure_of_an_environment_is_said_once_with_its_cause(
    reward: float | None, rewards_fail: bool
) -> None:
    said: list[str] = []
    failures = RewardFailures(100, Alarm(GuardsConfig(), said.append))
    cause = (
        "environment my.py:Game on member 1 of group 0: `step` raised KeyError: 'a'\n  File \"my.py\", line 3, in step"
    )
    for _ in range(3):
        if rewards_fail:
            failures.observe(FAILED)
        failures.observe(SampleScored(ROW._replace(finish="environment"), Score(reward, {}, cause)))
    assert len(said) == 1 + rewards_fail
    assert "an environment failed, which environment.on_error lets pass" in said[-1]
    assert "logs/environment*.jsonl" in said[-1]
    assert cause in said[-1]
    assert "reward" not in said[-1]


def test_it_names_the_logs_of_the_service_that_failed() -> None:
    for service in ("reward", "cost"):
        said: list[str] = []
        failed = scored(Score(None, {}, f"{service} function f on member 0 of group 0: it hung"))
        RewardFailures(10, Alarm(GuardsConfig(), said.append)).observe(failed)
        assert f"logs/{service}*.jsonl" in said[0]


def test_a_run_that_can_score_nothing_ends() -> None:
    failures = RewardFailures(3, Alarm(GuardsConfig(), lambda text: None))
    failures.observe(FAILED)
    failures.observe(FAILED)
    failures.observe(scored(Score(1.0, {})))
    failures.observe(FAILED)
    failures.observe(FAILED)
    with pytest.raises(RewardError, match="last 3 samples"):
        failures.observe(FAILED)


def test_a_run_whose_groups_are_all_given_up_ends() -> None:
    failures = RewardFailures(8, Alarm(GuardsConfig(), lambda text: None), members=4)
    failures.observe(GroupPoisoned(0, "one two", "`reset` hung"))
    failures.observe(scored(Score(1.0, {})))
    failures.observe(GroupPoisoned(1, "one two", "`reset` hung"))
    with pytest.raises(RewardError, match=r"last 8 samples .*\n.*group 2 was given up as poison: `reset` hung"):
        failures.observe(GroupPoisoned(2, "one two", "`reset` hung"))


TROUBLES: tuple[tuple[str, Callable[[Alarm], Any], Event, type[AsyncrlError]], ...] = (
    ("first_failure", lambda alarm: RewardFailures(9, alarm), FAILED, TrainingStopped),
    ("unscored", lambda alarm: RewardFailures(1, alarm), FAILED, RewardError),
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
    said: list[str] = []
    make(Alarm(GuardsConfig(**silent), said.append)).observe(trouble)
    assert said == []
    with pytest.raises(error, match=f'guards.{key} = "stop" ends the run: '):
        make(Alarm(GuardsConfig(**{**silent, key: "stop"}), said.append)).observe(trouble)
    warning = make(Alarm(GuardsConfig(**{**silent, key: "warn"}), said.append))
    warning.observe(trouble)
    (text,) = said
    assert text.startswith(f"guards.{key}: ")
    assert text.endswith(f'(guards.{key} = "stop" ends such a run, "off" silences this)')


@pytest.mark.trap("not_finite")
def test_three_steps_that_are_not_finite_end_the_run_and_name_the_samples() -> None:
    scene = Scene()
    scene.training.cost = StepCost(1.0, not_finite=1.0)
    with pytest.raises(NonFiniteLoss, match=r"3 steps in a row from version 0 .*\(0, 0\), \(0, 1\)"):
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
    with pytest.raises(OnlyTruncated, match=r"3 steps in a row from version 0 .*generation\.max_new_tokens"):
        scene.play()
    assert {event.reason for event in scene.told(Dropped)} == {"truncated"}


def test_rows_that_cannot_be_scored_are_named_once_each_and_end_no_run() -> None:
    said: list[str] = []
    reactions = GuardsConfig(first_failure="stop", unscored="stop")
    failures = RewardFailures(3, Alarm(reactions, said.append), where="rows.jsonl, line {}".format)
    for group in [0, 0, 1, *range(20)]:
        sample = ROW._replace(group=group)
        failures.observe(SampleScored(sample, Score(None, {}, f"no number in group {group}", bad_row=True)))
    assert len(said) == 6
    assert said[1] == (
        "rows.jsonl, line 1: this row cannot be scored, and its group is left out (data/dropped/bad_row); correct or "
        "remove it:\nno number in group 1"
    )
    assert said[5].startswith("further rows cannot be scored; they are counted as data/dropped/bad_row")
    with pytest.raises(TrainingStopped):
        failures.observe(FAILED)
