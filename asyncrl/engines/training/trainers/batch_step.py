"""The part that training steps of policy and critic share: masks, the split into updates, and progress by
micro-batches."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.engines.training.batch.masking import MaskedRow, mask_rows
from asyncrl.engines.training.batch.packing import micro_batches
from asyncrl.engines.training.interface import SampleKey, TrainRow
from asyncrl.engines.training.state.data_parallel import Ranks
from asyncrl.engines.training.step_metrics.mask_metrics import mask_counts, why_nothing_trained


class BatchRow(Protocol):
    """A row of a batch, with whatever a step adds to it."""

    @property
    def masked(self) -> MaskedRow: ...


Row = TypeVar("Row", bound=BatchRow)
Outcome = TypeVar("Outcome")


class BatchStep(ABC, Generic[Outcome]):
    """Trains on one batch, the rows of all ranks, one micro-batch per call of `advance`.

    The batch is split into `training.updates` consecutive parts with one optimizer step each. A part has one
    denominator over all its rows, micro-batches and ranks, fixed before its first backward pass. A part whose loss or
    gradient is not finite takes no optimizer step; a part without a live token is skipped.
    """

    def __init__(self, config: Config, ranks: Ranks, rows: Sequence[TrainRow], incarnation: int, version: int) -> None:
        staleness, algorithm = config.staleness, config.algorithm
        self.passes = 0
        self._config = config
        self._ranks = ranks
        self._masked = mask_rows(
            rows, incarnation, version, staleness.limit, staleness.policy, algorithm.mask_truncated
        )
        self._norms: list[float] = []  # gradient norms of the updates taken
        self._outcome: Outcome | None = None
        self._work = self._run()

    @property
    def outcome(self) -> Outcome:
        """Returns the outcome; only valid after `advance` returned False."""
        assert self._outcome is not None, "the step is not complete: call advance until it returns False"
        return self._outcome

    def advance(self) -> bool:
        """Runs the next micro-batch or optimizer step; returns False when the step is complete."""
        return next(self._work, False)

    def _run(self) -> Iterator[bool]:
        batch = gather_keys(self._ranks, [item.row.key for item in self._masked])
        counts = self._ranks.sum(mask_counts(self._masked))
        self._outcome = yield from self._train(batch, counts)

    @abstractmethod
    def _train(self, batch: Sequence[SampleKey], counts: Tensor) -> Generator[bool, None, Outcome]:
        """Trains on the batch, given the keys and the mask counts of all ranks; yields True after each pass."""

    def _micro_batches(self, masked: Sequence[MaskedRow]) -> list[list[int]]:
        return micro_batches([item.tokens for item in masked], self._config.training.micro_batch_tokens)

    def _passes(self, rows: Sequence[Row], backward: Callable[[list[Row]], bool]) -> Generator[bool, None, bool]:
        """Runs `backward` on micro-batches until one has a loss that is not finite; returns whether all were finite."""
        finite = True
        for indices in self._micro_batches([row.masked for row in rows]):
            finite = finite and backward([rows[index] for index in indices])
            self.passes += 1
            yield True
        return finite

    def _skipped(self, counts: Tensor) -> str:
        return "" if self._norms else why_nothing_trained(counts)


def gather_keys(ranks: Ranks, keys: Sequence[SampleKey]) -> list[SampleKey]:
    """Returns the sorted keys of the samples of all ranks."""
    rows = ranks.gather(torch.tensor(keys, dtype=torch.int64).reshape(-1, 3))
    return sorted((group, member, attempt) for group, member, attempt in rows.tolist())


def split_into_updates(rows: Sequence[Row], batch: Sequence[SampleKey], updates: int) -> Iterator[list[Row]]:
    """Yields this rank's rows of each update; the split of the batch does not depend on the number of ranks."""
    place = {key: index for index, key in enumerate(batch)}
    for update in range(updates):
        own = range(update * len(batch) // updates, (update + 1) * len(batch) // updates)
        yield [row for row in rows if place[row.masked.row.key] in own]


def denominators(part: Sequence[BatchRow]) -> Tensor:
    """Counts the response tokens and samples in the denominators, and the live tokens: float64 [3]."""
    counted = [row.masked for row in part if row.masked.counted]
    tokens, live = sum(len(item.live) for item in counted), sum(item.trained for item in counted)
    return torch.tensor([tokens, len(counted), live], dtype=torch.float64)
