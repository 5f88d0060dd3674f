import asyncio
from typing import Any, cast

import pytest

from asyncrl.algorithms import grpo, remax
from asyncrl.controller.controller import Controller
from asyncrl.controller.rollouts import Attempt
from asyncrl.fleet.fleet import Fleet
from asyncrl.protocols.batch import BatchRef, RowRef
from asyncrl.protocols.messages import PromptGroup, Score
from asyncrl.protocols.service_contracts import Generation, Reference, Reward, Training

SAMPLES = BatchRef((RowRef(0, 0, 0, 0, 4, 4, 0, 0, "stop", ()),))
GROUP = Attempt(PromptGroup(0, 0, 0, "2+2", (0,), 0, 0, 1.0, 8, 30.0), {})


class SeenReward(Reward):
    def __init__(self) -> None:
        self.asked_by: asyncio.Task[Any] | None = None

    async def score(self, samples: BatchRef, row: dict[str, Any]) -> list[Score]:
        self.asked_by = asyncio.current_task()
        return [Score(1.0, {})] * len(samples)


class EchoReference(Reference):
    async def logprobs(self, samples: BatchRef) -> BatchRef:
        return samples


class SeenSamples:
    """Takes the place of the controller."""

    def __init__(self) -> None:
        self.handed_in: list[tuple[BatchRef, list[Score]]] = []

    def holds(self, samples: BatchRef) -> BatchRef:
        return samples

    def ready(self, samples: BatchRef, scores: list[Score]) -> None:
        self.handed_in.append((samples, scores))


@pytest.mark.parametrize("score", [grpo.score, remax.score])
@pytest.mark.parametrize("reference", [None, EchoReference()])
async def test_a_score_takes_a_second_task_only_beside_a_reference(score: Any, reference: Reference | None) -> None:
    reward = SeenReward()
    control = SeenSamples()
    fleet = Fleet(Generation(), reward, Training(), reference=reference)
    await score(fleet, cast(Controller, control), GROUP, SAMPLES)
    assert control.handed_in == [(SAMPLES, [Score(1.0, {})])]
    assert (reward.asked_by is asyncio.current_task()) == (reference is None)
