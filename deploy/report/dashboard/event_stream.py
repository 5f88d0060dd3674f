"""Server-sent events: a response that goes on until the page leaves, or reads too slowly."""

import asyncio
from collections.abc import AsyncIterator, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

SEND_DEADLINE = 10.0
"""Seconds that a page may take to read an event; one that stands still holds memory and a place."""


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
