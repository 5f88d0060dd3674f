"""The endpoint of live feedback over real HTTP: who may rate, what a rating is, and what each mistake is told."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2

from asyncrl.config.sections.runtime_config import FeedbackConfig
from asyncrl.lanes.http_server import HttpServer
from asyncrl.rewards.feedback.pairs import RatableAnswer
from asyncrl.rewards.feedback.waiting_answers import FeedbackBoard, RatingsFile
from asyncrl.rewards.feedback.web import BODY_BYTES, FeedbackWeb
from tests import golden

KEY = "the-right-key"
CONFIG = FeedbackConfig(ask="rate", scale=5)
CHAT = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "<b>hi</b>"}]


class Page:
    def __init__(self, board: FeedbackBoard, client: httpx2.AsyncClient) -> None:
        self.board = board
        self.client = client
        self.waits: list[asyncio.Future[Any]] = []

    async def asks(self, *answers: RatableAnswer) -> None:
        self.waits += [asyncio.ensure_future(self.board.value(each, float("inf"), 10.0)) for each in answers]
        for _ in range(3):
            await asyncio.sleep(0)

    async def rate(self, said: Any) -> tuple[int, dict[str, Any]]:
        got = await self.client.post("/ratings", json=said)
        return got.status_code, got.json()


@asynccontextmanager
async def serving(folder: Path, config: FeedbackConfig = CONFIG) -> AsyncIterator[Page]:
    board = FeedbackBoard(RatingsFile(folder / "ratings.jsonl"))
    await board.file.open()
    server = HttpServer(FeedbackWeb(board, config, KEY).app, "127.0.0.1", 0)
    async with asyncio.TaskGroup() as tasks:
        port = server.listen("feedback.port")
        tasks.create_task(server.serve())
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=10) as client:
            page = Page(board, client)
            yield page
        for wait in page.waits:
            wait.cancel()
        await server.stop()
        board.file.close()


def answer(text: str = "hello", member: int = 0, **given: Any) -> RatableAnswer:
    return RatableAnswer(3, member, CHAT, text, **given)


async def test_what_waits_is_listed_with_its_conversation(tmp_path: Path) -> None:
    turns = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    async with serving(tmp_path) as page:
        await page.asks(answer("one"), answer("two", 1, turns=turns))
        asked = (await page.client.get("/answers")).json()
    assert (asked["ask"], asked["scale"], asked["waiting"]) == ("rate", 5, 2)
    assert [each["text"] for each in asked["answers"]] == ["one", "two"]
    assert asked["answers"][0]["prompt"] == CHAT
    assert [each["said"] for each in asked["answers"]] == [
        [{"role": "assistant", "content": "one"}],
        turns,
    ]
    assert [[each["text"] for each in pair] for pair in asked["pairs"]] == [["one", "two"]]


async def test_ratings_are_values_from_zero_to_one(tmp_path: Path) -> None:
    async with serving(tmp_path) as page:
        answers = [answer(str(rating), rating) for rating in (1, 2, 5)]
        await page.asks(*answers)
        for each, rating in zip(answers, (1, 2, 5), strict=True):
            assert (await page.rate({"sample": each.id, "rating": rating}))[0] == 200
        assert [await wait for wait in page.waits] == [0.0, 0.25, 1.0]


async def test_skips_by_http(tmp_path: Path) -> None:
    async with serving(tmp_path) as page:
        answers = [answer(text, number) for number, text in enumerate("abc")]
        await page.asks(*answers)
        skipped = [each.id for each in answers[:2]]
        assert await page.rate({"skipped": skipped}) == (200, {"values": [], "late": False})
        assert [await wait for wait in page.waits[:2]] == [None, None]
        assert (await page.rate({"skipped": ["unknown"]}))[0] == 404
        for wrong in ([], [3], "abc", [skipped[0], None]):
            assert (await page.rate({"skipped": wrong}))[0] == 400
        assert not page.waits[2].done()


async def test_picks_by_http(tmp_path: Path) -> None:
    async with serving(tmp_path) as page:
        answers = [answer(text, number) for number, text in enumerate("abcd")]
        await page.asks(*answers)
        first, second, third, fourth = (each.id for each in answers)
        assert await page.rate({"chosen": second, "other": first}) == (200, {"values": [1.0, 0.0], "late": False})
        assert await page.rate({"equal": [third, fourth]}) == (200, {"values": [0.5, 0.5], "late": False})


async def test_without_the_key_nothing_is_said(tmp_path: Path) -> None:
    async with serving(tmp_path) as page:
        for method, path in (("GET", "/"), ("GET", "/answers"), ("POST", "/ratings")):
            for given in ("", "the-wrong-key", "the-right-keyy", "ключ"):
                got = await page.client.request(method, path, params={"key": given}, headers={"Authorization": ""})
                assert (got.status_code, "the key is missing or wrong" in got.json()["error"]) == (401, True)


MISTAKES: list[tuple[Any, int]] = [
    *(({"sample": "NAME", **more}, 400) for more in ({"rating": 6}, {"rating": 0}, {"rating": 2.5}, {"rating": True})),
    ({"sample": "NAME", "rating": 1, "more": 1}, 400),
    ({"sample": "0.0.abc", "rating": 1}, 404),
    ({"equal": ["NAME"]}, 400),
    *((said, 400) for said in ([], 7, b"", b"{", b"\xff\xfe", b"[" * 3000, b'{"equal": ["\\ud800", "\\ud800"]}')),
    (b'{"sample": "' + b"x" * BODY_BYTES, 413),
]


async def test_mistakes_are_explained_and_rate_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as page:
        await page.asks(answer())
        for said, status in MISTAKES:
            body = said if isinstance(said, bytes) else json.dumps(said).replace("NAME", answer().id).encode()
            got = await page.client.post("/ratings", content=body)
            assert got.status_code == status
            golden.says(got.json()["error"])
        assert (page.waits[0].done(), page.board.file.ratings) == (False, 0)
        said = {"sample": answer().id, "rating": 4}
        assert (await page.rate(said))[0] == (await page.rate(said))[0] == 200
        status, explained = await page.rate({**said, "rating": 1})
        assert (status, "the first rating counts" in explained["error"]) == (409, True)


async def test_the_page_lets_no_other_script_run(tmp_path: Path) -> None:
    async with serving(tmp_path) as page:
        got = await page.client.get("/", params={"key": KEY})
    policy = got.headers["content-security-policy"]
    nonce = policy.partition("'nonce-")[2].partition("'")[0]
    assert f'<script nonce="{nonce}">' in got.text
    assert "default-src 'none'" in policy
    assert "{{nonce}}" not in got.text
    assert "innerHTML" not in got.text
    assert (got.headers["referrer-policy"], got.headers["cache-control"]) == ("no-referrer", "no-store")
    assert KEY not in got.text
