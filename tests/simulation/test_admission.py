"""Adaptive admission against full, on the virtual clock.

Each case runs once with each, from the same seed. A batch has 16 samples of 4 s; 32 slots sample it in 2 s. Which stage
is the slowest follows from the seconds of a step and of a score.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import Any

import pytest

from asyncrl.controller.gate.admission import Admission
from asyncrl.simulation.fakes.fake_service import Pace
from asyncrl.simulation.fakes.generation import Lengths, constant, lognormal, stragglers
from asyncrl.simulation.fakes.training import StepCost
from tests.simulation.simulated_run import Scenario, SimulationResult, simulate

BASE = Scenario(groups=4, members=4, cut_at=2, slots=32, thorough=False, checkpoint_every=1000)
LENGTHS: Mapping[str, Lengths] = {
    "constant": constant(40),
    "lognormal": lognormal(30, 0.8),
    "stragglers": stragglers(30, 0.05, 10),
}
BOUND_BY: Mapping[str, Mapping[str, Any]] = {
    "trainer": {"cost": StepCost(6.0)},
    "nothing": {"cost": StepCost(2.5)},
    "generator": {"cost": StepCost(1.0)},
    "reward": {"cost": StepCost(2.0), "reward_delay": 1.0, "reward_calls": 6},
    "latency": {"cost": StepCost(3.0), "reward_delay": 5.0, "slots": 96},
    "long scores": {"cost": StepCost(3.0), "reward_delay": 6.0},
}
CHANGES: Mapping[str, Callable[[float], Mapping[str, Pace]]] = {
    "steady": lambda middle: {},
    "slower generator": lambda middle: {"generation": lambda now: 3.0 if now >= middle else 1.0},
    "faster trainer": lambda middle: {"training": lambda now: 3.0 if now < middle else 1.0},
    "bursts": lambda middle: {"generation": lambda now: 4.0 if now % 40.0 < 8.0 else 1.0},
}
"""The pace of services, given the middle of the run in seconds."""
STEPS = 60
LARGE_CUSHION = {"slower generator": 2}
"""Smaller limits for some changes: what full admission has drawn ahead lasts for limit steps when generation becomes
the slowest stage, so at 4 and more it starves later, once; the tests of a slower generator below are about that."""
LARGE = 8
"""A limit at which full admission has many batches ahead."""
SLOWER_BATCH = 6.0
"""Seconds in which the slots sample a batch once generation takes three times as long."""
CASES = (
    *(("trainer", "constant", "steady"), ("trainer", "stragglers", "steady"), ("nothing", "lognormal", "steady")),
    *(("generator", "lognormal", "steady"), ("reward", "lognormal", "steady"), ("latency", "constant", "steady")),
    *(
        ("long scores", "lognormal", "steady"),
        ("trainer", "lognormal", "slower generator"),
        ("trainer", "constant", "faster trainer"),
    ),
    ("trainer", "lognormal", "bursts"),
)


@dataclass(frozen=True, slots=True)
class Figures:
    """starved: seconds in which the trainer had no batch. tokens: in the loss, a second.

    Of the second half of the steps: staleness, the mean of tokens in the loss; spread, the standard deviation of the
    samples in flight when a step begins, as a share of their mean.
    """

    seconds: float
    starved: float
    tokens: float
    staleness: float
    spread: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One case with full and with adaptive admission."""

    full: Figures
    adaptive: Figures

    @property
    def longer_starved(self) -> float:
        """Returns how much longer the trainer starves, as a share of the run with full admission."""
        return (self.adaptive.starved - self.full.starved) / self.full.seconds

    @property
    def tokens(self) -> float:
        """Returns the trained tokens a second, as a share of those with full admission."""
        return self.adaptive.tokens / self.full.tokens


def compare(bound_by: str, lengths: str, change: str = "steady", **settings: Any) -> Comparison:
    """Runs one case with each admission. settings: further fields of the scenario."""
    scenario = replace(BASE, lengths=LENGTHS[lengths], **{**BOUND_BY[bound_by], **settings})
    middle = scenario.steps / 2 * max(2.0, scenario.cost.fixed)
    scenario = replace(scenario, pace=CHANGES[change](middle))
    return Comparison(*(figures(simulate(replace(scenario, admission=each))) for each in ("full", "adaptive")))


def figures(result: SimulationResult) -> Figures:
    late = result.in_flight[len(result.in_flight) // 2 :]
    return Figures(
        seconds=result.seconds,
        starved=result.idle * result.seconds,
        tokens=result.in_loss / result.seconds,
        staleness=fmean(age for version, age in result.staleness.items() if 2 * version >= result.version),
        spread=pstdev(late) / fmean(late),
    )


@pytest.mark.parametrize(("bound_by", "lengths", "change"), CASES)
def test_the_trainer_does_not_starve_longer_and_trains_as_many_tokens(bound_by: str, lengths: str, change: str) -> None:
    found = compare(bound_by, lengths, change, steps=STEPS, limit=LARGE_CUSHION.get(change, 4))
    assert found.longer_starved <= 0.02
    assert found.tokens >= 0.98
    assert found.adaptive.staleness <= found.full.staleness + 0.05
    assert found.adaptive.spread <= 0.15 or change != "steady"


def test_one_batch_in_waiting_is_enough_for_a_slow_trainer_whatever_the_limit() -> None:
    found = compare("trainer", "constant", steps=STEPS, limit=8)
    assert found.full.staleness > 5
    assert found.adaptive.staleness <= 1.3
    assert found.longer_starved <= 0.02


def test_what_full_admission_had_ahead_is_lost_once_whatever_the_length_of_the_run() -> None:
    """No admission that holds less can avoid this loss: from the change on the slots sample no faster for it."""
    runs = [compare("nothing", "constant", "slower generator", steps=steps, limit=LARGE) for steps in (150, 250)]
    shorter, longer = (found.adaptive.starved - found.full.starved for found in runs)
    assert 0 < shorter <= LARGE * SLOWER_BATCH
    assert longer == pytest.approx(shorter, abs=SLOWER_BATCH / 4)


def draw_freely_from(moment: float, patch: pytest.MonkeyPatch) -> None:
    """Lets adaptive admission draw all that the limit allows from a moment on: what its own reaction can reach."""
    before = Admission.allows

    def allows(admission: Admission, waiting: int) -> bool:
        return asyncio.get_running_loop().time() >= moment or before(admission, waiting)

    patch.setattr(Admission, "allows", allows)


def test_the_reaction_to_a_slower_generator_costs_little_beside_that(monkeypatch: pytest.MonkeyPatch) -> None:
    case = ("trainer", "lognormal", "slower generator")
    steps = 150
    found = compare(*case, steps=steps, limit=LARGE)
    draw_freely_from(steps / 2 * 6.0, monkeypatch)
    at_once = compare(*case, steps=steps, limit=LARGE)
    assert found.adaptive.starved - at_once.adaptive.starved <= 0.02 * found.full.seconds


def test_nothing_changes_for_synchronous_training() -> None:
    full, adaptive = (simulate(Scenario(limit=0, steps=4, admission=each)) for each in ("full", "adaptive"))
    assert full.digest == adaptive.digest


def never_rises(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Admission, "_starve", lambda admission, missing, lost: admission._left.clear())


def never_falls(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Admission, "_leave", lambda admission, left: None)


def falls_by_all_that_is_left(patch: pytest.MonkeyPatch) -> None:
    def leave(admission: Admission, left: int) -> None:
        admission.bound = max(admission._config.batch, admission.bound - left)

    patch.setattr(Admission, "_leave", leave)


@pytest.mark.parametrize(
    ("mutant", "case"),
    [
        (never_rises, ("long scores", "lognormal", "steady")),
        (falls_by_all_that_is_left, ("nothing", "lognormal", "steady")),
    ],
)
def test_a_mutant_of_the_feedback_lets_the_trainer_starve(
    mutant: Callable[[pytest.MonkeyPatch], None], case: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        test_the_trainer_does_not_starve_longer_and_trains_as_many_tokens(*case)


def test_without_the_fall_of_the_bound_samples_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    never_falls(monkeypatch)
    with pytest.raises(AssertionError):
        test_one_batch_in_waiting_is_enough_for_a_slow_trainer_whatever_the_limit()
