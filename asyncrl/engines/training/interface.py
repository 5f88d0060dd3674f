"""The interface of a training engine: rows in, a step outcome out."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.lanes.weights.tensor_spec import WeightsSpec
from asyncrl.protocols.messages import Canary

SampleKey = tuple[int, int, int]  # group, member, attempt


@dataclass(frozen=True, slots=True)
class TrainRow:
    """Holds one sample as training reads it. Arrays are one-dimensional.

    group, member, attempt: identify the sample. prompt_ids [prompt], response_ids [tokens]: token ids.
    logprobs [tokens]: recorded by the engine that sampled, of the distribution at `temperature`.
    versions [tokens]: weight version of `incarnation` that sampled each token.
    reference_logprobs [tokens]: of the frozen reference model, only with a KL term.
    truncated: the sample ended at its token limit.
    advantage: one number for all tokens, or float64 [tokens]. With a critic it is the reward of the sample, from which
    the engine computes token advantages (`loss/token_advantages.py`).
    values [tokens]: the critic's value before each token was sampled. valued_at: optimizer steps that the critic had
    taken when it computed them. cost, cost_values, cost_valued_at: the same for the cost of the sample.
    """

    group: int
    member: int
    attempt: int
    incarnation: int
    prompt_ids: NDArray[np.int64]
    response_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int64]
    advantage: float | NDArray[np.float64]
    temperature: float = 1.0
    truncated: bool = False
    reference_logprobs: NDArray[np.float32] | None = None
    values: NDArray[np.float32] | None = None
    valued_at: int = 0
    cost: float | None = None
    cost_values: NDArray[np.float32] | None = None
    cost_valued_at: int = 0

    def __post_init__(self) -> None:
        tokens = len(self.response_ids)
        assert len(self.prompt_ids) > 0, f"sample {self.key} has no prompt token"
        assert tokens > 0, f"sample {self.key} has no response token"
        assert len(self.logprobs) == len(self.versions) == tokens, f"sample {self.key}: columns differ in length"

    @property
    def key(self) -> SampleKey:
        return (self.group, self.member, self.attempt)


@dataclass(frozen=True, slots=True)
class SampleTokenCounts:
    """Counts what a step did with the response tokens of one sample.

    trained: tokens in the loss. masked: tokens left out for `reason`, "stale", "truncated" or "not finite". rejected:
    live tokens that a correction gave the weight 0.
    """

    key: SampleKey
    trained: int
    masked: int
    reason: str = ""
    rejected: int = 0


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Reports what one step did.

    updates: optimizer steps taken. skipped: why `updates` is 0, "stale", "truncated" or "not finite"; else "". samples:
    of this rank. batch: sorted keys of the samples of all ranks. metrics: over all ranks, see `step_metrics`. culprits:
    samples of this rank with a loss term that is not finite.
    """

    updates: int
    skipped: str
    samples: tuple[SampleTokenCounts, ...]
    batch: tuple[SampleKey, ...]
    metrics: dict[str, float]
    culprits: tuple[SampleKey, ...] = ()

    @property
    def keys(self) -> list[SampleKey]:
        """Returns the sorted keys of this rank's samples that entered the loss."""
        return sorted(sample.key for sample in self.samples if sample.trained)


class StepRun(Protocol):
    """A step in progress, which runs one forward and backward pass at a time."""

    @property
    def outcome(self) -> StepOutcome:
        """Returns the outcome; only valid after `advance` returned False."""
        ...

    @property
    def passes(self) -> int:
        """Counts the micro-batches done so far."""
        ...

    def advance(self) -> bool:
        """Runs the next micro-batch or optimizer step; returns False when the step is complete."""
        ...


class TrainingEngine(Protocol):
    """Trains the policy; implemented by `PolicyTrainer`. Not thread-safe: all calls come from one thread."""

    def begin(self, rows: Sequence[TrainRow], incarnation: int, version: int) -> StepRun:
        """Starts a step on this rank's rows, sorted by (group, member), and computes nothing yet."""
        ...

    @property
    def weights_spec(self) -> WeightsSpec:
        """Returns names, shapes and dtype of the published weights."""
        ...

    def named_tensors(self) -> dict[str, Tensor]:
        """Returns the float32 master weights, tied ones under every name. The next step changes them in place."""
        ...

    def canary(self) -> Canary:
        """Returns the canary of the current weights, which generation engines compare themselves with."""
        ...

    def save(self, directory: Path, extra: dict[str, Any]) -> None:
        """Writes model/ and trainer.pt below `directory`, with the plain values `extra`.

        Every rank calls this method; ranks other than 0 write only the state that is their own.

        Raises:
            WeightsError: the ranks do not hold the same weights.
        """
        ...


def run_step(engine: TrainingEngine, rows: Sequence[TrainRow], incarnation: int, version: int) -> StepOutcome:
    """Runs a whole step at once."""
    step = engine.begin(rows, incarnation, version)
    while step.advance():
        pass
    return step.outcome
