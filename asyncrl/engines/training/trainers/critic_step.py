"""What a critic learns from one batch, a micro-batch at a time.

Of a cost critic all of these are `cost_critic/...`.

critic/loss: mean over updates. critic/grad_norm: before clipping; critic/learning_rate: of the last update.
critic/updates: optimizer steps taken, 0 when the batch taught nothing.
Over live tokens, with the values as they were just before the update that they are in: critic/value_mean,
critic/return_mean, critic/explained_variance: 1 - Var(R - V) / Var(R); critic/clip_frac: where the clipped value was
further off, so that nothing pulls the value there. critic/staleness: updates between judging and learning, mean.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.config import Config
from asyncrl.engines.training.credit import credit_of
from asyncrl.engines.training.interface import TrainRow
from asyncrl.engines.training.masking import Masked, mask_rows
from asyncrl.engines.training.microbatch import live_rows, live_values
from asyncrl.engines.training.model import ValueModel
from asyncrl.engines.training.optimizer import Optimizer, descend
from asyncrl.engines.training.packing import micro_batches
from asyncrl.engines.training.ranks import Ranks
from asyncrl.engines.training.signals import Signal
from asyncrl.engines.training.statistics import mask_counts, why_nothing_trained
from asyncrl.engines.training.step import denominators, gather_keys, parts_of
from asyncrl.objectives.values import Moments, explained_variance, value_loss

SUMS = ("tokens", "loss", "held", "value", "return", "return_squares", "error", "error_squares", "staleness")


@dataclass(frozen=True, slots=True)
class Learner:
    """What a step works on. signal: what the model learns to expect."""

    model: ValueModel
    optimizer: Optimizer
    config: Config
    ranks: Ranks
    signal: Signal


@dataclass(frozen=True, slots=True)
class ValueOutcome:
    """updates: optimizer steps taken. skipped: "" | "stale" | "truncated" | "not finite", why there was none."""

    updates: int
    skipped: str
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class ValueRow:
    """returns: float64 [tokens], what its values are to become."""

    masked: Masked
    returns: NDArray[np.float64]


class ValueStep:
    """Takes the same rows, the same share of them in each update and the same mask as the policy's step does.

    The loss of an update is the mean over all its response tokens; a masked one only loses its term. An update whose
    loss or gradient is not finite changes nothing.
    """

    def __init__(self, learner: Learner, rows: Sequence[TrainRow], epoch: int, version: int) -> None:
        config = learner.config
        self._learner, self._algorithm = learner, config.algorithm
        self._masked = mask_rows(
            rows, epoch, version, config.staleness.limit, config.staleness.policy, self._algorithm.mask_truncated
        )
        self._sums = torch.zeros(len(SUMS), dtype=torch.float64, device=learner.model.device)
        self._norms: list[float] = []
        self._outcome: ValueOutcome | None = None
        self._work = self._run()

    @property
    def outcome(self) -> ValueOutcome:
        """Only after `advance` answered False."""
        assert self._outcome is not None, "the step is not complete: call advance until it answers False"
        return self._outcome

    def advance(self) -> bool:
        """Do the next micro-batch or the optimizer step; False when the step is complete."""
        return next(self._work, False)

    def _run(self) -> Iterator[bool]:
        ranks, config = self._learner.ranks, self._learner.config
        batch = gather_keys(ranks, [item.row.key for item in self._masked])
        signal = self._learner.signal
        rows = [ValueRow(item, credit_of(item.row, self._algorithm, signal).returns) for item in self._masked]
        counts = ranks.sum(mask_counts(self._masked))
        for part in parts_of(rows, batch, config.training.updates):
            yield from self._update(part)
        skipped = "" if self._norms else why_nothing_trained(counts)
        self._outcome = ValueOutcome(len(self._norms), skipped, self._metrics())

    def _update(self, part: list[ValueRow]) -> Iterator[bool]:
        learner = self._learner
        tokens, _, live = learner.ranks.sum(denominators(part)).tolist()
        if live == 0:
            return
        rows = [row for row in part if row.masked.trained]
        sums, finite = torch.zeros_like(self._sums), True
        budget = learner.config.training.micro_batch_tokens
        for indices in micro_batches([row.masked.tokens for row in rows], budget):
            finite = finite and self._pass([rows[index] for index in indices], 1.0 / tokens, sums)
            yield True
        norm = descend(learner.optimizer, learner.ranks, finite=finite)
        if norm is not None:
            self._norms.append(norm)
            self._sums += sums
        yield True

    def _pass(self, rows: list[ValueRow], weight: float, sums: Tensor) -> bool:
        """Forward and backward of one micro-batch; False, and nothing added, when its loss is not finite."""
        model, signal, masked = self._learner.model, self._learner.signal, [row.masked for row in rows]
        judged = live_values(masked, [signal.of(item.row).values for item in masked], model.device)
        returns = live_values(masked, [row.returns for row in rows], model.device)
        values = model.values(live_rows(masked, model.device))
        found = value_loss(values, judged, returns, signal.settings(self._learner.config).value_clip)
        loss = weight * found.terms.sum()
        if not math.isfinite(loss.item()):
            return False
        torch.autograd.backward(loss)
        now = self._learner.optimizer.updates
        ages = live_values(masked, [float(now - signal.of(item.row).at) for item in masked], model.device)
        values, errors = values.detach(), returns - values.detach()
        columns = (
            torch.ones_like(values),
            weight * found.terms.detach(),
            found.held,
            values,
            returns,
            returns.double().square(),
            errors,
            errors.double().square(),
            ages,
        )
        sums += torch.stack([column.double().sum() for column in columns])
        return True

    def _metrics(self) -> dict[str, float]:
        sums = dict(zip(SUMS, self._learner.ranks.sum(self._sums).tolist(), strict=True))
        updates, tokens = len(self._norms), sums["tokens"]
        critic = self._learner.signal.critic
        if not updates:
            return {f"{critic}/updates": 0.0}
        returns = Moments(tokens, sums["return"], sums["return_squares"])
        errors = Moments(tokens, sums["error"], sums["error_squares"])
        return {
            f"{critic}/updates": float(updates),
            f"{critic}/loss": sums["loss"] / updates,
            f"{critic}/clip_frac": sums["held"] / tokens,
            f"{critic}/value_mean": sums["value"] / tokens,
            f"{critic}/return_mean": sums["return"] / tokens,
            f"{critic}/explained_variance": explained_variance(returns, errors),
            f"{critic}/staleness": sums["staleness"] / tokens,
            f"{critic}/grad_norm": sum(self._norms) / updates,
            f"{critic}/learning_rate": self._learner.optimizer.rate,
        }
