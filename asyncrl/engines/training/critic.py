"""The critic on plain PyTorch: a model with a value head, trained beside the policy from the same rows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.config import Config
from asyncrl.engines.training.interface import TrainRow
from asyncrl.engines.training.model import load_value_model, refuse_another_tokenizer
from asyncrl.engines.training.optimizer import Optimizer
from asyncrl.engines.training.packing import pad_rows
from asyncrl.engines.training.ranks import Alone
from asyncrl.engines.training.signals import REWARD, Signal
from asyncrl.engines.training.state import MODEL, TRAINER, read_state, write_state
from asyncrl.engines.training.torch import checkpoint_activations
from asyncrl.engines.training.value_step import Learner, ValueStep
from asyncrl.errors import ConfigError

CRITIC_RATE = 10.0
"""Times the policy's learning rate is the critic's, where the config names none: its head begins at 0, and what it lags
behind the policy is noise in every advantage."""


class TorchCritic:
    """Float32 master weights, AdamW with the trainer's settings but a learning rate of its own. Not thread-safe."""

    def __init__(self, config: Config, folder: Path, signal: Signal = REWARD) -> None:
        """folder: a model in the layout of `save_pretrained`, with a value head or without. signal: to be learnt."""
        own = signal.settings(config)
        rate = CRITIC_RATE * config.training.learning_rate if own.learning_rate is None else own.learning_rate
        settings = config.training.model_copy(update={"learning_rate": rate})
        model = load_value_model(folder, own.device, settings.precision)
        model.whole.train()
        if settings.gradient_checkpointing:
            checkpoint_activations(model.whole)
        optimizer = Optimizer.of(model.whole, settings, config.steps * settings.updates)
        self._learner = Learner(model, optimizer, config, Alone(), signal)

    @classmethod
    def resume(cls, config: Config, directory: Path, signal: Signal = REWARD) -> tuple["TorchCritic", dict[str, Any]]:
        """The critic that `save` left in `directory`, bit for bit, and the `extra` given then.

        Raises:
            ConfigError: there is none: the checkpoint is of an algorithm without a critic.
        """
        if not (directory / TRAINER).exists():
            raise ConfigError(
                f"checkpoint {directory.parent} holds no {signal.critic}: the run began with an algorithm that has "
                "none; start anew with another --run-dir"
            )
        critic = cls(config, directory / MODEL, signal)
        return critic, read_state(directory, critic._learner.optimizer, None, critic._learner.ranks)

    def refuse_another_tokenizer(self, policy: Path) -> None:
        """Raises ConfigError unless the model in this folder means the same by each token id."""
        refuse_another_tokenizer(self._learner.model, policy, f"{self._learner.signal.critic}.model")

    @property
    def updates(self) -> int:
        """Optimizer steps taken since the start of the run, over all epochs: the version of its values."""
        return self._learner.optimizer.updates

    @torch.no_grad()
    def values(
        self, prompts: Sequence[NDArray[np.int64]], responses: Sequence[NDArray[np.int64]]
    ) -> list[NDArray[np.float32]]:
        """Values [tokens] of each row, before each of its tokens was sampled, in one forward pass.

        The bits of a row depend on what else is in the pass; a single row's never do.
        """
        model = self._learner.model
        found = model.values(pad_rows(prompts, responses, [1.0] * len(prompts), model.device)).cpu().numpy()
        ends = np.cumsum([len(response) for response in responses])
        return np.split(found, ends[:-1])

    def begin(self, rows: Sequence[TrainRow], epoch: int, version: int) -> ValueStep:
        """Start to learn from these rows, the batch that the policy trains from `version`; nothing is computed yet."""
        return ValueStep(self._learner, rows, epoch, version)

    def save(self, directory: Path, extra: dict[str, Any]) -> None:
        """Write model/ and trainer.pt below `directory`; extra: plain values kept beside the state."""
        write_state(directory, self._learner.model, self._learner.optimizer, {}, extra, ranks=1)
