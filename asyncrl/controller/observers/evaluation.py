"""Held-out prompts, sampled by exactly one named version beside training, and scored by the run's rewards and costs."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from asyncrl.config import Config
from asyncrl.errors import Refused, Retryable, WeightsError
from asyncrl.fleet import Fleet
from asyncrl.protocols.batch import BatchRef
from asyncrl.protocols.contracts import Generation, Reward
from asyncrl.protocols.messages import PromptGroup, Published
from asyncrl.protocols.seeds import group_seed
from asyncrl.together import together

READER = "evaluation"
"""Name under which the version being copied out is leased from the trainer."""

Question = tuple[str | list[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """mean, stderr: of the reward over prompts (their samples averaged first). cost: the mean of costs, likewise; None
    where nothing has a cost. unscorable: samples without a reward, or without a cost where there are costs."""

    version: int
    prompts: int
    mean: float
    stderr: float
    cost: float | None
    unscorable: int
    seconds: float


Known = list[float | None]
"""Rewards or costs of a prompt's samples; None for those without one."""


class Evaluator:
    """Samples all held-out prompts with one version and scores them. cost: where answers have costs.

    Groups have negative ids, so that they are never taken for those of training.
    """

    def __init__(
        self,
        generation: Generation,
        reward: Reward,
        questions: Sequence[Question],
        config: Config,
        cost: Reward | None = None,
    ) -> None:
        self._generation, self._questions, self._config = generation, questions, config
        self._judges = [reward] if cost is None else [reward, cost]
        # As many groups as the engine has slots for: more would only wait in its queue.
        self._places = asyncio.Semaphore(max(1, config.generation.slots // config.evaluate.samples))

    async def evaluate(self, version: int, epoch: int) -> Evaluation:
        """Raises what reward and cost raise; Retryable when a worker died meanwhile."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        found = await together(*(self._ask(index, version, epoch) for index in range(len(self._questions))))
        rewards, *costs = zip(*found, strict=True)
        return summary(version, rewards, costs[0] if costs else None, loop.time() - began)

    async def _ask(self, index: int, version: int, epoch: int) -> list[Known]:
        """By each judge."""
        async with self._places:
            prompts, row = self._group(index, version, epoch)
            samples = BatchRef.join([finished async for finished in self._generation.generate(prompts)])
            try:
                judged = await together(*(judge.score(samples, row) for judge in self._judges))
                return [[score.reward for score in scores] for scores in judged]
            finally:
                await self._generation.release([sample.name for sample in samples], oldest=0)

    def _group(self, index: int, version: int, epoch: int) -> tuple[PromptGroup, dict[str, Any]]:
        prompt, row = self._questions[index]
        config, group = self._config, -1 - index
        prompts = PromptGroup(
            id=group,
            attempt=version,
            epoch=epoch,
            prompt=prompt,
            members=tuple(range(config.evaluate.samples)),
            seed=group_seed(config.seed, group),
            not_before=version,
            temperature=config.evaluate.temperature,
            max_new_tokens=config.generation.max_new_tokens,
            deadline=config.generation.deadline,
        )
        return prompts, row


def summary(version: int, rewards: Sequence[Known], costs: Sequence[Known] | None, seconds: float) -> Evaluation:
    """Mean and standard error over prompts; a prompt without any scorable sample does not count."""
    scored = _means(rewards)
    mean = fmean(scored) if scored else math.nan
    stderr = stdev(scored) / math.sqrt(len(scored)) if len(scored) > 1 else math.nan
    cost = None if costs is None else fmean(_means(costs) or [math.nan])
    unscorable = sum(known is None for each in (*rewards, *(costs or ())) for known in each)
    return Evaluation(version, len(scored), mean, stderr, cost, unscorable, seconds)


def _means(prompts: Sequence[Known]) -> list[float]:
    return [fmean(known) for each in prompts if (known := [one for one in each if one is not None])]


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds. lease: of one lease of a version; while a worker is away longer than that, the trainer gets its turn in
    between. deadline: until a version is given up, longer than a worker takes to be started again."""

    lease: float
    deadline: float

    @classmethod
    def of(cls, config: Config) -> "Patience":
        return cls(config.staleness.publish_deadline, config.fleet.start_deadline + config.fleet.call_deadline)


async def take_over(fleet: Fleet, published: Published, patience: Patience) -> None:
    """Have the evaluation service copy out a version, leased meanwhile so that the trainer cannot overwrite it.

    Raises:
        Refused: the version was overwritten.
        WeightsError: they do not match their digest, or could not be copied in time.
    """
    assert fleet.evaluation is not None
    loop = asyncio.get_running_loop()
    until = loop.time() + patience.deadline
    while loop.time() < until:
        await fleet.training.using(READER, published.version)
        try:
            async with asyncio.timeout(patience.lease):
                await fleet.evaluation.use_weights(published)
            return
        except TimeoutError:
            continue
        finally:
            await fleet.training.detached(READER)
    raise WeightsError(
        f"it was not copied within {patience.deadline:g} s, in tries of {patience.lease:g} s "
        "(staleness.publish_deadline): raise that when a copy takes longer, or look into the worker's log"
    )


class EvaluationSchedule:
    """Evaluates the versions asked for, one at a time, beside training. At most one waits: a newer one replaces it.

    passed_over: told each version that is not evaluated, and why.
    """

    def __init__(
        self,
        fleet: Fleet,
        evaluator: Evaluator,
        patience: Patience,
        done: Callable[[Evaluation], None],
        passed_over: Callable[[int, str], None],
    ) -> None:
        self._fleet, self._evaluator, self._patience = fleet, evaluator, patience
        self._done, self._passed_over = done, passed_over
        self._asked: Published | None = None
        self._changed, self._idle = asyncio.Event(), asyncio.Lock()
        self._newest = -1

    def ask(self, published: Published) -> None:
        """Evaluate this version as soon as the one before is done."""
        if self._asked is not None and self._asked.version != published.version:
            self._passed_over(self._asked.version, f"version {published.version} came before its turn")
        self._asked = published
        self._changed.set()

    async def run(self) -> None:
        """For ever: evaluate what was asked for last."""
        while True:
            await self._changed.wait()
            await self._next()

    async def finish(self, last: Published) -> None:
        """Returns when what was asked for, and the last version, are evaluated."""
        await self._next()
        self.ask(last)
        await self._next()

    async def _next(self) -> None:
        async with self._idle:
            self._changed.clear()
            published, self._asked = self._asked, None
            if published is not None and published.version != self._newest:
                await self._evaluate(published)

    async def _evaluate(self, published: Published) -> None:
        """A worker that dies meanwhile costs a second try, no more; a version that is overwritten is passed over."""
        for attempt in range(2):
            try:
                await take_over(self._fleet, published, self._patience)
                self._done(await self._evaluator.evaluate(published.version, published.epoch))
                self._newest = published.version
                return
            except (WeightsError, Refused) as error:
                self._newest = published.version
                self._passed_over(published.version, str(error))
                return
            except Retryable as error:
                if attempt:
                    self._passed_over(published.version, str(error))
