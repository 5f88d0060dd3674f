"""Bounds of the mismatch warn once while they are crossed, and end the run beyond."""

import math

import numpy as np
import pytest

from asyncrl.config import Mismatch
from asyncrl.errors import PolicyMismatch
from asyncrl.mismatch import MismatchWatch, apart
from asyncrl.protocols.messages import Canary

FINE, APART, FAR = ({"mismatch/kl": kl, "mismatch/ess": ess} for kl, ess in ((0.01, 0.9), (0.2, 0.9), (2.0, 0.1)))
WARN = Mismatch(warn_kl=0.1, warn_ess=0.5)


@pytest.mark.trap("engines_disagree")
def test_a_warning_is_given_once_and_again_after_a_step_within_the_bounds() -> None:
    watch = MismatchWatch(WARN)
    said = [watch.see(metrics, version) for version, metrics in enumerate([FINE, APART, APART, FINE, FAR])]
    assert [bool(text) for text in said] == [False, True, False, False, True]
    assert said[1] is not None
    assert said[1].startswith("step 1: mismatch/kl is 0.2, over mismatch.warn_kl = 0.1; ")
    assert "mismatch/ess is 0.1, under mismatch.warn_ess = 0.5" in (said[4] or "")


@pytest.mark.parametrize(
    ("bounds", "says"),
    [
        (Mismatch(stop_kl=1.0), "mismatch/kl is 2, over mismatch.stop_kl = 1"),
        (Mismatch(stop_ess=0.2, warn_ess=0.5), "mismatch/ess is 0.1, under mismatch.stop_ess = 0.2"),
    ],
)
@pytest.mark.trap("engines_disagree")
def test_beyond_the_last_bound_the_run_ends(bounds: Mismatch, says: str) -> None:
    watch = MismatchWatch(bounds)
    assert watch.see(APART, 1) is None
    with pytest.raises(PolicyMismatch, match=says):
        watch.see(FAR, 2)


@pytest.mark.trap("engines_disagree")
def test_of_several_readers_the_one_that_is_furthest_away_is_told_once() -> None:
    watch = MismatchWatch(Mismatch())
    assert watch.canary() == {}
    for difference in (0.1, 0.3, 0.2):
        watch.heard(difference)
    assert watch.canary() == {"mismatch/canary": 0.3}
    assert watch.canary() == {}
    for difference in (0.1, math.nan, 0.2):
        watch.heard(difference)
    assert math.isnan(watch.canary()["mismatch/canary"])


@pytest.mark.trap("engines_disagree")
def test_a_canary_over_a_nat_is_told_unless_asked_otherwise() -> None:
    said = MismatchWatch(Mismatch()).see({"mismatch/canary": 1.5}, 4)
    assert said is not None
    assert said.startswith("step 4: mismatch/canary is 1.5, over mismatch.warn_canary = 1; engine and trainer do not")
    assert MismatchWatch(Mismatch()).see({"mismatch/canary": 0.5}, 4) is None
    assert MismatchWatch(Mismatch(warn_canary=None)).see({"mismatch/canary": 1.5}, 4) is None
    for difference in (0.3, math.nan):
        with pytest.raises(PolicyMismatch, match=r"over mismatch\.stop_canary = 0\.2"):
            MismatchWatch(Mismatch(stop_canary=0.2)).see({"mismatch/canary": difference}, 4)


def test_each_bound_has_a_warning_of_its_own() -> None:
    watch = MismatchWatch(WARN)
    kl, both = {"mismatch/kl": 0.2, "mismatch/ess": 0.9}, {"mismatch/kl": 0.2, "mismatch/ess": 0.1}
    said = [watch.see(metrics, version) or "" for version, metrics in enumerate([kl, both, both])]
    assert ["kl is" in text for text in said] == [True, False, False]
    assert ["ess is" in text for text in said] == [False, True, False]


def test_an_engine_is_as_far_away_as_its_worst_token() -> None:
    canary = Canary((5, 6), (2, 0), (-0.5, -1.5))
    assert apart(canary, np.array([-1.25, -9.0, -0.5], np.float32)) == 0.25


def test_without_bounds_and_without_a_trained_token_nothing_is_said() -> None:
    assert MismatchWatch(Mismatch()).see(FAR, 1) is None
    watch = MismatchWatch(WARN)
    said = [watch.see(metrics, version) for version, metrics in enumerate([APART, {}, APART])]
    assert [bool(text) for text in said] == [True, False, False]
