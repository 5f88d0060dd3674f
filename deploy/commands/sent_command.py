"""Sends a running run a command without arguments, and prints its answer."""

import asyncio
from pathlib import Path

from asyncrl.deploy.commands.command_parser import CommandParser


def send(name: str, about: str | None, arguments: list[str]) -> int:
    """Runs the command line of `asyncrl NAME RUN_DIR`. Raises ConfigError when no run answers, or refuses."""
    parser = CommandParser(f"asyncrl {name}", description=about)
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="Directory of a run that goes on, on this host.")
    asked = parser.parse_args(arguments)
    from asyncrl.fleet.launching.run_access import send_command
    from asyncrl.telemetry.run_directory import RunDirectory

    print(asyncio.run(send_command(RunDirectory(asked.run.absolute()).commands, name)))
    return 0
