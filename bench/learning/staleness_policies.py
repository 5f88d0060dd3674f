"""Compares the staleness policies on the same simulated fleet: `python -m asyncrl.bench.learning.staleness_policies`.

Eight prompts a step, eight samples of each, 192 slots, limit 2; one completion in twenty is ten times as long as the
others. The slots sample a batch in 4.8 s and the trainer takes as long for one, so that either waits for the other only
because of the policy. `whole groups` is `mask` that never trains a part of a group; `cut_at = never` still cuts a group
when one of its samples has its last chance.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from statistics import mean

from asyncrl.bench.measurements import table
from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.gate.group_state import OPEN, GroupState
from asyncrl.simulation.fakes.generation import stragglers
from asyncrl.simulation.fakes.training import StepCost
from asyncrl.simulation.scenarios import Scenario
from asyncrl.simulation.simulated_run import simulate

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

    # Live tokens of the samples that were trained or dropped, by seed, and of the long ones among them.
    ended = [{**dict.fromkeys(result.dropped, 0), **result.live} for result in results]
    slow = [
        [tokens for key, tokens in tokens_of.items() if result.lengths.get(key, 0) == SLOW]
        for tokens_of, result in zip(ended, results, strict=True)
    ]
    return PolicyResult(
        live=mean(result.live_tokens / result.seconds for result in results),
        over=mean(1 - result.live_tokens / result.in_loss for result in results),
        idle=mean(result.idle for result in results),
        slots=mean(result.generating / (scenario.slots * result.seconds) for result in results),
        masked=mean(mean(tokens == 0 for tokens in tokens_of.values()) for tokens_of in ended),
        slow=mean(mean(tokens > 0 for tokens in of_seed) for of_seed in slow),
        slow_tokens=mean(mean(tokens / SLOW for tokens in of_seed) for of_seed in slow),
    )


def result_table(outcomes: dict[str, PolicyResult]) -> str:
    head = ("", "live tokens/s", "over limit", "trainer idle", "slots used", "all masked", "slow: trained", "tokens")
    rows = []
    for name, found in outcomes.items():
        live, *shares = astuple(found)
        rows.append([name, f"{live:.0f}", *(f"{share:.1%}" for share in shares)])
    return table(head, rows)


def main(arguments: Sequence[str] = ()) -> None:
    if arguments:
        raise SystemExit("asyncrl-bench policies takes no flags")
    print(result_table({name: outcome(name, steps=40, seeds=5) for name in POLICIES}))


if __name__ == "__main__":
    main()
