"""Scores samples with a reward model, in addition to the functions of the user."""

from pathlib import Path

import torch

from asyncrl.concurrency import gather
from asyncrl.config.schema import MODEL_TERM
from asyncrl.engines.devices import refuse_unusable
from asyncrl.engines.training.batch.micro_batches import forward_passes, token_ids
from asyncrl.engines.training.models_with_heads import ValueModel, load_score_model, refuse_another_tokenizer
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.protocols.batch import Batch, BatchRef
from asyncrl.rewards.execution.function_call import result_of
from asyncrl.rewards.functions import FunctionSpec
from asyncrl.rewards.sample import FunctionResult, Sample
from asyncrl.services.reward import RewardService


class RewardModelService(RewardService):
    """Scores a sample by the model state at its last sampled token, which may belong to a stop string.

    options: `model`: the folder of the reward model. A score that is not finite is handled like that of a function.
    With `generation.deterministic`, each row has a forward pass of its own, so that its bits do not depend on others.
    """

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._model: ValueModel
        key = f"{context.service}.model"
        self._specs = (*self._specs, FunctionSpec(MODEL_TERM, MODEL_TERM, self._section.weight, key=key))

    async def start(self) -> None:
        """Loads the model and starts the functions.

        Raises:
            ConfigError: torch lacks the device, or the folder holds no reward model with the tokenizer of the policy.
        """
        self._model = await self.context.compute.run(self._load)
        await super().start()

    async def _score_all(self, refs: BatchRef, samples: list[Sample]) -> list[list[FunctionResult]]:
        by_functions, by_model = await gather(super()._score_all(refs, samples), self._score_with_model(refs))
        return [[*own, of_model] for own, of_model in zip(by_functions, by_model, strict=True)]

    async def _score_with_model(self, refs: BatchRef) -> list[FunctionResult]:
        rows = await self.context.reader.read(refs, ["prompt_ids", "response_ids"])
        scores: dict[int, float] = {}
        for part in forward_passes(rows, self.context.config):
            scores.update(zip(part, await self.context.compute.run(self._scores, rows.take(part)), strict=True))
        return [result_of(scores[row]) for row in range(len(refs))]

    # ---- on the compute thread ---------------------------------------------------------------------------

    def _load(self) -> ValueModel:
        context, device, key = self.context, self._section.device, f"{self.context.service}.model"
        refuse_unusable(f"{context.service}.device", device)
        model = load_score_model(Path(context.options["model"]), device, context.config.training.precision)
        refuse_another_tokenizer(model, context.model_dir, key)
        return model

    @torch.no_grad()
    def _scores(self, rows: Batch) -> list[float]:
        """Runs one forward pass."""
        scores: list[float] = self._model.scores(*token_ids(rows)).cpu().tolist()
        return scores
