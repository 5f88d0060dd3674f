"""Trials with machines that join find each of these mistakes, so their checks can fail."""

import asyncio
from collections.abc import Callable, Collection, Mapping

import pytest

from asyncrl.controller.crash_attribution import CrashAttribution, Death
from asyncrl.controller.rollouts import Rollouts
from asyncrl.errors import DeadlineExceeded, FleetFailed
from asyncrl.fleet.launching.join_point import JoinPoint, Offer
from asyncrl.fleet.launching.joining_host import JoiningHost
from asyncrl.fleet.replicas import Replicas
from asyncrl.fleet.supervisor import Supervisor, WorkerSlot
from asyncrl.lanes.control.server import Server
from asyncrl.simulation.faults.simulate_command import described, outcome_of
from asyncrl.simulation.faults.trial_execution import TrialRun
from asyncrl.simulation.faults.trial_plan import draw_joined
from tests.simulation import test_joined_fleets as fleets

SEEDS = 200
Patch = pytest.MonkeyPatch
lost = fleets.test_a_machine_that_is_lost_costs_attempts_and_its_spare_goes_on
scaled = fleets.test_as_many_workers_run_as_were_asked_for_and_no_attempt_is_lost


# ---- machines that die or are cut off ----------------------------------------------------------------------


def a_machine_that_fell_silent_is_never_lost(patch: Patch) -> None:
    async def watch(server: Server) -> None:
        await asyncio.Event().wait()

    patch.setattr(Server, "_watch_heartbeats", watch)


def a_machine_that_lost_its_controller_keeps_its_worker(patch: Patch) -> None:
    async def end_worker(host: JoiningHost) -> None:
        """The worker goes on, though nobody calls it."""

    patch.setattr(JoiningHost, "end_worker", end_worker)


def a_machine_gets_a_second_worker(patch: Patch) -> None:
    patch.setattr(Offer, "is_free", property(lambda offer: offer.is_ready and not offer.is_leaving))


def a_lost_machine_is_still_offered(patch: Patch) -> None:
    def lose(point: JoinPoint, agent: str, offer: Offer) -> None:
        if offer.worker is not None:
            offer.worker.end("its host is gone")
            offer.worker = None
        point._changed.wake()

    patch.setattr(JoinPoint, "_lose", lose)


def each_death_on_a_lost_host_is_an_event_of_its_own(patch: Patch) -> None:
    def record(crashes: CrashAttribution, death: Death, alive: Collection[str]) -> None:
        whole(crashes, death, [*alive, "another"])

    whole = CrashAttribution.record_death
    patch.setattr(CrashAttribution, "record_death", record)


def a_group_is_blamed_for_the_network(patch: Patch) -> None:
    patch.setattr(Rollouts, "_is_excused", lambda rollouts, group, cause: isinstance(cause, DeadlineExceeded))


# ---- machines that leave -----------------------------------------------------------------------------------


def a_worker_that_drains_takes_new_work(patch: Patch) -> None:
    patch.setattr(Replicas, "drain", lambda replicas, number: None)


def a_worker_that_drains_ends_with_rows_that_groups_need(patch: Patch) -> None:
    def is_idle(replicas: Replicas, number: int) -> bool:
        replica = replicas.replicas[number]
        calls = (call for worker in replica.workers for call in worker.outstanding.values())
        return not replica.alive or not (replica.load or any(True for call in calls for _ in call.groups))

    patch.setattr(Replicas, "is_idle", is_idle)


def a_worker_that_is_to_drain_is_killed(patch: Patch) -> None:
    def retire(supervisor: Supervisor, instance: str, seconds: float) -> bool:
        supervisor.kill(instance)
        return True

    patch.setattr(Supervisor, "retire", retire)


# ---- more and fewer workers --------------------------------------------------------------------------------


def a_worker_that_is_too_many_is_killed(patch: Patch) -> None:
    def park(supervisor: Supervisor, slot: WorkerSlot, seconds: float) -> None:
        slot.wanted.clear()
        if (running := supervisor.instances.get(slot.worker.name)) is not None:
            running.launched.kill()

    patch.setattr(Supervisor, "park", park)


def a_worker_that_was_too_many_stays_away(patch: Patch) -> None:
    whole = Supervisor.park
    patch.setattr(Supervisor, "park", lambda supervisor, slot, seconds: whole(supervisor, _never_wanted(slot), seconds))


def _never_wanted(slot: WorkerSlot) -> WorkerSlot:
    slot.wanted = _Never()
    return slot


class _Never(asyncio.Event):
    def set(self) -> None:
        """Stays as it is."""


def a_machine_that_comes_late_is_not_noticed(patch: Patch) -> None:
    async def ready(point: JoinPoint, offer: Offer) -> None:
        offer.is_ready = True

    patch.setattr(JoinPoint, "_ready", ready)


MUTANTS: Mapping[Callable[[Patch], None], int] = {
    a_machine_that_fell_silent_is_never_lost: 10,
    a_machine_that_lost_its_controller_keeps_its_worker: 7,
    a_machine_gets_a_second_worker: 0,
    each_death_on_a_lost_host_is_an_event_of_its_own: 7,
    a_group_is_blamed_for_the_network: 276,
    a_worker_that_drains_ends_with_rows_that_groups_need: 104,
    a_worker_that_is_to_drain_is_killed: 104,
    a_worker_that_is_too_many_is_killed: 104,
}
"""Each mutant and a seed whose trial finds it; the seed changes when trials are drawn in another way."""

DIRECTED: Mapping[Callable[[Patch], None], Callable[[], None]] = {
    a_lost_machine_is_still_offered: lambda: lost("host", 260),
    a_worker_that_drains_takes_new_work: lambda: scaled((1,)),
    a_worker_that_was_too_many_stays_away: lambda: scaled((3, 1, 2)),
    a_machine_that_comes_late_is_not_noticed: fleets.test_a_machine_that_comes_late_takes_a_place_that_waits,
}
"""Mutants that random trials seldom meet, or that only make a run slower or smaller, and a test that finds each."""


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_found(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    assert any(_fails(seed) for seed in (MUTANTS[mutant], *range(SEEDS))), "no check noticed"


def _fails(seed: int) -> bool:
    outcome = outcome_of(draw_joined(seed))
    print(f"seed {seed}: {described(outcome):.300}")  # noqa: T201
    return not isinstance(outcome, TrialRun)


@pytest.mark.parametrize("mutant", DIRECTED)
def test_a_mutant_is_found_by_its_test(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, FleetFailed)):
        DIRECTED[mutant]()
