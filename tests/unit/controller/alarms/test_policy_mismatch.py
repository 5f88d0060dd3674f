"""Bounds of the mismatch warn once while they are crossed, and end the run beyond."""

import math

import numpy as np
import pytest

from asyncrl.config.schema import MismatchConfig
from asyncrl.controller.alarms.policy_mismatch import PolicyMismatchAlarm
from asyncrl.engines.canary_logprobs import canary_distance
from asyncrl.errors import PolicyMismatch
from asyncrl.protocols.messages import Canary

FINE, APART, FAR = ({"mismatch/kl": kl, "mismatch/ess": ess} for kl, ess in ((0.01, 0.9), (0.2, 0.9), (2.0, 0.1)))
WARN = MismatchConfig(warn_kl=0.1, warn_ess=0.5)


@pytest.mark.trap("engines_disagree")
def test_a_warning_is_given_once_and_again_after_a_step_within_the_bounds() -> None:
    alarm = PolicyMismatchAlarm(WARN)
    said = [alarm.check(metrics, version) for version, metrics in enumerate([FINE, APART, APART, FINE, FAR])]
    assert [bool(text) for text in said] == [False, True, False, False, True]
    assert said[1] is not None
    assert said[1].startswith("step 1: mismatch/kl is 0.2, over mismatch.warn_kl = 0.1; ")
    assert "mismatch/ess is 0.1, under mismatch.warn_ess = 0.5" in (said[4] or "")


@pytest.mark.parametrize(
    ("bounds", "says"),
    [
        (MismatchConfig(stop_kl=1.0), "mismatch/kl is 2, over mismatch.stop_kl = 1"),
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
    kl, both = {"mismatch/kl": 0.2, "mismatch/ess": 0.9}, {"mismatch/kl": 0.2, "mismatch/ess": 0.1}
    said = [alarm.check(metrics, version) or "" for version, metrics in enumerate([kl, both, both])]
    assert ["kl is" in text for text in said] == [True, False, False]
    assert ["ess is" in text for text in said] == [False, True, False]


def test_an_engine_is_as_far_away_as_its_worst_token() -> None:
    canary = Canary((5, 6), (2, 0), (-0.5, -1.5))
    assert canary_distance(canary, np.array([-1.25, -9.0, -0.5], np.float32)) == 0.25


def test_without_bounds_and_without_a_trained_token_nothing_is_said() -> None:
    assert PolicyMismatchAlarm(MismatchConfig()).check(FAR, 1) is None
    alarm = PolicyMismatchAlarm(WARN)
    said = [alarm.check(metrics, version) for version, metrics in enumerate([APART, {}, APART])]
    assert [bool(text) for text in said] == [True, False, False]
