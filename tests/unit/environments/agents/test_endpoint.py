"""The HTTP server of a child's agents: keys, limits, and errors as the client knows them."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from asyncrl.environments.agents import endpoint, exchanges
from asyncrl.environments.agents.chat_completions import answer_of
from asyncrl.environments.agents.endpoint import AgentAccess, Endpoint
from asyncrl.environments.agents.exchanges import AgentFailed, Exchanges
from asyncrl.environments.tools.call_formats import FORMS
from tests import golden
from tests.unit.environments.agents.conftest import until

ASKS = {"messages": [{"role": "user", "content": "a"}]}


class Episode:
    """An episode whose agent is this test."""

    def __init__(self, number: int, access: AgentAccess, exchanges: Exchanges) -> None:
        self.number = number
        self.access = access
        self.exchanges = exchanges

    @classmethod
    async def begin(cls) -> "Episode":
        exchanges = Exchanges()
        return cls(*(await Endpoint.running().open(exchanges)), exchanges)

    def client(self, key: str | None = None) -> httpx2.AsyncClient:
        headers = {"Authorization": f"Bearer {key or self.access.key}".encode("latin-1")}
        return httpx2.AsyncClient(base_url=self.access.base_url, headers=headers, timeout=20, trust_env=False)

    async def post(self, body: Any = ASKS, path: str = "/chat/completions", **settings: Any) -> tuple[int, Any]:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.client(settings.pop("key", None)) as client:
            response = await client.post(path, content=content, **settings)
            return response.status_code, response.json()

    async def answer(self, text: str = "b") -> None:
        await self.exchanges.next_request()
        self.exchanges.answer(lambda request, turn: answer_of(request, turn, text, None, FORMS["hermes"]))


@pytest.fixture
async def episodes() -> AsyncIterator[list[Episode]]:
    found = [await Episode.begin() for _ in range(2)]
    yield found
    for each in found:
        await Endpoint.running().close(each.number)
    assert not Endpoint.of_loop


def text_of(found: tuple[int, Any]) -> str:
    return str(found[1]["error"]["message"])


async def test_each_episode_has_a_key_of_its_own(episodes: list[Episode]) -> None:
    one, other = episodes
    for key in (other.access.key, one.access.key[:-1], "x", "ö"):
        found = await one.post(key=key)
        assert (found[0], found[1]["error"]["type"]) == (401, "authentication_error")
        golden.says(text_of(found), "OPENAI_BASE_URL", "OPENAI_API_KEY")
    assert one.exchanges.counts["requests"] == 0
    unknown = one.access.base_url.replace(f"/{one.number}/", "/99/")
    assert (await one.post(path=f"{unknown}/chat/completions"))[0] == 401
    (status, found), _ = await asyncio.gather(one.post(), one.answer())
    assert (status, found["choices"][0]["message"]["content"]) == (200, "b")
    assert one.access.base_url.startswith("http://127.0.0.1:")


async def test_models_are_listed(episodes: list[Episode]) -> None:
    async with episodes[0].client() as client:
        listed = (await client.get("/models")).json()
        named = (await client.get("/models/some/name")).json()
    assert listed == {"object": "list", "data": [named]}
    assert (named["id"], named["object"]) == ("policy", "model")


async def test_other_endpoints_are_named_in_the_error(episodes: list[Episode]) -> None:
    for path in ("/responses", "/completions"):
        found = await episodes[0].post(path=path)
        assert found[0] == 404
        golden.says(text_of(found), f"{path}", "chat/completions")
    async with episodes[0].client() as client:
        assert (await client.get("/chat/completions")).status_code == 405


async def test_limits_come_before_reading(episodes: list[Episode], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "LARGEST_BODY", 1000)
    (one, _) = episodes

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"[" * 100

    assert "at most 1000 bytes" in text_of(await one.post(b"[" * 1001))
    assert (await sent(one, parts()))[0] == 413
    assert (await one.post(b"[" * 999))[0] == 400
    with contextlib.suppress(httpx2.TransportError):  # The connection may end before its error was read.
        assert (await sent(one, b"", {"x": "y" * 200_000}))[0] == 400
    assert one.exchanges.counts["requests"] == 3


async def sent(episode: Episode, content: Any, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    async with episode.client() as client:
        response = await client.post("/chat/completions", content=content, headers=headers)
        return response.status_code, response.content


async def test_a_body_that_does_not_come_is_refused(episodes: list[Episode], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "BODY_SECONDS", 0.05)

    one = episodes[0]
    host, _, port = one.access.base_url.split("/")[2].partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /episodes/{one.number}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n"
    writer.write(f"{head}Authorization: Bearer {one.access.key}\r\n\r\n{{".encode())
    response = await asyncio.wait_for(reader.read(), 20)
    assert response.startswith(b"HTTP/1.1 408")
    assert b"did not arrive within 0.05 s" in response
    writer.close()


async def test_too_many_requests_are_refused_and_then_end_the_episode(
    episodes: list[Episode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchanges, "QUEUED", 2)
    monkeypatch.setattr(exchanges, "MOST_REQUESTS", 5)
    one, other = episodes
    waiting = [asyncio.ensure_future(one.post({"messages": [{"role": "user", "content": str(n)}]})) for n in range(3)]
    done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    (refused,) = (each.result() for each in done)
    assert refused[0] == 429
    golden.says(text_of(refused), "2 requests")
    for _ in range(2):
        assert (await one.post(b"{"))[0] == 400
    assert "at most 5 requests" in text_of(await one.post())
    with golden.raises(AgentFailed, match="5 requests"):
        await one.exchanges.next_request()
    assert (await asyncio.gather(other.post(), other.answer()))[0][0] == 200
    one.exchanges.close()
    assert sorted([(await each)[0] for each in waiting]) == [429, 503, 503]


async def test_a_client_that_goes_away_is_not_asked_for(episodes: list[Episode]) -> None:
    one = episodes[0]
    gone = asyncio.ensure_future(one.post())
    await until(lambda: len(one.exchanges._queue) > 0)
    gone.cancel()
    await until(lambda: one.exchanges._queue[0].waiting == 0)
    found, _ = await asyncio.gather(one.post({"messages": [{"role": "user", "content": "other"}]}), one.answer("to it"))
    assert found[1]["choices"][0]["message"]["content"] == "to it"
    assert one.exchanges.turns == 1


async def test_an_episode_may_begin_while_the_last_one_ends() -> None:
    first = await Episode.begin()
    ending = asyncio.create_task(Endpoint.running().close(first.number))
    await until(lambda: Endpoint.running()._changing.locked())
    second = await Episode.begin()
    await ending
    (status, _), _ = await asyncio.gather(second.post(), second.answer())
    assert status == 200
    await Endpoint.running().close(second.number)
    assert not Endpoint.of_loop
