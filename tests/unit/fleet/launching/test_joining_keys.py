"""Hosts that join over ZeroMQ, with keys that fit and keys that do not."""

import asyncio
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.concurrency import running_beside
from asyncrl.errors import ConfigError
from asyncrl.fleet.launching.join_point import JoinedWorker, JoinPoint, open_join_point
from asyncrl.fleet.launching.joining_host import JoiningHost
from asyncrl.fleet.launching.key_folder import KeyFolder, WorkerKey
from asyncrl.fleet.worker.worker_spec import WorkerSpec
from asyncrl.lanes.bound_socket import bound_socket
from asyncrl.lanes.control.zmq_wire import ZmqWire
from asyncrl.lanes.data.file_cache import FileCache, FileServer, OfferedFiles
from tests.unit.fleet.fake_workers import spec_of
from tests.unit.fleet.launching.sites import ECHO, VERSIONS, fake_host


@pytest.fixture
def address() -> str:
    with closing(bound_socket("127.0.0.1", 0, "a test")) as socket:
        port = socket.getsockname()[1]
    return f"tcp://127.0.0.1:{port}"


def join_point(address: str, keys: KeyFolder, **changes: Any) -> JoinPoint:
    plain = {"deadline": 30.0, "report": lambda text: None, "versions": VERSIONS}
    return JoinPoint(address, {"echo": ECHO}, keys.role_of, **(plain | changes))


def host(wire: ZmqWire, address: str, key: WorkerKey, **changes: Any) -> JoiningHost:
    return fake_host(wire, address=address, proof=key.proof, **changes)[0]


async def ended(joining: JoiningHost, point: JoinPoint, spec: WorkerSpec) -> JoinedWorker:
    """Has a host run a worker until the host is to leave."""
    task = asyncio.create_task(joining.serve())
    async with asyncio.timeout(60):
        worker = await point.spawn(spec)
        joining.stop.set()
        await task
    return worker


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_host_with_an_admitted_key_gets_a_worker_also_if_the_key_is_made_while_the_run_goes_on(
    is_late: bool, address: str, tmp_path: Path
) -> None:
    keys = KeyFolder.made(tmp_path)
    first = keys.key_of("echo")
    with closing(ZmqWire(keys.controller_keys())) as here:
        async with running_beside({"keys": keys.follow()}), open_join_point(join_point(address, keys), here) as point:
            key = WorkerKey.read(KeyFolder(tmp_path).key_of("echo", "late") if is_late else first)
            with closing(ZmqWire(key.keys)) as there:
                worker = await ended(host(there, address, key), point, spec_of("echo0.0-0-a"))
                assert worker.host.name == "h1"


async def test_a_host_starts_its_worker_with_its_own_paths_of_the_files(address: str, tmp_path: Path) -> None:
    keys = KeyFolder.made(tmp_path / "keys")
    run_dir = tmp_path / "run"
    model = tmp_path / "model"
    for file in (run_dir / "config.toml", model / "config.json"):
        file.parent.mkdir()
        file.write_text("{}")
    key = WorkerKey.read(keys.key_of("echo"))
    files = FileServer({"echo": [OfferedFiles(run_dir, "run", ("config.toml",)), OfferedFiles(model, "folder")]})
    spec = spec_of("echo0.0-0-a")
    spec = replace(spec, facts=replace(spec.facts, run_dir=run_dir, model_dir=model), options={"model": str(model)})
    with closing(ZmqWire(keys.controller_keys())) as here, closing(ZmqWire(key.keys)) as there:
        async with open_join_point(join_point(address, keys, files=files), here) as point:
            joining = host(there, address, key, files=FileCache(tmp_path / "cache", print))
            # The run directory has no logs, so it is not written by this host.
            worker = await ended(joining, point, spec)
            (started,) = joining.launcher.workers  # type: ignore[attr-defined]
            assert started.spec.facts.model_dir == model, "it is seen"
            assert started.spec.options == {"model": str(model)}
            assert started.spec.facts.run_dir.parent == tmp_path / "cache" / "runs"
            assert worker.spec.facts.run_dir == run_dir


@pytest.mark.parametrize("whose", ["another controller's", "one made for another controller"])
async def test_a_host_with_another_key_is_refused_at_once(whose: str, address: str, tmp_path: Path) -> None:
    keys = KeyFolder.made(tmp_path / "ours")
    others = KeyFolder.made(tmp_path / "theirs")
    own = WorkerKey.read(keys.key_of("echo"))
    other = WorkerKey.read(others.key_of("echo"))
    wrong = other if whose == "another controller's" else _addressed_to(other, own)
    with closing(ZmqWire(keys.controller_keys())) as here, closing(ZmqWire(wrong.keys)) as there:
        async with open_join_point(join_point(address, keys), here):
            with pytest.raises(ConfigError, match="does not accept the key of this host"):
                async with asyncio.timeout(60):
                    await host(there, address, wrong).serve()


def _addressed_to(key: WorkerKey, other: WorkerKey) -> WorkerKey:
    """Returns a key that knows the controller of the other one, which does not know the key."""
    return WorkerKey(key.role, type(key.keys)(key.keys.public, key.keys.secret, server=other.keys.server))


async def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    keys = KeyFolder.made(tmp_path)
    keys.key_of("echo")
    with closing(bound_socket("127.0.0.1", 0, "a test")) as socket, closing(ZmqWire(keys.controller_keys())) as wire:
        socket.listen()
        address = f"tcp://127.0.0.1:{socket.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"cannot listen at {address} .*another program listens there"):
            async with open_join_point(join_point(address, keys), wire):
                pass


async def test_a_revoked_key_ends_what_runs_with_it_and_opens_no_connection(address: str, tmp_path: Path) -> None:
    keys = KeyFolder.made(tmp_path)
    said = list[str]()
    key, other = (WorkerKey.read(keys.key_of("echo", name)) for name in ("rented", "own"))
    with closing(ZmqWire(keys.controller_keys())) as here, closing(ZmqWire(key.keys)) as there:
        point = join_point(address, keys, report=said.append)
        async with running_beside({"keys": keys.follow()}), open_join_point(point, here), asyncio.timeout(60):
            joining = host(there, address, key)
            task = asyncio.create_task(joining.serve())
            worker = await point.spawn(spec_of("echo0.0-0-a"))
            (tmp_path / "rented.admitted").unlink()
            assert await worker.wait() == "its host h1 is gone: its key was revoked"
            assert worker.has_left, "which is no death"
            with pytest.raises(ConfigError, match="the key of h1 was revoked"):
                await task
            assert [process.dead for process in joining.launcher.workers] == [True]  # type: ignore[attr-defined]
            assert said[-1] == "the key of h1 was revoked; its echo worker ends"
            with pytest.raises(ConfigError, match="does not accept the key of this host"):
                await host(there, address, key).serve()
            with closing(ZmqWire(other.keys)) as again:
                await ended(host(again, address, other), point, spec_of("echo0.0-0-b"))
