"""`asyncrl join` offers this host to a run, which starts a worker of one role here."""

import argparse
import asyncio
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config.secret_places import default_cache
from asyncrl.deploy.commands.command_parser import CommandParser

if TYPE_CHECKING:
    from asyncrl.deploy.process.fork_client import Forks
    from asyncrl.fleet.launching.key_folder import WorkerKey

WITH_TORCH = ("generation", "evaluation", "reference", "training", "critic", "cost_critic")
"""Roles whose workers are forked from a process that has imported torch; all others from one without torch."""

DRAIN = 20.0
"""Seconds that a worker drains: it has ended before the 30 s are over that spot machines and Kubernetes give."""

ADMIT = "`asyncrl admit` makes a key with which workers of one role may join runs."
STANDARD_INPUT = Path("-")
KEY_HELP = (
    "Key of the role, from the run or `asyncrl admit`. -: the key is one line on standard input, a pipe, at whose end "
    "this host leaves."
)


def main(arguments: list[str]) -> int:
    asked = _parser().parse_args(arguments)
    from asyncrl.deploy.join_address import address_of_this_host, join_address, local_address_towards
    from asyncrl.errors import ConfigError
    from asyncrl.fleet.launching.joining import LONGEST_DRAIN
    from asyncrl.fleet.launching.key_folder import WorkerKey

    key = WorkerKey.read(asked.key) if asked.key != STANDARD_INPUT else _key_from_input()
    if key.role != asked.role:
        raise ConfigError(f"{asked.key} is a key of {key.role} workers, not of {asked.role} workers")
    if not 0 <= asked.drain <= LONGEST_DRAIN:
        raise ConfigError(f"--drain: {asked.drain:g} s is no time to drain; write 0 to {LONGEST_DRAIN:g}")
    if not asked.timeout >= 0:  # Neither is a number that is none.
        raise ConfigError(f"--timeout: {asked.timeout:g} s is no time to wait; write 0 or more")
    address = join_address(asked.to, "--to")
    if asked.check:
        return asyncio.run(_check(asked, key, address))
    from asyncrl.deploy.process.local_launcher import LARGE_FLEET, allow_descriptors

    allow_descriptors(LARGE_FLEET)
    own = address_of_this_host(asked.address, "--address") if asked.address else local_address_towards(address)
    with _forks(asked.role) as forks:
        asyncio.run(_join(asked, key, own, forks))
    return 0


def _key_from_input() -> "WorkerKey":
    """Reads one line, and nothing behind it: the end of the input comes later, and has this host leave."""
    from asyncrl.errors import ConfigError
    from asyncrl.fleet.launching.key_folder import WorkerKey

    if stat.S_ISREG(os.fstat(sys.stdin.fileno()).st_mode):
        raise ConfigError("--key -: standard input is a file, not a pipe: name the file with --key FILE")
    return WorkerKey.parse(sys.stdin.buffer.readline().decode(errors="replace"), "the line on standard input")


def _parser() -> CommandParser:
    parser = CommandParser("asyncrl join", description=__doc__)
    parser.add_argument("role", help="Service whose worker may run here, such as generation.")
    parser.add_argument("--to", required=True, metavar="tcp://HOST:PORT", help="Where the run listens.")
    parser.add_argument("--key", required=True, type=Path, help=KEY_HELP)
    parser.add_argument("--address", default="", help="Address of this host that others reach; default: towards HOST.")
    text = "Seconds to wait for a run that is not there, yet or any more; default: 300."
    parser.add_argument("--timeout", type=float, default=300.0, help=text)
    text = "Folder for files that this host does not see; default: ~/.cache/asyncrl."
    parser.add_argument("--cache", type=Path, default=default_cache(), help=text)
    text = "Folder whose `logs` has the logs of workers that do not see the run directory; default: one in the cache."
    parser.add_argument("--logs", type=Path, help=text)
    text = f"Seconds in which a worker finishes what it has when this host is told to leave; default: {DRAIN:g}."
    parser.add_argument("--drain", type=float, default=DRAIN, help=text)
    text = "Only ask, and end: with exit status 0 if the run answers, or if a worker of this host works or waits in it."
    parser.add_argument("--check", choices=("run", "worker"), help=text)
    return parser


@contextmanager
def _forks(role: str) -> "Iterator[Forks | None]":
    """Begins to import what workers of the role need, before one is wanted."""
    from asyncrl.deploy.process.fork_client import MODULES, Forks, worker_environment

    environment = worker_environment(os.environ, wire="tcp")
    modules = MODULES if role in WITH_TORCH else ()
    with Forks(environment, modules) if sys.platform == "linux" else nullcontext() as forks:
        yield forks


async def _check(asked: argparse.Namespace, key: "WorkerKey", address: str) -> int:
    """Prints what this host does in the run; returns the exit status."""
    from asyncrl.fleet.launching.joining import HostState, installed_versions, state_of_host
    from asyncrl.lanes.control.zmq_wire import ZmqWire
    from asyncrl.lanes.host_id import HostId, gpus_of_host

    host = HostId.here()
    gpus = gpus_of_host(os.environ)
    with closing(ZmqWire(key.keys)) as wire:
        state = await state_of_host(wire, address, asked.role, key.proof, host, installed_versions(), gpus)
    print(f"the run at {address} answers: {host.name} {state}")
    return 0 if asked.check == "run" or state in (HostState.WORKS, HostState.WAITS) else 1


async def _join(asked: argparse.Namespace, key: "WorkerKey", own_address: str, forks: "Forks | None") -> None:
    from asyncrl.deploy.join_address import join_address
    from asyncrl.deploy.process.interrupts import StopSignals
    from asyncrl.deploy.process.local_launcher import LocalLauncher
    from asyncrl.errors import Interrupted
    from asyncrl.fleet.launching.joining_host import JoiningHost
    from asyncrl.lanes.control.zmq_wire import ZmqWire
    from asyncrl.lanes.data.file_cache import FileCache

    def say(text: str) -> None:
        print(text, flush=True)

    stop = asyncio.Event()
    with (
        closing(ZmqWire(key.keys)) as wire,
        LocalLauncher(secrets.token_hex(8), "tcp", forks, own_address) as launcher,
        StopSignals(say) as signals,
        signals.ending_in_order(stop.set),
    ):
        signals.hurry = launcher.hurry
        if asked.key == STANDARD_INPUT:
            asyncio.get_running_loop().add_reader(sys.stdin.fileno(), _leave_at_end, stop)
        if forks is not None:
            # Once it has joined, a worker is to work within seconds.
            await forks.prepare("torch" if asked.role in WITH_TORCH else "plain")
        files = FileCache(asked.cache.absolute(), say, asked.logs.absolute() if asked.logs else None)
        host = JoiningHost(
            *(wire, asked.to, asked.role, key.proof, launcher, stop, files),
            timeout=asked.timeout,
            say=say,
            resolve=partial(asyncio.to_thread, partial(join_address, key="--to")),
            drain=asked.drain,
            secret_paths=(str(asked.key.absolute()),) if asked.key != STANDARD_INPUT else (),
        )
        try:
            await host.serve()
        except asyncio.CancelledError:
            if not signals.abandoned:
                raise
            raise Interrupted("left at once; what the worker had begins again on other hosts") from None


def _leave_at_end(stop: asyncio.Event) -> None:
    """Has this host leave once its standard input has ended, with the process that holds its other end."""
    if not os.read(sys.stdin.fileno(), 4096):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        stop.set()


def admit(arguments: list[str]) -> int:
    parser = CommandParser("asyncrl admit", description=ADMIT)
    parser.add_argument("folder", type=Path, help="Folder of the keys of a controller, for fleet.join_keys.")
    parser.add_argument("role", help="Service whose workers may join with the key, such as generation.")
    parser.add_argument("--name", default="", help="Name of the key, for several of one role; default: the role.")
    asked = parser.parse_args(arguments)
    from asyncrl.config.install_hints import program
    from asyncrl.config.placement import JOINING_ROLES
    from asyncrl.config.sources.keys import closest
    from asyncrl.errors import ConfigError
    from asyncrl.fleet.launching.key_folder import MONITOR, KeyFolder

    roles = (*JOINING_ROLES, MONITOR)
    if asked.role not in roles:
        near = f"; did you mean {found}?" if (found := closest(asked.role, roles)) else ""
        raise ConfigError(f"there is no role {asked.role!r}; there are {', '.join(roles)}{near}")
    key = KeyFolder.made(asked.folder).key_of(asked.role, asked.name)
    if asked.role == MONITOR:
        use = f"lets people watch runs: copy it to where only they read it, and watch with\n  {program()} monitor"
    else:
        use = (
            f"lets {asked.role} workers join: copy it to their hosts, where only they read it, and start each with\n"
            f"  {program()} join {asked.role} --to"
        )
    print(
        f"{key} {use} tcp://HOST:PORT --key {key.name}\n"
        f"The run has fleet.join_keys = {str(asked.folder)!r}. Delete {key.with_suffix('.admitted')} to revoke the key."
    )
    return 0
