"""Evaluates versions on held-out prompts beside training, with the rewards and costs of the run."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from asyncrl.concurrency import gather
from asyncrl.config.schema import Config
from asyncrl.controller.observers.code_metrics import CodeRates
from asyncrl.controller.observers.events import Prompt
from asyncrl.errors import FleetFailed, Refused, Retryable, WeightsError
from asyncrl.fleet.episode_turns import sample_turns
from asyncrl.fleet.fleet import Fleet
from asyncrl.protocols.batch import BatchRef
from asyncrl.protocols.messages import PromptGroup, Published, Score
from asyncrl.protocols.seeds import group_seed
from asyncrl.protocols.service_contracts import Environment, Generation, Reward

READER = "evaluation"
"""Name of the reader that leases a version from the trainer while it is copied out."""

Known = list[float | None]
"""Rewards or costs of a prompt's samples; None for samples without one."""
Question = tuple[Prompt, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of an evaluation.

    mean, stderr: of the reward over prompts (their samples averaged first). cost: the mean of costs, likewise, if there
    are costs. unscorable: samples without a reward or, if there are costs, a cost. code: rates of programs, if rewards
    are about them.
    """

    version: int
    prompts: int
    mean: float
    stderr: float
    cost: float | None
    unscorable: int
    seconds: float
    code: CodeRates | None = None


@dataclass
class Evaluator:
    """Samples all held-out prompts with one version and scores them. cost: the cost service, in a run with costs.
    environment: in a run with episodes.

    Groups have negative ids, which groups of training never have.
    """

    generation: Generation
    reward: Reward
    questions: Sequence[Question]
    config: Config
    cost: Reward | None = None
    environment: Environment | None = None

    def __post_init__(self) -> None:
        self._scorers = [self.reward] if self.cost is None else [self.reward, self.cost]
        # At most as many groups as the engines have slots for: more would only wait in their queues.
        slots = self.config.generation.slots * self.config.evaluate.replicas
        self._places = asyncio.Semaphore(max(1, slots // self.config.evaluate.samples))

    async def evaluate(self, version: int, incarnation: int) -> Evaluation:
        """Evaluates one version. Raises errors of reward and cost, and Retryable when a worker died meanwhile."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        found = await gather(*(self._ask(index, version, incarnation) for index in range(len(self.questions))))
        rewards, *costs = zip(*([_known(scores) for scores in each] for each in found), strict=True)
        made = summary(version, rewards, costs[0] if costs else None, loop.time() - began)
        return replace(made, code=CodeRates.of([[score.terms for score in scores] for scores, *_ in found]))

    async def _ask(self, index: int, version: int, incarnation: int) -> list[list[Score]]:
        """Returns the scores of a prompt's samples, of rewards and, if there are costs, of costs."""
        async with self._places:
            (prompt, row), group = self.questions[index], -1 - index
            prompts = PromptGroup(
                id=group,
                attempt=version,
                incarnation=incarnation,
                prompt=prompt,
                members=tuple(range(self.config.evaluate.samples)),
                seed=group_seed(self.config.seed, group),
                not_before=version,
                temperature=self.config.evaluate.temperature,
                max_new_tokens=self.config.generation.max_new_tokens,
                deadline=self.config.generation.deadline,
            )
            finished: list[BatchRef] = []
            try:
                await sample_turns(self.generation, self.environment, prompts, row, finished.append)
                samples = BatchRef.join(finished)
                return list(await gather(*(scorer.score(samples, row) for scorer in self._scorers)))
            finally:
                # Also those that have not finished: the next try of the version has samples of the same names.
                names = [(group, member, version) for member in prompts.members]
                for maker in filter(None, (self.generation, self.environment)):
                    await maker.release(names, oldest=0)


def _known(scores: Sequence[Score]) -> Known:
    return [score.reward for score in scores]


def summary(version: int, rewards: Sequence[Known], costs: Sequence[Known] | None, seconds: float) -> Evaluation:
    """Returns mean and standard error over prompts; a prompt without any scorable sample does not count."""
    scored = _means(rewards)
    mean = fmean(scored) if scored else math.nan
    stderr = stdev(scored) / math.sqrt(len(scored)) if len(scored) > 1 else math.nan
    cost = None if costs is None else fmean(_means(costs) or [math.nan])
    unscorable = sum(known is None for each in (*rewards, *(costs or ())) for known in each)
    return Evaluation(version, len(scored), mean, stderr, cost, unscorable, seconds)


def _means(prompts: Sequence[Known]) -> list[float]:
    return [fmean(known) for each in prompts if (known := [one for one in each if one is not None])]


async def copy_weights(fleet: Fleet, published: Published, config: Config) -> None:
    """Lets the evaluation service copy out a version, leased meanwhile so that the trainer cannot overwrite it.

    Between leases the trainer may write. Raises Refused when the version was overwritten, FleetFailed when it
    is damaged or not to be reached, and WeightsError for too slow a copy.
    """
    assert fleet.evaluation is not None
    lease = config.staleness.publish_deadline
    deadline = config.fleet.start_deadline + config.fleet.call_deadline  # Longer than a worker's restart takes.
    loop = asyncio.get_running_loop()
    until = loop.time() + deadline
    while loop.time() < until:
        await fleet.training.using((READER,), published.version)
        try:
            async with asyncio.timeout(lease):
                await fleet.evaluation.use_weights(published)
            return
        except TimeoutError:
            continue
        except WeightsError as unusable:
            text = f"weights of version {published.version} do not reach {READER}: {unusable}"
            raise FleetFailed(text) from unusable
        finally:
            await fleet.training.detached(READER)
    raise WeightsError(
        f"weights of version {published.version} could not be copied within {deadline:g} s, in tries of "
        f"{lease:g} s: raise staleness.publish_deadline when a copy takes longer, or read the worker's log"
    )


@dataclass
class EvaluationSchedule:
    """Evaluates versions on request, one at a time, beside training. At most one waits: a newer one replaces it.

    skipped: takes each version that is not evaluated, and the reason.
    """

    fleet: Fleet
    evaluator: Evaluator
    config: Config
    done: Callable[[Evaluation], None]
    skipped: Callable[[int, str], None]

    def __post_init__(self) -> None:
        self._asked: Published | None = None
        self._changed = asyncio.Event()
        self._idle = asyncio.Lock()
        self._newest = -1

    def ask(self, published: Published) -> None:
        """Requests the evaluation of this version after the running one."""
        if self._asked is not None and self._asked.version != published.version:
            self.skipped(self._asked.version, f"version {published.version} came before its turn")
        self._asked = published
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
            self._asked = None
            if published is not None and published.version != self._newest:
                await self._evaluate(published)

    async def _evaluate(self, published: Published) -> None:
        """Evaluates a version; tries again once when a worker dies, and skips a version that was overwritten."""
        for attempt in range(2):
            try:
                await copy_weights(self.fleet, published, self.config)
                self.done(await self.evaluator.evaluate(published.version, published.incarnation))
                self._newest = published.version
                return
            except (WeightsError, Refused) as error:
                self._newest = published.version
                self.skipped(published.version, str(error))
                return
            except Retryable as error:
                if attempt:
                    self.skipped(published.version, str(error))
