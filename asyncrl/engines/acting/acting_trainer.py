"""The trainer of a policy that acts, and its step: masks, the learner's updates, and the returns of episodes."""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from safetensors.torch import save_file
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.engines.acting.learner import ALONE, Learner
from asyncrl.engines.acting.ppo_learner import PpoLearner
from asyncrl.engines.acting.sac_learner import SacLearner
from asyncrl.engines.acting.stepping.spaces import SPACES, Spaces, write_spaces
from asyncrl.engines.acting.transitions import TransitionRow, joined
from asyncrl.engines.ranks.shards import gather_state
from asyncrl.engines.ranks.weight_gathering import TrainedWeights
from asyncrl.engines.training.trainer_checkpoint import MODEL, StateCopy, read_state, whole_state
from asyncrl.engines.training.training_step import NOT_FINITE, Lane, StepInParts, StepOutcome, undrawn
from asyncrl.lanes.weights.slot_memory import WeightsSpec, spec_of
from asyncrl.protocols.messages import Canary

WEIGHTS = "policy.safetensors"
LEARNERS: dict[str, type[Learner]] = {"ppo": PpoLearner, "sac": SacLearner}
LAST = 20
"""Episodes in `acting/return_last20`."""
PART = 0.01
"""Seconds of updates between two looks at other work of the compute thread."""


class ActingTrainer:
    """Trains an actor with PPO or SAC. On one thread the same rows give the same bits.

    returns: of the last episodes. transitions: that were trained so far. lane: draws blocks of a step in the trace.
    """

    lane: Lane = staticmethod(undrawn)

    def __init__(self, config: Config, spaces: Spaces) -> None:
        self.config = config
        self.spaces = spaces
        self.learner = LEARNERS[config.acting.algorithm](config, spaces)
        self.returns: deque[float] = deque(maxlen=LAST)
        self.transitions = 0

    @classmethod
    def resume(cls, config: Config, spaces: Spaces, directory: Path) -> tuple["ActingTrainer", dict[str, Any]]:
        """Restores the trainer that was copied and written to `directory`, bit for bit, with the saved `extra`."""
        trainer = cls(config, spaces)
        state = read_state(directory, trainer.learner.optimizer, ALONE)
        for name, module in trainer.learner.modules.items():
            module.load_state_dict(state["modules"][name])
        trainer.learner.restore(state["learner"])
        trainer.returns.extend(state["returns"])
        trainer.transitions = state["transitions"]
        return trainer, state["extra"]

    def copy_state(self, extra: dict[str, Any]) -> StateCopy:
        """Copies the policy for model/, and everything for trainer.pt, with the plain values `extra`."""
        optimizer = self.learner.optimizer
        state = whole_state(
            optimizer,
            ALONE.size,
            optimizer.states(),
            modules={name: module.state_dict() for name, module in self.learner.modules.items()},
            learner=self.learner.state(),
            returns=list(self.returns),
            transitions=self.transitions,
            extra=extra,
        )
        copies = self.config.training.background_checkpoints
        weights = gather_state(self.named_tensors(), copy=copies)
        return StateCopy(gather_state(state, copy=copies), partial(self._write_model, weights))

    def copy_beside_pass(self, extra: dict[str, Any]) -> None:
        """Copies nothing: parts of a step are short."""

    def _write_model(self, weights: Mapping[str, Tensor], directory: Path) -> None:
        (directory / MODEL).mkdir(parents=True, exist_ok=True)
        save_file(dict(weights), directory / MODEL / WEIGHTS)
        write_spaces(directory / MODEL / SPACES, self.spaces)

    @property
    def weights_spec(self) -> WeightsSpec:
        return spec_of(self.learner.actor, "float32")

    def named_tensors(self) -> dict[str, Tensor]:
        """Returns the weights of the actor; the next step changes them in place."""
        return dict(self.learner.actor.named_parameters())

    def publish_parts(self) -> None:
        """Does nothing: one rank has all weights."""

    @property
    def updates(self) -> int:
        return self.learner.optimizer.updates

    @property
    def trained_weights(self) -> TrainedWeights:
        return TrainedWeights(self.learner.actor, lambda: None)

    def canary(self) -> Canary | None:
        """Returns None: engine and trainer compute the same small network."""
        return None

    def begin(self, rows: Sequence[TransitionRow], version: int) -> "ActingStep":
        return ActingStep(self, rows, version)


class ActingStep(StepInParts):
    """Trains on the trajectories of a batch, some updates per call of `advance`. A batch without a live transition is
    skipped as stale; one whose every update is not finite, as that."""

    def __init__(self, trainer: ActingTrainer, rows: Sequence[TransitionRow], version: int) -> None:
        self._trainer = trainer
        self._learner = trainer.learner
        self._rows = rows
        self._version = version
        super().__init__()

    def _run(self) -> Iterator[bool]:
        learner = self._learner
        learner.norms.clear()
        learner.refused = 0
        rows = [row for row in self._rows if row.live.any()]
        if rows:
            yield from _parts(learner.learn(rows, self._version))
        is_broken = learner.refused > 0 and not learner.norms
        for row in rows if is_broken else ():
            row.trained = 0
            row.reason = NOT_FINITE
        trained = sorted(row.name for row in self._rows if row.trained)
        if trained:
            self._count_episodes()
        self._outcome = StepOutcome(
            updates=len(learner.norms),
            skipped="" if trained else NOT_FINITE if is_broken else "stale",
            samples=tuple(row.report() for row in self._rows),
            trained=tuple(trained),
            metrics=self._metrics(),
        )

    def _count_episodes(self) -> None:
        """Takes the returns of the episodes that ended in the batch, in the order of its rows."""
        self._trainer.returns.extend(float(value) for row in self._rows for value in row.returns)
        self._trainer.transitions += sum(row.trained for row in self._rows)

    def _metrics(self) -> dict[str, float]:
        rows = self._rows
        learner = self._learner
        total = sum(map(len, rows))
        trained = sum(row.trained for row in rows)
        stale = sum(len(row) - int(row.live.sum()) for row in rows)
        metrics = {
            "tokens/response": float(total),
            "tokens/trained": float(trained),
            "staleness/masked_fraction": stale / max(1, total),
            "acting/transitions": float(self._trainer.transitions),
            **self._of_episodes(),
        }
        if trained:
            ages = (self._version - joined(rows, "versions"))[joined(rows, "live").astype(np.bool_)]
            largest = float(ages.max())
            updates = largest * max(1, len(learner.norms)) + max(0, len(learner.norms) - 1)
            metrics |= {
                "staleness/mean": float(ages.mean()),
                "staleness/max": largest,
                "staleness/updates_max": updates,
            }
        if learner.norms:
            metrics |= {"grad_norm": fmean(learner.norms), "learning_rate": learner.optimizer.rate}
        return metrics | (learner.metrics() if trained else {})

    def _of_episodes(self) -> dict[str, float]:
        returns = [float(value) for row in self._rows for value in row.returns]
        lengths = [int(value) for row in self._rows for value in row.lengths]
        found = {"acting/episodes": float(len(returns))}
        if returns:
            found |= {"acting/return_mean": fmean(returns), "acting/length_mean": fmean(lengths)}
        if self._trainer.returns:
            found["acting/return_last20"] = fmean(self._trainer.returns)
        return found


def _parts(updates: Iterator[bool]) -> Iterator[bool]:
    """Yields True after updates that took PART or longer: each part costs two changes of threads."""
    began = time.monotonic()
    for _ in updates:
        if time.monotonic() - began >= PART:
            yield True
            began = time.monotonic()
