"""The trainer of a critic and its step: a model with a value head, trained beside the policy on the same rows. Its
metrics (docs/metrics.md) are over live tokens, with the values just before the update of the token."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.engines.models.model_families import refuse_rotation_by_longest_row
from asyncrl.engines.ranks.rank_mesh import RankMesh, own_device
from asyncrl.engines.ranks.shards import HeldModel
from asyncrl.engines.training.micro_batches import MaskedRow, lay_out_rows, live_rows, live_values, split_by_row
from asyncrl.engines.training.models_with_heads import ValueModel, load_value_model
from asyncrl.engines.training.optimizer import Optimizer
from asyncrl.engines.training.policy_loss import token_advantages
from asyncrl.engines.training.train_rows import REWARD, ModelRow, TrainRow, ValueTarget
from asyncrl.engines.training.trainer_checkpoint import MODEL, TRAINER, read_state
from asyncrl.engines.training.training_step import Backward, Trainer, TrainingStep
from asyncrl.errors import ConfigError
from asyncrl.objectives.losses import explained_variance, value_loss

SUMS = ("tokens", "loss", "clipped", "value", "return", "return_squares", "error", "error_squares", "staleness")


class CriticTrainer(Trainer):
    """Trains float32 master weights with the optimizer of the trainer, its settings and a learning rate of its own."""

    model: ValueModel

    def __init__(
        self, config: Config, folder: Path, target: ValueTarget = REWARD, mesh: RankMesh | None = None
    ) -> None:
        """Loads the model from `folder`, in the layout of `save_pretrained`, with a value head or without."""
        own = target.settings(config)
        refuse_rotation_by_longest_row(folder, config, f"{target.critic}.model" if own.model else "model.name")
        settings = config.training.model_copy(update={"learning_rate": own.rate(config.training.learning_rate)})
        self.config = config
        self.mesh = mesh or RankMesh()
        self.target = target
        device = own_device(own.device, self.mesh.rank, self.mesh.size)
        self.model = load_value_model(folder, device, settings.precision, in_parts=self.mesh.is_parted)
        self.model.share_out(self.mesh)
        self._held = HeldModel(self.model.whole, self.model.stage_weights, self.mesh)
        self.optimizer = Optimizer(self.model.whole, settings, config.steps)

    @classmethod
    def resume(
        cls, config: Config, directory: Path, target: ValueTarget = REWARD, mesh: RankMesh | None = None
    ) -> tuple["CriticTrainer", dict[str, Any]]:
        """Restores the critic that was copied and written to `directory`, bit for bit; returns its `extra` with it.
        Raises ConfigError for the checkpoint of an algorithm without this critic."""
        if not (directory / TRAINER).exists():
            raise ConfigError(
                f"checkpoint {directory.parent} holds no {target.critic}: the run began with an algorithm that has "
                "none; start anew with another --run-dir"
            )
        critic = cls(config, directory / MODEL, target, mesh)
        return critic, read_state(directory, critic.optimizer, critic.mesh)["extra"]

    def begin(self, rows: Sequence[TrainRow], incarnation: int, version: int) -> "CriticStep":
        return CriticStep(self, rows, incarnation, version)

    @torch.no_grad()
    def values(self, rows: Sequence[ModelRow]) -> list[NDArray[np.float32]]:
        """Computes the values [tokens] of each row, before each token was sampled, together, so that their bits depend
        on all these rows. Without rows it takes part in the pass of ranks that have some."""
        model = self.model
        budget = self.mesh.pass_budget(self.config.training.micro_batch_tokens)
        with self.mesh.failing():
            if not rows:
                model.idle_pass(backward=False)
                return []
            return split_by_row(model.values(lay_out_rows(rows, model.device, model.packs, budget)), rows)


class CriticStep(TrainingStep):
    """Trains a critic on the rows, updates and masks of the policy's step. The loss of an update is the mean over all
    its response tokens; a masked token only loses its loss term."""

    def __init__(self, trainer: CriticTrainer, rows: Sequence[TrainRow], incarnation: int, version: int) -> None:
        super().__init__(trainer, rows, incarnation, version)
        self._trainer = trainer
        self._sums = torch.zeros(len(SUMS), dtype=torch.float64, device=trainer.model.device)
        self._update_sums = self._sums

    def _prepare(self) -> Iterator[bool]:
        target = self._trainer.target
        for item in self._rows:
            _, values, _ = target.of(item.row)
            item.returns = token_advantages(item.row, self._config.algorithm, target) + values
        yield from ()

    def _backward(self, rows: Sequence[MaskedRow], number: int, tokens: int, samples: int) -> Backward:
        self._update_sums = torch.zeros_like(self._sums)
        finite = True
        for items in self._micro_batches(rows):
            finite = self._value_pass(items, 1.0 / tokens) and finite
            yield True
        return finite

    def _value_pass(self, rows: Sequence[MaskedRow], weight: float) -> bool:
        """Runs forward and backward of a micro-batch; returns False and adds nothing if its loss is not finite."""
        model = self._trainer.model
        target = self._trainer.target
        if not rows:
            model.idle_pass(backward=True)
            return True
        samples = [target.of(item.row) for item in rows]
        old = live_values(rows, [values for _, values, _ in samples], model.device)
        returns = live_values(rows, [item.returns for item in rows], model.device)
        with self._lane("forward"):
            values = model.values(live_rows(rows, model.device, model.packs, self._pass_budget))
        terms, clipped = value_loss(values, old, returns, target.settings(self._config).value_clip)
        loss = weight * terms.sum()
        with self._lane("backward"):  # Also of a loss that is not finite: ranks with shards of the weights take part.
            torch.autograd.backward(loss)
        if not math.isfinite(loss.item()):
            return False
        for item in rows:
            item.in_loss = item.live_tokens
        ages = [float(self._optimizer.updates - valued_at) for _, _, valued_at in samples]
        values, errors = values.detach(), returns - values.detach()
        of_values = (torch.ones_like(values), weight * terms.detach(), clipped, values)
        of_returns = (returns, returns.double().square(), errors, errors.double().square())
        columns = (*of_values, *of_returns, live_values(rows, ages, model.device))
        self._update_sums += torch.stack([column.double().sum() for column in columns])
        return True

    def _keep_sums(self) -> None:
        self._sums += self._update_sums

    def _metrics(self, counts: Tensor) -> dict[str, float]:
        sums = dict(zip(SUMS, self._mesh.rows.sum(self._sums).tolist(), strict=True))
        critic = self._trainer.target.critic
        updates = len(self._norms)
        tokens = sums["tokens"]
        if not updates:
            return {f"{critic}/updates": 0.0}
        returns, errors = ((tokens, sums[name], sums[f"{name}_squares"]) for name in ("return", "error"))
        return {
            f"{critic}/updates": float(updates),
            f"{critic}/loss": sums["loss"] / updates,
            f"{critic}/clip_frac": sums["clipped"] / tokens,
            f"{critic}/value_mean": sums["value"] / tokens,
            f"{critic}/return_mean": sums["return"] / tokens,
            f"{critic}/explained_variance": explained_variance(returns, errors),
            f"{critic}/staleness": sums["staleness"] / tokens,
            f"{critic}/grad_norm": sum(self._norms) / updates,
            f"{critic}/learning_rate": self._optimizer.rate,
        }
