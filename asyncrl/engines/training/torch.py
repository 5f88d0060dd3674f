"""The engine on plain PyTorch: any causal language model of transformers, CPU or CUDA, one device a rank."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from asyncrl.config import Config
from asyncrl.engines.probe import probe_ids
from asyncrl.engines.training.interface import TrainRow
from asyncrl.engines.training.logprobs import logprobs_after
from asyncrl.engines.training.model import load_causal_model
from asyncrl.engines.training.optimizer import Optimizer
from asyncrl.engines.training.pretraining import load_pretraining
from asyncrl.engines.training.ranks import Alone, Ranks, check_same, own_device
from asyncrl.engines.training.state import MODEL, read_state, write_own_state, write_state
from asyncrl.engines.training.step import TorchStep, Trainer
from asyncrl.objectives.kl import KlCoefficient
from asyncrl.objectives.lagrangian import Multiplier
from asyncrl.protocols.messages import Canary
from asyncrl.weights.spec import WeightsSpec, spec_of

CANARY_TOKENS = 16
"""Whose log-probs are compared: the likeliest, for those of unlikely ones are large and rounded."""


class TorchTraining:
    """Float32 master weights, AdamW. Deterministic on CPU with one thread: same rows, same bits."""

    def __init__(self, config: Config, folder: Path, ranks: Ranks | None = None, texts: Path | None = None) -> None:
        """folder: a model in the layout of `save_pretrained`. texts: the file of those that are learnt beside.

        Raises:
            TaskError: a text has not the columns it should have.
        """
        settings, ranks = config.training, ranks or Alone()
        device = own_device(settings.device, ranks.rank, ranks.size)
        model = load_causal_model(folder, device, settings.precision, float32_head=config.model.float32_head)
        model.whole.train()
        if settings.gradient_checkpointing:
            checkpoint_activations(model.whole)
        optimizer = Optimizer.of(model.whole, settings, config.steps * settings.updates)
        kl = KlCoefficient(config.algorithm.kl, config.algorithm.kl_target)
        pretraining = None if texts is None else load_pretraining(texts, config, model)
        self._probe = probe_ids(model.tokenizer)
        self._trainer = Trainer(model, optimizer, config, ranks, kl, multiplier_of(config), pretraining)

    @classmethod
    def resume(
        cls, config: Config, directory: Path, ranks: Ranks | None = None, texts: Path | None = None
    ) -> tuple["TorchTraining", dict[str, Any]]:
        """The engine that `save` left in `directory`, bit for bit, and the `extra` given then."""
        engine = cls(config, directory / MODEL, ranks, texts)
        trainer = engine._trainer
        return engine, read_state(directory, trainer.optimizer, trainer.kl, trainer.ranks, trainer.multiplier)

    def begin(self, rows: Sequence[TrainRow], epoch: int, version: int) -> TorchStep:
        return TorchStep(self._trainer, rows, epoch, version)

    @property
    def weights_spec(self) -> WeightsSpec:
        config = self._trainer.config
        return spec_of(self._trainer.model.whole, config.model.dtype)

    def named_tensors(self) -> dict[str, Tensor]:
        parameters = self._trainer.model.whole.named_parameters(remove_duplicate=False)
        return {name: parameter.detach() for name, parameter in parameters}

    def canary(self) -> Canary:
        model = self._trainer.model
        logprobs, tokens = logprobs_after(model, self._probe).topk(min(CANARY_TOKENS, model.vocabulary))
        return Canary(tuple(self._probe.tolist()), tuple(tokens.tolist()), tuple(logprobs.tolist()))

    def save(self, directory: Path, extra: dict[str, Any]) -> None:
        trainer = self._trainer
        check_same(trainer.ranks, trainer.optimizer.parameters)
        if trainer.ranks.rank == 0:
            numbers = {"kl": trainer.kl.value}
            numbers |= {} if trainer.multiplier is None else {"multiplier": trainer.multiplier.value}
            write_state(directory, trainer.model, trainer.optimizer, numbers, extra, trainer.ranks.size)
        else:
            write_own_state(directory, trainer.ranks.rank)


def multiplier_of(config: Config) -> Multiplier | None:
    """As a run begins with it."""
    if config.algorithm.constraint == "none":
        return None
    cost = config.cost
    assert cost.limit is not None, "the config needs it with a constraint"
    return Multiplier(cost.multiplier, cost.multiplier_rate, cost.limit, cost.multiplier_max)


def checkpoint_activations(model: Any) -> None:
    """transformers renamed the method within the range of versions that we accept."""
    renamed = hasattr(model, "activation_checkpointing_enable")
    enable = model.activation_checkpointing_enable if renamed else model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
