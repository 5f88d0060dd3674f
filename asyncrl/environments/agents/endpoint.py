"""The HTTP server of a child, on loopback, for the agents of all its episodes: chat completions and the list of models.

/episodes/NUMBER/v1/chat/completions    each episode has a base URL and a key of its own
"""

import asyncio
import hmac
import json
import secrets
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from asyncrl.environments.agents.chat_completions import RefusedRequest, chunks, completion, read_request
from asyncrl.environments.agents.exchanges import Exchange, Exchanges
from asyncrl.lanes.http_server import HttpServer

HOST = "127.0.0.1"
LARGEST_BODY = 4 * 2**20
"""Bytes of a request: more than the context of any model."""
LARGEST_SKIPPED = 64 * 2**20
"""Bytes of a request that are read and not kept, so that its client reads why it is refused."""
BODY_SECONDS = 30.0
"""Seconds in which a request has to arrive; it comes from this machine."""
CONNECTIONS = 4096
"""Connections of all agents of a child: an agent has one or a few, and a thousand episodes are many for a child."""
MODEL = {"id": "policy", "object": "model", "created": 0, "owned_by": "asyncrl"}
RETRIES = "x-stainless-retry-count"
"""Header in which the client says how often it has sent a request before."""
KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "server_error"}
OTHERS = "this endpoint has chat/completions and models only; set the agent's library to chat completions"


@dataclass(frozen=True, slots=True)
class AgentAccess:
    """Says how an agent reaches the policy."""

    base_url: str
    key: str


@dataclass(eq=False, slots=True)
class Endpoint:
    """Serves the episodes that are open. It runs from the first that opens to the last that closes."""

    _open: dict[int, tuple[str, Exchanges]] = field(default_factory=dict)
    _numbers: int = 0
    _port: int = 0
    _server: HttpServer | None = None
    _serving: asyncio.Task[None] | None = None
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    of_loop: ClassVar["dict[asyncio.AbstractEventLoop, Endpoint]"] = {}

    @classmethod
    def running(cls) -> "Endpoint":
        """Returns the endpoint of this event loop."""
        return cls.of_loop.setdefault(asyncio.get_running_loop(), cls())

    async def open(self, exchanges: Exchanges) -> tuple[int, AgentAccess]:
        """Admits an agent, and returns the number of its episode with what the agent needs."""
        self._numbers += 1
        number = self._numbers
        key = secrets.token_urlsafe(32)
        with ExitStack() as unless_opened:
            unless_opened.callback(self._open.pop, number)
            self._open[number] = (key, exchanges)  # Before it waits for a server that ends: this endpoint goes on.
            async with self._changing:
                if self._server is None:
                    self._start()
            unless_opened.pop_all()
        return number, AgentAccess(f"http://{HOST}:{self._port}/episodes/{number}/v1", key)

    async def close(self, number: int) -> None:
        """Refuses all further requests of an episode."""
        _, exchanges = self._open.pop(number)
        exchanges.close()
        async with self._changing:
            if not self._open:
                await self._stop()
            if not self._open:
                self.of_loop.pop(asyncio.get_running_loop(), None)

    def _start(self) -> None:
        self._server = HttpServer(self._application(), HOST, 0, connections=CONNECTIONS)
        self._port = self._server.listen("environment.use")
        self._serving = asyncio.create_task(self._server.serve(), name="agent endpoint")

    async def _stop(self) -> None:
        server = self._server
        self._server = None
        if server is not None:
            await server.stop()

    def _application(self) -> Starlette:
        root = "/episodes/{number:int}/v1"
        return Starlette(
            routes=[
                Route(root + "/chat/completions", _answered(self._complete), methods=["POST"]),
                Route(root + "/models", _answered(self._models)),
                Route(root + "/models/{model:path}", _answered(self._models)),
            ],
            exception_handlers={HTTPException: _not_found},
        )

    def _episode(self, request: Request) -> Exchanges:
        """Returns the exchanges of the episode that a request belongs to, by its path and its key."""
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        key, exchanges = self._open.get(request.path_params["number"], ("", None))
        known = hmac.compare_digest(given.strip().encode("latin-1"), key.encode())
        if exchanges is None or kind.lower() != "bearer" or not known:
            raise RefusedRequest(
                "the key is not that of this episode: use OPENAI_BASE_URL and OPENAI_API_KEY as the agent got them",
                status=401,
            )
        exchanges.count_request()
        return exchanges

    async def _models(self, request: Request) -> Response:
        self._episode(request)
        named = "model" in request.path_params
        return JSONResponse(MODEL if named else {"object": "list", "data": [MODEL]})

    async def _complete(self, request: Request) -> Response:
        exchanges = self._episode(request)
        body = await _body(request)
        asked = read_request(body, retry=request.headers.get(RETRIES, "0") not in ("", "0"))
        exchange = exchanges.arrive(asked)
        try:
            await _answer_or_disconnect(exchange, request)
            answer = exchange.answer.result()
        finally:
            exchange.waiting -= 1
        exchange.delivered = True
        if asked.stream:
            return StreamingResponse(chunks(asked, answer), media_type="text/event-stream")
        return JSONResponse(completion(asked, answer))


async def _body(request: Request) -> bytes:
    """Returns the body of a request, of which no more is read than may come."""
    parts = []
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size <= LARGEST_BODY:
                    parts.append(part)
                elif size > LARGEST_SKIPPED:
                    break
    except TimeoutError:
        raise RefusedRequest(f"the request did not arrive within {BODY_SECONDS:g} s", status=408) from None
    if size > LARGEST_BODY:
        raise RefusedRequest(f"a request has at most {LARGEST_BODY} bytes", status=413)
    return b"".join(parts)


async def _answer_or_disconnect(exchange: Exchange, request: Request) -> None:
    """Waits until the exchange has an answer. Raises ClientDisconnect when the client goes away."""
    gone = asyncio.ensure_future(request.receive())  # After the body, only a disconnection comes.
    ends: list[asyncio.Future[Any]] = [exchange.answer, gone]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
    if not exchange.answer.done():
        raise ClientDisconnect
    if exchange.answer.cancelled():
        raise RefusedRequest("the episode has ended", status=503)


Handler = Callable[[Request], Awaitable[Response]]


def _answered(handler: Handler) -> Handler:
    """Returns a handler that turns refusals into errors as the client knows them."""

    async def answered(request: Request) -> Response:
        try:
            return await handler(request)
        except RefusedRequest as refused:
            return _error(str(refused), refused.status, refused.param)
        except ClientDisconnect:
            return Response(status_code=499)

    return answered


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(f"there is no {request.method} {request.url.path}: {OTHERS}", error.status_code)


def _error(text: str, status: int, param: str | None = None) -> Response:
    kind = KINDS.get(status, "invalid_request_error")
    body: dict[str, Any] = {"error": {"message": text, "type": kind, "param": param, "code": None}}
    headers = {"content-type": "application/json", "connection": "close"}
    return Response(json.dumps(body), status, headers)
