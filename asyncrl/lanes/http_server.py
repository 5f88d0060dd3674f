"""Serves an ASGI app over HTTP on the event loop of a worker or child, whose signals it leaves alone. The module needs
the extra `serve`."""

import asyncio
import socket
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import uvicorn

from asyncrl.errors import ConfigError

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
    """Serves `app` at host and port between `start` and `stop`. connections: as many are served at one time, others get
    the status 503."""

    def __init__(self, app: Any, host: str, port: int, *, connections: int = 64) -> None:
        self._address = (host, port)
        self._server = _EmbeddedServer(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                ws="none",
                http="h11",
                h11_max_incomplete_event_size=HEADER_BYTES,
                limit_concurrency=connections,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=int(STOP_SECONDS),
            )
        )
        self._serving: asyncio.Task[None] | None = None

    def start(self, tasks: asyncio.TaskGroup, key: str) -> int:
        """Begins to listen and returns the port, a free one where the port is 0. Raises ConfigError, which names the
        config key `key`, when the port is taken."""
        listening = bound_socket(*self._address, key)
        listening.listen(128)
        port = int(listening.getsockname()[1])
        self._serving = tasks.create_task(self._server.serve([listening]), name=f"HTTP server at port {port}")
        return port

    async def stop(self) -> None:
        """Stops listening; requests that still run are cut off after a moment."""
        if self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait([self._serving], timeout=2 * STOP_SECONDS)


def bound_socket(host: str, port: int, key: str) -> socket.socket:
    """Returns a socket that is bound to the address. Raises ConfigError, which names `key`, when it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # or asyncio leaves Nagle on
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise ConfigError(
            f"{key}: {host}:{port} cannot be listened at: {getattr(error, 'strerror', None) or error}; write another "
            "address, or port = 0 for a free one"
        ) from None
    return bound
