"""A rank that follows others while it samples: it has no rows, compares nothing, and ends after the rank that died."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.errors import PeerLost, Refused
from asyncrl.fleet.remote_worker import DEATH_NOTICE
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.lanes.weights.handover import WeightHandover
from asyncrl.protocols.batch import BatchRef
from asyncrl.protocols.messages import Canary, Published
from asyncrl.protocols.rank_layout import Layout
from asyncrl.services.generation import GenerationService, SamplingGroup

PUBLISHED = Published(1, 4, "", 0, "", canary=Canary((0,), (0,), (-1.0,)))


class StandInEngine:
    """Has the version that it is given. put_away returns when it may."""

    tokenizer = turns = context = None
    version = -1

    def __init__(self) -> None:
        self.may_put_away = asyncio.Event()

    async def update(self, published: Published) -> None:
        self.version = published.version

    async def load_own(self, version: int) -> None:
        self.version = version

    async def put_away(self) -> None:
        await self.may_put_away.wait()

    async def logprobs_after(self, prompt: object) -> None:
        raise Refused("the leader is asked")

    async def run(self, deliver: object) -> None:
        raise PeerLost("the leader is gone")

    def close(self) -> None:
        pass


def following(engine: Any) -> SamplingGroup:
    return SamplingGroup(SimpleNamespace(end=lambda: None), engine, follows=True)  # type: ignore[arg-type]


@pytest.fixture
def config() -> Config:
    return Config.model_validate({"model": {"name": "tiny"}, "task": {"prompts": "none"}})


async def test_a_rank_that_follows_takes_weights_and_answers_nothing(
    config: Config, worker_context: Callable[..., WorkerContext], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = StandInEngine()
    handover = WeightHandover()

    async def opened(context: WorkerContext) -> SamplingGroup:
        return following(engine)

    monkeypatch.setattr(SamplingGroup, "open", opened)
    monkeypatch.setattr(SamplingGroup, "run", lambda group, deliver: asyncio.sleep(0))
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        context = worker_context("generation", config, tasks, layout=Layout(tp=2), rank=1, handover=handover)
        service = GenerationService(context)
        await service.start()
        assert service.rows is None
        assert await service.restore_rows(str(tmp_path), BatchRef(())) == BatchRef(())
        using = await service.use_weights(PUBLISHED)
        assert (using.version, using.canary, using.readers) == (4, None, (context.spec.instance,))
        weights: dict[str, Any] = {}
        await handover.offer(5, weights)
        putting_away = asyncio.ensure_future(handover.put_away())
        await service.use_weights(replace(PUBLISHED, version=5))
        assert not putting_away.done(), "the leader may still load this version"
        assert handover.take(5) is weights
        engine.may_put_away.set()
        await putting_away
        await service.stop()


async def test_the_death_of_another_rank_is_reported_before_the_end_of_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []

    async def noted(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", noted)
    with pytest.raises(PeerLost):
        await following(StandInEngine()).run(lambda done: None)
    assert waits == [DEATH_NOTICE]
