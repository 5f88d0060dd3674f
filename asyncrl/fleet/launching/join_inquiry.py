"""Asks a run what this host does in it, over the connection by which hosts join; health checks of containers use it."""

import secrets
from collections.abc import Mapping, Sequence

from asyncrl.errors import ConfigError, DeadlineExceeded, FleetFailed, PeerLost, Refused
from asyncrl.fleet.launching.joining import HEARTBEAT, HostState, joining_hello
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.wire import Wire
from asyncrl.lanes.host_id import HostId
from asyncrl.protocols.join_messages import JoinRequest

DEADLINE = 5.0
"""Seconds for the answer, which takes some milliseconds once the run is reached."""


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
            return HostState(await client.call("state", (request,), DEADLINE))
    except Refused as refused:
        raise ConfigError(f"{address} refuses this host: {refused}") from refused
    except (PeerLost, DeadlineExceeded) as lost:
        raise FleetFailed(f"no run answers at {address}: {lost}") from lost
