"""Compares the staleness policies on one fleet; `asyncrl-bench policies` prints the longer table."""

import pytest

from asyncrl.bench.learning.staleness_policies import PolicyResult, outcome, result_table

STEPS, SEEDS = 20, 5
NAMES = ("admit", "drop", "mask, whole groups", "mask, cuts")


@pytest.fixture(scope="module")
def policies() -> dict[str, PolicyResult]:
    outcomes = {name: outcome(name, STEPS, SEEDS) for name in NAMES}
    print(f"\n{result_table(outcomes)}")  # noqa: T201
    return outcomes


def test_cuts_train_far_more_live_tokens_than_dropping(policies: dict[str, PolicyResult]) -> None:
    assert policies["mask, cuts"].live >= 1.5 * policies["drop"].live


def test_cuts_train_no_fewer_live_tokens_than_admitting_all(policies: dict[str, PolicyResult]) -> None:
    assert policies["mask, cuts"].live >= policies["admit"].live


def test_cuts_leave_the_trainer_less_idle_than_admitting_all(policies: dict[str, PolicyResult]) -> None:
    assert policies["mask, cuts"].idle < policies["admit"].idle


def test_hardly_a_sample_is_masked_whole(policies: dict[str, PolicyResult]) -> None:
    assert policies["mask, cuts"].masked < 0.02


def test_slow_samples_train(policies: dict[str, PolicyResult]) -> None:
    assert policies["mask, cuts"].slow > 0.99


def test_waiting_for_whole_groups_expires_the_siblings_of_slow_samples(policies: dict[str, PolicyResult]) -> None:
    whole, cuts = policies["mask, whole groups"], policies["mask, cuts"]
    assert whole.masked > 0.15
    assert whole.live < 0.75 * cuts.live
    assert whole.idle > 1.5 * cuts.idle


def test_only_admitting_all_trains_tokens_over_the_limit(policies: dict[str, PolicyResult]) -> None:
    assert policies["admit"].over > 0.2
    assert all(policies[name].over == 0 for name in NAMES if name != "admit")
