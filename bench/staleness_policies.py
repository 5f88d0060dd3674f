"""Compares the staleness policies on the same simulated fleet: `python -m asyncrl.bench.staleness_policies`.

Eight prompts a step, eight samples of each, 192 slots, limit 2; one completion in twenty is ten times as long as the
others. The slots sample a batch in 4.8 s and the trainer takes as long for one, so that either waits for the other only
because of the policy. `whole groups` is `mask` that never trains a part of a group; `cut_at = never` still cuts a group
when one of its samples has its last chance.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.gate.group_state import OPEN, GroupState
from asyncrl.simulation.fakes.generation import stragglers
from asyncrl.simulation.fakes.training import StepCost
from asyncrl.simulation.scenarios import Scenario, SimulationResult, simulate

SHORT, TIMES = 100, 10
SLOW = SHORT * TIMES


class WholeGroups(Gate):
    """Never trains a part of a group."""

    def may_cut(self, group: GroupState) -> bool:
        return not group.members(*OPEN)


BASE = Scenario(lengths=stragglers(SHORT, 0.05, TIMES), cost=StepCost(4.8), thorough=False)
POLICIES = {
    "admit": replace(BASE, policy="admit"),
    "block": replace(BASE, policy="block"),
    "drop": replace(BASE, policy="drop"),
    "mask, whole groups": replace(BASE, policy="mask", gate_class=WholeGroups),
    "mask, cut_at = never": replace(BASE, policy="mask", cut_at=None),
    "mask, cuts": replace(BASE, policy="mask", cut_at=4),
}


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """Holds means over seeds; shares lie between 0 and 1.

    live: trained tokens within the limit, per second. over: share of the trained tokens that are over the limit.
    idle: share of the trainer's time without a batch. slots: share of the slots' time that was used. masked: share of
    samples that left without a live token. slow: share of the long completions that trained; slow_tokens: of their
    tokens.
    """

    live: float
    over: float
    idle: float
    slots: float
    masked: float
    slow: float
    slow_tokens: float


def outcome(name: str, steps: int, seeds: int) -> PolicyResult:
    """Simulates one policy of POLICIES."""
    scenario = replace(POLICIES[name], steps=steps)
    results = [simulate(replace(scenario, seed=seed)) for seed in range(seeds)]

    def over_seeds(of: Callable[[SimulationResult], float]) -> float:
        return mean(of(result) for result in results)

    return PolicyResult(
        live=over_seeds(lambda result: result.live_tokens / result.seconds),
        over=over_seeds(lambda result: 1 - result.live_tokens / result.in_loss),
        idle=over_seeds(lambda result: result.idle),
        slots=over_seeds(lambda result: result.generating / (scenario.slots * result.seconds)),
        masked=over_seeds(lambda result: mean(result.live.get(key, 0) == 0 for key in _left(result))),
        slow=over_seeds(lambda result: mean(result.live.get(key, 0) > 0 for key in _left_slow(result))),
        slow_tokens=over_seeds(lambda result: mean(result.live.get(key, 0) / SLOW for key in _left_slow(result))),
    )


def _left(result: SimulationResult) -> Iterator[tuple[int, int]]:
    """Yields the samples that were trained or dropped."""
    return iter(result.live | dict.fromkeys(result.dropped, 0))


def _left_slow(result: SimulationResult) -> Iterator[tuple[int, int]]:
    return (key for key in _left(result) if result.lengths.get(key, 0) == SLOW)


def table(steps: int = 40, seeds: int = 5) -> dict[str, PolicyResult]:
    """Simulates all policies over the same seeds."""
    return {name: outcome(name, steps, seeds) for name in POLICIES}


def lines(outcomes: dict[str, PolicyResult]) -> Iterator[str]:
    """Formats the table as text."""
    columns = ("live tokens/s", "over limit", "trainer idle", "slots used", "all masked", "slow: trained", "tokens")
    yield f"{'':<21}" + "".join(f"{column:>15}" for column in columns)
    for name, o in outcomes.items():
        shares = (o.over, o.idle, o.slots, o.masked, o.slow, o.slow_tokens)
        yield f"{name:<21}{o.live:>15.0f}" + "".join(f"{share:>15.1%}" for share in shares)


def main(arguments: Sequence[str] = ()) -> None:
    """Prints the table."""
    if arguments:
        raise SystemExit("asyncrl-bench policies takes no flags")
    print("\n".join(lines(table())))


if __name__ == "__main__":
    main()
