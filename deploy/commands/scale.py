"""`asyncrl scale` changes the number of workers of services while a run goes on."""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

from asyncrl.deploy.commands.command_parser import CommandParser

WANTED = re.compile(r"(\w+)=(\d+)")


def main(arguments: list[str]) -> int:
    parser = CommandParser("asyncrl scale", description=__doc__)
    parser.add_argument("run", type=Path, help="Directory of a run that goes on, on this host.")
    parser.add_argument("wanted", nargs="+", metavar="SERVICE=N", help="Number of workers, such as generation=3.")
    asked = parser.parse_args(arguments)
    from asyncrl.fleet.launching.run_access import send_command
    from asyncrl.telemetry.run_directory import RunDirectory

    commands = RunDirectory(asked.run.absolute()).commands
    for service, count in parse(asked.wanted):
        print(asyncio.run(send_command(commands, "scale", service, count)), flush=True)
    return 0


def parse(wanted: Sequence[str]) -> list[tuple[str, int]]:
    """Returns services with their numbers. Raises ConfigError for what is no SERVICE=N, and for a service twice."""
    from asyncrl.errors import ConfigError

    parsed: dict[str, int] = {}
    for text in wanted:
        if (found := WANTED.fullmatch(text)) is None:
            raise ConfigError(f"{text!r} is no number of workers: write SERVICE=N, such as generation=3")
        if found[1] in parsed:
            raise ConfigError(f"{found[1]} is there twice: write one number for it")
        parsed[found[1]] = int(found[2])
    return list(parsed.items())
