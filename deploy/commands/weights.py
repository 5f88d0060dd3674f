"""`asyncrl weights` shows what weights the trainer of a running run holds: for each pipeline stage its tensors, their
norm and a digest, between two steps. The first rank of a stage answers: with tp or shard it holds parts of them."""

import asyncio
from pathlib import Path

from asyncrl.deploy.commands.command_parser import CommandParser

DEADLINE = 600.0
"""Seconds for the running step to end, and for the digests of a large model."""


def main(arguments: list[str]) -> int:
    parser = CommandParser("asyncrl weights", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="Directory of a run that goes on, on this host.")
    parser.add_argument("pattern", nargs="?", default="", help="Names of tensors to show too, such as '*.q_proj.*'.")
    asked = parser.parse_args(arguments)
    from asyncrl.fleet.launching.run_access import send_command
    from asyncrl.telemetry.run_directory import RunDirectory

    commands = RunDirectory(asked.run.absolute()).commands
    print(asyncio.run(send_command(commands, "weights", asked.pattern, deadline=DEADLINE)))
    return 0
