"""Policy losses: terms of the tokens, and where a bound holds them. Pure functions on flat tensors [tokens].

log_ratio is current minus old log-prob of the sampled token and carries the gradient; which policy is the old one, and
the weight that every term is multiplied with, is decided in `corrections`. Advantages carry none. Terms are summed with
the weights of `aggregation`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.objectives.rows import Rows


@dataclass(frozen=True, slots=True)
class Losses:
    """terms: to be minimized, with gradient [tokens]. ratio: as the loss takes it, detached [tokens].

    held: bool [tokens], where a bound removed the gradient or, with CISPO, changed the weight.
    """

    terms: Tensor
    ratio: Tensor
    held: Tensor


def clipped_loss(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Losses:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(log_ratio).

    The group-relative objective of DeepSeekMath (arXiv 2402.03300, eq. 3) over PPO's clipped surrogate
    (arXiv 1707.06347, eq. 7), with separate bounds below and above (DAPO, arXiv 2503.14476, section 3.1).
    dual_clip: c > 1; for A < 0 the objective is max(min(r A, clip(r) A), c A) (dual-clip PPO, arXiv 1912.09729).
    """
    ratio = log_ratio.exp()
    terms = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    held = ((ratio > 1 + clip_high) & (advantages > 0)) | ((ratio < 1 - clip_low) & (advantages < 0))
    if dual_clip is not None:
        terms = torch.where(advantages < 0, torch.minimum(terms, -dual_clip * advantages), terms)
        held = held | ((ratio > dual_clip) & (advantages < 0))
    return Losses(terms, ratio.detach(), held)


def sequence_log_ratio(log_ratio: Tensor, rows: Rows) -> Tensor:
    """log s_it: the mean of a row's log ratios, log s_i, with the gradient of the token alone.

    GSPO's ratio (arXiv 2507.18071, eq. 7) as GSPO-token writes it (eq. 14): sg[log s_i] + log_ratio - sg[log_ratio].
    With `sequence_mean_token_mean` and one advantage a row, value and gradient are GSPO's (eq. 5); a weight or an
    advantage of a token's own counts for that token and no other.
    """
    return rows.spread(rows.mean(log_ratio.detach())) + log_ratio - log_ratio.detach()


def clipped_weight_loss(
    log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> Losses:
    """-sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi: the weight is clipped, no token loses its gradient.

    CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5); the paper sets no lower bound: clip_low = 1.
    logprobs: current ones, with gradient.
    """
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return Losses(-weight * advantages * logprobs, ratio, ratio != weight)


def geometric_mean_loss(log_ratio: Tensor, advantages: Tensor, rows: Rows, clip_low: float, clip_high: float) -> Losses:
    """-A exp(mean over the row of the clipped log ratios), of which each token has the gradient of its own log ratio.

    GMPO (arXiv 2507.20673, geometric mean with token-level clipping): token by token log r is held in
    [-clip_low, clip_high], on the side that the sign of A would push it to, before the mean is taken. Summed over a row
    with equal weights the gradient is that of the mean; a token of weight 0 has none. advantages: one value a row.
    """
    bounded = log_ratio.clamp(-clip_low, clip_high)
    one_sided = torch.where(advantages > 0, torch.minimum(log_ratio, bounded), torch.maximum(log_ratio, bounded))
    held = ((log_ratio > clip_high) & (advantages > 0)) | ((log_ratio < -clip_low) & (advantages < 0))
    own = one_sided - one_sided.detach()
    mean = (rows.spread(rows.mean(one_sided.detach())) + own).exp()
    return Losses(-advantages * mean, log_ratio.detach().exp(), held)


def kept_ratio_loss(log_ratio: Tensor, advantages: Tensor, kept: Tensor) -> Losses:
    """-r A of the kept tokens, 0 of the others: M2PO's objective (arXiv 2510.01161), without a clip.

    kept: bool [tokens], see `second_moment`.
    """
    ratio = log_ratio.exp()
    return Losses(torch.where(kept, -ratio * advantages, 0.0), ratio.detach(), ~kept)


def soft_gate_loss(log_ratio: Tensor, advantages: Tensor, positive: float, negative: float) -> Losses:
    """-f(r) A with f(r) = 4 / tau sigmoid(tau (r - 1)): a gate that closes smoothly away from r = 1.

    SAPO (arXiv 2511.20347, the soft gate). tau: `positive` for A > 0, else `negative`; larger ones close faster.
    """
    ratio = log_ratio.exp()
    tau = torch.where(advantages > 0, advantages.new_tensor(positive), advantages.new_tensor(negative))
    terms = -torch.sigmoid(tau * (ratio - 1)) * (4 / tau) * advantages
    return Losses(terms, ratio.detach(), torch.zeros_like(advantages, dtype=torch.bool))
