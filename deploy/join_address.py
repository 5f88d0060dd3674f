"""Resolves the address at which workers join a run, and finds its keys."""

import ipaddress
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config.install_hints import program
from asyncrl.errors import ConfigError
from asyncrl.fleet.launching.key_folder import CONTROLLER, MONITOR, KeyFolder
from asyncrl.lanes.bound_socket import family_of, host_of, on_tcp

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

ADDRESS = re.compile(r"tcp://([^/:\[\]]+|\[[0-9A-Fa-f:.]+\]):(\d+)")
KEYS = "join_keys"
"""Folder of keys in a run directory."""


def join_address(text: str, key: str) -> str:
    """Returns tcp://IP:PORT of an address with the name or number of a host. key: names it in errors. Raises
    ConfigError for what is no such address, or names no single host."""
    found = ADDRESS.fullmatch(text)
    if not found or not 0 < int(found[2]) < 65536:
        raise ConfigError(f"{key}: {text!r} is no address; write tcp://HOST:PORT, or tcp://[NUMBER]:PORT with IPv6")
    try:
        known = socket.getaddrinfo(found[1].strip("[]"), None, type=socket.SOCK_STREAM)
        host = str(min(known, key=lambda each: each[0] != socket.AF_INET)[4][0])
    except OSError as error:
        raise ConfigError(f"{key}: there is no host {found[1]!r}: {error}") from error
    if ipaddress.ip_address(host).is_unspecified:
        raise ConfigError(f"{key}: {found[1]} is every address of a host: name the one by which others reach it")
    return on_tcp(host, found[2])


def listen_address(config: "Config") -> str:
    """Returns where a run listens. Raises ConfigError for a wrong address, and for one that other hosts reach without
    keys that somebody made for them."""
    address = join_address(config.fleet.listen, "fleet.listen")
    if not config.fleet.join_keys and not ipaddress.ip_address(host_of(address)).is_loopback:
        raise ConfigError(
            f"fleet.listen: other hosts reach {config.fleet.listen}, and fleet.join_keys names no keys: make a folder "
            f"of them with `asyncrl admit DIR {min(config.fleet.joined)}`, and write fleet.join_keys = DIR"
        )
    return address


def refuse_missing_keys(config: "Config") -> None:
    """Raises ConfigError when the config names a folder without keys for hosts that join."""
    if not config.fleet.join_keys:
        return
    folder = Path(config.fleet.join_keys)
    roles = sorted(config.fleet.joined)
    if not (folder / CONTROLLER).exists():
        commands = ", ".join(f"`{program()} admit {folder} {role}`" for role in roles)
        raise ConfigError(f"fleet.join_keys: {folder} has no keys: make them on this host with {commands}")


def join_keys(config: "Config", run_dir: Path) -> KeyFolder:
    """Returns the keys of a run; makes those in its directory where the config names none."""
    if config.fleet.join_keys:
        return KeyFolder(Path(config.fleet.join_keys))
    folder = KeyFolder.made(run_dir / KEYS)
    for role in (*config.fleet.joined, MONITOR):
        folder.key_of(role)
    return folder


def address_of_this_host(name: str, key: str) -> str:
    """Returns the number of an address of this host, at which workers can listen. Raises ConfigError for another one;
    key: names it there."""
    host = host_of(join_address(on_tcp(name, 1), key))
    with socket.socket(family_of(host)) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise ConfigError(
                f"{key}: {name} is no address of this host ({error.strerror}): write one of its own, or leave it out"
            ) from error
    return host


def local_address_towards(address: str) -> str:
    """Returns the address of this host from which it reaches another one; nothing is sent."""
    host = host_of(address)
    with socket.socket(family_of(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(address.rpartition(":")[2])))
        return str(probe.getsockname()[0])
