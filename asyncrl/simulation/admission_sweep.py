"""Compares full with adaptive admission on the virtual clock: `python -m asyncrl.simulation.admission_sweep`.

Each case runs twice with the same seeds. A batch has 16 samples of 4 s; 32 slots sample it in 2 s. Which stage is the
slowest follows from the seconds of a step and of a score.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean, pstdev
from typing import Any

from asyncrl.simulation.fakes.fake_service import Pace
from asyncrl.simulation.fakes.generation import Lengths, constant, lognormal, stragglers
from asyncrl.simulation.fakes.training import StepCost
from asyncrl.simulation.scenarios import Scenario, SimulationResult
from asyncrl.simulation.simulated_run import simulate

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


def from_then_on(begin: float, factor: float) -> Pace:
    return lambda now: factor if now >= begin else 1.0


def until(end: float, factor: float) -> Pace:
    return lambda now: factor if now < end else 1.0


def bursts(period: float, seconds: float, factor: float) -> Pace:
    """Makes work slower at the beginning of each period."""
    return lambda now: factor if now % period < seconds else 1.0


CHANGES: Mapping[str, Callable[[float], Mapping[str, Pace]]] = {
    "steady": lambda middle: {},
    "slower generator": lambda middle: {"generation": from_then_on(middle, 3.0)},
    "faster generator": lambda middle: {"generation": until(middle, 3.0)},
    "slower trainer": lambda middle: {"training": from_then_on(middle, 3.0)},
    "faster trainer": lambda middle: {"training": until(middle, 3.0)},
    "bursts": lambda middle: {"generation": bursts(40.0, 8.0, 4.0)},
}
"""The pace of services, given the middle of the run in seconds."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over seeds. starved: seconds in which the trainer had no batch. tokens: in the loss, a second.

    Of the second half of the steps: staleness, the mean of tokens in the loss; in_flight, samples when a step begins;
    spread, its standard deviation as a share of the mean.
    """

    seconds: float
    starved: float
    tokens: float
    staleness: float
    in_flight: float
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


def compare(bound_by: str, lengths: str, change: str = "steady", *, seeds: int = 1, **settings: Any) -> Comparison:
    """Runs one case with each admission. settings: further fields of the scenario."""
    scenario = replace(BASE, lengths=LENGTHS[lengths], **{**BOUND_BY[bound_by], **settings})
    middle = scenario.steps / 2 * max(2.0, scenario.cost.fixed)
    scenario = replace(scenario, pace=CHANGES[change](middle))
    full, adaptive = (
        figures([simulate(replace(scenario, admission=admission, seed=seed)) for seed in range(seeds)])
        for admission in ("full", "adaptive")
    )
    return Comparison(full, adaptive)


def figures(results: Sequence[SimulationResult]) -> Figures:
    late = [result.in_flight[len(result.in_flight) // 2 :] for result in results]
    return Figures(
        seconds=fmean(result.seconds for result in results),
        starved=fmean(result.idle * result.seconds for result in results),
        tokens=fmean(result.in_loss / result.seconds for result in results),
        staleness=fmean(
            age for result in results for version, age in result.staleness.items() if 2 * version >= result.version
        ),
        in_flight=fmean(fmean(counts) for counts in late),
        spread=fmean(pstdev(counts) / fmean(counts) for counts in late),
    )


COLUMNS = (
    *("limit", "bound by", "lengths", "change", "staleness full", "adaptive", "starved full", "adaptive", "longer"),
    *("tokens", "in flight full", "adaptive", "spread full", "adaptive"),
)


def cells(found: Comparison) -> tuple[str, ...]:
    full, adaptive = found.full, found.adaptive
    pair = (full, adaptive)
    return (
        *(f"{each.staleness:.2f}" for each in pair),
        *(f"{each.starved / each.seconds:.1%}" for each in pair),
        *(f"{found.longer_starved:.1%}", f"{found.tokens:.3f}"),
        *(f"{each.in_flight:.0f}" for each in pair),
        *(f"{each.spread:.0%}" for each in pair),
    )


def main() -> None:
    widths = [max(10, len(column)) for column in COLUMNS]
    rows = product((1, 2, 4, 8), BOUND_BY, LENGTHS, CHANGES)
    found = ((str(limit), *case, *cells(compare(*case, seeds=2, steps=150, limit=limit))) for limit, *case in rows)
    for row in itertools.chain([COLUMNS], found):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
