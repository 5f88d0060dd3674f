"""`asyncrl monitor tcp://HOST:PORT`: a run is watched from another host, by who has a key for that."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import asdict
from pathlib import Path

import pytest

from asyncrl.deploy import cli
from asyncrl.errors import PeerLost, Refused
from asyncrl.fleet.launching import run_access
from asyncrl.fleet.launching.join_point import JoinPoint, Places, open_join_point
from asyncrl.fleet.launching.key_folder import MONITOR, KeyFolder, WorkerKey
from asyncrl.fleet.launching.run_access import RunWatch, SeenRun, watched_run
from asyncrl.lanes.bound_socket import bound_socket
from asyncrl.lanes.control.zmq_wire import ZmqWire
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.telemetry.run_status import RunStatus, WorkerStatus, write_status

WORKER = WorkerStatus("generation0.0", "a", "", ("generate",), 3, {"busy": 0.5}, 0.9, 10**9, 1, {}, {"tokens": 9.0}, 5)


@asynccontextmanager
async def run_that_listens(
    folder: Path, now: Callable[[], float] = time.time
) -> AsyncIterator[tuple[str, KeyFolder, RunDirectory]]:
    """A join point of a run in `folder`, whose files the caller writes."""
    keys = KeyFolder.made(folder / "keys")
    directory = RunDirectory(folder)
    keys.key_of(MONITOR)
    keys.key_of("echo")
    with closing(bound_socket("127.0.0.1", 0, "a test")) as bound:
        address = f"tcp://127.0.0.1:{bound.getsockname()[1]}"
    watch = RunWatch(directory, keys.role_of, now).watch
    places = {"echo": Places(1, ("asyncrl",), "asyncrl join echo")}
    point = JoinPoint(address, places, keys.role_of, deadline=30.0, report=print, watch=watch)
    with closing(ZmqWire(keys.controller_keys())) as wire:
        async with open_join_point(point, wire):
            yield address, keys, directory


def write(directory: RunDirectory, version: int, *, ended: bool = False) -> None:
    status = RunStatus(time.time(), version, 25, {"running": 4}, (WORKER,), ended=ended)
    write_status(directory.status, status)
    directory.metrics.write_text(json.dumps({"step": version, "reward/mean": 0.7}) + "\n")


async def monitor(*arguments: str) -> int:
    async with asyncio.timeout(60):
        return await asyncio.to_thread(cli.main, ["monitor", *arguments, "--once"])


async def test_a_run_is_watched_over_its_join_point(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    async with run_that_listens(tmp_path) as (address, keys, directory):
        key = str(keys.key_of(MONITOR))
        assert await monitor(address, "--key", key) == 2
        assert "has not begun to train: look again" in capsys.readouterr().err
        monkeypatch.setattr(run_access, "SHORTEST", 0.0)
        write(directory, 7)
        assert await monitor(address, "--key", key) == 0
        shown = capsys.readouterr().out
        assert await monitor(str(tmp_path)) == 0
        assert capsys.readouterr().out == shown, "it is what the host of the run sees"
    assert "version 7 of 25 steps" in shown
    assert "step 7: reward 0.700" in shown
    assert "generation0.0 50%" in shown


async def test_the_clock_of_the_run_tells_how_old_a_state_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with run_that_listens(tmp_path, lambda: 1e9 + 3) as (address, keys, directory):
        write_status(directory.status, RunStatus(1e9, 7, 25, {}, ()))
        assert await monitor(address, "--key", str(keys.key_of(MONITOR))) == 0
    assert "This state is" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("whose", "says"),
    [
        ("worker", "is a key of echo workers: make one with"),
        ("other", "does not accept"),
        ("none", "write --key with a key that"),
    ],
)
async def test_another_key_does_not_watch(
    whose: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with run_that_listens(tmp_path) as (address, keys, directory):
        write(directory, 7)
        other = KeyFolder.made(tmp_path / "other").key_of(MONITOR)
        key = {"worker": ["--key", str(keys.key_of("echo"))], "other": ["--key", str(other)], "none": []}[whose]
        assert await monitor(address, *key) == 2
    assert says in capsys.readouterr().err


async def test_the_controller_refuses_the_proof_of_a_worker(tmp_path: Path) -> None:
    async with run_that_listens(tmp_path) as (address, keys, directory):
        write(directory, 7)
        key = WorkerKey.read(keys.key_of("echo"))
        with closing(ZmqWire(key.keys)) as wire, pytest.raises(Refused, match="is of echo workers"):
            async with watched_run(wire, address, key) as look:
                await look()


async def test_the_files_are_read_once_a_second_however_many_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = RunWatch(RunDirectory(tmp_path), lambda proof: MONITOR)
    looks = []

    def look() -> SeenRun:
        looks.append(1)
        return SeenRun("", "", 1.0)

    monkeypatch.setattr(watch, "_look", look)
    for _ in range(20):
        assert await watch.watch("proof") == ("", "", 1.0)
    assert len(looks) == 1


async def test_a_run_that_ends_meanwhile_is_said_to_be_gone(tmp_path: Path) -> None:
    seen = asyncio.Event()
    gone = asyncio.Event()

    async def look_twice(address: str, key: WorkerKey) -> None:
        with closing(ZmqWire(key.keys)) as wire:
            async with watched_run(wire, address, key) as look:
                assert json.loads((await look()).status)["workers"] == [asdict(WORKER) | {"doing": ["generate"]}]
                seen.set()
                await gone.wait()
                await look()

    async with asyncio.timeout(60):
        async with run_that_listens(tmp_path) as (address, keys, directory):
            write(directory, 7)
            looking = asyncio.create_task(look_twice(address, WorkerKey.read(keys.key_of(MONITOR))))
            await seen.wait()
        gone.set()
        with pytest.raises(PeerLost, match=r"does not answer .* it has ended, or the network broke"):
            await looking
