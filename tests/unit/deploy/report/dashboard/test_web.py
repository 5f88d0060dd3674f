"""The dashboard over real HTTP: who may read and command, and what each mistake is told."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from asyncrl.deploy.report.dashboard import web
from asyncrl.deploy.report.dashboard.shown_runs import AddressRun, ShownRuns
from asyncrl.deploy.report.dashboard.web import DashboardWeb
from asyncrl.errors import PeerLost, Refused
from asyncrl.fleet.launching.run_access import open_commands
from asyncrl.lanes.http_server import HttpServer
from asyncrl.protocols.messages import Call
from asyncrl.telemetry.run_status import RunStatus, write_status
from tests.unit.deploy.report.recorded_runs import SAMPLE, recorded_run, step

TOKEN = "the-right-token"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = recorded_run(tmp_path / "runs" / "one", [step(1, 1.0)], [SAMPLE])
    write_status(path / "status.json", RunStatus(time.time(), 1, 9, {"ready": 2}, ()))
    return path


@asynccontextmanager
async def serving(runs: ShownRuns) -> AsyncIterator[httpx2.AsyncClient]:
    server = HttpServer(DashboardWeb(runs, TOKEN).app, "127.0.0.1", 0)
    async with asyncio.TaskGroup() as tasks:
        port = server.listen("--port")
        tasks.create_task(server.serve())
        headers = {"Authorization": f"Bearer {TOKEN}"}
        try:
            async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=10) as client:
                yield client
        finally:
            await server.stop()


def runs_in(run_dir: Path) -> ShownRuns:
    return ShownRuns([run_dir.parent], time.time)


async def states(client: httpx2.AsyncClient, run: str, count: int = 1) -> list[dict[str, Any]]:
    """Returns the first states whose lists of runs differ, each with the one before it."""
    found: list[dict[str, Any]] = []
    async with client.stream("GET", "/events", params={"run": run}) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                state = json.loads(line.removeprefix("data: "))
                if not found or state["runs"] != found[-1]["runs"]:  # The age of a state changes at any time.
                    found.append(state)
                if len(found) == count:
                    break
    return found


async def test_nothing_but_the_empty_page_is_read_without_the_token(run_dir: Path) -> None:
    async with serving(runs_in(run_dir)) as client:
        page = await client.get("/", headers={"Authorization": ""})
        assert page.status_code == 200
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "one" not in page.text.split("<script")[0].split("<main>")[0].split("<nav")[1]
        for sent in ("", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer \xfc"):
            for method, path in (("GET", "/events"), ("GET", "/samples"), ("POST", "/stop"), ("POST", "/scale/a/1")):
                got = await client.request(
                    method, f"{path}?run=one", headers={b"authorization": sent.encode("latin-1")}
                )
                assert (got.status_code, "open the address" in got.json()["error"]) == (401, True), (sent, path)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8470", "127.0.0.1.evil.example:1", "192.168.0.1:1", ""])
async def test_a_page_of_another_name_reads_nothing(run_dir: Path, host: str) -> None:
    async with serving(runs_in(run_dir)) as client:
        for path in ("/", "/samples?run=one"):
            assert (await client.get(path, headers={"Host": host})).status_code == 421
        assert (await client.get("/samples?run=one", headers={"Host": "localhost:9"})).status_code == 200, "a tunnel"


async def test_the_state_of_runs_is_streamed_when_it_changes(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "SECONDS", 0.01)
    monkeypatch.setattr("asyncrl.deploy.report.dashboard.shown_runs.SHORTEST", 0.0)
    async with serving(runs_in(run_dir)) as client:
        (seen,) = await states(client, "one")
        assert seen["runs"] == [{"name": "one", "state": "training", "version": 1, "steps": 9}]
        assert (seen["run"]["groups"], seen["run"]["takes_commands"]) == (1, False)
        (seen,) = await states(client, "")
        assert seen["run"] is None
        task = asyncio.ensure_future(states(client, "one", 2))
        while not task.done():
            write_status(run_dir / "status.json", RunStatus(time.time(), 2, 9, {}, (), ended=True))
            await asyncio.wait([task], timeout=0.1)
            write_status(run_dir / "status.json", RunStatus(time.time(), 3, 9, {}, ()))
            await asyncio.wait([task], timeout=0.1)
        assert len({state["runs"][0]["version"] for state in task.result()}) == 2


async def test_samples_are_paged_and_a_group_is_opened(run_dir: Path) -> None:
    async with serving(runs_in(run_dir)) as client:
        page = (await client.get("/samples?run=one")).json()
        assert [(row["step"], row["group"], row["rewards"]) for row in page["groups"]] == [(1, 0, [1.0])]
        group = (await client.get("/samples/1/0?run=one")).json()
        assert [each["text"] for each in group["samples"]] == ["ba"]
        for path, code, says in (
            ("/samples?run=two", 404, "there is no run 'two' here"),
            ("/samples?run=../one", 404, "there is no run"),
            ("/samples?run=one&before=-1", 400, "before is a number"),
            ("/samples/1/7?run=one", 404, "group 7 of step 1 is not recorded"),
        ):
            got = await client.get(path)
            assert (got.status_code, says in got.json()["error"]) == (code, True), got.text


async def test_commands_reach_the_run_and_its_refusal_the_page(run_dir: Path, tmp_path: Path) -> None:
    taken: list[tuple[str, tuple[Any, ...]]] = []

    async def commands(call: Call) -> str:
        taken.append((call.method, call.args))
        if call.method == "stop":
            raise Refused("the run does not train yet")
        return f"did {call.method}"

    async with serving(runs_in(run_dir)) as client:
        got = await client.post("/pause?run=one")
        assert (got.status_code, "commands.json does not exist" in got.json()["error"]) == (409, True)
        async with open_commands(run_dir / "commands.json", f"ipc://{tmp_path}/socket", commands):
            for path in ("/pause", "/unpause", "/scale/generation/3"):
                assert (await client.post(f"{path}?run=one")).json()["said"].startswith("did ")
            got = await client.post("/stop?run=one")
            assert (got.status_code, got.json()) == (409, {"error": "controller[0]: the run does not train yet"})
            assert (await client.get("/pause?run=one")).status_code == 405
            (seen,) = await states(client, "one")
            assert seen["run"]["takes_commands"] is True
    assert taken == [("pause", ()), ("unpause", ()), ("scale", ("generation", 3)), ("stop", ())]


async def test_a_run_at_an_address_is_watched_and_takes_no_commands() -> None:
    looks = 0

    async def watch() -> tuple[RunStatus, dict[str, Any], float]:
        nonlocal looks
        looks += 1
        if looks > 3:
            raise PeerLost("the run at tcp://h:1 does not answer")
        return RunStatus(100.0, 4, 9, {}, (), paused=True), {"step": 4, "reward/mean": 0.5}, 101.0

    async with serving(ShownRuns([], time.time, AddressRun("tcp://h:1", watch))) as client:
        (seen,) = await states(client, "tcp://h:1")
        assert (seen["run"]["state"], seen["run"]["takes_commands"]) == ("paused", False)
        assert seen["run"]["curves"][0]["points"] == [[4, 0.5]]
        got = await client.post("/pause", params={"run": "tcp://h:1"})
        assert (got.status_code, "takes no commands" in got.json()["error"]) == (409, True)
        assert await states(client, "tcp://h:1") == [{"error": "the run at tcp://h:1 does not answer"}]


async def test_as_many_pages_as_allowed_are_open_at_one_time(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "MAX_STREAMS", 1)
    monkeypatch.setattr(web, "SECONDS", 0.01)
    async with serving(runs_in(run_dir)) as client:
        async with client.stream("GET", "/events?run=one") as first:
            assert first.status_code == 200
            got = await client.get("/events?run=one")
            assert (got.status_code, "1 pages are open" in got.json()["error"]) == (503, True)
        async with asyncio.timeout(60):
            while (await client.send(client.build_request("GET", "/events?run=one"), stream=True)).status_code == 503:
                pass


async def test_a_page_that_reads_nothing_loses_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "SEND_DEADLINE", 0.01)
    ended: list[bool] = []

    async def texts() -> AsyncIterator[str]:
        yield "data: 1\n\n"

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def receive() -> Any:
        await asyncio.Event().wait()

    async with asyncio.timeout(60):
        await web.EventStream(texts(), lambda: ended.append(True), {})({}, receive, send)
    assert ended == [True]


async def test_a_stream_without_news_has_a_heartbeat(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "SECONDS", 0.01)
    monkeypatch.setattr(web, "HEARTBEAT", 0.05)
    async with serving(runs_in(run_dir)) as client, client.stream("GET", "/events?run=one") as answer:
        lines = answer.aiter_lines()
        async with asyncio.timeout(60):
            while (await anext(lines)) != ": nothing changed":
                pass
