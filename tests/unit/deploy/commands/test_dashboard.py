"""`asyncrl dashboard`: the address that it prints opens the runs, and each mistake gives one clear error."""

import asyncio
import re
import time
from contextlib import closing
from pathlib import Path

import httpx2
import pytest

from asyncrl.deploy.cli import main
from asyncrl.deploy.commands import dashboard
from asyncrl.lanes.bound_socket import bound_socket
from asyncrl.telemetry.run_status import RunStatus, write_status
from tests.unit.deploy.report.recorded_runs import SAMPLE, recorded_run, step


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    path = recorded_run(tmp_path / "runs" / "one", [step(1, 1.0)], [SAMPLE])
    write_status(path / "status.json", RunStatus(time.time(), 1, 9, {}, ()))
    return tmp_path / "runs"


async def test_the_printed_address_has_the_token_and_nothing_else_prints_it(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serving = asyncio.ensure_future(dashboard.serve([str(runs)], None, 0))
    printed = ""
    async with asyncio.timeout(60):
        while "Ctrl-C" not in printed:
            await asyncio.wait([serving], timeout=0.01)
            assert not serving.done()
            printed += capsys.readouterr().out
    (found,) = re.finditer(r"dashboard: (http://127\.0\.0\.1:\d+/)#([\w-]{32})\n", printed)
    async with httpx2.AsyncClient(base_url=found[1], timeout=10) as client:
        headers = {"Authorization": f"Bearer {found[2]}"}
        assert (await client.get("/samples?run=one", headers=headers)).json()["all"] == 1
        assert (await client.get("/samples?run=one")).status_code == 401
    serving.cancel()
    await asyncio.wait([serving])
    said = capsys.readouterr()
    assert found[2] not in said.out + said.err


def test_a_port_that_is_taken_is_named(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(bound_socket("127.0.0.1", 0, "a test")) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["dashboard", str(runs), "--port", str(port)]) == 2
    assert re.search(rf"--port: 127\.0\.0\.1:{port} cannot be listened at", capsys.readouterr().err)


def test_without_the_extra_it_says_what_to_install(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dashboard, "find_spec", lambda name: None)
    assert main(["dashboard", str(runs)]) == 2
    said = capsys.readouterr().err
    assert "the dashboard needs starlette and uvicorn; run: " in said
    assert "serve" in said
