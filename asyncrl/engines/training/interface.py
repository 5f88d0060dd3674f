"""What a training engine is: plain rows in, an outcome out. The service and a plain loop use it alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.protocols.messages import Canary
from asyncrl.weights.spec import WeightsSpec


@dataclass(frozen=True, slots=True)
class TrainRow:
    """One sample. Arrays are one-dimensional.

    group, member, attempt: whose sample it is. prompt_ids [prompt], response_ids [tokens]: token ids.
    logprobs [tokens]: log-probs recorded by the engine that sampled, of the tempered distribution.
    versions [tokens]: which weights sampled each token, of `epoch`. reference_logprobs [tokens]: frozen
    model, only with a KL term. truncated: the sample ended at its token cap.
    advantage: one for all tokens; with a critic the sample's reward, from which the engine makes one a token
    (`credit.py`), float64 [tokens]. values [tokens]: the critic's, before each token was sampled; judged_at: updates
    that the critic had taken when it judged. cost, cost_values, cost_judged_at: the same of what the sample costs.
    """

    group: int
    member: int
    attempt: int
    epoch: int
    prompt_ids: NDArray[np.int64]
    response_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int64]
    advantage: float | NDArray[np.float64]
    temperature: float = 1.0
    truncated: bool = False
    reference_logprobs: NDArray[np.float32] | None = None
    values: NDArray[np.float32] | None = None
    judged_at: int = 0
    cost: float | None = None
    cost_values: NDArray[np.float32] | None = None
    cost_judged_at: int = 0

    def __post_init__(self) -> None:
        tokens = len(self.response_ids)
        assert len(self.prompt_ids) > 0, f"sample {self.key} has no prompt token"
        assert tokens > 0, f"sample {self.key} has no response token"
        assert len(self.logprobs) == len(self.versions) == tokens, f"sample {self.key}: columns differ in length"

    @property
    def key(self) -> tuple[int, int, int]:
        return (self.group, self.member, self.attempt)


@dataclass(frozen=True, slots=True)
class SampleOutcome:
    """trained, masked: response tokens in the loss, and left out; reason: "stale" | "truncated" | "not finite".
    rejected: those of neither, within the limit but with no weight from the correction."""

    key: tuple[int, int, int]
    trained: int
    masked: int
    reason: str = ""
    rejected: int = 0


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one step did.

    updates: optimizer steps taken. skipped: "" | "stale" | "truncated" | "not finite", why updates is 0. samples: of
    this rank. batch: keys of the samples of all ranks, sorted. metrics: of all ranks, see `statistics.py`. culprits:
    samples of this rank whose own terms were not finite.
    """

    updates: int
    skipped: str
    samples: tuple[SampleOutcome, ...]
    batch: tuple[tuple[int, int, int], ...]
    metrics: dict[str, float]
    culprits: tuple[tuple[int, int, int], ...] = ()

    @property
    def keys(self) -> list[tuple[int, int, int]]:
        """Samples of this rank that entered the loss, sorted."""
        return sorted(sample.key for sample in self.samples if sample.trained)


class StepRun(Protocol):
    """A step under way, one forward and backward pass at a time."""

    @property
    def outcome(self) -> StepOutcome:
        """Only after `advance` answered False."""
        ...

    @property
    def passes(self) -> int:
        """Micro-batches done so far."""
        ...

    def advance(self) -> bool:
        """Do the next micro-batch or the optimizer step; False when the step is complete."""
        ...


class TrainingEngine(Protocol):
    """Implemented by `TorchTraining`. Not thread-safe: all calls from one thread."""

    def begin(self, rows: Sequence[TrainRow], epoch: int, version: int) -> StepRun:
        """Start a step on this rank's rows, sorted by (group, member); nothing is computed yet."""
        ...

    @property
    def weights_spec(self) -> WeightsSpec:
        """Names, shapes and dtype of what is published."""
        ...

    def named_tensors(self) -> dict[str, Tensor]:
        """The master weights, float32, tied ones under every name. They change with the next step."""
        ...

    def canary(self) -> Canary:
        """What the master weights say, for engines to compare with; see `weights_spec` for what they are given."""
        ...

    def save(self, directory: Path, extra: dict[str, Any]) -> None:
        """Write model/ and trainer.pt below `directory`; extra: plain values kept beside the state. Ranks but the first
        write what is theirs alone. Raises WeightsError when ranks do not hold the same weights."""
        ...


def run_step(engine: TrainingEngine, rows: Sequence[TrainRow], epoch: int, version: int) -> StepOutcome:
    """A whole step at once."""
    step = engine.begin(rows, epoch, version)
    while step.advance():
        pass
    return step.outcome
