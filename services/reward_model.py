"""Scores samples with a reward model, in addition to the functions of the user."""

from pathlib import Path

import torch

from asyncrl.concurrency import gather
from asyncrl.config.schema import MODEL_TERM
from asyncrl.engines.devices import refuse_unusable
from asyncrl.engines.models.row_length import refuse_rotation_by_longest_row
from asyncrl.engines.training.batch.contexts import contexts_of
from asyncrl.engines.training.batch.micro_batches import spans_of, token_ids
from asyncrl.engines.training.models_with_heads import ValueModel, load_score_model, refuse_another_tokenizer
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.protocols.batch import Batch, BatchRef
from asyncrl.rewards.execution.function_call import result_of
from asyncrl.rewards.functions import FunctionSpec
from asyncrl.rewards.sample import FunctionResult, Sample
from asyncrl.services.forward_passes import results_of_forward_passes
from asyncrl.services.reward import RewardService


class RewardModelService(RewardService):
    """Scores a sample by the model state at its last sampled token, which may belong to a stop string. A score that is
    not finite is handled like that of a function. options: `model`: the folder of the reward model."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._model: ValueModel
        key = f"{context.spec.service}.model"
        self._specs = (*self._specs, FunctionSpec(MODEL_TERM, MODEL_TERM, self._section.weight, key=key))

    async def start(self) -> None:
        """Loads the model and starts the functions. Raises ConfigError when torch lacks the device or the folder holds
        no reward model with the policy's tokenizer."""
        self._model = await self.context.compute.run(self._load)
        await super().start()

    async def _score_all(self, refs: BatchRef, samples: list[Sample]) -> list[list[FunctionResult]]:
        by_model = results_of_forward_passes(self.context, refs, self._scores)
        by_functions, scores = await gather(super()._score_all(refs, samples), by_model)
        return [[*own, result_of(score)] for own, score in zip(by_functions, scores, strict=True)]

    def _load(self) -> ValueModel:
        context, device, key = self.context, self._section.device, f"{self.context.spec.service}.model"
        refuse_unusable(f"{context.spec.service}.device", device)
        folder = Path(context.spec.options["model"])
        refuse_rotation_by_longest_row(folder, context.config, key)
        model = load_score_model(folder, device, context.config.training.precision)
        refuse_another_tokenizer(model, context.facts.model_dir, key)
        return model

    @torch.no_grad()
    def _scores(self, rows: Batch) -> list[float]:
        """Returns the score of each row's newest context."""
        newest = [contexts_of(*row)[-1] for row in zip(*token_ids(rows), spans_of(rows), strict=True)]
        prompts, responses = [each.prompt for each in newest], [each.response for each in newest]
        scores: list[float] = self._model.scores(prompts, responses).cpu().tolist()
        return scores
