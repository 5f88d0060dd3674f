"""Serves an ASGI app over HTTP on the event loop of a worker or child, whose signals it leaves alone. The module needs
the extra `serve`."""

import asyncio
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn

from asyncrl.lanes.bound_socket import bound_socket

STOP_SECONDS = 2.0
"""Seconds that open connections have to end by themselves when the server stops."""
KEEP_ALIVE = 5
"""Seconds that an idle connection stays open."""
HEADER_BYTES = 32 * 1024
"""Bytes that the head of a request may have."""


class _EmbeddedServer(uvicorn.Server):
    """Handles no signals: they belong to the process that it runs in."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class HttpServer:
    """Serves `app` at host and port from `listen` to `stop`, in a task of the caller that runs `serve`. connections: as
    many are served at one time, others get the status 503."""

    def __init__(self, app: Any, host: str, port: int, *, connections: int = 64) -> None:
        self._address = (host, port)
        self._server = _EmbeddedServer(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                lifespan="off",
                ws="none",
                http="h11",
                h11_max_incomplete_event_size=HEADER_BYTES,
                limit_concurrency=connections,
                backlog=connections,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=int(STOP_SECONDS),
            )
        )
        self._backlog = connections
        self._listening: socket.socket | None = None
        self._ended = asyncio.Event()

    def listen(self, key: str) -> int:
        """Begins to listen and returns the port, a free one where the port is 0. Raises ConfigError, which names the
        config key `key`, when the port is taken."""
        self._listening = bound_socket(*self._address, key)
        self._listening.listen(self._backlog)
        return int(self._listening.getsockname()[1])

    async def serve(self) -> None:
        """Answers requests until `stop`."""
        assert self._listening is not None, "`listen` comes first"
        try:
            await self._server.serve([self._listening])
        finally:
            self._listening.close()
            self._ended.set()

    async def stop(self) -> None:
        """Stops listening; requests that still run are cut off after a moment."""
        if self._listening is not None:
            self._server.should_exit = True
            with suppress(TimeoutError):
                async with asyncio.timeout(2 * STOP_SECONDS):
                    await self._ended.wait()
