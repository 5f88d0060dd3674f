"""Serves an ASGI app over HTTP on the event loop of a worker or child, whose signals it leaves alone. The module needs
the extra `serve`.

    accepted ── HEAD_SECONDS ──> head ──> request ──> answer ── KEEP_ALIVE ──> closed

A connection without a request holds no place that another one needs: where all are taken, the oldest of them goes, of
the address that has the most.
"""

import asyncio
import resource
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from asyncrl.lanes.bound_socket import bound_socket

STOP_SECONDS = 2.0
"""Seconds that open connections have to end by themselves when the server stops."""
KEEP_ALIVE = 5
"""Seconds that an idle connection stays open."""
HEADER_BYTES = 32 * 1024
"""Bytes that the head of a request may have."""
TARGET_BYTES = 2048
"""Bytes that path and query may have. Python reads no number of twice as many digits."""
HEAD_SECONDS = 5.0
"""Seconds from the start of a connection, or of a further request, to the end of its head."""


class _EmbeddedServer(uvicorn.Server):
    """Handles no signals: they belong to the process that it runs in."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _BoundedProtocol(H11Protocol):
    """One connection, which ends where the head of a request does not come in time."""

    _late: asyncio.TimerHandle | None = None
    began = 0.0

    @property
    def is_idle(self) -> bool:
        """Returns whether the connection has no request that is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()
        most = self.limit_concurrency
        if most is None or len(self.connections) < most:
            return
        idle = [each for each in self.connections if isinstance(each, _BoundedProtocol) and each.is_idle]
        idle.sort(key=lambda each: each.began)
        addresses = [each.client and each.client[0] for each in idle]
        if other := [each for each in idle if each is not self]:
            crowd = max(set(addresses), key=addresses.count)
            oldest = next((each for each in other if each.client and each.client[0] == crowd), other[0])
            oldest.connections.discard(oldest)
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.is_idle:
            self._stop_waiting()
        elif not self.transport.is_closing():
            self._await_head()

    def _await_head(self) -> None:
        if self._late is None:
            self.began = self.loop.time()
            self._late = self.loop.call_later(HEAD_SECONDS, self._end)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _end(self) -> None:
        self._late = None
        if self.is_idle:
            self.transport.abort()


def _with_bounds(app: Any) -> Any:
    """Returns an app that refuses heads that are too large, also those that came at once, before the app sees them."""

    async def bounded(scope: Any, receive: Any, send: Any) -> None:
        target = len(scope["raw_path"]) + len(scope["query_string"])
        head = target + sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        status = 414 if target > TARGET_BYTES else 431 if head > HEADER_BYTES else 0
        if not status:
            await app(scope, receive, send)
            return
        text = b"the address is too long\n" if status == 414 else b"the head of the request is too large\n"
        headers = [(b"content-length", str(len(text)).encode()), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": text})

    return bounded


class HttpServer:
    """Serves `app` at host and port from `listen` to `stop`, in a task of the caller that runs `serve`. connections: as
    many requests are answered at one time, as far as descriptors allow, others get the status 503."""

    def __init__(self, app: Any, host: str, port: int, *, connections: int = 64) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        connections = connections if soft == resource.RLIM_INFINITY else min(connections, soft // 2)
        self._address = (host, port)
        self._server = _EmbeddedServer(
            uvicorn.Config(
                _with_bounds(app),
                log_config=None,
                log_level="error",  # Whoever connects says no lines on the terminal of the run.
                access_log=False,
                server_header=False,
                proxy_headers=False,
                lifespan="off",
                ws="none",
                http=_BoundedProtocol,
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
