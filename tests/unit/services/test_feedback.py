"""The reward service that asks a person: scores wait for ratings that come by HTTP, and end without them too."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.lanes.data.row_store import RowStore
from asyncrl.protocols.batch import BatchRef, RowRef
from asyncrl.protocols.messages import Score
from asyncrl.services.feedback import FeedbackService

OPTIONS = {"host": "127.0.0.1", "port": 0, "key": "the-right-key"}


class Person:
    """A running service, a store to put samples into, and a client of the page."""

    def __init__(self, service: FeedbackService, store: RowStore, client: httpx2.AsyncClient) -> None:
        self.service, self.store, self.client = service, store, client

    def ref(self, text: str, member: int = 0, group: int = 4, version: int = 0) -> RowRef:
        place = self.store.put({"text": np.frombuffer(text.encode(), np.uint8)})
        return RowRef(group, member, 0, 1, 5, len(text), version, version, "stop", (place,))

    async def score(self, *refs: RowRef) -> list[Score]:
        return await self.service.score(BatchRef(refs), {"prompt": "say:", "answer": "b"})

    async def waiting(self) -> list[dict[str, Any]]:
        found = (await self.client.get("/answers")).json()["answers"]
        return [dict(each) for each in found]

    async def rate(self, name: str, rating: int) -> bool:
        """Returns whether the rating was late."""
        got = await self.client.post("/ratings", json={"sample": name, "rating": rating})
        assert got.status_code == 200, got.text
        return bool(got.json()["late"])


def config(*functions: Any, **feedback: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"name": "m"},
            "task": {"prompts": "rows.jsonl", "samples_per_prompt": 2},
            "reward": {"functions": functions},
            "feedback": {"ask": "rate", "deadline": 60, **feedback},
            "staleness": {"limit": 2},
        }
    )


Serving = Callable[[Config], AbstractAsyncContextManager[Person]]


@pytest.fixture
def serving(worker_context: Callable[..., WorkerContext], tmp_path: Path) -> Serving:
    @asynccontextmanager
    async def serve(settings: Config) -> AsyncIterator[Person]:
        store = RowStore.private("inproc://generation", 16, 1024)
        async with asyncio.TaskGroup() as tasks:
            context = worker_context("reward", settings, tasks, source=store, run_dir=tmp_path, options=OPTIONS)
            service = FeedbackService(context)
            try:
                await service.start()
                address = f"http://127.0.0.1:{service.port}"
                headers = {"Authorization": f"Bearer {OPTIONS['key']}"}
                async with httpx2.AsyncClient(base_url=address, headers=headers, timeout=10) as client:
                    yield Person(service, store, client)
            finally:
                await service.stop()

    return serve


async def test_a_rating_is_the_reward_beside_functions(serving: Serving) -> None:
    async with serving(config("exact_match", weight=2.0)) as person:
        scoring = asyncio.ensure_future(person.score(person.ref("a"), person.ref("b", 1)))
        while len(asked := await person.waiting()) < 2:
            pass
        assert [each["text"] for each in asked] == ["a", "b"]
        assert not await person.rate(asked[0]["sample"], 5)
        assert not scoring.done()
        assert not await person.rate(asked[1]["sample"], 2)
        first, second = await scoring
        counters = person.service.counters
    assert (first.reward, first.terms) == (2.0, {"exact_match": 0.0, "person": 1.0})
    assert (second.reward, second.terms) == (1.5, {"exact_match": 1.0, "person": 0.25})
    assert (counters["feedback/ratings"], counters["feedback/waiting"], counters["feedback/late"]) == (2, 0, 0)


@pytest.mark.parametrize(
    ("otherwise", "reward", "terms", "error"),
    [
        ({"otherwise": "ignore"}, None, {}, "person on member 0 of group 4: nobody rated it within 0.05 s"),
        ({"otherwise": "constant", "constant": 0.25}, 0.25, {"person": 0.25}, ""),
    ],
)
async def test_what_nobody_rates_has_the_value_that_the_config_names(
    otherwise: dict[str, Any], reward: float | None, terms: dict[str, float], error: str, serving: Serving
) -> None:
    async with serving(config(deadline=0.05, **otherwise)) as person:
        (score,) = await person.score(person.ref("a"))
        assert (score.reward, score.terms) == (reward, terms)
        assert error in score.error
        assert await person.waiting() == []


async def test_nobody_is_asked_about_held_out_answers(serving: Serving) -> None:
    async with serving(config("exact_match")) as person:
        (score,) = await person.score(person.ref("b", group=-1))
        assert (score.reward, score.terms) == (1.0, {"exact_match": 1.0})
    async with serving(config(otherwise="constant")) as person:
        (score,) = await person.score(person.ref("b", group=-1))
        assert score.terms == {"person": 0.5}


async def test_a_sample_beyond_the_staleness_limit_waits_no_longer(serving: Serving) -> None:
    async with serving(config(otherwise="constant")) as person:
        old = asyncio.ensure_future(person.score(person.ref("old", version=0)))
        while not (asked := await person.waiting()):
            pass
        fresh = asyncio.ensure_future(person.score(person.ref("fresh", 1, version=3)))
        assert (await old)[0].terms == {"person": 0.5}
        assert await person.rate(asked[0]["sample"], 5)
        fresh.cancel()


async def test_a_restarted_worker_knows_what_was_rated(serving: Serving) -> None:
    async with serving(config()) as person:
        scoring = asyncio.ensure_future(person.score(person.ref("a")))
        while not (asked := await person.waiting()):
            pass
        await person.rate(asked[0]["sample"], 5)
        await scoring
    async with serving(config(deadline=0.01)) as person:
        (score,) = await person.score(person.ref("a"))
        assert score.reward == 1.0
        assert person.service.counters["feedback/ratings"] == 1


async def test_waiting_for_a_person_is_idle_time(serving: Serving) -> None:
    async with serving(config()) as person:
        with person.service.context.occupancy.serving():  # as the dispatcher does
            scoring = asyncio.ensure_future(person.score(person.ref("a")))
            while not (asked := await person.waiting()):
                pass
            states = [person.service.context.clock.current]
            await person.rate(asked[0]["sample"], 5)
            await scoring
            assert [*states, person.service.context.clock.current] == ["starved", "overhead"]


async def test_a_taken_port_is_refused_by_its_key(
    worker_context: Callable[..., WorkerContext], serving: Serving
) -> None:
    async with serving(config()) as person, asyncio.TaskGroup() as tasks:
        options = {**OPTIONS, "port": person.service.port}
        second = FeedbackService(worker_context("reward", config(), tasks, options=options))
        with pytest.raises(ConfigError, match=r"feedback\.port: 127\.0\.0\.1:\d+ cannot be listened at"):
            await second.start()
        await second.stop()
