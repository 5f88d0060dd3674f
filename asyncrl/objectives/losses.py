"""The losses of policies, critics and reward models: pure functions on flat tensors.

`log_ratio` is the current minus the old log-prob of the sampled token and carries the gradient; advantages carry none.
`corrections` chooses the old policy and the weight of each loss term.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from asyncrl.objectives.ragged import Ragged

Aggregation = Literal["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "constant"]
Reduce = Callable[[Tensor], Tensor]
"""An element-wise reduction over all ranks."""
FURTHEST = 20.0
"""Bound of log ratios, in nats, on both sides: a ratio of 5e8 is far beyond every bound of a loss, while float32
overflows at 88, and one such token would leave the whole update without a finite loss. verl has the same bound."""
HALVINGS = 60
"""Bisection steps: 60 halvings reach the resolution of float64."""


class SurrogateLoss(NamedTuple):
    """Holds the per-token results of a surrogate loss, all [tokens].

    terms: values to minimize, with gradient. ratio: the ratio as the loss uses it, detached. clipped: bool, where a
    bound removed the gradient or, for CISPO, changed the weight.
    """

    terms: Tensor
    ratio: Tensor
    clipped: Tensor


def clipped_loss(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> SurrogateLoss:
    """Computes -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(log_ratio).

    Sources: the group-relative objective of DeepSeekMath (arXiv 2402.03300, eq. 3) over PPO's clipped surrogate
    (arXiv 1707.06347, eq. 7), with separate bounds below and above (DAPO, arXiv 2503.14476, section 3.1).
    dual_clip: c > 1; for A < 0 the objective is max(min(r A, clip(r) A), c A) (dual-clip PPO, Ye et al. 2020, arXiv
    1912.09729, eq. 5, with c = 3). Without it the term of one stale token that has become likelier grows with its ratio
    and no bound holds it: min takes r A, not the clipped part.
    """
    ratio = log_ratio.exp()
    terms = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    clipped = ((ratio > 1 + clip_high) & (advantages > 0)) | ((ratio < 1 - clip_low) & (advantages < 0))
    if dual_clip is not None:
        terms = torch.where(advantages < 0, torch.minimum(terms, -dual_clip * advantages), terms)
        clipped = clipped | ((ratio > dual_clip) & (advantages < 0))
    return SurrogateLoss(terms, ratio.detach(), clipped)


def log_ratio(current: Tensor, old: Tensor) -> Tensor:
    """Returns log(current / old), held within FURTHEST: the ratio that the loss clips. Only `current` has a gradient.

    Sources: with `behaviour` as old policy PPO (arXiv 1707.06347, eq. 6); with `proximal` and a weight for proximal /
    behaviour the decoupled objective (arXiv 2110.00641; for asynchronous training AReaL, arXiv 2505.24298).
    """
    return (current - old.detach()).clamp(-FURTHEST, FURTHEST)


def sequence_log_ratio(log_ratio: Tensor, ragged: Ragged) -> Tensor:
    """Computes log s_it, the mean of the row's log ratios with the gradient of the single token.

    Source: GSPO (arXiv 2507.18071, eq. 7) in the form of GSPO-token (eq. 14): sg[log s_i] + log_ratio - sg[log_ratio].
    With `sequence_mean_token_mean` and one advantage per row, value and gradient equal those of GSPO (eq. 5). Weights
    and advantages may still differ from token to token.
    """
    return ragged.spread(ragged.mean(log_ratio.detach())) + log_ratio - log_ratio.detach()


def clipped_weight_loss(
    log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> SurrogateLoss:
    """Computes -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi: clips the weight and keeps every gradient.

    Source: CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5), which sets no lower bound: clip_low = 1.
    logprobs: of the current policy, with gradient.
    """
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return SurrogateLoss(-weight * advantages * logprobs, ratio, ratio != weight)


def geometric_mean_loss(
    log_ratio: Tensor, advantages: Tensor, ragged: Ragged, clip_low: float, clip_high: float
) -> SurrogateLoss:
    """Computes -A exp(mean over the row of the clipped log ratios); each token carries its own share of the gradient.

    Source: GMPO (arXiv 2507.20673, geometric mean with token-level clipping). Each log ratio is first clipped
    to [-clip_low, clip_high], on the side to which the sign of A pushes it. Summed over a row with equal weights,
    the gradient is that of the mean. advantages: equal for all tokens of a row.
    """
    bounded = log_ratio.clamp(-clip_low, clip_high)
    one_sided = torch.where(advantages > 0, torch.minimum(log_ratio, bounded), torch.maximum(log_ratio, bounded))
    clipped = ((log_ratio > clip_high) & (advantages > 0)) | ((log_ratio < -clip_low) & (advantages < 0))
    own = one_sided - one_sided.detach()
    mean = (ragged.spread(ragged.mean(one_sided.detach())) + own).exp()
    return SurrogateLoss(-advantages * mean, log_ratio.detach().exp(), clipped)


def soft_gate_loss(log_ratio: Tensor, advantages: Tensor, positive: float, negative: float) -> SurrogateLoss:
    """Computes -f(r) A with f(r) = 4 / tau sigmoid(tau (r - 1)), a gate that closes smoothly away from r = 1.

    Source: SAPO (arXiv 2511.20347). tau is `positive` for A > 0, else `negative`; a larger tau closes faster.
    """
    ratio = log_ratio.exp()
    tau = torch.where(advantages > 0, advantages.new_tensor(positive), advantages.new_tensor(negative))
    terms = -torch.sigmoid(tau * (ratio - 1)) * (4 / tau) * advantages
    return SurrogateLoss(terms, ratio.detach(), torch.zeros_like(advantages, dtype=torch.bool))


def kept_ratio_loss(log_ratio: Tensor, advantages: Tensor, kept: Tensor) -> SurrogateLoss:
    """Computes -r A for the kept tokens, bool [tokens], and 0 for the others. Source: M2PO (arXiv 2510.01161)."""
    ratio = log_ratio.exp()
    return SurrogateLoss(torch.where(kept, -ratio * advantages, 0.0), ratio.detach(), ~kept)


class LossInputs(NamedTuple):
    """Holds what losses read; tensors are [tokens]. current: log-probs with gradient. behaviour: those of the policy
    that sampled. clip: bounds below and above. second_moment: bound of the squared log ratios of this update (M2PO)."""

    log_ratio: Tensor
    current: Tensor
    behaviour: Tensor
    advantages: Tensor
    ragged: Ragged
    clip: tuple[float, float]
    dual_clip: float | None
    gate_temperatures: tuple[float, float] | None
    second_moment: float


def _kept_ratio(given: LossInputs) -> SurrogateLoss:
    moved = (given.current - given.behaviour).detach()  # Unbounded, as those that `second_moment` was found from.
    kept = ~pushed_away(moved, given.advantages) | (moved.double().square() <= given.second_moment)
    return kept_ratio_loss(given.log_ratio, given.advantages, kept)


def _soft_gate(given: LossInputs) -> SurrogateLoss:
    assert given.gate_temperatures is not None, "the config requires them with sapo"
    return soft_gate_loss(given.log_ratio, given.advantages, *given.gate_temperatures)


LOSSES: Mapping[str, Callable[[LossInputs], SurrogateLoss]] = {
    "clip": lambda given: clipped_loss(given.log_ratio, given.advantages, *given.clip, given.dual_clip),
    "gspo": lambda given: clipped_loss(
        sequence_log_ratio(given.log_ratio, given.ragged), given.advantages, *given.clip
    ),
    "cispo": lambda given: clipped_weight_loss(given.log_ratio, given.current, given.advantages, *given.clip),
    "gmpo": lambda given: geometric_mean_loss(given.log_ratio, given.advantages, given.ragged, *given.clip),
    "m2po": _kept_ratio,
    "sapo": _soft_gate,
}
"""Losses by the values of `algorithm.loss`."""


def pushed_away(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """Returns which tokens the update moves further from the policy that sampled them, bool [tokens]."""
    return log_ratio * advantages > 0


def second_moment_bound(squares: Tensor, budget: float, total: Reduce, largest: Reduce) -> float:
    """Returns M2PO's bound up to which squared log ratios are kept, so that their mean is at most `budget`.

    Tokens that are `pushed_away` with the largest squared log ratios are left out until the mean of the remaining
    squares is within the budget. The authors' program caps the squares in that mean where the paper leaves them out,
    and therefore keeps fewer tokens. squares: float64 [n], of the tokens `pushed_away` on this rank. total, largest:
    sum and maximum over all ranks. Bisection finds the bound midway between the largest kept and the smallest dropped
    square; it is infinity when all are kept.
    """

    def fits(bound: float) -> bool:
        kept = squares[squares <= bound]
        added, count = total(torch.tensor([float(kept.sum()), float(len(kept))], dtype=torch.float64)).tolist()
        return bool(added <= budget * count)

    high = _peak(squares, largest)
    if fits(high):
        return float("inf")
    low = 0.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    kept = _peak(squares[squares <= low], largest)
    left_out = -_peak(-squares[squares > low], largest, -torch.inf)
    return (kept + left_out) / 2


def _peak(values: Tensor, largest: Reduce, none: float = 0.0) -> float:
    """Returns the largest value on any rank."""
    own = float(values.max()) if len(values) else none
    return float(largest(torch.tensor([own], dtype=torch.float64)).item())


def row_weights(aggregation: Aggregation, lengths: Tensor, tokens: int, samples: int, divisor: int) -> Tensor:
    """Returns the weight of every token of each row in the loss of an optimizer step, float32 [rows].

    - token_mean: 1 / tokens (DAPO, arXiv 2503.14476, section 3.3).
    - sequence_mean_token_sum: 1 / samples, a sum over the answer as in REINFORCE (RLOO, arXiv 2402.14740).
    - sequence_mean_token_mean: 1 / (samples x length), the average of GRPO (arXiv 2402.03300, eq. 3).
    - constant: 1 / (samples x divisor), Dr. GRPO (arXiv 2503.20783, section 3.2).

    lengths: [rows] response tokens of each row. Masked tokens count, so that masking a token removes its loss term and
    changes no other weight. tokens, samples: of the whole optimizer step.
    """
    if aggregation == "sequence_mean_token_mean":
        return 1.0 / (samples * lengths.to(torch.float32))
    weight = {
        "token_mean": 1.0 / tokens,
        "sequence_mean_token_sum": 1.0 / samples,
        "constant": 1.0 / (samples * divisor),
    }[aggregation]
    return torch.full(lengths.shape, weight, device=lengths.device)


# The critic's value loss and explained variance: pure functions on flat tensors [tokens].


Moments: TypeAlias = tuple[float, float, float]
"""Count, sum and sum of squares of some numbers."""
SAME = 1e-12
"""Returns with a smaller variance count as equal; rounding leaves about this much."""


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Computes 1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2); with clip 0 1/2 (V - R)^2.

    Source: PPO (arXiv 1707.06347, eq. 9); factor and clip come from OpenAI's program (`baselines`, ppo2). values: V,
    with gradient. old: V_old, the values that the advantages were computed with. returns: R = A + V_old. Returns the
    loss of each token, with gradient, and where the clipped value was further from the return, bool.
    """
    errors = (values - returns).square()
    if clip == 0:
        return errors / 2, torch.zeros_like(returns, dtype=torch.bool)
    clipped = (torch.clamp(values, old - clip, old + clip) - returns).square()
    return torch.maximum(errors, clipped) / 2, clipped > errors


def explained_variance(returns: Moments, errors: Moments) -> float:
    """Computes 1 - Var(R - V) / Var(R), and 0 when all returns are equal. errors: moments of R - V."""
    total, left = ((squares / count - (summed / count) ** 2) for count, summed, squares in (returns, errors))
    return 1.0 - left / total if total > SAME else 0.0


# The loss of a reward model on preferences: a pure function on flat tensors [pairs].


def bradley_terry_loss(better: Tensor, other: Tensor, wins: Tensor) -> Tensor:
    """Computes -log sigmoid(r_better - r_other) for each pair whose `wins` is 1; in general the cross-entropy of the
    probability sigmoid(r_better - r_other) that the first answer wins and `wins`, 0.5 for answers that are equal.

    Source: the model of Bradley and Terry (1952), as the loss of a reward model in Ouyang et al. (arXiv 2203.02155,
    eq. 1). better, other: scores, with gradient.
    """
    return binary_cross_entropy_with_logits(better - other, wins, reduction="none")


# The losses of SAC: pure functions on flat tensors [transitions]. Log-probs are of whole actions, in nats.
#
# Sources: soft actor-critic with a learned temperature (arXiv 1812.05905; equations in each function); the smaller of
# two critics from clipped double Q-learning (arXiv 1802.09477, algorithm 1).


def soft_targets(
    rewards: Tensor, terminated: Tensor, next_values: Tensor, next_logprobs: Tensor, temperature: Tensor, gamma: float
) -> Tensor:
    """Computes y = r + gamma (1 - terminated) (Q'(s', a') - temperature log pi(a' | s')), without gradient.

    Source: arXiv 1812.05905, eq. 3 and 5. next_values: the smaller value of the two target critics for an action that
    the present policy sampled in s'. terminated: 1 where the episode ended by itself; an episode that a time limit cut
    off would have gone on, so its last state keeps its value (arXiv 1712.00378).
    """
    soft_values = next_values - temperature * next_logprobs
    return (rewards + gamma * (1 - terminated) * soft_values).detach()


def critics_loss(values: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Computes the sum over critics of mean(w 1/2 (Q - y)^2). Source: arXiv 1812.05905, eq. 5; weights of a prioritised
    replay arXiv 1511.05952, section 3.4. values: [critics, transitions]. weights: 1 with a uniform replay."""
    return (weights * (values - targets).square() / 2).mean(dim=1).sum()


def actor_loss(logprobs: Tensor, values: Tensor, temperature: Tensor) -> Tensor:
    """Computes mean(temperature log pi(a | s) - Q(s, a)) for actions with gradient. Source: arXiv 1812.05905, eq. 9."""
    return (temperature.detach() * logprobs - values).mean()


def temperature_loss(log_temperature: Tensor, logprobs: Tensor, target_entropy: float) -> Tensor:
    """Computes -temperature mean(log pi + target entropy), whose gradient raises the temperature while the entropy is
    below its target. Source: arXiv 1812.05905, eq. 18. Only the temperature has a gradient."""
    return -(log_temperature.exp() * (logprobs.detach() + target_entropy)).mean()


@torch.no_grad()
def move_towards(targets: list[Tensor], sources: list[Tensor], tau: float) -> None:
    """Sets each target to (1 - tau) target + tau source, in place. Source: arXiv 1812.05905, algorithm 1."""
    torch._foreach_lerp_(targets, sources, tau)
