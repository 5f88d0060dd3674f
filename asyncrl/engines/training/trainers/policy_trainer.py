"""The trainer of the policy: any causal language model of transformers, on CPU or CUDA, one device per rank."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.engines.canary_logprobs import canary_of, probe_tokens
from asyncrl.engines.training.interface import TrainRow
from asyncrl.engines.training.loss.logprobs import logprobs_after
from asyncrl.engines.training.loss.pretraining_loss import load_pretraining
from asyncrl.engines.training.state.data_parallel import Ranks, SingleRank, check_same, own_device
from asyncrl.engines.training.state.models_with_heads import load_causal_model
from asyncrl.engines.training.state.optimizer import training_optimizer
from asyncrl.engines.training.state.saved_state import MODEL, read_state, write_own_state, write_state
from asyncrl.engines.training.trainers.policy_step import PolicyState, PolicyStep
from asyncrl.lanes.weights.tensor_spec import WeightsSpec, spec_of
from asyncrl.objectives.kl import KlCoefficient
from asyncrl.objectives.lagrangian import Multiplier
from asyncrl.protocols.messages import Canary


class PolicyTrainer:
    """Trains float32 master weights with AdamW. On CPU with one thread the same rows give the same bits."""

    def __init__(self, config: Config, folder: Path, ranks: Ranks | None = None, texts: Path | None = None) -> None:
        """Loads the model from `folder`, in the layout of `save_pretrained`, and the pretraining texts, if any.

        Raises:
            TaskError: a pretraining text cannot be used.
        """
        settings, ranks = config.training, ranks or SingleRank()
        device = own_device(settings.device, ranks.rank, ranks.size)
        model = load_causal_model(folder, device, settings.precision, float32_head=config.model.float32_head)
        optimizer = training_optimizer(model.whole, settings, config.steps)
        kl = KlCoefficient(config.algorithm.kl, config.algorithm.kl_target)
        pretraining = None if texts is None else load_pretraining(texts, config, model)
        self._probe = probe_tokens(model.tokenizer)
        self._state = PolicyState(model, optimizer, config, ranks, kl, _multiplier_of(config), pretraining)

    @classmethod
    def resume(
        cls, config: Config, directory: Path, ranks: Ranks | None = None, texts: Path | None = None
    ) -> tuple["PolicyTrainer", dict[str, Any]]:
        """Restores the trainer that `save` wrote to `directory`, bit for bit, and returns the saved `extra` with it."""
        trainer = cls(config, directory / MODEL, ranks, texts)
        state = trainer._state
        return trainer, read_state(directory, state.optimizer, state.kl, state.ranks, state.multiplier)

    def begin(self, rows: Sequence[TrainRow], incarnation: int, version: int) -> PolicyStep:
        return PolicyStep(self._state, rows, incarnation, version)

    @property
    def weights_spec(self) -> WeightsSpec:
        return spec_of(self._state.model.whole, self._state.config.model.dtype)

    def named_tensors(self) -> dict[str, Tensor]:
        parameters = self._state.model.whole.named_parameters(remove_duplicate=False)
        return {name: parameter.detach() for name, parameter in parameters}

    def canary(self) -> Canary:
        return canary_of(self._probe, logprobs_after(self._state.model, self._probe))

    def save(self, directory: Path, extra: dict[str, Any]) -> None:
        state = self._state
        check_same(state.ranks, state.optimizer.parameters)
        if state.ranks.rank == 0:
            numbers = {"kl": state.kl.value}
            numbers |= {} if state.multiplier is None else {"multiplier": state.multiplier.value}
            write_state(directory, state.model, state.optimizer, numbers, extra, state.ranks.size)
        else:
            write_own_state(directory, state.ranks.rank)


def _multiplier_of(config: Config) -> Multiplier | None:
    """Returns the cost multiplier at the start of a run, or None without a cost constraint."""
    if config.algorithm.constraint == "none":
        return None
    cost = config.cost
    assert cost.limit is not None, "the config requires a limit with a constraint"
    return Multiplier(cost.multiplier, cost.multiplier_rate, cost.limit, cost.multiplier_max)
