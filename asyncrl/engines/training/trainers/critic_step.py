"""A training step of a critic, one micro-batch at a time, and its metrics.

The metrics of the cost critic begin with `cost_critic/`.

- critic/loss: mean over updates; critic/grad_norm: before clipping; critic/learning_rate: of the last update.
- critic/updates: optimizer steps taken, 0 when nothing in the batch trained.

Over live tokens, with the values just before the update of the token:
- critic/value_mean, critic/return_mean; critic/explained_variance: 1 - Var(R - V) / Var(R).
- critic/clip_frac: share where the clipped value was further from the return, so that the token has no gradient.
- critic/staleness: mean number of updates between computing a value and training on it.
"""

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.engines.training.batch.masking import MaskedRow
from asyncrl.engines.training.batch.microbatch import live_rows, live_values
from asyncrl.engines.training.batch.value_targets import ValueTarget
from asyncrl.engines.training.interface import SampleKey, TrainRow
from asyncrl.engines.training.loss.token_advantages import token_advantages
from asyncrl.engines.training.state.data_parallel import Ranks
from asyncrl.engines.training.state.models_with_heads import ValueModel
from asyncrl.engines.training.state.optimizer import Optimizer, optimizer_step
from asyncrl.engines.training.trainers.batch_step import BatchStep, denominators, split_into_updates
from asyncrl.objectives.value_loss import Moments, explained_variance, value_loss

SUMS = ("tokens", "loss", "clipped", "value", "return", "return_squares", "error", "error_squares", "staleness")


@dataclass(frozen=True, slots=True)
class CriticState:
    """Holds what steps of a critic work on. target: what the critic learns to predict."""

    model: ValueModel
    optimizer: Optimizer
    config: Config
    ranks: Ranks
    target: ValueTarget


@dataclass(frozen=True, slots=True)
class CriticOutcome:
    """Reports a step of a critic.

    updates: optimizer steps taken. skipped: why there was none, "stale", "truncated" or "not finite"; else "".
    """

    updates: int
    skipped: str
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class CriticRow:
    """Holds a row and its returns, float64 [tokens], which the values are trained to match."""

    masked: MaskedRow
    returns: NDArray[np.float64]


class CriticStep(BatchStep[CriticOutcome]):
    """Trains a critic on the rows, updates and masks of the policy's step.

    The loss of an update is the mean over all its response tokens; a masked token only loses its loss term. An update
    whose loss or gradient is not finite changes nothing.
    """

    def __init__(self, state: CriticState, rows: Sequence[TrainRow], incarnation: int, version: int) -> None:
        super().__init__(state.config, state.ranks, rows, incarnation, version)
        self._state = state
        self._sums = torch.zeros(len(SUMS), dtype=torch.float64, device=state.model.device)

    def _train(self, batch: Sequence[SampleKey], counts: Tensor) -> Generator[bool, None, CriticOutcome]:
        algorithm, target = self._config.algorithm, self._state.target
        rows = [CriticRow(item, token_advantages(item.row, algorithm, target).returns) for item in self._masked]
        for part in split_into_updates(rows, batch, self._config.training.updates):
            yield from self._update(part)
        return CriticOutcome(len(self._norms), self._skipped(counts), self._metrics())

    def _update(self, part: list[CriticRow]) -> Iterator[bool]:
        tokens, _, live = self._ranks.sum(denominators(part)).tolist()
        if live == 0:
            return
        rows = [row for row in part if row.masked.trained]
        sums = torch.zeros_like(self._sums)
        finite = yield from self._passes(rows, lambda some: self._backward(some, 1.0 / tokens, sums))
        norm = optimizer_step(self._state.optimizer, self._ranks, finite=finite)
        if norm is not None:
            self._norms.append(norm)
            self._sums += sums
        yield True

    def _backward(self, rows: list[CriticRow], weight: float, sums: Tensor) -> bool:
        """Runs forward and backward of a micro-batch; returns False and adds nothing if its loss is not finite."""
        model, masked = self._state.model, [row.masked for row in rows]
        samples = [self._state.target.of(item.row) for item in masked]
        old = live_values(masked, [sample.values for sample in samples], model.device)
        returns = live_values(masked, [row.returns for row in rows], model.device)
        values = model.values(live_rows(masked, model.device))
        found = value_loss(values, old, returns, self._state.target.settings(self._config).value_clip)
        loss = weight * found.terms.sum()
        if not math.isfinite(loss.item()):
            return False
        torch.autograd.backward(loss)
        now = self._state.optimizer.updates
        values, errors = values.detach(), returns - values.detach()
        columns = (
            torch.ones_like(values),
            weight * found.terms.detach(),
            found.clipped,
            values,
            returns,
            returns.double().square(),
            errors,
            errors.double().square(),
            live_values(masked, [float(now - sample.valued_at) for sample in samples], model.device),
        )
        sums += torch.stack([column.double().sum() for column in columns])
        return True

    def _metrics(self) -> dict[str, float]:
        sums = dict(zip(SUMS, self._ranks.sum(self._sums).tolist(), strict=True))
        updates, tokens = len(self._norms), sums["tokens"]
        critic = self._state.target.critic
        if not updates:
            return {f"{critic}/updates": 0.0}
        returns = Moments(tokens, sums["return"], sums["return_squares"])
        errors = Moments(tokens, sums["error"], sums["error_squares"])
        return {
            f"{critic}/updates": float(updates),
            f"{critic}/loss": sums["loss"] / updates,
            f"{critic}/clip_frac": sums["clipped"] / tokens,
            f"{critic}/value_mean": sums["value"] / tokens,
            f"{critic}/return_mean": sums["return"] / tokens,
            f"{critic}/explained_variance": explained_variance(returns, errors),
            f"{critic}/staleness": sums["staleness"] / tokens,
            f"{critic}/grad_norm": sum(self._norms) / updates,
            f"{critic}/learning_rate": self._state.optimizer.rate,
        }
