"""The dashboard over HTTP, for one user on one machine.

GET  /                          the page, which has no data; its address ends in #TOKEN, which browsers do not send
GET  /events?run=NAME           server-sent events: {"runs": [...], "run": {...}}, and a comment every HEARTBEAT
GET  /samples?run=NAME&before=N a page of the recorded groups
GET  /samples/STEP/GROUP?run=NAME
POST /pause, /unpause, /stop, /scale/SERVICE/COUNT  each ?run=NAME

All but the page need the header `Authorization: Bearer TOKEN`, which no other page can send.
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from asyncrl.deploy.report.dashboard.shown_runs import ShownRun, ShownRuns
from asyncrl.errors import AsyncrlError
from asyncrl.telemetry.run_status import SECONDS

FOLDER = Path(__file__).parent
MAX_STREAMS = 12
"""Pages that may be open at one time; a browser opens one connection for each."""
HEARTBEAT = 10.0
"""Seconds after which a stream without news sends a comment, so that both ends notice when the other one is gone."""
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
"""Names by which a browser may call this host; a page of another name that resolves to it is an attack."""
COMMANDS = ("pause", "unpause", "stop")
"""Commands without arguments."""
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
Endpoint = Callable[[Request], Awaitable[Response]]
SEND_DEADLINE = 10.0
"""Seconds that a page may take to read an event; one that stands still holds memory and a place."""


class DashboardWeb:
    """Serves the page of some runs. token: everyone who has it may read and command them."""

    def __init__(self, runs: ShownRuns, token: str) -> None:
        self._runs = runs
        self._token = token.encode()
        self._streams = 0
        self._page = (FOLDER / "page.html").read_text("utf-8")
        routes = [
            Route("/", self._local(self._show_page)),
            Route("/events", self._guarded(self._events)),
            Route("/samples", self._guarded(self._samples)),
            Route("/samples/{step:int}/{group:int}", self._guarded(self._group)),
            *(Route(f"/{name}", self._guarded(self._command), methods=["POST"]) for name in COMMANDS),
            Route("/scale/{service}/{count:int}", self._guarded(self._scale), methods=["POST"]),
        ]
        self.app = Starlette(routes=routes, exception_handlers={HTTPException: _failed, AsyncrlError: _failed})

    def _local(self, endpoint: Endpoint) -> Endpoint:
        async def local(request: Request) -> Response:
            if request.headers.get("host", "").rpartition(":")[0] not in LOOPBACK_NAMES:
                raise HTTPException(421, "open the address that the command printed, or a tunnel to localhost")
            return await endpoint(request)

        return local

    def _guarded(self, endpoint: Endpoint) -> Endpoint:
        async def guarded(request: Request) -> Response:
            scheme, _, token = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not secrets.compare_digest(token.encode(), self._token):
                raise HTTPException(401, "the token is missing or wrong: open the address that the command printed")
            return await endpoint(request)

        return self._local(guarded)

    async def _show_page(self, request: Request) -> Response:
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        headers = {**HEADERS, "Content-Security-Policy": policy}
        return HTMLResponse(self._page.replace("{{nonce}}", nonce), headers=headers)

    async def _run(self, request: Request) -> ShownRun:
        name = request.query_params.get("run", "")
        if (run := await self._runs.named(name)) is None:
            raise HTTPException(404, f"there is no run {name!r} here any more")
        return run

    async def _events(self, request: Request) -> Response:
        if self._streams >= MAX_STREAMS:
            raise HTTPException(503, f"{MAX_STREAMS} pages are open, which is the most: close one")
        self._streams += 1
        return EventStream(self._states(request.query_params.get("run", "")), self._left, dict(HEADERS))

    def _left(self) -> None:
        self._streams -= 1

    async def _states(self, name: str) -> AsyncIterator[str]:
        """Yields the state of the runs when it changed, for ever."""
        loop = asyncio.get_running_loop()
        before = ""
        sent_at = loop.time()
        while True:
            text = json.dumps(await self._state(name))
            if text != before:
                yield f"data: {text}\n\n"
                before = text
                sent_at = loop.time()
            elif loop.time() - sent_at >= HEARTBEAT:
                yield ": nothing changed\n\n"
                sent_at = loop.time()
            await asyncio.sleep(SECONDS)

    async def _state(self, name: str) -> dict[str, Any]:
        try:
            run = await self._runs.named(name)
            return {"runs": await self._runs.rows(), "run": await run.look() if run else None}
        except AsyncrlError as error:
            return {"error": str(error)}

    async def _samples(self, request: Request) -> Response:
        before = request.query_params.get("before", "")
        if before and not (before.isascii() and before.isdigit()):
            raise HTTPException(400, "before is a number that a page of samples gave as `next`")
        run = await self._run(request)
        return JSONResponse(await run.page(int(before) if before else None), headers=HEADERS)

    async def _group(self, request: Request) -> Response:
        run = await self._run(request)
        place = request.path_params
        if (found := await run.group(place["step"], place["group"])) is None:
            raise HTTPException(404, f"group {place['group']} of step {place['step']} is not recorded")
        return JSONResponse(found, headers=HEADERS)

    async def _command(self, request: Request) -> Response:
        run = await self._run(request)
        return JSONResponse({"said": await run.command(request.url.path[1:])}, headers=HEADERS)

    async def _scale(self, request: Request) -> Response:
        run = await self._run(request)
        wanted = request.path_params
        return JSONResponse({"said": await run.command("scale", wanted["service"], wanted["count"])}, headers=HEADERS)


async def _failed(request: Request, error: Exception) -> Response:
    """Answers with the error as JSON: 409 where a run refuses, or does not answer."""
    status, text = (error.status_code, error.detail) if isinstance(error, HTTPException) else (409, str(error))
    return JSONResponse({"error": text}, status, HEADERS)


class EventStream(Response):
    """Sends texts as they come. ended: called once, when the response is over."""

    media_type = "text/event-stream"

    def __init__(self, texts: AsyncIterator[str], ended: Callable[[], None], headers: MutableMapping[str, str]) -> None:
        super().__init__(headers={**headers, "Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._texts = texts
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = [asyncio.ensure_future(self._send(send)), asyncio.ensure_future(_until_left(receive))]
        try:
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in work:
                task.cancel()
            results = await asyncio.gather(*work, return_exceptions=True)
            self._ended()
        for error in results:
            if isinstance(error, Exception):
                raise error

    async def _send(self, send: Send) -> None:
        with suppress(TimeoutError):
            await _in_time(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for text in self._texts:
                await _in_time(send, {"type": "http.response.body", "body": text.encode(), "more_body": True})


async def _in_time(send: Send, message: MutableMapping[str, Any]) -> None:
    async with asyncio.timeout(SEND_DEADLINE):
        await send(message)


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
