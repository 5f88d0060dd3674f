"""`asyncrl dashboard` shows runs live in a browser on this machine: workers, curves, samples and commands."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.deploy.commands.command_parser import CommandParser

if TYPE_CHECKING:
    from asyncrl.deploy.report.dashboard.shown_runs import ShownRuns

PORT = 8470
HOST = "127.0.0.1"
TOKEN_BYTES = 24


def main(arguments: list[str]) -> int:
    parser = CommandParser("asyncrl dashboard", description=__doc__)
    text = "Name run directories, folders that hold some (default: runs), or tcp://HOST:PORT where one run listens."
    parser.add_argument("runs", nargs="*", metavar="RUNS|ADDRESS", help=text)
    parser.add_argument("--port", type=int, default=PORT, help=f"Port on {HOST}, 0 for a free one; default: {PORT}.")
    text = "Key of the role monitor, for an address: `asyncrl admit FOLDER monitor` makes one."
    parser.add_argument("--key", type=Path, metavar="FILE", help=text)
    asked = parser.parse_args(arguments)
    from asyncrl.config.install_hints import install_extra
    from asyncrl.errors import ConfigError

    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise ConfigError(f"the dashboard needs {' and '.join(missing)}; run: {install_extra('serve')}")
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(asked.runs or ["runs"], asked.key, asked.port))
    return 0


async def serve(runs: list[str], key: Path | None, port: int) -> None:
    """Serves until Ctrl-C."""
    from asyncrl.deploy.report.dashboard.web import DashboardWeb
    from asyncrl.lanes.http_server import HttpServer

    async with _shown(runs, key) as shown:
        token = secrets.token_urlsafe(TOKEN_BYTES)
        server = HttpServer(DashboardWeb(shown, token).app, HOST, port)
        port = server.listen("--port")
        print(f"dashboard: http://{HOST}:{port}/#{token}", "Ctrl-C ends it; runs go on.", sep="\n", flush=True)
        try:
            await server.serve()
        finally:
            await server.stop()


@asynccontextmanager
async def _shown(runs: list[str], key: Path | None) -> AsyncIterator["ShownRuns"]:
    """Finds the runs. Raises ConfigError where there is none."""
    import time

    from asyncrl.deploy.commands.monitor import looking_at
    from asyncrl.deploy.report.dashboard.shown_runs import AddressRun, ShownRuns
    from asyncrl.errors import ConfigError

    addresses = [run for run in runs if run.startswith("tcp://")]
    if not addresses:
        yield ShownRuns([Path(run) for run in runs], time.time)
        return
    if len(runs) > 1:
        raise ConfigError(f"{addresses[0]}: name one address alone, or directories")
    async with looking_at(addresses[0], key) as look:
        await look()
        yield ShownRuns([], time.time, AddressRun(addresses[0], look))
