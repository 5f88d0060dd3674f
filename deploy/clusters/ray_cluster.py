"""Connects to a Ray cluster, or starts one on this machine."""

import math
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from asyncrl.config.install_hints import install_extra, program
from asyncrl.deploy.clusters.node_host import CREDENTIALS
from asyncrl.deploy.clusters.ray_placement import RayPlace
from asyncrl.errors import ConfigError, FleetFailed

MEMORY = 80_000_000
"""Bytes of Ray's object store in a cluster that we start: little more than the least, since nothing goes through it."""

REACHED = 5.0
"""Seconds in which the head of a cluster accepts a connection."""

QUIET: Mapping[str, Any] = {"log_to_driver": False, "logging_level": "error"}
"""Options of ray.init: what actors print goes into the run's logs."""

ENVIRONMENT = (*CREDENTIALS, "RAY_AUTH_MODE")


@contextmanager
def ray_cluster(address: str, places: Sequence[RayPlace], say: Callable[[str], None]) -> Iterator[Any]:
    """Yields the module `ray`, connected to a cluster; starts one on this machine where none is named.

    Ray reads its token as it is imported. Workers that this process starts later have no use for it, so it is in no
    environment any more. Raises ConfigError when Ray is missing, or the cluster cannot be used.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    source = "--address" if address else "RAY_ADDRESS"
    address = address or os.environ.get("RAY_ADDRESS", "")
    before = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    if not address:
        os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    try:
        ray = _connected(address, source, say) if address else _started(places)
    finally:
        for name in ENVIRONMENT:
            os.environ.pop(name, None)
    try:
        yield ray
    finally:
        ray.shutdown()
        os.environ.update(before)


def _import_ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as missing:
        raise ConfigError(f"--on ray: Ray is not installed here; run: {install_extra('ray')}") from missing
    return ray


def _connected(address: str, source: str, say: Callable[[str], None]) -> Any:
    ray = _import_ray()
    _refuse_address(address, source)
    try:
        ray.init(address=address, **QUIET)
    except ray.exceptions.AuthenticationError as error:
        advice = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or ~/.ray/auth_token as on its nodes"
        raise ConfigError(f"{source}: the Ray cluster at {address} does not accept our token: {advice}") from error
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        raise ConfigError(
            f"{source}: cannot use the Ray cluster at {address}: {_first_line(error)}. This command has to run on a "
            f"node of it, or by `{_as_job()}`"
        ) from error
    if os.environ.get("RAY_AUTH_MODE") != "token":
        say(
            "warning: this Ray cluster asks for no token, so whoever reaches its ports can read the keys of the run: "
            "start its nodes with RAY_AUTH_MODE=token"
        )
    return ray


def _refuse_address(address: str, source: str) -> None:
    """Raises ConfigError for an address that is not of a cluster's head; Ray itself would try for long."""
    if "://" in address:
        raise ConfigError(
            f"{source}: {address} is for clients outside of a Ray cluster, whom its nodes cannot reach: write "
            f"HOST:PORT of its head (port 6379) on a node of it, or use `{_as_job()}`"
        )
    host, _, port = address.rpartition(":")
    if address in ("auto", "local") or not (host and port.isdigit()):
        if address not in ("auto", "local"):
            raise ConfigError(f"{source}: {address!r} is no address of a Ray cluster; write HOST:PORT of its head")
        return
    try:
        socket.create_connection((host, int(port)), REACHED).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"{source}: no Ray cluster was reached at {address} within {REACHED:g} s: {error}. Start its head there "
            f"with `ray start --head --port={port}`"
        ) from error


def _as_job() -> str:
    return f"ray job submit -- {program()} run NAME --on ray"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


def _started(places: Sequence[RayPlace]) -> Any:
    """Starts a cluster on this machine, with room for all places: they share its cores as the workers of any run do."""
    ray = _import_ray()
    cpus = max(os.cpu_count() or 1, math.ceil(sum(place.resources.get("CPU", 0.0) for place in places)))
    try:
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, object_store_memory=MEMORY, **QUIET)
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        text = f"--on ray: no Ray cluster could be started on this machine: {_first_line(error)}"
        raise FleetFailed(text) from error
    return ray
