"""Trainers die at random points, and the fleets around them go on from the checkpoint with every invariant held."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from asyncrl.simulation import virtual_loop
from asyncrl.simulation.fakes.fake_service import FakeService
from asyncrl.simulation.fakes.generation import FakeGeneration
from asyncrl.simulation.faults.simulate_command import outcome_of
from asyncrl.simulation.faults.trial_execution import ControllerLife, TrialRun, run_trial
from asyncrl.simulation.faults.trial_plan import Fault, Trial, draw_returns
from tests.named_seed import named_seed, starts

CORE = 20
SEEDS = 40
PART = 10
MUTANT_SEEDS = 60
Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("start", starts(CORE, SEEDS, PART))
def test_random_deaths_of_the_trainer_hold_every_invariant(start: int) -> None:
    returned = 0
    seen = Counter[str]()
    for seed in range(start, start + PART):
        with named_seed(seed):
            outcome = run_trial(draw_returns(seed))
        returned += outcome.returns
        seen.update(end.partition("(")[0] for end in outcome.ends)
    assert returned >= PART // 2
    assert seen["finished"] == PART
    assert seen["FleetFailed"] >= 1, "some trainers died more often than a run goes back"


@pytest.mark.parametrize("seed", [1, 5, 9])
def test_the_same_seed_gives_the_same_history(seed: int) -> None:
    assert run_trial(draw_returns(seed)).digest == run_trial(draw_returns(seed)).digest


def test_a_run_goes_back_to_one_checkpoint_so_often_and_then_ends_with_the_reason() -> None:
    deaths = tuple(Fault("kill", at, "training") for at in (60, 160, 260, 360))
    outcome = run_trial(Trial(seed=1, steps=20, checkpoint_every=100, returns=2, faults=deaths))
    assert outcome.returns == 3, "the third death ends the run; the next start goes back once"
    assert outcome.ends[0].startswith("FleetFailed('training0.0 died: was killed. Resume with: the same")
    assert outcome.ends[1:] == ["finished"]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("at", [150, 303], ids=["step", "using"])
def test_a_trainer_that_is_silent_for_the_deadline_of_a_call_is_killed_and_starts_again(ranks: int, at: int) -> None:
    silence = (Fault("stall", at, "training", seconds=70.0),)
    shape = Trial(seed=1, ranks=ranks, steps=12, step_time=2.0, checkpoint_every=2, returns=1, faults=silence)
    outcome = run_trial(shape)
    assert (outcome.lives, outcome.returns) == (1, 1), outcome.ends


def test_a_newer_checkpoint_makes_room_for_further_deaths() -> None:
    deaths = tuple(Fault("kill", at, "training") for at in (200, 450, 700, 950))
    outcome = run_trial(Trial(seed=1, steps=30, checkpoint_every=1, returns=1, faults=deaths))
    assert (outcome.returns, outcome.lives) == (4, 1)


def test_workers_that_can_go_on_stay_and_the_others_start_again() -> None:
    """An environment keeps what it answered, and is started again; generation and rewards are the same instances."""
    started = Counter[str]()

    class Counted(TrialRun):
        def __init__(self, trial: Trial) -> None:
            super().__init__(trial)
            known = self.truth.services

            class Services(dict[str, Any]):
                def __setitem__(self, instance: str, service: Any) -> None:
                    started[service.service] += 1
                    super().__setitem__(instance, service)

            self.truth.services = Services(known)

    async def main() -> TrialRun:
        run = Counted(Trial(seed=2, steps=6, turns=2, returns=1, faults=(Fault("kill", 300, "training"),)))
        await run.run()
        return run

    assert virtual_loop.run(main()).returns == 1
    assert started == {"generation": 1, "reward": 1, "environment": 2}


# ---- mistakes --------------------------------------------------------------------------------------------


def generation_keeps_the_weights_of_the_dead_trainer(patch: Patch) -> None:
    patch.setattr(FakeGeneration, "renew", FakeService.renew)


def workers_keep_their_incarnation(patch: Patch) -> None:
    async def renew(service: FakeService, facts: Any) -> None:
        return

    patch.setattr(FakeService, "renew", renew)


def the_journal_is_not_resumed(patch: Patch) -> None:
    async def resumed(life: Any, _: Any) -> Any:
        return life

    patch.setattr(ControllerLife, "_resumed", resumed)


MUTANTS: list[Callable[[Patch], None]] = [
    generation_keeps_the_weights_of_the_dead_trainer,
    the_journal_is_not_resumed,
]


@pytest.mark.parametrize("mistake", MUTANTS, ids=lambda mistake: mistake.__name__)
def test_a_broken_return_is_found(mistake: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mistake(monkeypatch)
    found = (seed for seed in range(MUTANT_SEEDS) if isinstance(outcome_of(draw_returns(seed)), BaseException))
    assert next(found, None) is not None, f"{MUTANT_SEEDS} seeds did not find it"


def test_workers_that_keep_their_incarnation_are_found_by_what_starts_again(monkeypatch: Patch) -> None:
    """A fleet ends such workers, and goes on with others."""
    workers_keep_their_incarnation(monkeypatch)
    with pytest.raises(AssertionError):
        test_workers_that_can_go_on_stay_and_the_others_start_again()
