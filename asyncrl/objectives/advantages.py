"""Advantage estimators in float64: for the samples of one batch, when it is cut; for the tokens of one answer
and the transitions of an environment (GAE); and those of rewards under a cost limit, with the price of costs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

STD_EPSILON = 1e-4
"""Small number that is added to the standard deviation. TRL uses the same one, so that learning curves compare."""


@dataclass(frozen=True, slots=True)
class RewardedCut:
    """Holds the members of one group that train together and every known reward of the group.

    members: in rising order. rewards: by member; some only enter the baseline. tokens: number of sampled tokens by
    member, 0 for a member that is left out of the loss. greedy: reward of the greedy answer, if there is one. turns:
    the rewards in parts, one for each turn, of members with several turns.
    """

    group: int
    members: tuple[int, ...]
    rewards: Mapping[int, float]
    tokens: Mapping[int, int] = field(default_factory=dict)
    greedy: float | None = None
    turns: Mapping[int, Sequence[float]] = field(default_factory=dict)

    def by_turn(self, member: int) -> Sequence[float]:
        return self.turns.get(member) or (self.rewards[member],)


Advantages: TypeAlias = Callable[[Sequence[RewardedCut], int], list[list[float]]]
"""An estimator: maps the cuts of one batch and the version that they train to one list of advantages per cut, in the
order of the members."""


def group_advantages(rewards: Floats, *, normalize_std: bool = False) -> Floats:
    """Computes A_i = r_i - mean(R), optionally divided by std(R) + 1e-4; equal rewards give exactly 0.

    Sources: with the standard deviation (ddof 1) DeepSeekMath (arXiv 2402.03300, section 4.1), without it Dr. GRPO
    (arXiv 2503.20783, section 3.2). rewards: float64 [R], every known reward of one group. Raises ValueError for fewer
    than two, or for one that is not finite.
    """
    if len(rewards) < 2 or not np.all(np.isfinite(rewards)):
        raise ValueError(f"a group baseline needs at least two finite rewards, not {rewards.tolist()}")
    if rewards.max() == rewards.min():
        return np.zeros_like(rewards)
    scale = rewards.std(ddof=1) + STD_EPSILON if normalize_std else np.float64(1.0)
    advantages: Floats = (rewards - rewards.mean()) / scale
    return advantages


def leave_one_out_advantages(rewards: Floats) -> Floats:
    """Computes A_i = r_i - mean of the other rewards of the group; equal rewards give exactly 0.

    Source: RLOO (arXiv 2402.14740, REINFORCE leave-one-out). Takes and raises what `group_advantages` does.
    """
    return group_advantages(rewards) * (len(rewards) / (len(rewards) - 1))


def group_estimate(advantage: str, *, normalize_std: bool) -> Callable[[Floats], Floats]:
    """Returns what compares the values of one group with each other: "leave_one_out" or "group_mean"."""
    if advantage == "leave_one_out":
        return leave_one_out_advantages
    return partial(group_advantages, normalize_std=normalize_std)


def turn_advantages(
    cuts: Sequence[RewardedCut], estimate: Callable[[Floats], Floats], discount: float
) -> list[list[tuple[float, ...]]]:
    """Compares what each sample earns from a turn on with what others of its group earn from the same turn on.

    A_(i,k) = estimate of G_(i,k) among {G_(j,k): sample j of the group has a turn k}, with the reward to go G_(i,k) =
    sum over l >= k of discount^(l-k) r_(i,l). Sources: REINFORCE with rewards to go (Williams 1992) and a baseline of
    its own for each step (Greensmith et al. 2004, JMLR 5); with one turn it is that of the group. A sample that has
    ended is in no baseline of later turns: it was not asked there, and 0 in its place would favour every long episode
    over it. A turn that no other sample has gets 0, for there is nothing to compare it with.
    """
    found = []
    for cut in cuts:
        to_go = {member: rewards_to_go(cut.by_turn(member), discount) for member in cut.rewards}
        own: dict[int, list[float]] = {member: [] for member in cut.rewards}
        for turn in range(max(map(len, to_go.values()))):
            there = sorted(member for member, values in to_go.items() if turn < len(values))
            values = np.array([to_go[member][turn] for member in there], np.float64)
            compared = estimate(values) if len(there) > 1 else np.zeros(1)
            for member, advantage in zip(there, compared.tolist(), strict=True):
                own[member].append(advantage)
        found.append([tuple(own[member]) for member in cut.members])
    return found


def rewards_to_go(rewards: Sequence[float], discount: float) -> list[float]:
    """Computes G_k = r_k + discount x G_(k+1), 0 after the last."""
    found = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + discount * following
        found.append(following)
    return found[::-1]


def batch_advantages(values: Floats, tokens: Floats) -> Floats:
    """Computes (v_i - mean) / (std + 1e-4), where mean and std run over all tokens of the batch.

    Source: REINFORCE++ (arXiv 2501.03262, global advantage normalization). A sample counts once for each of its tokens;
    the variance is divided by the number of tokens minus one. Equal values give exactly 0. values: float64 [samples],
    rewards, or rewards minus the mean of their group. tokens: float64 [samples]: number of sampled tokens; a sample
    with 0 tokens is excluded from mean and std. Raises ValueError for a value that is not finite.
    """
    if not np.all(np.isfinite(values)):
        raise ValueError(f"the rewards of a batch must be finite, not {values.tolist()}")
    counted = values[tokens > 0]
    if not len(counted) or counted.max() == counted.min():
        return np.zeros_like(values)
    centred = values - np.average(values, weights=tokens)
    std = np.sqrt((tokens * centred**2).sum() / (tokens.sum() - 1))
    advantages: Floats = centred / (std + STD_EPSILON)
    return advantages


def group_baseline(
    cuts: Sequence[RewardedCut], version: int, *, estimate: Callable[[Floats], Floats] = group_advantages
) -> list[list[float]]:
    """Compares each sample with the other rewards of its group."""
    found = []
    for cut in cuts:
        order = sorted(cut.rewards)
        values = estimate(np.array([cut.rewards[member] for member in order], np.float64))
        by_member = dict(zip(order, values.tolist(), strict=True))
        found.append([by_member[member] for member in cut.members])
    return found


def greedy_baseline(cuts: Sequence[RewardedCut], version: int) -> list[list[float]]:
    """Computes A_i = r_i - r(greedy answer to the same prompt). Source: ReMax (arXiv 2310.10505, algorithm 1)."""
    found = []
    for cut in cuts:
        assert cut.greedy is not None, f"group {cut.group} was cut before its greedy answer had a reward"
        found.append([cut.rewards[member] - cut.greedy for member in cut.members])
    return found


def plain_rewards(cuts: Sequence[RewardedCut], version: int) -> list[list[float]]:
    """Passes the rewards on; with a critic the trainer computes token advantages from them."""
    return [[cut.rewards[member] for member in cut.members] for cut in cuts]


def batch_normalized(
    cuts: Sequence[RewardedCut], version: int, *, first: Advantages = plain_rewards
) -> list[list[float]]:
    """Normalizes rewards, or the advantages of `first`, by mean and standard deviation over the whole batch.

    With `first = group_baseline` this is REINFORCE++-baseline (arXiv 2501.03262).
    """
    tokens = np.array([cut.tokens[member] for cut in cuts for member in cut.members], np.float64)
    return _split(batch_advantages(np.concatenate(first(cuts, version), dtype=np.float64), tokens), cuts)


def shuffled(cuts: Sequence[RewardedCut], version: int, *, estimate: Advantages, seed: int) -> list[list[float]]:
    """Permutes the advantages of `estimate`, by seed and version only: a control experiment that must not learn."""
    return _split(np.random.default_rng([seed, version]).permutation(np.concatenate(estimate(cuts, version))), cuts)


def _split(values: Floats, cuts: Sequence[RewardedCut]) -> list[list[float]]:
    """Splits the values of all samples into one list per cut."""
    flat = iter(values.tolist())
    return [[next(flat) for _ in cut.members] for cut in cuts]


def token_rewards(
    reward: float, tokens: int, kl: Floats | None = None, coefficient: float = 0.0, along: Floats | None = None
) -> Floats:
    """Returns r_t = along_t - coefficient x kl_t, plus at the last token what `along` lacks of the reward; float64
    [tokens]. Without `along`, all of the reward comes with the last token.

    Source: the reward of RLHF (arXiv 1909.08593, section 2.2; arXiv 2203.02155, section 3.5), and the rewards r_t of a
    Markov decision process for `along` (GAE, arXiv 1506.02438, section 2). kl: [tokens], the k1 estimate of the
    sampling policy against the reference, or None for no KL penalty. along: [tokens], rewards before the end.
    """
    rewards: Floats = np.zeros(tokens) if kl is None else -coefficient * kl
    if along is not None:
        rewards = rewards + along
        reward -= float(along.sum())
    rewards[-1] += reward
    return rewards


def generalized_advantages(rewards: Floats, values: Floats, gamma: float, gae_lambda: float) -> Floats:
    """Computes A_t = sum over l of (gamma lambda)^l delta_(t+l), delta_t = r_t + gamma V_(t+1) - V_t; [tokens].

    Source: GAE (arXiv 1506.02438, eq. 16). An answer is an episode: the value after its last token is 0, even if the
    answer was truncated. rewards, values: float64 [tokens]; values[t] is the value before token t is sampled.
    """
    never = np.zeros(len(rewards), np.bool_)
    return trajectory_advantages(rewards, values, np.append(values[1:], 0.0), never, never, gamma, gae_lambda)


def trajectory_advantages(
    rewards: Floats,
    values: Floats,
    next_values: Floats,
    terminated: NDArray[np.bool_],
    ended: NDArray[np.bool_],
    gamma: float,
    gae_lambda: float,
) -> Floats:
    """Computes A_t = delta_t + gamma lambda (1 - ended_t) A_(t+1), delta_t = r_t + gamma (1 - terminated_t) V'_t - V_t.

    Source: GAE (arXiv 1506.02438, eq. 16), cut where an episode ends; an episode that a time limit ended keeps the
    value of its last state (arXiv 1712.00378), as does the piece of an episode at the end of the array. All arrays are
    [transitions] of one environment, in order. next_values: V' of the state that the transition led to, before a reset.
    """
    deltas = rewards + gamma * np.where(terminated, 0.0, next_values) - values
    advantages = np.zeros_like(deltas)
    following = 0.0
    for step in reversed(range(len(deltas))):
        following = deltas[step] + (0.0 if ended[step] else gamma * gae_lambda * following)
        advantages[step] = following
    return advantages


# Rewards under a cost limit: the combined advantage and its Lagrange multiplier (Safe RLHF, arXiv 2310.12773).


def constrained_advantages(reward: Floats, cost: Floats, multiplier: float) -> Floats:
    """Computes (A_reward - lambda A_cost) / (1 + lambda) per token, the token weight in the gradient of appendix B.

    The paper clips the ratio in a term for rewards and in one for costs; the authors' program, and this one, only once.
    """
    combined: Floats = (reward - multiplier * cost) / (1.0 + multiplier)
    return combined


SMALLEST = 1e-8
"""Lower bound of the multiplier, which is updated in log space; costs far below the limit would drive it to 0."""


@dataclass(slots=True)
class Multiplier:
    """Holds lambda, the price of one unit of cost in units of reward.

    rate: step size of ln lambda. limit: allowed mean cost of an answer. largest: upper bound of lambda.
    """

    value: float
    rate: float
    limit: float
    largest: float

    def update(self, mean_cost: float) -> None:
        """Moves the multiplier after a training iteration on answers of this mean cost.

        ln lambda <- ln lambda + rate x lambda x (mean cost - limit): gradient ascent in log space, which keeps lambda
        positive (eq. 31, where J_C contains the limit).
        """
        log = math.log(self.value) + self.rate * self.value * (mean_cost - self.limit)
        self.value = math.exp(max(math.log(SMALLEST), min(log, math.log(self.largest))))
