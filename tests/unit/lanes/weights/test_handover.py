"""Weights change hands between a trainer's rank and the engine in its process, and come back for each step."""

import pytest
from torch import Tensor, ones

from asyncrl.errors import Refused
from asyncrl.lanes.weights.handover import WeightHandover


class StandInEngine:
    """Takes weights when told to, and loses them when it is put away."""

    def __init__(self, handover: WeightHandover) -> None:
        self._handover = handover
        self.version: int | None = None
        handover.attach(self.load, self.put_away)

    async def load(self, version: int) -> None:
        self._handover.take(version)
        self.version = version

    async def put_away(self) -> None:
        self.version = None


def weights() -> dict[str, Tensor]:
    return {"w": ones(2)}


@pytest.fixture
def handover() -> WeightHandover:
    return WeightHandover()


@pytest.fixture
def engine(handover: WeightHandover) -> StandInEngine:
    return StandInEngine(handover)


async def test_a_version_is_taken_once_and_held_by_one_side(handover: WeightHandover, engine: StandInEngine) -> None:
    offered = weights()
    await handover.offer(0, offered)
    assert engine.version is None, "the controller has not announced it"
    assert handover.take(0) is offered
    with pytest.raises(Refused, match=r"^the trainer's rank in this process does not hold weights of version 0 for"):
        handover.take(0)


async def test_a_step_that_changed_nothing_gives_the_same_version_back(
    handover: WeightHandover, engine: StandInEngine
) -> None:
    await handover.offer(3, weights())
    await engine.load(3)
    await handover.put_away()
    assert engine.version is None
    await handover.offer(3, weights())
    assert engine.version == 3


async def test_a_newer_version_waits_until_it_is_announced(handover: WeightHandover, engine: StandInEngine) -> None:
    await handover.offer(3, weights())
    await engine.load(3)
    await handover.put_away()
    await handover.offer(4, weights())
    assert engine.version is None
    await engine.load(4)
    assert engine.version == 4


async def test_an_engine_that_comes_late_is_refused_and_served_after_the_step(
    handover: WeightHandover, engine: StandInEngine
) -> None:
    """Another rank may sample a whole batch before this one has heard of its version."""
    await handover.offer(0, weights())
    await handover.put_away()
    with pytest.raises(Refused):
        await engine.load(0)
    await handover.offer(0, weights())
    assert engine.version == 0


async def test_without_an_engine_there_is_nothing_to_put_away(handover: WeightHandover) -> None:
    await handover.offer(0, weights())
    await handover.put_away()
    with pytest.raises(Refused):
        handover.take(0)


async def test_an_engine_of_several_ranks_may_take_a_version_until_all_put_it_away(handover: WeightHandover) -> None:
    """The first rank took it before its trainer began the step."""
    offered = weights()
    taken = []

    async def put_away() -> None:
        taken.append(handover.take(0))

    handover.attach(StandInEngine(WeightHandover()).load, put_away, waits=True)
    await handover.offer(0, offered)
    await handover.put_away()
    assert taken == [offered]
    handover.attach(StandInEngine(WeightHandover()).load, StandInEngine(WeightHandover()).put_away, waits=True)
    await handover.offer(1, offered)
    await handover.put_away()
    with pytest.raises(Refused):
        handover.take(1)
