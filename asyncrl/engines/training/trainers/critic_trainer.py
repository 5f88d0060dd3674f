"""The trainer of a critic: a model with a value head, trained beside the policy on the same rows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.config.schema import Config
from asyncrl.engines.training.batch.packing import pad_rows, split_by_row
from asyncrl.engines.training.batch.value_targets import REWARD, ValueTarget
from asyncrl.engines.training.interface import TrainRow
from asyncrl.engines.training.state.data_parallel import SingleRank
from asyncrl.engines.training.state.models_with_heads import load_value_model, refuse_another_tokenizer
from asyncrl.engines.training.state.optimizer import training_optimizer
from asyncrl.engines.training.state.saved_state import MODEL, TRAINER, read_state, write_state
from asyncrl.engines.training.trainers.critic_step import CriticState, CriticStep
from asyncrl.errors import ConfigError

CRITIC_RATE = 10.0
"""Default learning rate of a critic, as a multiple of the policy's. Its head starts at 0, and while it lags behind the
policy it adds noise to every advantage."""


class CriticTrainer:
    """Trains float32 master weights with AdamW, the trainer's settings and a learning rate of its own.

    Not thread-safe.
    """

    def __init__(self, config: Config, folder: Path, target: ValueTarget = REWARD) -> None:
        """Loads the model from `folder`, in the layout of `save_pretrained`, with a value head or without."""
        own = target.settings(config)
        rate = CRITIC_RATE * config.training.learning_rate if own.learning_rate is None else own.learning_rate
        settings = config.training.model_copy(update={"learning_rate": rate})
        model = load_value_model(folder, own.device, settings.precision)
        optimizer = training_optimizer(model.whole, settings, config.steps)
        self._state = CriticState(model, optimizer, config, SingleRank(), target)

    @classmethod
    def resume(
        cls, config: Config, directory: Path, target: ValueTarget = REWARD
    ) -> tuple["CriticTrainer", dict[str, Any]]:
        """Restores the critic that `save` wrote to `directory`, bit for bit, and returns the saved `extra` with it.

        Raises:
            ConfigError: the checkpoint belongs to an algorithm without this critic.
        """
        if not (directory / TRAINER).exists():
            raise ConfigError(
                f"checkpoint {directory.parent} holds no {target.critic}: the run began with an algorithm that has "
                "none; start anew with another --run-dir"
            )
        critic = cls(config, directory / MODEL, target)
        return critic, read_state(directory, critic._state.optimizer, None, critic._state.ranks)

    def refuse_another_tokenizer(self, policy: Path) -> None:
        """Raises ConfigError unless the model in the folder `policy` has the vocabulary of the critic."""
        refuse_another_tokenizer(self._state.model, policy, f"{self._state.target.critic}.model")

    @property
    def updates(self) -> int:
        """Counts the optimizer steps of the run over all incarnations: the version of the values."""
        return self._state.optimizer.updates

    @torch.no_grad()
    def values(
        self, prompts: Sequence[NDArray[np.int64]], responses: Sequence[NDArray[np.int64]]
    ) -> list[NDArray[np.float32]]:
        """Computes the values [tokens] of each row, before each token was sampled, in one forward pass.

        The bits of a row depend on the other rows of the pass; a pass over a single row always gives the same bits.
        """
        model = self._state.model
        values = model.values(pad_rows(prompts, responses, [1.0] * len(prompts), model.device))
        return split_by_row(values, [len(response) for response in responses])

    def begin(self, rows: Sequence[TrainRow], incarnation: int, version: int) -> CriticStep:
        """Starts a step on the batch that the policy trains from `version`; computes nothing yet."""
        return CriticStep(self._state, rows, incarnation, version)

    def save(self, directory: Path, extra: dict[str, Any]) -> None:
        """Writes model/ and trainer.pt below `directory`, with the plain values `extra`."""
        write_state(directory, self._state.model, self._state.optimizer, {}, extra, ranks=1)
