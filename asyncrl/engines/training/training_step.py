"""The part that training steps of policy and critic share: masks, the split into updates, one pass at a time."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.engines.models.lora import published_tensors
from asyncrl.engines.ranks.rank_mesh import RankMesh, Ranks
from asyncrl.engines.ranks.shards import HeldModel
from asyncrl.engines.ranks.weight_gathering import TrainedWeights
from asyncrl.engines.training.micro_batches import MaskedRow, mask_counts, mask_rows, micro_batches
from asyncrl.engines.training.models_with_heads import LoadedModel
from asyncrl.engines.training.optimizer import Optimizer, check_same
from asyncrl.engines.training.train_rows import TrainRow, padded_sizes
from asyncrl.engines.training.trainer_checkpoint import (
    AdaptedModel,
    StateCopy,
    own_state,
    whole_state,
    write_model,
)
from asyncrl.lanes.weights.slot_memory import WeightsSpec
from asyncrl.protocols.batch import SampleName
from asyncrl.protocols.messages import CUT_SHORT, LEFT_OUT, Canary, TrainedSample

Backward: TypeAlias = Generator[bool, None, bool]
"""Backward passes: yields True after each, and returns whether all losses were finite."""
NOT_FINITE = "not finite"


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Reports what one step did.

    updates: optimizer steps taken. skipped: why `updates` is 0, "stale", "truncated", "rejected" or "not finite"; else
    "". samples: of this rank. trained: sorted keys of the samples of all ranks that entered the loss of an update that
    was taken. metrics: over all ranks. culprits: samples of this rank with a loss term that is not finite.
    """

    updates: int
    skipped: str
    samples: tuple[TrainedSample, ...]
    trained: tuple[SampleName, ...]
    metrics: dict[str, float]
    culprits: tuple[SampleName, ...] = ()


Lane: TypeAlias = Callable[[str], AbstractContextManager[None]]
"""Draws a block of work on the track of this name in the trace."""


class AdvancingStep(Protocol):
    """A step of an engine, which runs in parts. outcome: once `advance` has returned False. is_computed: whether the
    next part changes the weights, which a step in lockstep says once the passes of its first update are done."""

    @property
    def outcome(self) -> StepOutcome: ...

    @property
    def is_computed(self) -> bool: ...

    def advance(self) -> bool: ...

    def forgo_updates(self) -> bool: ...


class TrainedPolicy(Protocol):
    """An engine that trains, as the service needs it. lane: draws blocks of a step in the trace. updates: optimizer
    steps taken so far."""

    lane: Lane

    @property
    def updates(self) -> int: ...

    @property
    def weights_spec(self) -> WeightsSpec: ...

    def named_tensors(self) -> Mapping[str, Tensor]: ...

    def canary(self) -> Canary | None: ...

    def copy_state(self, extra: dict[str, Any]) -> StateCopy: ...

    def copy_beside_pass(self, extra: dict[str, Any]) -> StateCopy | None: ...

    def publish_parts(self) -> None: ...

    @property
    def trained_weights(self) -> TrainedWeights: ...


def undrawn(name: str) -> AbstractContextManager[None]:
    return nullcontext()


class StepInParts(ABC):
    """Runs a step part by part, one for each call of `advance`, which the service of the engine makes."""

    is_computed = False

    def __init__(self) -> None:
        self._outcome: StepOutcome | None = None
        self._work = self._run()

    @property
    def outcome(self) -> StepOutcome:
        """Returns the outcome; only valid after `advance` returned False."""
        assert self._outcome is not None, "the step is not complete: call advance until it returns False"
        return self._outcome

    def advance(self) -> bool:
        """Runs the next part; returns False when the step is complete."""
        return next(self._work, False)

    def forgo_updates(self) -> bool:
        """Takes no further update, where parts of a step are long. Returns whether none was taken, and none will be;
        other threads may call it."""
        return False

    @abstractmethod
    def _run(self) -> Iterator[bool]:
        """Yields True after each part, and sets the outcome at the end."""


class Trainer(ABC):
    """Trains one model. Not thread-safe: all calls come from one thread. lane: draws forward and backward passes, which
    a GPU may still compute when they end here, and optimizer steps. prepared: the folder that the weights came from,
    which a checkpoint before the first update links to; None: each checkpoint holds its weights, as that of a new head,
    which is in no folder."""

    config: Config
    mesh: RankMesh
    model: LoadedModel
    optimizer: Optimizer
    lane: Lane = staticmethod(undrawn)
    prepared: Path | None = None
    _held: HeldModel
    _adapted: AdaptedModel | None = None

    @property
    def updates(self) -> int:
        return self.optimizer.updates

    @property
    def trained_weights(self) -> TrainedWeights:
        return TrainedWeights(self._held.whole, self.optimizer.parts_moved)

    def _facts(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps beside model and optimizer. All ranks call it together."""
        return {}

    def copy_state(self, extra: dict[str, Any]) -> StateCopy:
        """Copies model and state for a checkpoint, with the plain values `extra`. Ranks that share out the weights copy
        their parts; else, and of adapters, rank 0 copies the whole. Raises WeightsError when ranks that should hold the
        same weights do not."""
        mesh = self.mesh
        copy = self.config.training.background_checkpoints
        with mesh.failing():
            check_same(mesh, self.optimizer.parameters)
            facts = self._facts()
            named = None if self._adapted is None else published_tensors(self.model.whole)
            parts, weights, states = self._held.copied(self.optimizer, named, copy=copy)
        if mesh.rank > 0:
            return StateCopy(own_state(), None, mesh.rank, parts, mesh.size)
        state = whole_state(self.optimizer, mesh.size, states, extra=extra, **facts)
        # Adapters are small, and ranks with parts write them apart: their checkpoints stay as they are.
        linked = None if self.updates or self._adapted or parts else self.prepared
        return StateCopy(state, partial(write_model, self.model, weights, self._adapted, linked), 0, parts, mesh.size)

    def save(self, directory: Path, extra: dict[str, Any]) -> dict[str, str]:
        """Writes model/ and trainer.pt below `directory`. Returns the sha256 (hex) of each file by relative path."""
        return self.copy_state(extra).write(directory)

    @abstractmethod
    def begin(self, rows: Sequence[TrainRow], incarnation: int, version: int) -> "TrainingStep":
        """Starts a step on this rank's rows, sorted by (group, member), and computes nothing yet."""


def run_step(trainer: Trainer, rows: Sequence[TrainRow], incarnation: int, version: int) -> StepOutcome:
    """Runs a whole step at once."""
    step = trainer.begin(rows, incarnation, version)
    while step.advance():
        pass
    return step.outcome


class TrainingStep(StepInParts):
    """Trains on one batch, the rows of all ranks, one micro-batch per call of `advance`.

    The batch is split into `training.updates` consecutive parts with one optimizer step each. A part has one
    denominator over all its rows, micro-batches and ranks, fixed before its first backward pass. A part whose loss or
    gradient is not finite takes no optimizer step, nor does a part whose every token was masked or rejected.

    The compute thread calls `advance`, and other threads may call `forgo_updates`: an update is agreed to or forgone,
    never both, which a lock decides. All ranks take the same updates.
    """

    def __init__(self, trainer: Trainer, rows: Sequence[TrainRow], incarnation: int, version: int) -> None:
        self._config = config = trainer.config
        self._mesh = trainer.mesh
        self._optimizer = trainer.optimizer
        self._lane = trainer.lane
        self._packs = trainer.model.packs
        staleness = config.staleness
        truncated = config.algorithm.mask_truncated
        self._rows = mask_rows(rows, incarnation, version, staleness.limit, staleness.policy, truncated)
        self._pass_budget = self._mesh.pass_budget(config.training.micro_batch_tokens)
        self._norms: list[float] = []  # gradient norms of the updates taken
        self._not_taken: set[str] = set()  # why updates with a live token were not taken, the same on all ranks
        self._culprits: list[SampleName] = []
        self._has_waited = False  # for the update to be allowed, in lockstep
        self._deciding = threading.Lock()
        self._is_cut_short = False
        self._has_agreed = False  # to an update of this step
        super().__init__()

    def advance(self) -> bool:
        """Runs the next micro-batch or optimizer step; returns False when the step is complete. Raises PeerLost when
        another rank is gone."""
        with self._mesh.failing():
            return super().advance()

    def forgo_updates(self) -> bool:
        with self._deciding:
            self._is_cut_short = True
            return not self._has_agreed

    def _agrees(self) -> bool:
        """Returns whether this rank takes the next update, which `forgo_updates` does not prevent any more then."""
        with self._deciding:
            self._has_agreed |= not self._is_cut_short
            return not self._is_cut_short

    def _run(self) -> Iterator[bool]:
        batch = gather_keys(self._mesh.rows, [item.row.key for item in self._rows])
        counts = self._mesh.rows.sum(mask_counts(self._rows))
        yield from self._prepare()
        for number, part in enumerate(split_into_updates(self._rows, batch, self._config.training.updates)):
            if CUT_SHORT in self._not_taken:
                _mark(part, CUT_SHORT)
            else:
                yield from self._update(part, number)
        trained = gather_keys(self._mesh.rows, [item.row.key for item in self._rows if item.trained])
        self._outcome = StepOutcome(
            updates=len(self._norms),
            skipped="" if self._norms else self._why_skipped(counts),
            metrics=self._metrics(counts),
            samples=tuple(item.report() for item in self._rows),
            trained=tuple(trained),
            culprits=tuple(self._culprits),
        )

    def _why_skipped(self, counts: Tensor) -> str:
        _, _, stale, _ = counts.tolist()
        masked = "stale" if stale > 0 else "truncated"
        return next((why for why in (NOT_FINITE, "rejected", CUT_SHORT, LEFT_OUT) if why in self._not_taken), masked)

    def _update(self, part: Sequence[MaskedRow], number: int) -> Iterator[bool]:
        counted = [item for item in part if item.counted]
        own = [sum(len(item.live) for item in counted), len(counted), sum(item.live_tokens for item in counted)]
        tokens, samples, live = self._mesh.rows.sum(torch.tensor(own, dtype=torch.float64)).tolist()
        if live == 0:
            return
        rows = [item for item in part if item.live_tokens]
        finite = yield from self._until_cut_short(self._backward(rows, number, int(tokens), int(samples)))
        if self._config.staleness.admission == "lockstep" and not self._has_waited:
            self._has_waited = self.is_computed = True
            yield True
            self.is_computed = False
        self._take(part, finite)
        yield True

    def _take(self, part: Sequence[MaskedRow], finite: bool) -> None:
        """Takes the optimizer step of an update, unless its loss is empty or not finite on any rank."""
        own = [sum(item.in_loss for item in part), sum(item.rejected for item in part)]
        in_loss, rejected = self._mesh.rows.sum(torch.tensor(own, dtype=torch.float64)).tolist()
        votes = torch.tensor([int(not finite), int(not self._agrees())])
        broken, cut_short = self._mesh.everyone.largest(votes).tolist()
        if cut_short:
            self._optimizer.discard()
            self._not_taken.add(CUT_SHORT)
            _mark(part, CUT_SHORT)
        elif not in_loss and not broken:
            self._optimizer.discard()
            self._not_taken.add("rejected" if rejected else LEFT_OUT)
        elif (norm := self._optimizer_step(finite=not broken)) is not None:
            self._norms.append(norm)
            self._keep_sums()
        else:
            self._not_taken.add(NOT_FINITE)
            _mark(part, NOT_FINITE)

    def _until_cut_short(self, passes: Backward) -> Backward:
        """Runs the passes of an update. A rank alone leaves out the rest of one that it forgoes; others wait in theirs
        for those that it has begun."""
        while not (self._is_cut_short and self._mesh.size == 1):
            try:
                yield next(passes)
            except StopIteration as ended:
                return bool(ended.value)
        return True

    def _optimizer_step(self, finite: bool) -> float | None:
        with self._lane("optimizer"):
            return self._optimizer.step(self._mesh, finite=finite)

    @abstractmethod
    def _prepare(self) -> Iterator[bool]:
        """Computes what the loss needs of each row; yields True after each forward pass."""

    @abstractmethod
    def _backward(self, rows: Sequence[MaskedRow], number: int, tokens: int, samples: int) -> Backward:
        """Accumulates the gradient of update `number`, whose loss is divided by all its tokens or samples."""

    @abstractmethod
    def _keep_sums(self) -> None:
        """Adds what `_backward` summed for the metrics to the sums of the step, because its update was taken."""

    @abstractmethod
    def _metrics(self, counts: Tensor) -> dict[str, float]:
        """Computes the metrics of the whole step. counts: `mask_counts` of all ranks."""

    def _micro_batches(self, rows: Sequence[MaskedRow]) -> Iterator[list[MaskedRow]]:
        """Yields the rows of each pass; none where only other ranks still have rows, see `RankMesh.in_step`."""
        budget = self._config.training.micro_batch_tokens
        longest, contexts = padded_sizes([item.row for item in rows])
        parts = micro_batches(longest, budget, contexts, packed=self._packs)
        yield from self._mesh.in_step([[rows[index] for index in indices] for indices in parts])


def _mark(rows: Iterable[MaskedRow], why: str) -> None:
    """Notes why the update of these rows was not taken."""
    for row in rows:
        row.lost = why


def gather_keys(ranks: Ranks, keys: Sequence[SampleName]) -> list[SampleName]:
    """Returns the sorted keys of the samples of all ranks."""
    rows = ranks.gather(torch.tensor(keys, dtype=torch.int64).reshape(-1, 3))
    return sorted((group, member, attempt) for group, member, attempt in rows.tolist())


def split_into_updates(
    rows: Sequence[MaskedRow], batch: Sequence[SampleName], updates: int
) -> Iterator[list[MaskedRow]]:
    """Yields this rank's rows of each update; the split of the batch does not depend on the number of ranks."""
    place = {key: index for index, key in enumerate(batch)}
    for update in range(updates):
        own = range(update * len(batch) // updates, (update + 1) * len(batch) // updates)
        yield [item for item in rows if place[item.row.key] in own]
