"""The HTTP server that workers and children run on their event loop."""

import asyncio

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from asyncrl.errors import ConfigError
from asyncrl.lanes.bound_socket import bound_socket
from asyncrl.lanes.http_server import HttpServer


async def hello(request: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


def made(port: int = 0) -> HttpServer:
    return HttpServer(Starlette(routes=[Route("/", hello)]), "127.0.0.1", port)


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
