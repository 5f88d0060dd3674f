"""Bounds of the mismatch warn once while they are crossed, and end the run beyond."""

import pytest

from asyncrl.config import Mismatch
from asyncrl.errors import PolicyMismatch
from asyncrl.mismatch import MismatchWatch

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


def test_without_bounds_and_without_a_trained_token_nothing_is_said() -> None:
    assert MismatchWatch(Mismatch()).see(FAR, 1) is None
    watch = MismatchWatch(WARN)
    said = [watch.see(metrics, version) for version, metrics in enumerate([APART, {}, APART])]
    assert [bool(text) for text in said] == [True, False, False]
