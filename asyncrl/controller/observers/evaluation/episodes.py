"""Evaluates a policy that acts: the returns and lengths of episodes with the same seeds in each evaluation."""

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from asyncrl.config.schema import Config
from asyncrl.controller.observers.evaluation.answers import SaveResults
from asyncrl.controller.observers.evaluation.evaluator import Evaluation
from asyncrl.objectives.pass_at_k import Rate, mean_with_interval
from asyncrl.protocols.batch import BatchRef
from asyncrl.protocols.messages import PromptGroup
from asyncrl.protocols.seeds import group_seed
from asyncrl.protocols.service_contracts import Generation

EPISODES = -1
"""Group of the episodes of an evaluation. Groups of training have none below 0."""


@dataclass(frozen=True, slots=True)
class HeldOutEpisode:
    """One episode of an evaluation. reward: its return; None where its environment lost it. finish: why it ended:
    terminated, truncated, lost or time_limit."""

    version: int
    episode: int
    reward: float | None
    steps: int
    finish: str


@dataclass(frozen=True, slots=True)
class EpisodesEvaluation(Evaluation):
    """The result of an evaluation of a policy that acts. prompts: episodes with a return; mean, stderr: of returns;
    low, high: interval of 95 % of their mean; unscorable: episodes that their environment lost; length: mean of steps;
    cut_off: episodes that the deadline ended; undrawn: why there are no pictures, with the first evaluation only."""

    low: float = math.nan
    high: float = math.nan
    length: float = math.nan
    cut_off: int = 0
    undrawn: str = ""

    def metrics(self) -> dict[str, float]:
        """Returns the numbers by the names of their metrics."""
        found = {"mean": self.mean, "stderr": self.stderr, "low": self.low, "high": self.high}
        named = {f"eval/return/{name}": value for name, value in found.items()}
        lost = {"eval/lost_episodes": float(self.unscorable), "eval/cut_off_episodes": float(self.cut_off)}
        return {**named, "eval/length/mean": self.length, **lost}

    def __str__(self) -> str:
        interval = "" if math.isnan(self.low) else f" [{self.low:.5g} - {self.high:.5g}]"
        lost = f", {self.unscorable} lost" if self.unscorable else ""
        cut = f", {self.cut_off} cut off after generation.deadline" if self.cut_off else ""
        undrawn = f"; there are no pictures: {self.undrawn}" if self.undrawn else ""
        return (
            f"evaluated, version {self.version}: return {self.mean:.5g}{interval} over {self.prompts} episodes of "
            f"{self.length:.1f} steps{lost}{cut}, {self.seconds:.1f} s{undrawn}"
        )


@dataclass
class EpisodeEvaluator:
    """Plays the episodes of `evaluate.episodes` with one version. save: takes them; without it they are not kept."""

    generation: Generation
    config: Config
    save: SaveResults | None = None

    def __post_init__(self) -> None:
        self._undrawn = ""

    async def evaluate(self, version: int, incarnation: int) -> EpisodesEvaluation:
        """Evaluates one version. Raises Retryable when the worker died meanwhile."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        rows, undrawn = await self._played(version, incarnation)
        if self.save is not None:
            self.save("", version, list(_episodes(version, rows)))
        found = summary_of_episodes(version, rows, loop.time() - began)
        known = self._undrawn
        self._undrawn = undrawn or self._undrawn
        return found if known else replace(found, undrawn=undrawn)

    async def _played(self, version: int, incarnation: int) -> tuple[BatchRef, str]:
        """Returns the episodes in their order, and why the first one was not drawn."""
        prompts = PromptGroup(
            id=EPISODES,
            attempt=version,
            incarnation=incarnation,
            prompt="",
            members=tuple(range(self.config.evaluate.episodes)),
            seed=group_seed(self.config.seed, EPISODES),
            not_before=version,
            temperature=0.0,
            max_new_tokens=1,
            deadline=self.config.generation.deadline,
        )
        finished: list[BatchRef] = []
        try:
            async for episodes in self.generation.generate(prompts):
                finished.append(episodes)
            rows = BatchRef(tuple(sorted(BatchRef.join(finished), key=lambda row: row.member)))
            undrawn = "".join(text.text for text in await self.generation.texts(rows))
        finally:
            await self.generation.release([(EPISODES, member, version) for member in prompts.members], oldest=0)
        return rows, undrawn


def summary_of_episodes(version: int, rows: BatchRef, seconds: float) -> EpisodesEvaluation:
    """Returns what the episodes come to; those that their environment lost count neither for return nor length."""
    whole = [row for row in rows if row.reward is not None]
    returns = [row.reward for row in whole if row.reward is not None]
    mean, low, high = mean_with_interval(returns) if returns else Rate(math.nan, math.nan, math.nan)
    stderr = stdev(returns) / math.sqrt(len(returns)) if len(returns) > 1 else math.nan
    return EpisodesEvaluation(
        version,
        len(whole),
        mean,
        stderr,
        None,
        len(rows) - len(whole),
        seconds,
        low=low,
        high=high,
        length=fmean(row.tokens for row in whole) if whole else math.nan,
        cut_off=sum(row.finish == "time_limit" for row in rows),
    )


def _episodes(version: int, rows: BatchRef) -> Iterator[HeldOutEpisode]:
    for row in rows:
        yield HeldOutEpisode(version, row.member, row.reward, row.tokens, row.finish)
