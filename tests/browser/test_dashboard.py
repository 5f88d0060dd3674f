"""The dashboard in a real browser: two sizes, light and dark, by keyboard alone, and with what a model may write."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.deploy.report.dashboard.shown_runs import ShownRuns
from asyncrl.deploy.report.dashboard.web import DashboardWeb
from asyncrl.errors import Refused
from asyncrl.fleet.launching.run_access import open_commands
from asyncrl.lanes.http_server import HttpServer
from asyncrl.protocols.messages import Call
from asyncrl.telemetry.run_status import RunStatus, WorkerStatus, write_status
from tests.browser.chromium import PROGRAM, Tab, browser_tab
from tests.unit.deploy.report.recorded_runs import SAMPLE, recorded_run, step

pytestmark = pytest.mark.skipif(not PROGRAM, reason="Chromium is not installed: apt-get install chromium")

TOKEN = "a-token-of-more-than-twenty-characters"
ATTACK = "<img src=x onerror='window.hacked = 1'></script><script>window.hacked = 1</script>"
TURNS = [
    {"role": "assistant", "content": "go left"},
    {"role": "user", "content": "a wall"},
    {"role": "assistant", "content": ATTACK},
]
SHARES = {"busy": 0.7, "starved": 0.2, "blocked": 0.1}
WORKERS = tuple(
    WorkerStatus(
        name, "a", problem, ("generate for 2.0 s",) * 66, 1, SHARES, 0.9, 10**9, 1, {}, {}, 29, service=service
    )
    for name, service, problem in (
        ("generation0.0", "generation", ""),
        ("generation1.0", "generation", "killed by SIGKILL; starts again"),
        ("reward0.0", "reward", ""),
        ("training0.0", "training", ""),
    )
)


def write_runs(folder: Path) -> Path:
    """Writes a run that has ended, and one that goes on with answers and episodes; returns the latter."""
    recorded_run(folder / "older", [step(1, 1.0)], [SAMPLE])
    write_status(folder / "older" / "status.json", RunStatus(time.time() - 60, 1, 1, {"trained": 1}, (), ended=True))
    numbers = {"staleness/mean": 1.0, "perf/tokens_per_s": 812.0, "completions/length_mean": 9.0}
    lines = [step(n, float(n), **numbers, **{"reward/mean": n / 40}) for n in range(1, 30)]
    samples = [
        replace(SAMPLE, step=n, group=n, member=m, text=f"answer {n}.{m}", reward=m / 2)
        for n in range(1, 30)
        for m in (0, 1)
    ]
    samples += [
        replace(SAMPLE, step=30, group=30, member=m, prompt=ATTACK, turns=TURNS, turn_rewards=[0.25, 0.75], text="x")
        for m in (0, 1)
    ]
    path = recorded_run(folder / "newer", lines, samples)
    write_status(path / "status.json", RunStatus(time.time(), 29, 50, {"ready": 4, "trained": 58}, WORKERS))
    return path


class Site:
    """The page of two runs. taken: commands that reached the newer one."""

    def __init__(self, path: Path, tab: Tab, address: str) -> None:
        self.path = path
        self.tab = tab
        self.address = address
        self.taken: list[tuple[str, tuple[Any, ...]]] = []
        self.paused = False

    async def commands(self, call: Call) -> str:
        if call.method == "scale" and call.args[1] > 4:
            raise Refused("the pool of generation has room for 4")
        self.taken.append((call.method, call.args))
        self.paused = {"pause": True, "unpause": False}.get(call.method, self.paused)
        self.write()
        return f"did {call.method}"

    def write(self) -> None:
        status = RunStatus(time.time(), 29, 50, {"ready": 4, "trained": 58}, WORKERS, paused=self.paused)
        write_status(self.path / "status.json", status)

    async def keys(self, *names: str) -> None:
        for name in names:
            await self.tab.key(name)

    async def tab_to(self, selector: str) -> None:
        """Presses Tab until an element has the focus."""
        for _ in range(60):
            if await self.tab.value(f"document.activeElement.matches({selector!r})"):
                return
            await self.tab.key("Tab")
        raise AssertionError(f"Tab never reaches {selector}")


Opening = Callable[..., AbstractAsyncContextManager[Site]]


@pytest.fixture
def opened(tmp_path: Path) -> Opening:
    @asynccontextmanager
    async def opening(width: int = 1300, scheme: str = "light") -> AsyncIterator[Site]:
        path = write_runs(tmp_path / "runs")
        server = HttpServer(DashboardWeb(ShownRuns([tmp_path / "runs"], time.time), TOKEN).app, "127.0.0.1", 0)
        async with asyncio.TaskGroup() as tasks, browser_tab(tmp_path / "profile") as tab:
            address = f"http://127.0.0.1:{server.listen('--port')}"
            tasks.create_task(server.serve())
            site = Site(path, tab, address)
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            await tab.call("Emulation.setDeviceMetricsOverride", **size)
            await tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            async with open_commands(path / "commands.json", f"ipc://{tmp_path}/socket", site.commands):
                await tab.open(f"{address}/#{TOKEN}")
                await tab.until("document.querySelectorAll('#groups tr').length === 30")
                yield site
            await server.stop()

    return opening


@pytest.mark.parametrize(("width", "scheme"), [(1300, "light"), (420, "dark")])
async def test_runs_workers_curves_and_samples_are_shown(opened: Opening, width: int, scheme: str) -> None:
    async with opened(width, scheme) as site:
        tab = site.tab
        text = await tab.text()
        for shown in (
            "newer",
            "older",
            "training · 29 of 50 steps",
            "ended · 1 of 1 steps",
            "killed by SIGKILL",
            "and 64 more",
        ):
            assert shown in text
        assert await tab.value("[...document.querySelectorAll('svg')].every(each => each.clientWidth > 200)")
        assert await tab.value("document.querySelectorAll('svg').length") == 4
        assert await tab.value("document.documentElement.scrollWidth <= window.innerWidth")
        background = await tab.value("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(245, 246, 248)") == (scheme == "light")
        assert TOKEN not in await tab.value("location.href"), "the token leaves the address"
        await tab.value("document.querySelector('#groups a').click()")
        await tab.until("document.querySelectorAll('.sample').length === 2")
        assert await tab.value("document.documentElement.scrollWidth <= window.innerWidth")
        if folder := os.environ.get("ASYNCRL_SCREENSHOTS"):
            await tab.screenshot(Path(folder) / f"dashboard-{width}-{scheme}.png")
        assert tab.complaints == []
        assert {url.partition("?")[0].removeprefix(site.address) for url in tab.requests if "#" not in url} <= {
            *("/", "/events", "/samples", "/samples/30/30", "data:,")
        }


async def test_an_episode_is_read_turn_by_turn_and_stays_text(opened: Opening) -> None:
    async with opened() as site:
        await site.tab.value("document.querySelector('#groups a').click()")
        await site.tab.until("document.querySelectorAll('.turn').length === 6")
        turns = await site.tab.value("[...document.querySelectorAll('.turn')].slice(0, 3).map(each => each.innerText)")
        assert [turn.split("\n")[0] for turn in turns] == [
            "1 · assistant · reward 0.250",
            "2 · user",
            "3 · assistant · reward 0.750",
        ]
        assert ATTACK in turns[2]
        assert await site.tab.value("window.hacked === undefined && !document.querySelector('main img')")


async def test_a_run_is_watched_and_commanded_by_keyboard_alone(opened: Opening) -> None:
    async with opened() as site:
        tab = site.tab
        await site.tab_to("#pause")
        await tab.key("Enter")
        await tab.until("document.querySelector('#state').textContent === 'paused'")
        await tab.until("document.querySelector('#note').textContent === 'did pause'")
        await tab.until("document.activeElement.id === 'pause' && document.activeElement.textContent === 'Unpause'")
        await tab.key("Enter")
        await tab.until("document.querySelector('#state').textContent === 'training'")
        await site.tab_to("#count")
        assert await tab.value("document.activeElement.value") == "2", "as many as there are"
        await site.keys("ArrowUp", "Tab", "Enter")
        await tab.until("document.querySelector('#note').textContent === 'did scale'")
        await tab.value("document.querySelector('#count').value = 9")
        await site.tab_to("#scale")
        await tab.key("Enter")
        await tab.until("document.querySelector('#note').textContent.includes('has room for 4')")
        await tab.value("document.querySelector('#stop').focus()")
        await tab.key("Enter")
        await tab.until("document.querySelector('#confirm').open")
        assert await tab.value("document.activeElement.value") == "no", "Enter alone stops nothing"
        await tab.key("Enter")
        await tab.until("!document.querySelector('#confirm').open")
        await tab.key("Enter")
        await site.tab_to("dialog button[value=stop]")
        await tab.key("Enter")
        await tab.until("document.querySelector('#note').textContent === 'did stop'")
        assert site.taken == [("pause", ()), ("unpause", ()), ("scale", ("generation", 3)), ("stop", ())]


async def test_samples_are_drilled_into_by_keyboard_alone(opened: Opening) -> None:
    async with opened() as site:
        tab = site.tab
        await site.tab_to("#groups a")
        await tab.key("Enter")
        await tab.until("document.querySelector('#group-title').textContent.includes('Step 30, group 30')")
        assert await tab.value("document.activeElement.id") == "group"
        await tab.key("j")
        await tab.until("document.querySelector('#siblings').innerText.includes('answer 29.1')")
        await tab.key("k")
        await tab.until("document.querySelector('#group-title').textContent.includes('Step 30, group 30')")
        await tab.key("Escape")
        await tab.until("document.querySelector('#group').hidden")
        assert await tab.value("document.activeElement.closest('#groups') !== null"), "focus goes back to the list"
        await tab.value("document.body.focus(); document.activeElement.blur()")
        await site.tab_to("nav a[href*=older]")
        await tab.key("Enter")
        await tab.until("document.querySelector('#name').textContent === 'older'")
        await tab.until("document.querySelectorAll('#groups tr').length === 1")
        assert await tab.value("document.querySelector('#controls').hidden"), "an ended run takes no commands"
        assert tab.complaints == []


async def test_without_its_token_the_page_says_what_to_open(opened: Opening) -> None:
    async with opened() as site:
        await site.tab.value("sessionStorage.clear()")
        await site.tab.open("about:blank")
        await site.tab.open(f"{site.address}/")
        await site.tab.until("document.body.innerText.includes('the token is missing')")
        await site.tab.open("about:blank")
        await site.tab.open(f"{site.address}/#the-token-of-another-dashboard")
        await site.tab.until("document.body.innerText.includes('the token is missing or wrong')")
