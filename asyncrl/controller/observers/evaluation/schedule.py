"""Decides when versions are evaluated: on request, one at a time, beside training."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from asyncrl.concurrency import running_timeout
from asyncrl.config.schema import Config
from asyncrl.controller.observers.evaluation.answers import AnswersFolder
from asyncrl.controller.observers.evaluation.episodes import EpisodeEvaluator
from asyncrl.controller.observers.evaluation.evaluator import Evaluation, Evaluator, Question
from asyncrl.errors import DeadlineExceeded, Refused, Retryable, WeightsError
from asyncrl.fleet.fleet import Fleet
from asyncrl.protocols.messages import Published

READER = "evaluation"
"""Name of the reader that leases a version from the trainer while it is copied out."""


class VersionEvaluator(Protocol):
    """Evaluates versions on one set, or on its episodes."""

    async def evaluate(self, version: int, incarnation: int) -> Evaluation: ...


async def copy_weights(fleet: Fleet, published: Published, config: Config) -> None:
    """Lets the evaluation service copy out a version, leased meanwhile so that the trainer cannot overwrite it.

    Between leases the trainer may write. Raises Refused when the version was overwritten, and WeightsError when it is
    damaged, or the copy too slow.
    """
    assert fleet.evaluation is not None
    lease = config.staleness.publish_deadline + published.transfer
    deadline = config.fleet.start_deadline + config.fleet.call_deadline  # Longer than a worker's restart takes.
    loop = asyncio.get_running_loop()
    until = loop.time() + deadline
    while loop.time() < until:
        await fleet.training.using((READER,), published.version)
        try:
            async with running_timeout(lease):
                await fleet.evaluation.use_weights(published)
            return
        except (TimeoutError, DeadlineExceeded):
            continue
        finally:
            await fleet.training.detached(READER)
    raise WeightsError(
        f"weights of version {published.version} could not be copied within {deadline:g} s, in tries of "
        f"{lease:.3g} s: raise staleness.publish_deadline when a copy takes longer, or read the worker's log"
    )


@dataclass
class EvaluationSchedule:
    """Evaluates versions on request, one at a time, beside training. At most one waits: a newer one replaces it, and is
    evaluated on its sets too.

    evaluators: by the name of the set. skipped: takes each version that is not evaluated, and the reason.
    """

    fleet: Fleet
    evaluators: Mapping[str, VersionEvaluator]
    config: Config
    done: Callable[[Evaluation], None]
    skipped: Callable[[int, str], None]

    def __post_init__(self) -> None:
        self._asked: Published | None = None
        self._sets: dict[str, None] = {}
        self._running = -1
        self._changed = asyncio.Event()
        self._idle = asyncio.Lock()
        self._newest = -1
        self._finished: set[str] = set()

    @property
    def pending(self) -> set[int]:
        """Returns the versions that are evaluated now, or wait for it."""
        asked = -1 if self._asked is None else self._asked.version
        return {version for version in (self._running, asked) if version >= 0}

    def ask(self, published: Published, sets: Collection[str] | None = None) -> None:
        """Requests the evaluation of this version, after the running one, on these sets; default: on all of them."""
        if self._asked is not None and self._asked.version != published.version:
            self.skipped(self._asked.version, f"version {published.version} came before its turn")
        self._asked = published
        self._sets |= dict.fromkeys(self.evaluators if sets is None else sets)
        self._changed.set()

    async def run(self) -> None:
        while True:
            await self._changed.wait()
            await self._next()

    async def finish(self, last: Published) -> None:
        await self._next()
        self.ask(last)
        await self._next()

    async def _next(self) -> None:
        async with self._idle:
            self._changed.clear()
            published = self._asked
            if published is None:
                return
            if published.version != self._newest:
                self._finished.clear()
            sets = [name for name in self._sets if name not in self._finished]
            self._sets.clear()
            self._asked = None
            self._running = self._newest = published.version
            try:
                await self._evaluate(published, sets)
            finally:
                self._running = -1

    async def _evaluate(self, published: Published, left: list[str]) -> None:
        """Evaluates a version on these sets; tries again once when a worker dies, and skips a version that was
        overwritten."""
        for attempt in range(2 if left else 0):
            try:
                await copy_weights(self.fleet, published, self.config)
                while left:
                    self.done(await self.evaluators[left[0]].evaluate(published.version, published.incarnation))
                    self._finished.add(left.pop(0))
                return
            except (WeightsError, Refused) as error:
                self._finished.update(left)
                self.skipped(published.version, str(error))
                return
            except Retryable as error:
                if attempt:
                    self.skipped(published.version, str(error))


def schedule_of(
    fleet: Fleet,
    config: Config,
    questions: Mapping[str, Sequence[Question]],
    answers: Path,
    done: Callable[[Evaluation], None],
    skipped: Callable[[int, str], None],
) -> EvaluationSchedule | None:
    """Returns the schedule of a run; None without held-out prompts or episodes. questions: by set. answers: folder that
    gets them. done, skipped: as in EvaluationSchedule."""
    if not config.evaluate.is_on:
        return None
    assert fleet.evaluation is not None, "a run with evaluations has this service"
    folder = AnswersFolder(answers, config.evaluate.keep_answers)
    save = folder.save if folder.keep else None
    if config.acting.env:
        return EvaluationSchedule(fleet, {"": EpisodeEvaluator(fleet.evaluation, config, save)}, config, done, skipped)
    evaluators = {
        name: Evaluator(fleet.evaluation, fleet.reward, own, config, fleet.cost, fleet.environment, name, save)
        for name, own in questions.items()
    }
    return EvaluationSchedule(fleet, evaluators, config, done, skipped)
