"""Which groups run alone, and which are blamed, after which deaths and failures."""

from collections.abc import Callable, Collection
from typing import Any

import pytest

from asyncrl.controller import crash_attribution
from asyncrl.controller.crash_attribution import (
    ATTRIBUTED_AFTER,
    FAILURES,
    ISOLATED_AFTER,
    MOST_FORGIVEN,
    CrashAttribution,
    Death,
)
from asyncrl.fleet.supervisor import MAX_DEATHS, MAX_TESTED

NOTICE = 2.0


class Fleet:
    """Reports deaths, ten seconds apart unless said otherwise. Each host has two workers."""

    def __init__(self) -> None:
        self.crashes = CrashAttribution(NOTICE)
        self.now = 0.0

    def die(
        self,
        *groups: int,
        worker: str = "w0",
        host: str = "h0",
        after: float = 10.0,
        alone: bool = False,
        alive: Collection[str] = (),
    ) -> None:
        """Lets a worker die `after` seconds. alive: workers on its host besides the usual two."""
        self.now += after
        death = Death(worker, host, self.now, frozenset(groups), groups[0] if alone else None, f"{worker} died")
        self.crashes.record_death(death, {f"{host}a", f"{host}b", *alive} - {worker})

    def isolate(self, *groups: int) -> None:
        for _ in range(ISOLATED_AFTER):
            self.die(*groups)

    def lose_host(self, host: str, *groups_of_workers: tuple[int, ...], apart: float = 0.5) -> None:
        for worker, groups in zip((f"{host}a", f"{host}b"), groups_of_workers, strict=True):
            self.die(*groups, worker=worker, host=host, after=apart)


def test_a_group_is_isolated_after_two_deaths_and_blamed_after_five() -> None:
    fleet = Fleet()
    for neighbour in range(10, 10 + ISOLATED_AFTER):
        assert not fleet.crashes.is_suspect(3)
        fleet.die(3, neighbour)
    assert fleet.crashes.is_suspect(3)
    assert not fleet.crashes.is_suspect(10)
    for _ in range(ATTRIBUTED_AFTER):
        assert not fleet.crashes.kills_workers(3)
        fleet.die(3, alone=True)
    assert fleet.crashes.kills_workers(3)
    assert fleet.crashes.count == ISOLATED_AFTER + ATTRIBUTED_AFTER == 5
    assert fleet.crashes.last_death(3) == "w0 died"


def test_the_supervisor_waits_for_the_evidence_against_a_group() -> None:
    """It ends the fleet for none of the deaths after which a group is dropped."""
    assert MAX_TESTED == ATTRIBUTED_AFTER + MOST_FORGIVEN
    assert MAX_DEATHS > ISOLATED_AFTER + MOST_FORGIVEN


def test_a_group_that_never_ran_alone_is_never_blamed() -> None:
    fleet = Fleet()
    for _ in range(20):
        fleet.die(3)
        fleet.crashes.record_failure(3, alone=False)
    assert fleet.crashes.is_suspect(3)
    assert not fleet.crashes.kills_workers(3)
    assert not fleet.crashes.fails_alone(3)


def test_a_lost_host_is_nobodys_event_however_many_are_lost() -> None:
    fleet = Fleet()
    for number in range(30):
        fleet.lose_host(f"h{number % 3}", (1, 2), (1, 2, 3))
        assert not any(map(fleet.crashes.is_suspect, (1, 2, 3)))
        fleet.now += 2 * NOTICE


def test_a_group_that_kills_all_workers_of_a_host_again_and_again_is_a_suspect() -> None:
    """Workers of a lost host are not back within the time of a notice."""
    fleet = Fleet()
    for _ in range(1 + ISOLATED_AFTER):
        assert not fleet.crashes.is_suspect(1)
        fleet.lose_host("h7", (1, 2), (1, 3), apart=NOTICE / 8)
    assert fleet.crashes.is_suspect(1)


def test_a_lost_host_is_no_event_and_no_evidence() -> None:
    fleet = Fleet()
    fleet.lose_host("h7", (1, 2), (1, 2, 3))
    fleet.die(1)
    assert not fleet.crashes.is_suspect(1)
    fleet.die(1)
    assert fleet.crashes.is_suspect(1)
    for _ in range(2 * ATTRIBUTED_AFTER):
        fleet.die(1, worker="h7a", host="h7", alone=True)
        fleet.die(5, worker="h7b", host="h7", after=NOTICE / 2)
    assert not fleet.crashes.kills_workers(1)


def test_workers_of_a_host_that_die_long_after_each_other_are_no_lost_host() -> None:
    fleet = Fleet()
    fleet.lose_host("h7", (1, 2), (1, 3), apart=2 * NOTICE)
    assert fleet.crashes.is_suspect(1)


def test_a_worker_whose_host_left_makes_no_group_a_suspect() -> None:
    fleet = Fleet()
    for _ in range(2 * ISOLATED_AFTER):
        before = fleet.crashes.count
        fleet.crashes.record_leave()
        assert fleet.crashes.count > before, "an attempt that ends with it is known not to have failed by itself"
    assert not fleet.crashes.is_suspect(1)


def test_a_host_of_which_a_worker_lives_is_not_lost() -> None:
    fleet = Fleet()
    fleet.die(1, worker="h7a", host="h7")
    fleet.die(1, worker="h7b", host="h7", after=0.5, alive=["h7c"])
    assert fleet.crashes.is_suspect(1)


def test_a_lost_host_takes_a_worker_with_it_once_and_explains_no_other_death() -> None:
    fleet = Fleet()
    fleet.isolate(1, 2)
    for _ in range(2):
        fleet.die(1, worker="h7a", host="h7", after=NOTICE / 4, alone=True)
    fleet.die(5, worker="h7b", host="h7", after=NOTICE / 4)
    fleet.die(1, worker="h7a", host="h7", after=NOTICE / 4, alone=True)
    assert not fleet.crashes.kills_workers(1)
    fleet.die(1, worker="h7a", host="h7", alone=True)
    assert fleet.crashes.kills_workers(1)


def test_a_host_may_be_lost_twice_within_the_time_of_a_notice() -> None:
    fleet = Fleet()
    for _ in range(ATTRIBUTED_AFTER):
        fleet.lose_host("h7", (1,), (2,), apart=NOTICE / 8)
    assert len({death.lost_host for death in fleet.crashes._deaths}) == ATTRIBUTED_AFTER


def test_isolated_groups_that_kill_their_workers_on_one_host_are_no_lost_host() -> None:
    fleet = Fleet()
    fleet.isolate(1, 2)
    for _ in range(ATTRIBUTED_AFTER):
        fleet.die(1, worker="h7a", host="h7", alone=True)
        fleet.die(2, worker="h7b", host="h7", after=0.5, alone=True)
    assert fleet.crashes.kills_workers(1)
    assert fleet.crashes.kills_workers(2)


def deaths_alone(*workers: str) -> CrashAttribution:
    """Lets workers of one host die in one moment, which a suspect, group 1, had for itself."""
    crashes = CrashAttribution(NOTICE)
    for _ in range(ISOLATED_AFTER):
        crashes.record_death(Death("w0", "h0", 0.0, frozenset((1,)), None, "w0 died"), ["w1"])
    for number, worker in enumerate(workers, 1):
        death = Death(worker, "h8", 10.0, frozenset((1,)), 1, f"{worker} died")
        crashes.record_death(death, workers[number:])
    return crashes


def test_a_host_of_which_one_suspect_had_several_services_for_itself_may_be_lost() -> None:
    assert not deaths_alone("reward0.0", "reference0.0", "generation0.0").kills_workers(1)


def test_a_suspect_that_crashes_one_generator_after_the_other_on_a_host_is_found() -> None:
    assert deaths_alone("generation0.0", "generation1.0", "generation2.0").kills_workers(1)


def test_a_group_needs_more_evidence_while_workers_die_without_it() -> None:
    fleet = Fleet()
    fleet.isolate(3)
    for _ in range(ATTRIBUTED_AFTER):
        fleet.die(3, alone=True)
        fleet.die(50, host="h9")
        fleet.crashes.forget(50)  # It went on elsewhere.
    assert not fleet.crashes.kills_workers(3)
    for _ in range(MOST_FORGIVEN):
        fleet.die(3, alone=True)
    assert fleet.crashes.kills_workers(3)


def test_deaths_that_another_suspect_explains_excuse_nobody() -> None:
    fleet = Fleet()
    fleet.isolate(3, 4)
    for _ in range(ATTRIBUTED_AFTER):
        fleet.die(3, alone=True)
        fleet.die(4, host="h9", alone=True)
    assert fleet.crashes.kills_workers(3)
    fleet.crashes.give_up(3)
    fleet.crashes.forget(3)
    assert fleet.crashes.kills_workers(4)


def test_an_attempt_that_goes_well_clears_a_group() -> None:
    fleet = Fleet()
    for _ in range(ISOLATED_AFTER):
        fleet.die(3)
        fleet.crashes.record_failure(3, alone=True)
    fleet.crashes.forget(3)
    assert not fleet.crashes.is_suspect(3)
    assert not fleet.crashes.fails_alone(3)


@pytest.mark.parametrize("alone", [True, False])
def test_a_group_that_fails_without_deaths_is_given_up_where_it_fails_alone(alone: bool) -> None:
    crashes = CrashAttribution(NOTICE)
    for failure in range(FAILURES):
        assert crashes.is_suspect(3) == (failure >= ISOLATED_AFTER)
        assert not crashes.fails_alone(3)
        crashes.record_failure(3, alone=alone and crashes.is_suspect(3))
    assert crashes.fails_alone(3) == alone


# ---- mutants: each breaks a rule, and some test above fails ------------------------------------------------


whole = CrashAttribution.record_death


def with_company(crashes: CrashAttribution, death: Death, alive: Collection[str]) -> None:
    death.alone = next(iter(death.present), None)
    whole(crashes, death, alive)


def explaining_all(crashes: CrashAttribution, death: Death, alive: Collection[str]) -> None:
    whole(crashes, death, alive)
    for each in crashes._deaths if death.lost_host is not None else ():
        if each.domain == death.domain and each.at >= death.at - NOTICE:
            each.lost_host = death.lost_host


def losing_again(crashes: CrashAttribution, death: Death, alive: Collection[str]) -> None:
    for each in crashes._deaths:
        if each.domain == death.domain:
            each.lost_host = None
    whole(crashes, death, alive)


def as_if_not_alone(crashes: CrashAttribution, death: Death, alive: Collection[str]) -> None:
    alone = death.alone
    death.alone = None
    whole(crashes, death, alive)
    death.alone = alone


def all_deaths_without(crashes: CrashAttribution, group: int, since: float) -> int:
    return sum(death.at >= since and group not in death.present for death in crashes._deaths)


MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "suspects after one death": (crash_attribution, "ISOLATED_AFTER", 1),
    "guilty one death early": (crash_attribution, "ATTRIBUTED_AFTER", ATTRIBUTED_AFTER - 1),
    "company is no excuse": (CrashAttribution, "record_death", with_company),
    "hosts are never lost": (
        CrashAttribution,
        "record_death",
        lambda crashes, death, alive: whole(crashes, death, [*alive, "another"]),
    ),
    "two deaths anywhere are a lost host": (
        CrashAttribution,
        "record_death",
        lambda crashes, death, alive: whole(crashes, death, ()),
    ),
    "a lost host explains all deaths there": (CrashAttribution, "record_death", explaining_all),
    "a host is lost again with each death": (CrashAttribution, "record_death", losing_again),
    "isolated groups lose hosts": (CrashAttribution, "record_death", as_if_not_alone),
    "suspects lose no host": (
        crash_attribution,
        "_died_of_groups",
        lambda deaths: all(death.alone is not None for death in deaths),
    ),
    "suspects lose every host": (
        crash_attribution,
        "_died_of_groups",
        lambda deaths: len({death.alone for death in deaths} - {None}) == len(deaths),
    ),
    "nothing is forgiven": (CrashAttribution, "_killed_by_others", lambda crashes, group, since: 0),
    "other suspects excuse": (CrashAttribution, "_killed_by_others", all_deaths_without),
    "nothing is forgotten": (CrashAttribution, "forget", lambda crashes, group: None),
    "failures need no isolation": (
        CrashAttribution,
        "fails_alone",
        lambda crashes, group: crashes._failures[group] >= FAILURES,
    ),
}
"""What each replaces, where, and by what."""


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_is_found(mutant: tuple[Any, str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*mutant)
    rules = [test for name, test in globals().items() if name.startswith("test_") and name != "test_a_mutant_is_found"]
    parametrized = test_a_group_that_fails_without_deaths_is_given_up_where_it_fails_alone
    checks = [test for test in rules if test is not parametrized] + [lambda: parametrized(alone=False)]
    assert any(map(fails, checks)), "no test noticed"


def fails(test: Callable[[], None]) -> bool:
    try:
        test()
    except AssertionError:
        return True
    return False


def test_the_loss_of_a_host_with_one_worker_is_no_event_of_its_groups() -> None:
    fleet = Fleet()
    for number in range(3 * ISOLATED_AFTER):
        fleet.die(3, worker=f"w{number}", host=f"h{number}", after=60.0)
        fleet.crashes.record_lost_host(f"w{number}")
        assert not fleet.crashes.is_suspect(3)
    fleet.die(3, worker="w0")
    fleet.crashes.record_lost_host("w9")  # Nobody's death.
    fleet.die(3, worker="w1")
    assert fleet.crashes.is_suspect(3), "its own deaths count"


def test_a_group_that_takes_one_host_after_the_other_with_it_in_a_moment_is_a_suspect() -> None:
    fleet = Fleet()
    for _ in range(1 + ISOLATED_AFTER):
        fleet.die(3, worker="w0", after=0.5)
        fleet.crashes.record_lost_host("w0")
    assert fleet.crashes.is_suspect(3)
