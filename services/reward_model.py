"""Scores samples with a reward model, in addition to the functions of the user, alone or beside a person."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.concurrency import gather
from asyncrl.config.schema import MODEL_TERM
from asyncrl.engines.devices import refuse_unusable
from asyncrl.engines.generation.tokenization import ASSISTANT, TokenizerWithStops
from asyncrl.engines.models.model_families import refuse_rotation_by_longest_row
from asyncrl.engines.models.model_folder import context_of_folder
from asyncrl.engines.ranks.rank_mesh import RankMesh, own_device
from asyncrl.engines.training.models_with_heads import ValueModel, load_score_model, refuse_another_tokenizer
from asyncrl.engines.training.train_rows import contexts_of, model_rows
from asyncrl.errors import RewardError, TaskError
from asyncrl.fleet.worker.rank_meeting import MeetingPlace
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.protocols.batch import Batch, BatchRef
from asyncrl.protocols.messages import Score
from asyncrl.protocols.prompt_row import PackedRow
from asyncrl.rewards.execution.function_call import result_of
from asyncrl.rewards.functions import FunctionSpec
from asyncrl.rewards.sample import FunctionResult, Sample
from asyncrl.services.feedback import PERSON, FeedbackService
from asyncrl.services.ranks import (
    LedRanks,
    find_meeting,
    in_passes,
    on_all_ranks,
    open_mesh,
    results_of_forward_passes,
    warn_of_whole_load,
)
from asyncrl.services.reward import RewardService
from asyncrl.tasks.prompt_rows import with_system
from asyncrl.tasks.turn_template import WHOLE


class RewardModelService(RewardService):
    """Scores a sample by the model state at its last sampled token, which may belong to a stop string; a model that
    reads text, by the state at the end of the conversation as its own chat template writes it. A score that is not
    finite is handled like that of a function. options: `model`: the folder of the reward model.

    Of several ranks the first one answers and runs the functions; the others compute with it.
    """

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._model: ValueModel
        self._mesh = RankMesh()
        self._ranks = LedRanks(context, self._mesh, {})
        self._positions: int | None
        key = f"{context.spec.service}.model"
        self._specs = (*self._specs, FunctionSpec(MODEL_TERM, MODEL_TERM, self._section.weight, key=key))

    async def start(self) -> None:
        """Loads the model and starts the functions. Raises ConfigError when torch lacks the device or the folder holds
        no reward model with the policy's tokenizer."""
        self._model = await self.context.compute.run(self._load, await find_meeting(self.context))
        self._ranks = LedRanks(self.context, self._mesh, {"samples": self._score_samples, "texts": self._score_texts})
        if not self._ranks.follows:
            await super().start()

    async def stop(self) -> None:
        await self._ranks.stop()
        await super().stop()

    async def score(self, samples: BatchRef, row: dict[str, Any] | PackedRow) -> list[Score]:
        return [] if self._ranks.follows else await super().score(samples, row)

    async def _score_all(self, refs: BatchRef, samples: list[Sample]) -> list[list[FunctionResult]]:
        by_model = self._scored_as_text(samples) if self._reads_text else self._scored(refs)
        by_functions, results = await gather(super()._score_all(refs, samples), by_model)
        return [[*own, result] for own, result in zip(by_functions, results, strict=True)]

    @property
    def _reads_text(self) -> bool:
        return self._section.reads == "text"

    async def _scored(self, refs: BatchRef) -> list[FunctionResult]:
        return [result_of(score) for score in await self._ranks.run("samples", refs)]

    async def _scored_as_text(self, samples: list[Sample]) -> list[FunctionResult]:
        """Scores prompts and answers; a conversation that the model cannot read has a reason in place of a score."""
        results, rows = await self.context.compute.run(self._conversations, samples)
        scores = await self._ranks.run("texts", list(rows.values()))
        results.update(zip(rows, map(result_of, scores), strict=True))
        return [results[number] for number in range(len(samples))]

    # ---- work of all ranks -------------------------------------------------------------------------------

    async def _score_samples(self, refs: BatchRef) -> list[float]:
        return await results_of_forward_passes(self.context, refs, self._scores, mesh=self._mesh)

    async def _score_texts(self, rows: list[list[int]]) -> list[float]:
        """Scores conversations, within the tokens that one pass may have."""
        lengths = list(map(len, rows))

        async def compute(own: Sequence[int]) -> list[float]:
            left = {number: lengths[row] for number, row in enumerate(own)}
            passes = []
            while left:
                passes.append(_within(left, self.context.config.training.micro_batch_tokens))
                left = {number: length for number, length in left.items() if number not in passes[-1]}

            def run(part: list[int]) -> list[float]:
                return self._forward([np.array(rows[own[number]], np.int64) for number in part])

            return await in_passes(self.context, self._mesh, passes, run)

        return await on_all_ranks(self.context, self._mesh, lengths, compute)

    def _load(self, meeting: MeetingPlace | None) -> ValueModel:
        context = self.context
        key = f"{self.context.spec.service}.model"
        refuse_unusable(f"{context.spec.service}.device", self._section.device)
        self._mesh = mesh = open_mesh(context, meeting, is_led=True)
        device = own_device(self._section.device, mesh.rank, mesh.size)
        folder = Path(context.spec.options["model"])
        refuse_rotation_by_longest_row(folder, context.config, key)
        model = load_score_model(folder, device, context.config.training.precision, in_parts=mesh.is_parted)
        if not self._reads_text:
            refuse_another_tokenizer(model, context.facts.model_dir, key)
        model.share_out(mesh)
        warn_of_whole_load(context, model.loaded_whole)
        self._positions = context_of_folder(folder)
        return model

    def _scores(self, rows: Batch) -> list[float]:
        """Returns the score of each row's newest context."""
        if not len(rows):
            return self._forward([])
        newest = [contexts_of(row)[-1] for row in model_rows(rows)]
        return self._forward([np.concatenate([each.prompt, each.response]) for each in newest])

    def _conversations(self, samples: list[Sample]) -> tuple[dict[int, FunctionResult], dict[int, list[int]]]:
        """Returns the tokens of conversations, and the results of those that have none."""
        results = dict[int, FunctionResult]()
        rows = dict[int, list[int]]()
        for number, sample in enumerate(samples):
            try:
                rows[number] = self._conversation(sample).tolist()
            except (TaskError, RewardError) as error:
                results[number] = FunctionResult(reason=str(error))
        return results, rows

    def _conversation(self, sample: Sample) -> NDArray[np.int64]:
        """Returns the tokens of prompt and answer by the chat template of the model. Raises RewardError where it has
        too few positions for them, and TaskError for a template that fails."""
        task = self.context.config.task
        texts = TokenizerWithStops(self._model.tokenizer, (), task.template_clock)
        prompt = with_system(sample.prompt, task.system, "the prompt", chat=True)
        messages = [*prompt, {"role": ASSISTANT, "content": sample.answer}]
        ids = texts.text_ids(texts.render_chat([*map(dict, messages)], end=WHOLE)).astype(np.int64)
        if self._positions is not None and len(ids) > self._positions:
            raise RewardError(
                f"prompt and answer have {len(ids)} tokens, and the reward model has {self._positions} positions"
            )
        return ids

    @torch.no_grad()
    def _forward(self, rows: list[NDArray[np.int64]]) -> list[float]:
        with self._mesh.failing():
            if not rows:
                self._model.idle_pass(backward=False)
                return []
            scores: list[float] = self._model.scores(rows).cpu().tolist()
            return scores


def _within(lengths: Mapping[int, int], tokens: int) -> list[int]:
    """Returns the first of these rows, and those after it that have room in one padded batch of so many tokens."""
    part = list[int]()
    longest = 0
    for number, length in lengths.items():
        longest = max(longest, length)
        if part and longest * (len(part) + 1) > tokens:
            break
        part.append(number)
    return part


# ---- beside a person, for whom the model may stand in --------------------------------------------------------------


class FeedbackWithModelService(FeedbackService, RewardModelService):
    """Adds the terms `model` and `person`. With `feedback.otherwise = "model"` the model's score s stands in for a
    person as sigmoid(s), and the term `model` is only reported."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        if self._feedback.otherwise == "model":
            self._specs = tuple(replace(spec, weight=0.0) if spec.name == MODEL_TERM else spec for spec in self._specs)
        assert self._specs[-1].name == PERSON

    def _result(self, others: list[FunctionResult], value: float | None, sample: Sample) -> FunctionResult:
        if value is not None or self._feedback.otherwise != "model":
            return super()._result(others, value, sample)
        score = others[-1]
        if not isinstance(score.value, float):
            return score
        return FunctionResult(1 / (1 + math.exp(-max(-60.0, min(60.0, score.value)))))
