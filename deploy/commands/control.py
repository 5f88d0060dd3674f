"""Commands that a running run obeys: pause, unpause, stop, scale, and weights, which only looks. Each is sent to the
socket of the run on this host, and its answer is printed."""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

from asyncrl.deploy.commands.command_parser import CommandParser

PAUSE = """`asyncrl pause` holds a running run back: samples in flight and the running step end, and nothing else begins
until `asyncrl unpause`. Workers keep their memory; nothing gets staler."""
UNPAUSE = "`asyncrl unpause` lets a paused run go on."
STOP = "`asyncrl stop` ends a running run with a checkpoint, after its running step, as the first Ctrl-C does."
SCALE = "`asyncrl scale` changes the number of workers of services while a run goes on."
WEIGHTS = """`asyncrl weights` shows what weights the trainer of a running run holds: for each pipeline stage its
tensors, their norm and a digest, between two steps. The first rank of a stage answers: with tp or shard it holds parts
of them."""
WANTED = re.compile(r"(\w+)=(\d+)")
DIGESTS_DEADLINE = 600.0
"""Seconds for the running step to end, and for the digests of a large model."""


def pause(arguments: list[str]) -> int:
    return _send(_parser("pause", PAUSE).parse_args(arguments).run, "pause")


def unpause(arguments: list[str]) -> int:
    return _send(_parser("unpause", UNPAUSE).parse_args(arguments).run, "unpause")


def stop(arguments: list[str]) -> int:
    return _send(_parser("stop", STOP).parse_args(arguments).run, "stop")


def scale(arguments: list[str]) -> int:
    parser = _parser("scale", SCALE)
    parser.add_argument("wanted", nargs="+", metavar="SERVICE=N", help="Number of workers, such as generation=3.")
    asked = parser.parse_args(arguments)
    for service, count in wanted_workers(asked.wanted):
        _send(asked.run, "scale", service, count)
    return 0


def weights(arguments: list[str]) -> int:
    parser = _parser("weights", WEIGHTS)
    parser.add_argument("pattern", nargs="?", default="", help="Names of tensors to show too, such as '*.q_proj.*'.")
    asked = parser.parse_args(arguments)
    return _send(asked.run, "weights", asked.pattern, deadline=DIGESTS_DEADLINE)


def _parser(name: str, about: str) -> CommandParser:
    parser = CommandParser(f"asyncrl {name}", description=about)
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="Directory of a run that goes on, on this host.")
    return parser


def _send(run: Path, name: str, *values: object, deadline: float | None = None) -> int:
    """Sends a command and prints its answer. Raises ConfigError when no run answers, or refuses."""
    from asyncrl.fleet.launching.run_access import send_command
    from asyncrl.telemetry.run_directory import RunDirectory

    commands = RunDirectory(run.absolute()).commands
    given = {} if deadline is None else {"deadline": deadline}
    print(asyncio.run(send_command(commands, name, *values, **given)), flush=True)
    return 0


def wanted_workers(wanted: Sequence[str]) -> list[tuple[str, int]]:
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
