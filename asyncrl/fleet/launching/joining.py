"""Shared by both ends of joining: their hello, their heartbeats, the packages whose versions have to agree, and the
question what a host does in a run. Health checks ask it every few seconds, so that nothing here loads a whole fleet."""

import secrets
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version

from asyncrl.errors import ConfigError, DeadlineExceeded, FleetFailed, PeerLost, Refused
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.wire import Wire
from asyncrl.lanes.host_id import HostId
from asyncrl.protocols.messages import PROTOCOL, Hello, JoinRequest
from asyncrl.version import __version__

JOINING = "joining"
"""Takes the place of the run in the hello of a host, which does not know the run yet."""

HEARTBEAT = 2.0
"""Seconds between heartbeats of a host and its controller: a host that is silent for four of them is lost."""

SIGN_OF_LIFE = 1.0
"""Seconds until an order to wait follows another order: that a host died shows when something is sent there."""

ORDER_DEADLINE = 10.0
"""Seconds without any order after which a host counts its controller as lost."""

INQUIRY_DEADLINE = 5.0
"""Seconds for the answer, which takes some milliseconds once the run is reached."""

LONGEST_DRAIN = 3600.0
"""Seconds that a host may let its worker drain: far longer than a group takes."""

START_TRIES = 3
"""Starts of new workers on one offer that fail in a row before it is dropped. A host that joins again makes another."""

REQUEST_BYTES = 1 << 20
"""Largest message of a host to its controller, whoever has a key: a part of a probe has 128 kB, all others far less."""

COMPARED = ("asyncrl", "torch", "transformers", "vllm")
"""Packages that a worker may need in the version that the controller has: they decide what is sampled."""


class HostState(StrEnum):
    """Names the steps of a host in a run, in the order in which it gets there."""

    ABSENT = "has not joined"
    STARTS = "starts a worker"
    WAITS = "waits for a free place"
    WORKS = "runs a worker"


def joining_hello(service: str, instance: str) -> Hello:
    return Hello(JOINING, 0, service, 0, instance, PROTOCOL, __version__)


def installed_versions() -> dict[str, str]:
    """Returns the versions of those packages that are installed. A build for another device ("+cpu") is the same
    version."""
    found = {"asyncrl": __version__}
    for package in COMPARED[1:]:
        try:
            found[package] = version(package).partition("+")[0]
        except PackageNotFoundError:
            continue
    return found


def version_problem(needed: Collection[str], ours: Mapping[str, str], theirs: Mapping[str, str], host: str) -> str:
    """Returns what differs between controller and host, and what to do about it; "" if nothing does."""
    differing = [name for name in needed if theirs.get(name) != ours.get(name)]
    if not differing:
        return ""
    here, there = (
        ", ".join(f"{name} {side.get(name, '(not installed)')}" for name in differing) for side in (ours, theirs)
    )
    return f"the controller has {here}, and {host} has {there}: install the same versions on both"


async def state_of_host(
    wire: Wire, address: str, service: str, proof: str, host: HostId, versions: Mapping[str, str], gpus: Sequence[str]
) -> HostState:
    """Returns the furthest state of the offers for this service that come from this host.

    Raises:
        ConfigError: the run refuses this host, for its key or its versions.
        FleetFailed: no run answers.
    """
    agent = secrets.token_hex(8)
    identity = (host.machine, host.memory, host.name)
    request = JoinRequest(service, agent, *identity, dict(versions), proof, list(gpus))
    client = Client(wire.connect(address), joining_hello(service, agent), f"the run at {address}", heartbeat=HEARTBEAT)
    try:
        async with client:
            return HostState(await client.call("state", (request,), INQUIRY_DEADLINE))
    except Refused as refused:
        raise ConfigError(f"{address} refuses this host: {refused}") from refused
    except (PeerLost, DeadlineExceeded) as lost:
        raise FleetFailed(f"no run answers at {address}: {lost}") from lost
