"""Checks from a host whether its workers could join a run: address, key, versions, clock, bandwidth."""

import asyncio
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from asyncrl.config.install_hints import program
from asyncrl.deploy.checks.machine import Check, check
from asyncrl.deploy.join_address import join_address
from asyncrl.errors import ConfigError, DeadlineExceeded, PeerLost, Refused
from asyncrl.fleet.launching.joining import Bandwidth, Clock, Probe, installed_versions, probe
from asyncrl.fleet.launching.key_folder import WorkerKey
from asyncrl.lanes.bound_socket import host_of
from asyncrl.lanes.control.auth import KEY_REFUSED
from asyncrl.lanes.control.zmq_wire import ZmqWire
from asyncrl.lanes.host_id import HostId, gpus_of_host
from asyncrl.protocols.messages import JoinRequest

CONNECT_DEADLINE = 5.0
"""Seconds for TCP to connect, and for the listener to greet."""
LARGEST_OFFSET = 1.0
"""Seconds between two clocks from which times in logs and traces of two hosts mislead."""
SLOW_TRIP = 0.1
"""Seconds of a round trip from which calls wait noticeably for it."""
SLOW = 5e6
"""Bytes a second below which a model of 1 GB takes minutes to arrive."""


def join_checks(address: str, key_file: Path, role: str) -> Iterator[Check]:
    """Yields the checks in the order in which joining needs them, and ends with the first without which the rest cannot
    be. role: that the key should have; "" for any."""
    try:
        number = join_address(address, "--join")
    except ConfigError as error:
        yield Check("address", "bad", str(error), "write the address that the run has as fleet.listen")
        return
    yield Check("address", "ok", number if number == address else f"{address} is {number}")
    if refused := _connection_problem(number):
        yield refused
        return
    yield Check("listener", "ok", f"ZeroMQ answers at {number}")
    try:
        key = WorkerKey.read(key_file)
    except ConfigError as error:
        yield Check("key", "bad", str(error), f"copy the key that `{program()} admit` wrote, and name it with --key")
        return
    if role not in ("", key.role):
        remedy = f"make a key of that role on the controller's host: `{program()} admit FOLDER {role}`"
        yield Check("key", "bad", f"{key_file} is a key of {key.role} workers, not of {role} workers", remedy)
        return
    yield from _probe_checks(number, key, key_file)


def _connection_problem(number: str) -> Check | None:
    """Returns why no ZeroMQ socket was reached there."""
    host = host_of(number)
    port = int(number.rpartition(":")[2])
    here = f"start the run there (`{program()} run NAME --listen {number}`), or write the port of its fleet.listen"
    between = f"look for a firewall: TCP from this host to port {port} of {host} has to pass"
    try:
        with socket.create_connection((host, port), CONNECT_DEADLINE) as connection:
            connection.sendall(b"\xff\0\0\0\0\0\0\0\0\x7f")  # The signature with which ZMTP begins; both sides send it.
            greeting = connection.recv(10)
    except ConnectionRefusedError:
        return Check("listener", "bad", f"nothing listens at {number}", here)
    except ConnectionResetError:
        greeting = b""
    except TimeoutError:
        return Check("listener", "bad", f"{number} did not answer within {CONNECT_DEADLINE:g} s", between)
    except OSError as error:
        return Check("listener", "bad", f"{number} cannot be reached: {error.strerror or error}", between)
    if greeting[:1] == b"\xff":
        return None
    return Check("listener", "bad", f"another program than asyncrl listens at {number}", here)


def _probe_checks(number: str, key: WorkerKey, key_file: Path) -> Iterator[Check]:
    host = HostId.here()
    identity = (host.machine, host.memory, host.name)
    ours = installed_versions()
    request = JoinRequest(
        *(key.role, secrets.token_hex(8), *identity, ours, key.proof), gpus=list(gpus_of_host(os.environ))
    )
    try:
        found = asyncio.run(_probe(key, number, request))
    except (PeerLost, DeadlineExceeded, Refused) as error:
        yield _failed(number, key, key_file, str(error))
        return
    yield Check("key", "ok", f"{key_file} is admitted, for {key.role} workers")
    yield _versions_check(found, ours)
    if found.answer.objection:
        remedy = "repair what the run refuses on its side or here, as it says; until then no worker joins from here"
        yield Check("joining", "bad", found.answer.objection, remedy)
    else:
        yield Check("joining", "ok", f"the run would take {key.role} workers of this host")
    yield _clock_check(found.clock)
    trip = f"{1e3 * found.clock.median:.1f} ms"
    remedy = "each call waits for that: use hosts nearer to the controller, or look what delays packets"
    yield check("round trip", found.clock.median < SLOW_TRIP, trip, remedy, "note")
    yield _bandwidth_check("to the controller", found.up)
    yield _bandwidth_check("from the controller", found.down)


async def _probe(key: WorkerKey, number: str, request: JoinRequest) -> Probe:
    with closing(ZmqWire(key.keys)) as wire:
        return await probe(wire, number, request)


def _failed(number: str, key: WorkerKey, key_file: Path, why: str) -> Check:
    """Explains a connection that was refused or broke."""
    if KEY_REFUSED in why:
        remedy = (
            f"copy the key that the run at {number} wrote under its join_keys, or that `{program()} admit FOLDER "
            f"{key.role}` wrote for this controller; one whose .admitted was deleted is revoked"
        )
        return Check("key", "bad", f"{number} does not accept {key_file}", remedy)
    if "another protocol" in why:
        return Check("versions", "bad", why, "install the same asyncrl on both hosts")
    if "another probe runs" in why:
        return Check("probe", "bad", why, "other hosts probe this run all the time: ask again when they have ended")
    return Check(
        "connection", "bad", why, f"look at the log of the run at {number}, which may have ended, and ask again"
    )


def _versions_check(found: Probe, ours: dict[str, str]) -> Check:
    theirs = found.answer.versions
    needed = found.answer.packages
    names = sorted({*ours, *theirs}, key=lambda name: (name not in needed, name))
    differing = [name for name in names if ours.get(name) != theirs.get(name)]
    shown = ", ".join(f"{name} {ours[name]}" for name in names if name not in differing)
    if not differing:
        return Check("versions", "ok", f"{shown} on both sides")
    missing = "(not installed)"
    there = ", ".join(
        f"{name} {theirs.get(name, missing)} there and {ours.get(name, missing)} here" for name in differing
    )
    if wrong := [name for name in differing if name in needed]:
        return Check("versions", "bad", there, f"install the same {' and '.join(wrong)} on both")
    return Check("versions", "ok", f"{shown} on both sides; {there}, which these workers do not need")


def _clock_check(clock: Clock) -> Check:
    text = f"the controller's is {clock.offset:+.4f} s ahead, give or take {clock.uncertainty:.4f} s"
    good = abs(clock.offset) - clock.uncertainty <= LARGEST_OFFSET
    remedy = "run NTP on both hosts: training does not mind, but times in logs and traces will not agree"
    return check("clock", good, text, remedy, "note")


def _bandwidth_check(way: str, found: Bandwidth) -> Check:
    if not found.bytes:
        remedy = "ask again when no other host probes the run"
        return Check(way, "note", f"not measured: {found.problem or 'nothing arrived'}", remedy)
    text = f"{found.rate / 1e6:.1f} MB/s ({found.bytes / 2**20:.1f} MiB, encrypted, on one connection)"
    remedy = "weights and files arrive slowly: use a faster network, or weights.codec for smaller weights"
    return check(way, found.rate >= SLOW, text, remedy, "note")
