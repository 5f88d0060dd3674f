"""The reward service that asks a person: scores wait for ratings that come by HTTP, and end without them too."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from asyncrl.config.schema import Config
from asyncrl.config.sections.task_config import EnvironmentConfig
from asyncrl.environments.transcript import transcript_column
from asyncrl.errors import ConfigError
from asyncrl.lanes.data.row_store import RowStore
from asyncrl.protocols.batch import BatchRef, RowRef
from asyncrl.protocols.messages import Score
from asyncrl.services.feedback import FeedbackService
from tests.unit.services.conftest import Serve, put_row, store_read_by

PROMPT_IDS = np.array([7, 8, 9, 10, 11], np.int32)
OPTIONS = {"host": "127.0.0.1", "port": 0, "key": "the-right-key"}


class Person:
    """A running service, a store to put samples into, and a client of the page."""

    def __init__(self, service: FeedbackService, store: RowStore, client: httpx2.AsyncClient) -> None:
        self.service = service
        self.store = store
        self.client = client

    def ref(self, text: str, member: int = 0, group: int = 4, version: int = 0, first: int | None = None) -> RowRef:
        data = np.frombuffer(text.encode(), np.uint8)
        row = put_row(self.store, text=text, prompt_ids=PROMPT_IDS, response_ids=data, group=group, member=member)
        return row._replace(first=version if first is None else first, last=version)

    async def score(self, *refs: RowRef) -> list[Score]:
        return await self.service.score(BatchRef(refs), {"prompt": "say:", "answer": "b"})

    async def waiting(self, count: int = 0) -> list[dict[str, Any]]:
        """Returns the answers that wait for a rating, once there are so many."""
        while len(found := (await self.client.get("/answers")).json()["answers"]) < count:
            pass
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
def serving(serve: Serve, tmp_path: Path) -> Serving:
    @asynccontextmanager
    async def shown(settings: Config) -> AsyncIterator[Person]:
        async with serve(FeedbackService, "reward", settings, run_dir=tmp_path, options=OPTIONS) as service:
            address = f"http://127.0.0.1:{service.port}"
            headers = {"Authorization": f"Bearer {OPTIONS['key']}"}
            async with httpx2.AsyncClient(base_url=address, headers=headers, timeout=10) as client:
                yield Person(service, store_read_by(service), client)

    return shown


async def test_a_rating_is_the_reward_beside_functions(serving: Serving) -> None:
    async with serving(config("exact_match", weight=2.0)) as person:
        scoring = asyncio.ensure_future(person.score(person.ref("a"), person.ref("b", 1)))
        asked = await person.waiting(2)
        assert [each["text"] for each in asked] == ["a", "b"]
        assert not await person.rate(asked[0]["sample"], 5)
        assert not scoring.done()
        assert not await person.rate(asked[1]["sample"], 2)
        first, second = await scoring
        counters = person.service.counters
    assert (first.reward, first.terms) == (2.0, {"exact_match": 0.0, "person": 1.0})
    assert (second.reward, second.terms) == (1.5, {"exact_match": 1.0, "person": 0.25})
    assert (counters["feedback/ratings"], counters["feedback/waiting"], counters["feedback/late"]) == (2, 0, 0)


async def rated_tokens(person: Person, ref: RowRef, folder: Path) -> list[int]:
    """Rates a sample, and returns the tokens that stand beside its rating on disk."""
    scoring = asyncio.ensure_future(person.score(ref))
    asked = await person.waiting(1)
    await person.rate(asked[0]["sample"], 5)
    await scoring
    (line,) = map(json.loads, (folder / "ratings.jsonl").read_text().splitlines())
    tokens: list[int] = line["answers"][0]["tokens"]
    return tokens


async def test_a_rating_keeps_the_tokens_of_prompt_and_answer(serving: Serving, tmp_path: Path) -> None:
    async with serving(config()) as person:
        assert await rated_tokens(person, person.ref("ab"), tmp_path) == [*PROMPT_IDS, *b"ab"]


@pytest.mark.parametrize(("given", "context"), [(2, [*PROMPT_IDS, *range(6)]), (-2, [1, 2, 3, 4, 5])])
async def test_a_rating_of_an_episode_keeps_its_newest_context(
    given: int, context: list[int], serving: Serving, tmp_path: Path
) -> None:
    settings = config().model_copy(update={"environment": EnvironmentConfig(use="guess", max_tokens=64)})
    async with serving(settings) as person:
        transcript = transcript_column([{"role": "assistant", "content": each} for each in "ab"])
        row = {"transcript": transcript, "turn_rewards": np.zeros(2, np.float32), "spans": [1, given, 3, 0]}
        row |= {"text": "b", "prompt_ids": PROMPT_IDS, "response_ids": range(6)}
        ref = put_row(person.store, **row)._replace(tokens=4, turns=2, given=2)
        assert await rated_tokens(person, ref, tmp_path) == context


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
        asked = await person.waiting(1)
        fresh = asyncio.ensure_future(person.score(person.ref("fresh", 1, version=3)))
        assert (await old)[0].terms == {"person": 0.5}
        assert await person.rate(asked[0]["sample"], 5)
        fresh.cancel()


@pytest.mark.parametrize(("policy", "newest"), [("mask", 3), ("drop", 2), ("block", 50), ("admit", 50)])
async def test_a_sample_waits_while_its_staleness_lets_it_train(policy: str, newest: int, serving: Serving) -> None:
    """Limit 2, and a sample of the versions 0 and 1: `mask` trains what its last token lets, `drop` what its first."""
    settings = config()
    settings = settings.model_copy(update={"staleness": settings.staleness.model_copy(update={"policy": policy})})
    async with serving(settings) as person:
        old = asyncio.ensure_future(person.score(person.ref("old", version=1, first=0)))
        newer = asyncio.ensure_future(person.score(person.ref("newer", 1, version=newest)))
        while len(await person.waiting()) < 2:
            assert not old.done()
        newest_of_all = asyncio.ensure_future(person.score(person.ref("newest", 2, version=newest + 1)))
        if policy in ("mask", "drop"):
            assert "nobody rated it" in (await old)[0].error
        while {each["text"] for each in await person.waiting()} < {"newer", "newest"}:
            assert not newer.done()
        assert old.done() == (policy in ("mask", "drop"))
        for each in (old, newer, newest_of_all):
            each.cancel()
        await asyncio.wait([old, newer, newest_of_all])


async def test_a_restarted_worker_knows_what_was_rated(serving: Serving) -> None:
    async with serving(config()) as person:
        scoring = asyncio.ensure_future(person.score(person.ref("a")))
        asked = await person.waiting(1)
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
            asked = await person.waiting(1)
            states = [person.service.context.clock.current]
            await person.rate(asked[0]["sample"], 5)
            await scoring
            assert [*states, person.service.context.clock.current] == ["starved", "overhead"]


async def test_a_taken_port_is_refused_by_its_key(serve: Serve, serving: Serving) -> None:
    async with serving(config()) as person:
        options = {**OPTIONS, "port": person.service.port}
        taken = pytest.RaisesExc(ConfigError, match=r"feedback\.port: 127\.0\.0\.1:\d+ cannot be listened at")
        with pytest.RaisesGroup(taken):
            async with serve(FeedbackService, "reward", config(), options=options):
                pass
