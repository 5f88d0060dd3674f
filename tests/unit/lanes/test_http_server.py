"""The HTTP server that workers and children run on their event loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from asyncrl.errors import ConfigError
from asyncrl.lanes import http_server
from asyncrl.lanes.bound_socket import bound_socket
from asyncrl.lanes.http_server import HttpServer

PATIENCE = 60.0


async def hello(request: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


def made(port: int = 0, **options: int) -> HttpServer:
    routes = [Route("/", hello), Route("/number/{number:int}", hello)]
    return HttpServer(Starlette(routes=routes), "127.0.0.1", port, **options)


@asynccontextmanager
async def serving(**options: int) -> AsyncIterator[int]:
    server = made(**options)
    port = server.listen("feedback.port")
    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve())
        yield port
        await server.stop()


async def said(port: int, request: bytes) -> bytes:
    """Returns the first line of the answer to a request, "" where the connection ends without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with suppress(ConnectionError):
        writer.write(request)
        line = await reader.readline()
        writer.close()
        return line.strip()
    return b""


GOOD = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
STARTS = {"nothing": b"", "half a line": b"GET / HT", "half a head": GOOD[:-4], "empty lines": b"\r\n\r\n"}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
async def test_connections_without_a_request_keep_nobody_out(start: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 3600.0)
    async with serving(connections=16) as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
        for _, writer in held:
            with suppress(ConnectionError):
                writer.write(start)
                await writer.drain()
        assert await said(port, GOOD) == b"HTTP/1.1 200 OK"
        for _, writer in held:
            writer.close()


@pytest.mark.parametrize("before", [b"", GOOD.replace(b"close", b"keep-alive")], ids=["at first", "after an answer"])
@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
async def test_a_head_that_does_not_come_ends_its_connection(
    before: bytes, start: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.05)
    async with serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        if before:
            writer.write(before)
            assert (await reader.readline()).strip() == b"HTTP/1.1 200 OK"
        with suppress(ConnectionError):
            writer.write(start)
            while await reader.read(4096):
                pass
        writer.close()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (GOOD.replace(b"Host", b"X: " + b"a" * 100_000 + b"\r\nHost"), b"431"),
        (GOOD.replace(b"Host", b"".join(b"X%d: y\r\n" % n for n in range(5000)) + b"Host"), b"431"),
        (GOOD.replace(b"GET /", b"GET /number/" + b"9" * 5000), b"414"),
        (GOOD.replace(b"GET /", b"GET /?before=" + b"9" * 5000), b"414"),
        (GOOD.replace(b"GET /", b"GET /number/" + b"9" * 1900), b"200"),
    ],
    ids=["long line", "many lines", "number in a path", "number in a query", "a number that is read"],
)
async def test_heads_are_bounded_also_those_that_come_at_once(request_: bytes, status: bytes) -> None:
    async with serving() as port:
        answer = await said(port, request_)
        assert answer.split()[1] == status if answer else status == b"431", "h11 may end one that came in pieces"


@pytest.mark.parametrize("start", [b"\xff\x00\x7f\r\n\r\n", b"\r\n" * 50, b"GET / HTTP/1.1\r\nUpgrade: h2c\r\n\r\n"])
async def test_what_strangers_send_is_said_nowhere(start: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(connections=2) as port:
        for _ in range(5):
            await said(port, start)
        assert await said(port, GOOD) == b"HTTP/1.1 200 OK"
    assert [each for each in caplog.records if each.levelname != "DEBUG"] == []


async def test_requests_are_answered_from_listen_to_stop() -> None:
    server = made()
    url = f"http://127.0.0.1:{server.listen('feedback.port')}"
    async with asyncio.TaskGroup() as tasks, httpx2.AsyncClient(timeout=20, trust_env=False) as client:
        first = tasks.create_task(client.get(url))  # It waits where nobody serves yet.
        tasks.create_task(server.serve())
        assert (await first).text == "hello"
        await server.stop()
        with pytest.raises(httpx2.ConnectError):
            await client.get(url)


async def test_a_stop_right_after_the_start_leaves_nothing_on_the_event_loop() -> None:
    server = made()
    port = server.listen("feedback.port")
    assert server._listening is not None
    number = server._listening.fileno()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve())
        await server.stop()
    assert not asyncio.get_running_loop().remove_reader(number)
    bound_socket("127.0.0.1", port, "feedback.port").close()


async def test_a_taken_port_names_the_key() -> None:
    server = made()
    port = server.listen("feedback.port")
    with pytest.raises(ConfigError, match=rf"feedback\.port: 127\.0\.0\.1:{port} cannot be listened at"):
        made(port).listen("feedback.port")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve())
        await server.stop()
