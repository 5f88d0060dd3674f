"""Evaluations of policies that act: returns with their interval, lost episodes, and what is kept of them."""

import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.config.sources.load_config import load
from asyncrl.controller.observers.evaluation import EpisodeEvaluator, HeldOutEpisode
from asyncrl.objectives.pass_at_k import mean_with_interval, student_quantile
from asyncrl.protocols.batch import BatchRef, RowRef, SampleName
from asyncrl.protocols.messages import PromptGroup, SampleText
from asyncrl.protocols.service_contracts import Generation


def config_with(episodes: int) -> Config:
    return load(None, (), values={"acting.env": "CartPole-v1", "evaluate.episodes": episodes}).config


class Played(Generation):
    """Plays episodes with these returns, the last ones first; None: the environment lost it."""

    def __init__(self, returns: Sequence[float | None], finish: str = "terminated") -> None:
        self.returns = returns
        self.finish = finish
        self.asked: list[PromptGroup] = []
        self.released: list[SampleName] = []

    async def generate(self, prompts: PromptGroup) -> AsyncIterator[BatchRef]:
        self.asked.append(prompts)
        for member in reversed(prompts.members):
            gained = self.returns[member]
            identity = (prompts.id, member, prompts.attempt, prompts.incarnation)
            finish = "lost" if gained is None else self.finish
            yield BatchRef((RowRef(*identity, 0, 10 + member, 4, 4, finish, (), gained),))

    async def texts(self, refs: BatchRef) -> list[SampleText]:
        return [SampleText(row.group, row.member, "", "no screen") for row in refs if row.member == 0]

    async def release(self, samples: list[SampleName], oldest: int) -> None:
        self.released += samples


async def test_returns_and_lengths_become_metrics_and_episodes_are_kept_in_order() -> None:
    kept: list[tuple[str, int, Sequence[Any]]] = []
    generation = Played([1.0, None, 2.0, 6.0])
    evaluator = EpisodeEvaluator(generation, config_with(4), lambda *each: kept.append(each))
    evaluation = await evaluator.evaluate(4, 1)
    half = student_quantile(2) * math.sqrt(7 / 3)
    metrics = evaluation.metrics()
    assert metrics["eval/return/mean"] == 3.0
    assert metrics["eval/return/stderr"] == pytest.approx(math.sqrt(7 / 3))
    assert (metrics["eval/return/low"], metrics["eval/return/high"]) == pytest.approx((3 - half, 3 + half))
    assert metrics["eval/length/mean"] == (10 + 12 + 13) / 3
    assert (metrics["eval/lost_episodes"], metrics["eval/cut_off_episodes"]) == (1, 0)
    assert (evaluation.prompts, evaluation.unscorable, evaluation.version) == (3, 1, 4)
    assert str(evaluation).startswith("evaluated, version 4: return 3 [")
    assert "over 3 episodes of 11.7 steps, 1 lost, " in str(evaluation)
    ((name, version, episodes),) = kept
    assert (name, version) == ("", 4)
    assert list(episodes[:2]) == [HeldOutEpisode(4, 0, 1.0, 10, "terminated"), HeldOutEpisode(4, 1, None, 11, "lost")]
    (asked,) = generation.asked
    assert (asked.id, asked.not_before, asked.temperature, asked.members) == (-1, 4, 0.0, (0, 1, 2, 3))
    assert sorted(generation.released) == [(-1, member, 4) for member in range(4)]


async def test_episodes_that_were_cut_off_count_and_are_named() -> None:
    evaluation = await EpisodeEvaluator(Played([5.0, 5.0], "time_limit"), config_with(2)).evaluate(0, 1)
    assert evaluation.metrics()["eval/cut_off_episodes"] == 2
    assert "2 cut off after generation.deadline" in str(evaluation)
    assert math.isnan(evaluation.low), "two values do not show how much they vary"


async def test_why_there_are_no_pictures_is_said_once() -> None:
    evaluator = EpisodeEvaluator(Played([1.0, 2.0]), config_with(2))
    assert str(await evaluator.evaluate(0, 1)).endswith("; there are no pictures: no screen")
    assert "pictures" not in str(await evaluator.evaluate(1, 1))


async def test_an_evaluation_whose_every_episode_was_lost_has_no_mean() -> None:
    evaluation = await EpisodeEvaluator(Played([None, None]), config_with(2)).evaluate(0, 1)
    assert math.isnan(evaluation.metrics()["eval/return/mean"])
    assert evaluation.unscorable == 2


@pytest.mark.parametrize(("freedom", "quantile"), [(3, 3.18245), (4, 2.77645), (9, 2.26216), (29, 2.04523)])
def test_the_quantile_of_students_distribution_is_that_of_its_tables(freedom: int, quantile: float) -> None:
    assert student_quantile(freedom) == pytest.approx(quantile, rel=0.01)


def test_equal_values_have_an_interval_without_width() -> None:
    assert mean_with_interval([500.0] * 10) == (500.0, 500.0, 500.0)
