"""A training step of the policy, one micro-batch at a time."""

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.engines.training.batch.masking import MaskedRow
from asyncrl.engines.training.batch.microbatch import MicroBatch, UpdateRow, micro_batch
from asyncrl.engines.training.batch.packing import micro_batches, split_by_row
from asyncrl.engines.training.interface import SampleKey, SampleTokenCounts, StepOutcome, TrainRow
from asyncrl.engines.training.loss.logprobs import frozen_logprobs, token_logprobs
from asyncrl.engines.training.loss.policy_loss import LossCoefficients, LossTerms, policy_loss_terms
from asyncrl.engines.training.loss.pretraining_loss import (
    PretrainingText,
    PretrainingTexts,
    pretraining_loss,
    texts_of,
)
from asyncrl.engines.training.loss.token_advantages import mean_cost, with_token_advantages
from asyncrl.engines.training.state.data_parallel import Ranks
from asyncrl.engines.training.state.models_with_heads import CausalModel
from asyncrl.engines.training.state.optimizer import Optimizer, optimizer_step
from asyncrl.engines.training.step_metrics.mask_metrics import mask_metrics
from asyncrl.engines.training.step_metrics.policy_metrics import PolicyTotals, policy_metrics
from asyncrl.engines.training.trainers.batch_step import BatchStep, denominators, split_into_updates
from asyncrl.objectives.aggregation import row_weights
from asyncrl.objectives.kl import KlCoefficient
from asyncrl.objectives.lagrangian import Multiplier
from asyncrl.objectives.second_moment import pushed_away, second_moment_bound

LogprobsByRow = dict[int, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class PolicyState:
    """Holds what steps of the policy work on.

    kl: coefficient of the KL, which changes after a step when it is adaptive. multiplier: price of costs, which changes
    after a step; None without costs. pretraining: texts learnt beside the samples, None without any.
    """

    model: CausalModel
    optimizer: Optimizer
    config: Config
    ranks: Ranks
    kl: KlCoefficient
    multiplier: Multiplier | None = None
    pretraining: PretrainingTexts | None = None


class PolicyStep(BatchStep[StepOutcome]):
    """Trains the policy on one batch. Samples of an update that is not finite do not count as trained."""

    def __init__(self, state: PolicyState, rows: Sequence[TrainRow], incarnation: int, version: int) -> None:
        super().__init__(state.config, state.ranks, rows, incarnation, version)
        self._state = state
        self._version = version
        self._algorithm = state.config.algorithm
        self._totals = PolicyTotals(state.model.device)
        self._pretrain_losses: list[float] = []
        self._lost: dict[SampleKey, str] = {}
        self._rejected: dict[SampleKey, int] = {}
        self._culprits: list[SampleKey] = []

    def _train(self, batch: Sequence[SampleKey], counts: Tensor) -> Generator[bool, None, StepOutcome]:
        state = self._state
        cost = None if state.multiplier is None else mean_cost(self._masked, self._ranks)
        self._masked = with_token_advantages(
            self._masked, self._algorithm, state.kl.value, self._ranks, state.multiplier
        )
        proximal = yield from self._proximal_logprobs()
        rows = [UpdateRow(item, 0.0, proximal.get(index)) for index, item in enumerate(self._masked)]
        updates = self._config.training.updates
        for number, part in enumerate(split_into_updates(rows, batch, updates)):
            yield from self._update(part, texts_of(state.pretraining, self._version, number, updates))
        metrics = mask_metrics(counts) | self._metrics()
        if "policy/kl_reference" in metrics:
            state.kl.update(metrics["policy/kl_reference"])
        if state.multiplier is not None and cost is not None and self._norms:
            state.multiplier.update(cost)
        return StepOutcome(
            updates=len(self._norms),
            skipped=self._skipped(counts),
            samples=tuple(self._token_counts(item) for item in self._masked),
            batch=tuple(batch),
            metrics=metrics,
            culprits=tuple(self._culprits),
        )

    def _token_counts(self, item: MaskedRow) -> SampleTokenCounts:
        key = item.row.key
        return item.token_counts(self._lost.get(key, ""), self._rejected.get(key, 0))

    def _proximal_logprobs(self) -> Generator[bool, None, LogprobsByRow]:
        """Computes the log-probs at the start of the step, if the loss needs them and several updates change them."""
        unneeded = self._algorithm.old_logprobs == "engine" and self._algorithm.rejection == "none"
        if unneeded or self._config.training.updates == 1:
            return {}
        return (yield from self._current_logprobs(self._masked))

    def _current_logprobs(self, masked: Sequence[MaskedRow]) -> Generator[bool, None, LogprobsByRow]:
        """Computes the trainer's log-probs, by row index, of every row with a live token."""
        found: LogprobsByRow = {}
        live = [index for index, item in enumerate(masked) if item.trained]
        for part in self._micro_batches([masked[index] for index in live]):
            rows = [masked[live[place]].row for place in part]
            logprobs = frozen_logprobs(
                self._state.model,
                [row.prompt_ids for row in rows],
                [row.response_ids for row in rows],
                [row.temperature for row in rows],
                self._config.training.logits_chunk,
            )
            found.update(zip((live[place] for place in part), logprobs, strict=True))
            self.passes += 1
            yield True
        return found

    def _second_moment(self, rows: list[UpdateRow]) -> Generator[bool, None, float]:
        """Computes the bound of the squared log ratios of this update; infinity for losses other than m2po."""
        if self._algorithm.loss != "m2po":
            return math.inf
        masked = [row.masked for row in rows]
        current = yield from self._current_logprobs(masked)
        squares = [_pushed_squares(masked[index], logprobs) for index, logprobs in current.items()]
        budget = self._algorithm.second_moment
        assert budget is not None, "the config requires second_moment with m2po"
        flat = torch.cat(squares) if squares else torch.zeros(0, dtype=torch.float64)
        return second_moment_bound(flat, budget, self._ranks.sum, self._ranks.largest)

    def _update(self, part: list[UpdateRow], texts: Sequence[PretrainingText]) -> Iterator[bool]:
        tokens, samples, live = self._ranks.sum(denominators(part)).tolist()
        if live == 0:
            return
        rows = self._weighted([row for row in part if row.masked.trained], int(tokens), int(samples))
        totals = PolicyTotals(self._state.model.device)
        coefficients = LossCoefficients(self._state.kl.value, (yield from self._second_moment(rows)))
        finite = yield from self._passes(rows, lambda some: self._backward(some, coefficients, totals))
        pretrained = yield from self._pretrain(self._state.pretraining, texts)
        norm = optimizer_step(self._state.optimizer, self._ranks, finite=finite)
        if norm is None:
            self._lost.update({row.masked.row.key: "not finite" for row in part})
        else:
            self._norms.append(norm)
            self._pretrain_losses.append(pretrained)
            self._totals.merge(totals)
        yield True

    def _weighted(self, part: list[UpdateRow], tokens: int, samples: int) -> list[UpdateRow]:
        lengths = torch.tensor([len(row.masked.live) for row in part])
        divisor = self._algorithm.divisor or self._config.generation.max_new_tokens
        weights = row_weights(self._algorithm.aggregation, lengths, tokens, samples, divisor).tolist()
        return [replace(row, weight=weight) for row, weight in zip(part, weights, strict=True)]

    def _backward(self, rows: list[UpdateRow], coefficients: LossCoefficients, totals: PolicyTotals) -> bool:
        """Runs forward and backward of a micro-batch; returns False and adds nothing if its loss is not finite."""
        batch = micro_batch(rows, self._state.model.device)
        chunk, bonus = self._config.training.logits_chunk, self._algorithm.entropy_bonus > 0
        found = token_logprobs(self._state.model, batch.padded, chunk, entropy_gradient=bonus)
        terms = policy_loss_terms(self._algorithm, coefficients, found.logprobs, found.entropy, batch)
        if not math.isfinite(terms.loss.item()):
            self._culprits.extend(_culprits(terms, batch))
            return False
        torch.autograd.backward(terms.loss)
        totals.add(terms, found.logprobs, found.entropy, batch, first=not self._norms)
        rejected = [int((weights == 0).sum()) for weights in _by_row(terms.weight, batch)]
        self._rejected.update(zip((row.masked.row.key for row in rows), rejected, strict=True))
        return True

    def _pretrain(
        self, pretraining: PretrainingTexts | None, texts: Sequence[PretrainingText]
    ) -> Generator[bool, None, float]:
        """Adds the gradient of this rank's share of the texts of an update, and returns its share of their loss.

        A loss that is not finite gives a gradient that is not finite, which stops the update on all ranks.
        """
        if pretraining is None:
            return 0.0
        training = self._config.training
        tokens = sum(len(text.learnt) for text in texts)
        own, total = texts[self._ranks.rank :: self._ranks.size], 0.0
        for indices in micro_batches([text.tokens for text in own], training.micro_batch_tokens):
            some = [own[index] for index in indices]
            loss = pretraining_loss(self._state.model, some, tokens, training.logits_chunk)
            torch.autograd.backward(pretraining.coefficient * loss)
            total += loss.item()
            self.passes += 1
            yield True
        return total

    def _metrics(self) -> dict[str, float]:
        sums, largest = self._totals.reduce(self._ranks)
        mismatch = self._totals.mismatch.metrics(self._ranks)
        pretrain = self._pretrain_metrics()
        if not self._norms:
            return {}
        state = self._state
        metrics = {"grad_norm": sum(self._norms) / len(self._norms), "learning_rate": state.optimizer.rate}
        planned, reference = self._config.training.updates, self._algorithm.kl > 0
        metrics |= policy_metrics(sums, largest, len(self._norms), planned, reference=reference) | mismatch
        metrics |= {"policy/kl_coefficient": state.kl.value} if reference else {}
        return metrics | pretrain | ({} if state.multiplier is None else {"cost/multiplier": state.multiplier.value})

    def _pretrain_metrics(self) -> dict[str, float]:
        if self._state.pretraining is None:
            return {}
        losses = self._ranks.sum(torch.tensor(self._pretrain_losses, dtype=torch.float64))
        return {"policy/pretrain_loss": float(losses.mean())}


def _pushed_squares(masked: MaskedRow, logprobs: NDArray[np.float32]) -> Tensor:
    """Returns the squared log ratios, float64, of live tokens that the update pushes further from their sampler."""
    log_ratio = torch.from_numpy((logprobs - masked.row.logprobs)[masked.live].astype(np.float64))
    advantages = np.broadcast_to(masked.row.advantage, masked.live.shape)[masked.live]
    return log_ratio[pushed_away(log_ratio, torch.from_numpy(advantages))].square()


def _culprits(terms: LossTerms, batch: MicroBatch) -> list[SampleKey]:
    """Returns the samples with a loss term that is not finite, or all samples when only the sum is not finite."""
    keys = [item.row.key for item in batch.masked]
    broken = [key for key, part in zip(keys, _by_row(terms.tokens, batch), strict=True) if not np.isfinite(part).all()]
    return broken or keys


def _by_row(tokens: Tensor, batch: MicroBatch) -> list[NDArray[np.float32]]:
    return split_by_row(tokens, [item.trained for item in batch.masked])
