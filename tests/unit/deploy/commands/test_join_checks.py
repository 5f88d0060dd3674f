"""`asyncrl doctor --join`: a real join point on loopback, and all that can be wrong with the way there."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

import pytest

from asyncrl.deploy import cli
from asyncrl.deploy.checks.machine import Check
from asyncrl.deploy.commands import join_checks
from asyncrl.fleet.launching.join_point import JoinPoint, Places, open_join_point
from asyncrl.fleet.launching.joining import Bandwidth, Clock, installed_versions
from asyncrl.fleet.launching.key_folder import KeyFolder
from asyncrl.lanes.bound_socket import bound_socket
from asyncrl.lanes.control.zmq_wire import ZmqWire
from asyncrl.protocols import messages


@contextmanager
def listening() -> Iterator[tuple[socket.socket, str]]:
    with closing(bound_socket("127.0.0.1", 0, "a test")) as bound:
        yield bound, f"tcp://127.0.0.1:{bound.getsockname()[1]}"


@asynccontextmanager
async def run_that_listens(folder: Path, **versions: str) -> AsyncIterator[tuple[str, KeyFolder]]:
    """A join point for echo workers."""
    keys = KeyFolder.made(folder)
    keys.key_of("echo")
    with listening() as (_, address):
        pass
    places = {"echo": Places(1, ("asyncrl", "torch"), "asyncrl join echo")}
    point = JoinPoint(
        address, places, keys.role_of, deadline=30.0, report=print, versions=installed_versions() | versions
    )
    with closing(ZmqWire(keys.controller_keys())) as wire:
        async with open_join_point(point, wire):
            yield address, keys


async def doctor(*arguments: str) -> int:
    """Runs the command beside the join point, in a thread with a loop of its own."""
    async with asyncio.timeout(60):
        return await asyncio.to_thread(cli.main, ["doctor", *arguments])


async def test_a_host_that_could_join_is_told_clock_and_bandwidth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with run_that_listens(tmp_path) as (address, keys):
        key = str(keys.key_of("echo"))
        assert await doctor("echo", "--join", address.replace("127.0.0.1", "localhost"), "--key", key) == 0
    text = capsys.readouterr().out
    for name in ("address", "listener", "key", "versions", "joining", "to the controller", "from the controller"):
        assert f"ok    {name} " in text, text
    assert f"tcp://localhost:{address.rpartition(':')[2]} is {address}" in text
    assert "the controller's is " in text
    assert text.count(" MB/s (4.0 MiB, encrypted, on one connection)") == 2
    assert f"join echo --to tcp://localhost:{address.rpartition(':')[2]} --key {key}" in text


async def test_a_revoked_key_other_versions_and_a_service_that_does_not_join(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    KeyFolder.made(tmp_path).key_of("reward")
    async with run_that_listens(tmp_path, torch="0.1") as (address, keys):
        key = keys.key_of("echo")
        assert await doctor("--join", address, "--key", str(key)) == 1
        text = capsys.readouterr().out
        assert "BAD   versions            torch 0.1 there and" in text
        assert "-> install the same torch on both" in text
        assert "BAD   joining             the controller has torch 0.1" in text
        key.with_suffix(".admitted").unlink()
        keys.look()
        assert await doctor("--join", address, "--key", str(key)) == 1
        assert f"does not accept {key}" in capsys.readouterr().out
        assert await doctor("--join", address, "--key", str(keys.key_of("reward"))) == 1
        assert "no reward workers join this run, and echo workers do" in capsys.readouterr().out


@pytest.mark.parametrize("whose", ["another controller's", "of another role", "missing"])
async def test_a_key_that_does_not_fit(whose: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with run_that_listens(tmp_path / "ours") as (address, keys):
        key = keys.key_of("echo")
        role = "echo"
        expected = "reward workers"
        if whose == "another controller's":
            key = KeyFolder.made(tmp_path / "theirs").key_of("echo")
            expected = f"{address} does not accept"
        elif whose == "of another role":
            key = keys.key_of("echo")
            role = "reward"
            expected = "is a key of echo workers, not of reward workers"
        else:
            key = tmp_path / "none.key"
            expected = "No such file"
        assert await doctor(role, "--join", address, "--key", str(key)) == 1
    (line, remedy) = capsys.readouterr().out.partition("BAD   key ")[2].splitlines()[:2]
    assert expected in line
    assert "asyncrl admit" in remedy


async def test_another_protocol_names_both_versions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from asyncrl.fleet.launching import joining

    async with run_that_listens(tmp_path) as (address, keys):
        monkeypatch.setattr(joining, "PROTOCOL", messages.PROTOCOL + 1)
        assert await doctor("--join", address, "--key", str(keys.key_of("echo"))) == 1
    text = capsys.readouterr().out
    assert "BAD   versions " in text
    assert f"protocol {messages.PROTOCOL + 1}" in text
    assert f"protocol {messages.PROTOCOL}" in text
    assert "-> install the same asyncrl on both hosts" in text


def test_an_address_without_a_listener(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with listening() as (_, address):
        pass
    assert cli.main(["doctor", "--join", address, "--key", str(tmp_path / "k")]) == 1
    text = capsys.readouterr().out
    assert f"BAD   listener            nothing listens at {address}" in text
    assert f"run NAME --listen {address}" in text


@pytest.mark.parametrize("says", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
async def test_an_address_with_another_listener(
    says: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(says)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await doctor("--join", f"tcp://127.0.0.1:{port}", "--key", str(tmp_path / "k")) == 1
    assert "another program than asyncrl listens at" in capsys.readouterr().out


def test_a_listener_that_says_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join_checks, "CONNECT_DEADLINE", 0.1)
    with listening() as (bound, address):
        bound.listen()
        assert cli.main(["doctor", "--join", address, "--key", str(tmp_path / "k")]) == 1
    text = capsys.readouterr().out
    assert f"{address} did not answer within 0.1 s" in text
    assert "-> look for a firewall: TCP from this host to port" in text


@pytest.mark.parametrize("wrong", ["10.0.0.1:70", "tcp://no.such.host.invalid:7000"])
def test_what_is_no_address(wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--join", wrong, "--key", str(tmp_path / "k")]) == 1
    assert "BAD   address             --join:" in capsys.readouterr().out


@pytest.mark.parametrize(("offset", "status"), [(0.2, "ok"), (-3.0, "note"), (3.0, "note")])
def test_clocks_that_differ_are_worth_knowing(offset: float, status: str) -> None:
    found = join_checks._clock_check(Clock(offset, 0.001, 0.002))
    assert (found.status, "run NTP" in found.remedy) == (status, status == "note")


def test_bandwidth_that_was_not_measured_is_not_called_slow() -> None:
    found = join_checks._bandwidth_check("to the controller", Bandwidth(0.0, 0, "another probe has begun since"))
    assert found == Check(
        "to the controller",
        "note",
        "not measured: another probe has begun since",
        "ask again when no other host probes the run",
    )
    assert join_checks._bandwidth_check("x", Bandwidth(4e6, 2**20)).status == "note"
    assert join_checks._bandwidth_check("x", Bandwidth(6e6, 2**20)).status == "ok"
