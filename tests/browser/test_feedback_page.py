"""The page of live feedback in a real browser: keys rate, what a model wrote stays text, nothing else is loaded."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from asyncrl.config.sections.runtime_config import FeedbackConfig
from asyncrl.lanes.http_server import HttpServer
from asyncrl.rewards.feedback.pairs import RatableAnswer
from asyncrl.rewards.feedback.waiting_answers import FeedbackBoard, RatingsFile
from asyncrl.rewards.feedback.web import FeedbackWeb
from tests.browser.chromium import PROGRAM, Tab, browser_tab

pytestmark = pytest.mark.skipif(not PROGRAM, reason="Chromium is not installed: apt-get install chromium")

KEY = "the-right-key"
ATTACKS = [
    "<img src=x onerror='window.hacked = 1'>",
    "</script><script>window.hacked = 1</script>",
    "<a href='javascript:window.hacked=1'>a</a><style>body{display:none}</style>",
    "\u202edetrevni\n\n  two   spaces",
]


class Site:
    """A served page, what waits at it, and a tab that shows it."""

    def __init__(self, board: FeedbackBoard, address: str, tab: Tab) -> None:
        self.board = board
        self.address = address
        self.tab = tab
        self._waits: list[asyncio.Future[float | None]] = []

    async def asks(self, *texts: str, prompt: str = "How was your day?") -> list["asyncio.Future[float | None]"]:
        chat = [{"role": "user", "content": prompt}]
        answers = [RatableAnswer(1, member, chat, text) for member, text in enumerate(texts)]
        waits = [asyncio.ensure_future(self.board.value(each, float("inf"), 60.0)) for each in answers]
        self._waits += waits
        for _ in range(3):
            await asyncio.sleep(0)
        return waits

    async def gives_up(self, text: str) -> None:
        """Asks about an answer, and stops waiting for its rating once the page shows it."""
        (wait,) = await self.asks(text)
        await self.tab.until(f"document.body.innerText.includes({text!r})")
        wait.cancel()
        await asyncio.wait([wait])

    async def close(self) -> None:
        for wait in self._waits:
            wait.cancel()
        await asyncio.gather(*self._waits, return_exceptions=True)


Opening = Callable[..., AbstractAsyncContextManager[Site]]


@pytest.fixture
def site(tmp_path: Path) -> Opening:
    @asynccontextmanager
    async def opened(ask: str = "rate", scale: int = 5, key: str = KEY) -> AsyncIterator[Site]:
        board = FeedbackBoard(RatingsFile(tmp_path / "ratings.jsonl"))
        await board.file.open()
        config = FeedbackConfig.model_validate({"ask": ask, "scale": scale})
        server = HttpServer(FeedbackWeb(board, config, KEY).app, "127.0.0.1", 0)
        async with asyncio.TaskGroup() as tasks, browser_tab(tmp_path / "profile") as tab:
            address = f"http://127.0.0.1:{server.listen('feedback.port')}"
            tasks.create_task(server.serve())
            await tab.open(f"{address}/?key={key}")
            shown = Site(board, address, tab)
            try:
                yield shown
            finally:
                await shown.close()
                await server.stop()
                board.file.close()

    return opened


async def test_keys_rate_one_answer_after_the_other(site: Opening) -> None:
    async with site() as page:
        await page.tab.until("document.body.innerText.includes('Nothing waits for you now')")
        first, second, third = await page.asks("Fine, thank you.", "None of your business!", "Which day?")
        await page.tab.until("document.body.innerText.includes('Fine, thank you.')")
        assert "How was your day?" in await page.tab.text()
        await page.tab.press("4")
        assert await first == 0.75
        await page.tab.until("document.body.innerText.includes('None of your business!')")
        await page.tab.press("1")
        assert await second == 0.0
        await page.tab.until("document.body.innerText.includes('Which day?')")
        await page.tab.press("s")
        await page.tab.until("document.body.innerText.includes('Nothing waits for you now')")
        assert await third is None, "the run waits for it no longer"
        assert page.tab.complaints == []
        assert {url.split("?")[0] for url in page.tab.requests} <= {
            f"{page.address}/",
            f"{page.address}/answers",
            f"{page.address}/ratings",
            "data:,",
        }


async def test_a_click_picks_the_better_of_two(site: Opening) -> None:
    async with site("pick") as page:
        first, second = await page.asks("It was fine, and yours?", "Day day day day day.")
        await page.tab.until("document.querySelectorAll('#answers .card').length === 2")
        assert await page.tab.value("document.querySelector('#title').textContent") == "Pick the better answer"
        await page.tab.value("document.querySelectorAll('#choices button')[1].click()")
        assert (await first, await second) == (0.0, 1.0)
        await page.tab.until("document.body.innerText.includes('Nothing waits for you now')")


async def test_what_a_model_wrote_stays_text(site: Opening) -> None:
    async with site(scale=2) as page:
        waits = await page.asks(*ATTACKS, prompt=ATTACKS[0])
        for text, wait in zip(ATTACKS, waits, strict=True):
            shown = "[...document.querySelectorAll('#answers .message')].map(each => each.textContent)[0]"
            await page.tab.until(f"{shown} === {text!r}")
            assert (
                await page.tab.value("document.querySelectorAll('main img, main a, main script, main style').length")
                == 0
            )
            await page.tab.press("2")
            assert await wait == 1.0
        assert await page.tab.value("window.hacked") is None


async def test_a_late_rating_is_said(site: Opening) -> None:
    async with site() as page:
        await page.gives_up("Too slow")
        await page.tab.press("5")
        await page.tab.until("document.body.innerText.includes('It came too late for this training step')")
        assert (page.board.file.ratings, page.board.file.late) == (1, 1)


async def test_an_answer_comes_again_when_the_worker_that_knew_it_was_started_again(site: Opening) -> None:
    async with site() as page:
        await page.gives_up("Still here")
        page.board._known.clear()  # As in a new worker, which the page asks before it knows the answer.
        await page.tab.press("5")
        await page.tab.until("document.body.innerText.includes('was never asked about here')")
        await page.tab.until("document.getElementById('question').hidden")  # It asked again, and nothing waits.
        (again,) = await page.asks("Still here")
        await page.tab.until("document.body.innerText.includes('Still here')")
        await page.tab.press("5")
        assert await again == 1.0


async def test_a_wrong_key_is_said(site: Opening) -> None:
    async with site(key="wrong-key") as page:
        await page.tab.until("document.body.innerText.includes('the key is missing or wrong')")
