"""Weights change hands between a trainer's rank and the engine in its process, and come back for each step."""

import pytest
from torch import Tensor, ones

from asyncrl.errors import Refused
from asyncrl.lanes.weights.handover import WeightHandover


class StandInEngine:
    """Takes weights when told to, and loses them when it is put away."""

    def __init__(self) -> None:
        self.handover = WeightHandover()
        self.version: int | None = None
        self.handover.attach(self.load, self.put_away)

    async def load(self, version: int) -> None:
        self.handover.take(version)
        self.version = version

    async def put_away(self) -> None:
        self.version = None


def weights() -> dict[str, Tensor]:
    return {"w": ones(2)}


async def test_a_version_is_taken_once_and_held_by_one_side() -> None:
    engine = StandInEngine()
    offered = weights()
    await engine.handover.offer(0, offered)
    assert engine.version is None, "the controller has not announced it"
    assert engine.handover.take(0) is offered
    with pytest.raises(Refused, match=r"^the trainer's rank in this process does not hold weights of version 0 for"):
        engine.handover.take(0)


async def test_a_step_that_changed_nothing_gives_the_same_version_back_and_a_newer_one_waits() -> None:
    engine = StandInEngine()
    await engine.handover.offer(3, weights())
    await engine.load(3)
    await engine.handover.put_away()
    assert engine.version is None
    await engine.handover.offer(3, weights())
    assert engine.version == 3
    await engine.handover.put_away()
    await engine.handover.offer(4, weights())
    assert engine.version is None, "it was not announced"
    await engine.load(4)
    assert engine.version == 4


async def test_an_engine_that_comes_late_is_refused_and_served_after_the_step() -> None:
    """Another rank may sample a whole batch before this one has heard of its version."""
    engine = StandInEngine()
    await engine.handover.offer(0, weights())
    await engine.handover.put_away()
    with pytest.raises(Refused):
        await engine.load(0)
    await engine.handover.offer(0, weights())
    assert engine.version == 0


async def test_without_an_engine_there_is_nothing_to_put_away() -> None:
    handover = WeightHandover()
    await handover.offer(0, weights())
    await handover.put_away()
    with pytest.raises(Refused):
        handover.take(0)


async def test_an_engine_of_several_ranks_may_take_a_version_until_all_put_it_away() -> None:
    """The first rank took it before its trainer began the step."""
    engine = StandInEngine()
    handover = engine.handover
    offered = weights()
    taken = []

    async def put_away() -> None:
        taken.append(handover.take(0))

    handover.attach(engine.load, put_away, waits=True)
    await handover.offer(0, offered)
    await handover.put_away()
    assert taken == [offered]
    handover.attach(engine.load, engine.put_away, waits=True)
    await handover.offer(1, offered)
    await handover.put_away()
    with pytest.raises(Refused):
        handover.take(1)
