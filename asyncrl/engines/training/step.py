"""One training iteration, a micro-batch at a time."""

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.config import Config
from asyncrl.engines.training.credit import mean_cost, with_credit
from asyncrl.engines.training.interface import SampleOutcome, StepOutcome, TrainRow
from asyncrl.engines.training.logprobs import frozen_logprobs, token_logprobs
from asyncrl.engines.training.masking import Masked, mask_rows
from asyncrl.engines.training.microbatch import MicroBatch, PartRow, micro_batch
from asyncrl.engines.training.model import CausalModel
from asyncrl.engines.training.objective import Strength, Terms, terms_of
from asyncrl.engines.training.optimizer import Optimizer, descend
from asyncrl.engines.training.packing import micro_batches
from asyncrl.engines.training.pretraining import Pretraining, Text, pretraining_loss, texts_of
from asyncrl.engines.training.ranks import Ranks
from asyncrl.engines.training.statistics import (
    Totals,
    mask_counts,
    mask_metrics,
    policy_metrics,
    why_nothing_trained,
)
from asyncrl.objectives.aggregation import row_weights
from asyncrl.objectives.kl import KlCoefficient
from asyncrl.objectives.lagrangian import Multiplier
from asyncrl.objectives.second_moment import pushed_away, second_moment_bound

Key = tuple[int, int, int]  # group, member, attempt


@dataclass(frozen=True, slots=True)
class Trainer:
    """What a step works on. kl: of the KL term; moves after each step when it is adaptive. multiplier: of costs, None
    without any; moves after each step. pretraining: texts that are learnt beside, None without any."""

    model: CausalModel
    optimizer: Optimizer
    config: Config
    ranks: Ranks
    kl: KlCoefficient
    multiplier: Multiplier | None = None
    pretraining: Pretraining | None = None


class TorchStep:
    """The batch, the rows of all ranks, is split into `training.updates` consecutive parts, one optimizer step each.

    Each part has one denominator over all its rows, micro-batches and ranks, fixed before its first backward
    pass. A part whose loss or gradient is not finite takes no optimizer step, and its samples do not count as
    trained; a part without a live token is passed over.
    """

    def __init__(self, trainer: Trainer, rows: Sequence[TrainRow], epoch: int, version: int) -> None:
        self.passes = 0
        self._trainer, self._version = trainer, version
        config, self._algorithm = trainer.config, trainer.config.algorithm
        self._masked = mask_rows(
            rows, epoch, version, config.staleness.limit, config.staleness.policy, self._algorithm.mask_truncated
        )
        self._totals = Totals(trainer.model.device)
        self._norms: list[float] = []
        self._pretrain_losses: list[float] = []
        self._lost: dict[Key, str] = {}
        self._rejected: dict[Key, int] = {}
        self._culprits: list[Key] = []
        self._outcome: StepOutcome | None = None
        self._work = self._run()

    @property
    def outcome(self) -> StepOutcome:
        assert self._outcome is not None, "the step is not complete: call advance until it answers False"
        return self._outcome

    def advance(self) -> bool:
        return next(self._work, False)

    def _run(self) -> Iterator[bool]:
        batch = gather_keys(self._trainer.ranks, [item.row.key for item in self._masked])
        counts = self._trainer.ranks.sum(mask_counts(self._masked))
        costs = None if self._trainer.multiplier is None else mean_cost(self._masked, self._trainer.ranks)
        kl, multiplier = self._trainer.kl.value, self._trainer.multiplier
        self._masked = with_credit(self._masked, self._algorithm, kl, self._trainer.ranks, multiplier)
        proximal = yield from self._proximal()
        rows = [PartRow(item, 0.0, proximal.get(index)) for index, item in enumerate(self._masked)]
        updates = self._trainer.config.training.updates
        for number, part in enumerate(parts_of(rows, batch, updates)):
            yield from self._update(part, texts_of(self._trainer.pretraining, self._version, number, updates))
        metrics = mask_metrics(counts) | self._metrics()
        if "policy/kl_reference" in metrics:
            self._trainer.kl.update(metrics["policy/kl_reference"])
        if self._trainer.multiplier is not None and costs is not None and self._norms:
            self._trainer.multiplier.update(costs)
        self._outcome = StepOutcome(
            updates=len(self._norms),
            skipped="" if self._norms else why_nothing_trained(counts),
            samples=tuple(self._sample(item) for item in self._masked),
            batch=tuple(batch),
            metrics=metrics,
            culprits=tuple(self._culprits),
        )

    def _sample(self, item: Masked) -> SampleOutcome:
        key = item.row.key
        return item.outcome(self._lost.get(key, ""), self._rejected.get(key, 0))

    def _proximal(self) -> Generator[bool, None, dict[int, NDArray[np.float32]]]:
        """The trainer's own log-probs at the start of the step, by row, where several updates will move them."""
        unneeded = self._algorithm.old_logprobs == "engine" and self._algorithm.rejection == "none"
        if unneeded or self._trainer.config.training.updates == 1:
            return {}
        return (yield from self._logprobs_now(self._masked))

    def _logprobs_now(self, masked: Sequence[Masked]) -> Generator[bool, None, dict[int, NDArray[np.float32]]]:
        """The trainer's log-probs, by row, of rows with a live token."""
        found: dict[int, NDArray[np.float32]] = {}
        live = [index for index, item in enumerate(masked) if item.trained]
        for part in self._micro_batches([masked[index] for index in live]):
            rows = [masked[live[place]].row for place in part]
            found.update(zip((live[place] for place in part), self._frozen(rows), strict=True))
            self.passes += 1
            yield True
        return found

    def _second_moment(self, rows: list[PartRow]) -> Generator[bool, None, float]:
        """The bound that M2PO puts on the squared log ratios of this update."""
        if self._algorithm.loss != "m2po":
            return math.inf
        masked, ranks = [row.masked for row in rows], self._trainer.ranks
        now = yield from self._logprobs_now(masked)
        squares = torch.cat([_pushed_squares(masked[index], found) for index, found in now.items()] or [NOTHING])
        budget = self._algorithm.second_moment
        assert budget is not None, "the config needs it"
        return second_moment_bound(squares, budget, ranks.sum, ranks.largest)

    def _frozen(self, rows: list[TrainRow]) -> list[NDArray[np.float32]]:
        return frozen_logprobs(
            self._trainer.model,
            [row.prompt_ids for row in rows],
            [row.response_ids for row in rows],
            [row.temperature for row in rows],
            self._trainer.config.training.logits_chunk,
        )

    def _micro_batches(self, masked: Sequence[Masked]) -> list[list[int]]:
        return micro_batches([item.tokens for item in masked], self._trainer.config.training.micro_batch_tokens)

    def _update(self, part: list[PartRow], texts: Sequence[Text]) -> Iterator[bool]:
        tokens, samples, live = self._trainer.ranks.sum(denominators(part)).tolist()
        if live == 0:
            return
        rows = self._weighted([row for row in part if row.masked.trained], int(tokens), int(samples))
        totals = Totals(self._trainer.model.device)
        strength = Strength(self._trainer.kl.value, (yield from self._second_moment(rows)))
        finite = True
        for indices in self._micro_batches([row.masked for row in rows]):
            finite = finite and self._pass([rows[index] for index in indices], strength, totals)
            self.passes += 1
            yield True
        pretrained = yield from self._pretrain(self._trainer.pretraining, texts)
        norm = descend(self._trainer.optimizer, self._trainer.ranks, finite=finite)
        if norm is None:
            self._lost.update({row.masked.row.key: "not finite" for row in part})
        else:
            self._norms.append(norm)
            self._pretrain_losses.append(pretrained)
            self._totals.merge(totals)
        yield True

    def _weighted(self, part: list[PartRow], tokens: int, samples: int) -> list[PartRow]:
        lengths = torch.tensor([len(row.masked.live) for row in part])
        divisor = self._algorithm.divisor or self._trainer.config.generation.max_new_tokens
        weights = row_weights(self._algorithm.aggregation, lengths, tokens, samples, divisor).tolist()
        return [replace(row, weight=weight) for row, weight in zip(part, weights, strict=True)]

    def _pass(self, rows: list[PartRow], strength: Strength, totals: Totals) -> bool:
        """Forward and backward of one micro-batch; False, and nothing added, when its loss is not finite."""
        batch = micro_batch(rows, self._trainer.model.device)
        chunk, bonus = self._trainer.config.training.logits_chunk, self._algorithm.entropy_bonus > 0
        found = token_logprobs(self._trainer.model, batch.padded, chunk, entropy_gradient=bonus)
        terms = terms_of(self._algorithm, strength, found.logprobs, found.entropy, batch)
        if not math.isfinite(terms.loss.item()):
            self._culprits.extend(culprits(terms, batch))
            return False
        torch.autograd.backward(terms.loss)
        totals.add(terms, found.logprobs, found.entropy, batch, first=not self._norms)
        self._rejected.update(zip((row.masked.row.key for row in rows), left_out(terms, batch), strict=True))
        return True

    def _pretrain(self, pretraining: Pretraining | None, texts: Sequence[Text]) -> Generator[bool, None, float]:
        """This rank's share of the texts of an update, and of their loss. One that is not finite has no finite
        gradient, which stops the update on all ranks."""
        if pretraining is None:
            return 0.0
        ranks, training = self._trainer.ranks, self._trainer.config.training
        tokens = sum(len(text.learnt) for text in texts)
        own, total = texts[ranks.rank :: ranks.size], 0.0
        for indices in micro_batches([text.tokens for text in own], training.micro_batch_tokens):
            some = [own[index] for index in indices]
            loss = pretraining_loss(self._trainer.model, some, tokens, training.logits_chunk)
            torch.autograd.backward(pretraining.coefficient * loss)
            total += loss.item()
            self.passes += 1
            yield True
        return total

    def _metrics(self) -> dict[str, float]:
        sums, largest = self._totals.reduce(self._trainer.ranks)
        mismatch = self._totals.mismatch.metrics(self._trainer.ranks)
        pretrain = self._pretrain_metrics()
        if not self._norms:
            return {}
        metrics = {"grad_norm": sum(self._norms) / len(self._norms), "learning_rate": self._trainer.optimizer.rate}
        planned, reference = self._trainer.config.training.updates, self._algorithm.kl > 0
        metrics |= policy_metrics(sums, largest, len(self._norms), planned, reference=reference) | mismatch
        metrics |= {"policy/kl_coefficient": self._trainer.kl.value} if reference else {}
        multiplier = self._trainer.multiplier
        return metrics | pretrain | ({} if multiplier is None else {"cost/multiplier": multiplier.value})

    def _pretrain_metrics(self) -> dict[str, float]:
        if self._trainer.pretraining is None:
            return {}
        losses = self._trainer.ranks.sum(torch.tensor(self._pretrain_losses, dtype=torch.float64))
        return {"policy/pretrain_loss": float(losses.mean())}


NOTHING = torch.zeros(0, dtype=torch.float64)


def _pushed_squares(masked: Masked, logprobs: NDArray[np.float32]) -> Tensor:
    """Squared log ratios, float64, of the live tokens that the update pushes further from their sampler."""
    log_ratio = torch.from_numpy((logprobs - masked.row.logprobs)[masked.live].astype(np.float64))
    advantages = np.broadcast_to(masked.row.advantage, masked.live.shape)[masked.live]
    return log_ratio[pushed_away(log_ratio, torch.from_numpy(advantages))].square()


def gather_keys(ranks: Ranks, keys: Sequence[Key]) -> list[Key]:
    """Of the samples of all ranks, sorted."""
    rows = ranks.gather(torch.tensor(keys, dtype=torch.int64).reshape(-1, 3))
    return sorted((group, member, attempt) for group, member, attempt in rows.tolist())


class OfBatch(Protocol):
    """A row of a batch."""

    @property
    def masked(self) -> Masked: ...


R = TypeVar("R", bound=OfBatch)


def parts_of(rows: Sequence[R], batch: Sequence[Key], updates: int) -> Iterator[list[R]]:
    """This rank's rows of each update, whatever else it holds: the batch is split as one rank would split it."""
    place = {key: index for index, key in enumerate(batch)}
    for update in range(updates):
        own = range(update * len(batch) // updates, (update + 1) * len(batch) // updates)
        yield [row for row in rows if place[row.masked.row.key] in own]


def denominators(part: Sequence[OfBatch]) -> Tensor:
    """float64 [3]: response tokens and samples in the denominators, live tokens."""
    counted = [row.masked for row in part if row.masked.counted]
    tokens, live = sum(len(item.live) for item in counted), sum(item.trained for item in counted)
    return torch.tensor([tokens, len(counted), live], dtype=torch.float64)


def culprits(terms: Terms, batch: MicroBatch) -> list[Key]:
    """Samples with a term that is not finite; all of the micro-batch when only their sum is not."""
    keys = [item.row.key for item in batch.masked]
    parts = _by_row(terms.tokens, batch)
    broken = [key for key, part in zip(keys, parts, strict=True) if not np.isfinite(part).all()]
    return broken or keys


def left_out(terms: Terms, batch: MicroBatch) -> list[int]:
    """Live tokens that the correction gave no weight, of each row."""
    return [int((part == 0).sum()) for part in _by_row(terms.weight, batch)]


def _by_row(tokens: Tensor, batch: MicroBatch) -> list[NDArray[np.float32]]:
    """tokens: of the live ones, row after row."""
    ends = np.cumsum([item.trained for item in batch.masked])
    return np.split(tokens.detach().cpu().numpy(), ends[:-1])
