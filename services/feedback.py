"""Scores samples by what a person says on a web page while the run trains, in addition to the functions of the user."""

import math

import numpy as np
from numpy.typing import NDArray

from asyncrl.concurrency import gather
from asyncrl.config.sections.secret import revealed
from asyncrl.engines.training.train_rows import contexts_of, model_rows
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.lanes.http_server import HttpServer
from asyncrl.protocols.batch import SPANS, BatchRef, RowRef
from asyncrl.rewards.feedback.pairs import RatableAnswer
from asyncrl.rewards.feedback.waiting_answers import FeedbackBoard, RatingsFile
from asyncrl.rewards.feedback.web import FeedbackWeb
from asyncrl.rewards.functions import FunctionSpec
from asyncrl.rewards.sample import FunctionResult, Sample
from asyncrl.services.reward import RewardService
from asyncrl.telemetry.run_directory import RunDirectory

PERSON = "person"
"""Name of the reward term of a person."""


class FeedbackService(RewardService):
    """Adds the term `person` to a score. A sample waits for its rating in `score`, at most `feedback.deadline`.
    options: `host`, `port` and `key` of the page. Samples of the evaluation are shown to nobody."""

    renews = False

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._feedback = section = context.config.feedback
        options = revealed(context.spec.options)
        person = FunctionSpec(PERSON, PERSON, section.weight, key="feedback.ask", on_error="ignore")
        self._specs = (*self._specs, person)
        members = context.config.task.samples_per_prompt if section.ask == "pick" else 0
        self.board = FeedbackBoard(RatingsFile(RunDirectory(context.facts.run_dir).ratings), members=members)
        web = FeedbackWeb(self.board, section, options["key"])
        self._http = HttpServer(web.app, options["host"], options["port"])
        self.port = 0

    async def start(self) -> None:
        """Reads the ratings on disk, serves the page and starts the functions. Raises ConfigError when the port is
        taken."""
        await self.board.file.open()
        self.port = self._http.listen("feedback.port")
        self.context.tasks.create_task(self._http.serve(), name=f"feedback page at port {self.port}")
        await super().start()

    async def stop(self) -> None:
        await self._http.stop()
        self.board.file.close()
        await super().stop()

    @property
    def finished(self) -> int:
        return super().finished + self.board.rated + self.board.unrated

    async def _score_all(self, refs: BatchRef, samples: list[Sample]) -> list[list[FunctionResult]]:
        others, values = await gather(super()._score_all(refs, samples), self._ask_all(refs, samples))
        self._count()
        return [
            [*own, self._result(own, value, sample)] for own, value, sample in zip(others, values, samples, strict=True)
        ]

    async def _ask_all(self, refs: BatchRef, samples: list[Sample]) -> list[float | None]:
        seen = await self._seen(refs)
        with self.context.occupancy.waiting():
            return list(await gather(*(self._ask(*each) for each in zip(refs, samples, seen, strict=True))))

    async def _seen(self, refs: BatchRef) -> list[NDArray[np.int32]]:
        """Returns the tokens of the newest context of each sample, as a reward model scores it."""
        names = ["prompt_ids", "response_ids", *([SPANS] if self._plays else [])]
        found = await self.context.reader.read(refs, names)
        newest = [contexts_of(row)[-1] for row in model_rows(found)]
        return [np.concatenate([each.prompt, each.response]).astype(np.int32) for each in newest]

    async def _ask(self, ref: RowRef, sample: Sample, seen: NDArray[np.int32]) -> float | None:
        if sample.group < 0:  # of the evaluation
            return None
        await self.board.version_seen(ref.last)
        self._count()
        answer = RatableAnswer.of(sample, seen)
        seconds = self._feedback.deadline
        return await self.board.value(answer, self._useful_to(ref), seconds, ref.attempt)

    def _useful_to(self, ref: RowRef) -> float:
        """Returns the newest version of the policy that may train on a sample."""
        staleness = self.context.config.staleness
        stamp = staleness.rule.expires(ref.first, ref.last)
        return math.inf if stamp is None else stamp + staleness.limit

    def _count(self) -> None:
        board = self.board
        self.counters |= {
            "feedback/ratings": float(board.file.ratings),
            "feedback/late": float(board.file.late),
            "feedback/waiting": float(board.waiting),
            "feedback/unrated": float(board.unrated),
        }

    def _result(self, others: list[FunctionResult], value: float | None, sample: Sample) -> FunctionResult:
        """Returns the result of the person. others: those of functions and model."""
        if value is not None:
            return FunctionResult(value)
        if self._feedback.otherwise == "constant":
            return FunctionResult(self._feedback.constant)
        if sample.group < 0:
            return FunctionResult({})  # A held-out sample has the other terms only.
        return FunctionResult(
            reason=f"nobody rated it within {self._feedback.deadline:g} s (feedback.deadline), or while the staleness "
            "limit let it train, or while another answer was left to compare it with, or a person skipped it"
        )
