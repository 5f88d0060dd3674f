"""Scores samples by what a person says, and by a reward model, which may stand in for the person."""

import math
from dataclasses import replace

from asyncrl.config.schema import MODEL_TERM
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.rewards.sample import FunctionResult, Sample
from asyncrl.services.feedback import PERSON, FeedbackService
from asyncrl.services.reward_model import RewardModelService


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
