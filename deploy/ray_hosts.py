"""Places the workers that join a run on a Ray cluster.

asyncrl run --on ray ──> placement group: a bundle for each worker
                    └──> NodeHost actors, one in each bundle ──> `asyncrl join` ──> joins the run at fleet.listen
node or actor dies ───> Ray moves the bundle and starts the actor again ──────────> joins again

Calls, rows and weights take the run's own lanes. Ray carries the key of a role, as an argument of its actors, since it
writes environment variables of a runtime environment into the logs of every node; and logs, at the end.
"""

import math
import os
import secrets
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.install_hints import install_extra, program
from asyncrl.config.placement import PlacedWorker, Placement, joinable
from asyncrl.config.schema import Config
from asyncrl.deploy.join_address import KEYS
from asyncrl.deploy.ray_node import CREDENTIALS, NodeHost
from asyncrl.errors import ConfigError, FleetFailed
from asyncrl.fleet.launching.key_folder import KeyFolder
from asyncrl.lanes.bound_socket import bound_socket

# Finds what each worker that joins asks of a Ray cluster: resources, and the node where its pool names hosts.


Resources = Mapping[str, float]

ON_NODE = 0.001
"""Share of the resource that Ray gives each node for its address, which every worker there takes."""


@dataclass(frozen=True, slots=True)
class RayPlace:
    """A worker that joins. name: of its actor. resources: that it asks of a node. host: name of that node; "": any.
    sees_all_gpus: its pool chooses among the GPUs of the node, by their numbers there, instead of Ray. is_rank: whether
    it is one of several ranks, which are best on one node."""

    service: str
    name: str
    resources: Resources
    host: str = ""
    sees_all_gpus: bool = False
    is_rank: bool = False


def places_of(config: Config) -> list[RayPlace]:
    """Returns a place for each worker that may join, or each of the services in `fleet.joined` where that is set."""
    joined = config.fleet.joined
    placement = Placement.of(config)
    counts = {service: count for service, count in joinable(config).items() if not joined or service in joined}
    wanted = [each for service, count in counts.items() for each in placement.workers[service][:count]]
    users = Counter(each.places for each in wanted if each.service in placement.pooled)
    return [
        RayPlace(
            each.service,
            f"{each.service}{each.number}",
            _resources(config, each, users[each.places]),
            each.host if each.service in placement.pooled else "",
            each.service in placement.pooled and each.on_gpu,
            each.ranks > 1,
        )
        for each in wanted
    ]


def _resources(config: Config, worker: PlacedWorker, users: int) -> Resources:
    """Returns what `fleet.ray_resources` says, or else one CPU, and a GPU where the service computes on one. users:
    workers of a pool that share its GPU, of which each asks for its share; 0 without a pool."""
    if worker.service in config.fleet.ray_resources:
        return config.fleet.ray_resources[worker.service]
    if not worker.on_gpu:
        return {"CPU": 1.0}
    each = len(worker.devices)
    return {"CPU": 1.0, "GPU": float(each) if each > 1 or users <= 1 else round(1 / users - 5e-5, 4)}


def bundles(places: Sequence[RayPlace], nodes: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Returns the bundle of each place. nodes: what Ray says about the cluster. Raises ConfigError when a host of a
    pool is no node of it."""
    addresses = {node["NodeManagerHostname"]: node["NodeManagerAddress"] for node in nodes if node["Alive"]}
    if absent := sorted({place.host for place in places} - {"", *addresses}):
        raise ConfigError(
            f"pools: {' and '.join(absent)} {'are no nodes' if len(absent) > 1 else 'is no node'} of the Ray cluster, "
            f"whose nodes are {', '.join(sorted(addresses))}: name nodes as `hostname` prints them there, or none"
        )
    return [
        {**place.resources, **({f"node:{addresses[place.host]}": ON_NODE} if place.host else {})} for place in places
    ]


LAST_LOGS = 10.0
"""Seconds for all actors to hand over their logs; those that died have nothing any more."""

ROOM_AT_ONCE = 5.0
"""Seconds in which a cluster with room places all workers; one without may start nodes."""

Say = Callable[[str], None]
MEMORY = 80_000_000
"""Bytes of Ray's object store in a cluster that we start: little more than the least, since nothing goes through it."""

REACHED = 5.0
"""Seconds in which the head of a cluster accepts a connection."""

QUIET: Mapping[str, Any] = {"log_to_driver": False, "logging_level": "error"}
"""Options of ray.init: what actors print goes into the run's logs."""

ENVIRONMENT = (*CREDENTIALS, "RAY_AUTH_MODE")


@contextmanager
def ray_hosts(config: Config, run_dir: Path, *, address: str, listen: str, say: Say) -> Iterator[list[str]]:
    """Starts hosts on a Ray cluster, and ends them with the block; yields the flags with which the run has them join.

    address: of the cluster; "": the one of this Ray job, or else one that is started on this machine. listen: where the
    run is to listen; "": at a free port of this node.

    Raises:
        ConfigError: Ray is not installed, the cluster cannot be used, or a host of a pool is no node of it.
        FleetFailed: the cluster has no room for the workers, or their actors do not start.
    """
    places = places_of(config)
    with _keys(config, places, run_dir.absolute()) as keys, ray_cluster(address, places, say) as ray:
        listen = listen or _free_address(_own_address(ray))
        with _placed(ray, places, config.fleet.join_deadline, say) as group:
            run = secrets.token_hex(4)
            starts = _Starts(ray, group, keys, listen, config.fleet.join_deadline, run)
            actors = [starts.start(number, place) for number, place in enumerate(places)]
            try:
                _await_start(ray, places, actors, config.fleet.join_deadline, say)
                yield _flags(config, places, listen, keys)
            finally:
                _keep_logs(ray, places, actors, run_dir / "logs")
                for actor in actors:
                    ray.kill(actor)


@contextmanager
def _keys(config: Config, places: Sequence[RayPlace], run_dir: Path) -> Iterator[KeyFolder]:
    """Yields the folder of keys that the config names, if this machine has it, or else that of the run; makes keys for
    each service that may join. Removes those of a run that was refused."""
    named = Path(config.fleet.join_keys) if config.fleet.join_keys else None
    folder = KeyFolder.made(named if named is not None and named.is_dir() else run_dir / KEYS)
    for place in places:
        folder.key_of(place.service)
    try:
        yield folder
    finally:
        if not (run_dir / "journal").exists():
            shutil.rmtree(run_dir / KEYS, ignore_errors=True)


def _flags(config: Config, places: Sequence[RayPlace], listen: str, keys: KeyFolder) -> list[str]:
    """Returns config flags. All workers that were placed are waited for, unless `fleet.joined` says how many."""
    services = dict.fromkeys(place.service for place in places)
    count = {service: sum(place.service == service for place in places) for service in services}
    joined = ", ".join(f"{service} = {config.fleet.joined.get(service, count[service])}" for service in count)
    return [
        "--fleet.wire=tcp",
        f"--fleet.listen={listen}",
        f"--fleet.join_keys={keys.path}",
        f"--fleet.joined={{{joined}}}",
    ]


def _own_address(ray: Any) -> str:
    """Returns the address of this node by which the cluster knows it."""
    here = ray.get_runtime_context().get_node_id()
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == here)


def _free_address(ip: str) -> str:
    with closing(bound_socket(ip, 0, "the run, for workers that join")) as socket:
        return f"tcp://{ip}:{socket.getsockname()[1]}"


@contextmanager
def _placed(ray: Any, places: Sequence[RayPlace], deadline: float, say: Say) -> Iterator[Any]:
    """Reserves a bundle for each place, on different nodes as far as there are, or on few ones where ranks need each
    other; raises FleetFailed without room."""
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group(
        bundles(places, ray.nodes()), strategy="PACK" if any(place.is_rank for place in places) else "SPREAD"
    )
    try:
        if not group.wait(min(ROOM_AT_ONCE, deadline)):
            wanted = ", ".join(f"{place.name} {_amounts(place.resources)}" for place in places)
            free = _amounts(ray.available_resources())
            lack = f"the Ray cluster has no room for {wanted}: free are {free}"
            say(f"{lack}; waiting for it until {deadline:g} s are over (fleet.join_deadline)")
            if not group.wait(max(0.0, deadline - ROOM_AT_ONCE)):
                raise FleetFailed(f"{lack}, for {deadline:g} s. Add nodes, or ask for less in fleet.ray_resources")
        yield group
    finally:
        remove_placement_group(group)


def _amounts(resources: Any) -> str:
    """Returns amounts such as {CPU = 1}, without what Ray adds of itself."""
    own = {name: amount for name, amount in resources.items() if ":" not in name and "memory" not in name}
    return "{" + ", ".join(f"{name} = {amount:g}" for name, amount in own.items()) + "}"


@dataclass(frozen=True, slots=True)
class _Starts:
    """Starts the actor of each place. run: sets the names of its folders on a node apart."""

    ray: Any
    group: Any
    keys: KeyFolder
    listen: str
    deadline: float
    run: str

    def start(self, number: int, place: RayPlace) -> Any:
        """Returns the actor in the bundle of this number."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        command = ["-m", "asyncrl.deploy.cli", "join", place.service, "--to", self.listen, "--key", "-"]
        # A host whose actor is gone has no resources of Ray any more, and so no time to drain.
        command += ["--timeout", str(self.deadline), "--drain", "0"]
        variables = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"} if place.sees_all_gpus else {}
        actor = self.ray.remote(NodeHost).options(
            num_cpus=place.resources.get("CPU", 0.0),
            num_gpus=place.resources.get("GPU", 0.0),
            resources={name: amount for name, amount in place.resources.items() if name not in ("CPU", "GPU")},
            max_restarts=-1,
            runtime_env={"env_vars": variables},
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=number),
        )
        return actor.remote(command, self.keys.key_of(place.service).read_text(), f"asyncrl-{self.run}-{place.name}")


def _await_start(ray: Any, places: Sequence[RayPlace], actors: Sequence[Any], deadline: float, say: Say) -> None:
    try:
        nodes = ray.get([actor.node.remote() for actor in actors], timeout=deadline)
    except ray.exceptions.RayError as error:
        advice = "asyncrl has to be installed for the Python of each node"
        raise FleetFailed(f"workers did not start on the Ray cluster: {error} ({advice})") from error
    say("placed by Ray: " + ", ".join(f"{place.name} on {node}" for place, node in zip(places, nodes, strict=True)))


def _keep_logs(ray: Any, places: Sequence[RayPlace], actors: Sequence[Any], folder: Path) -> None:
    """Writes what the actors that live have logged into the run's logs; a run that was refused has none."""
    if not folder.is_dir():
        return
    named = zip(places, actors, strict=True)
    reports = [actor.logs.remote(f"ray-{place.name}.out") for place, actor in named]
    done, _ = ray.wait(reports, num_returns=len(reports), timeout=LAST_LOGS)
    for report in done:
        try:
            logs = ray.get(report, timeout=LAST_LOGS)
        except ray.exceptions.RayError:  # The actor is dead, and what it said with it.
            continue
        for name, content in logs.items():
            (folder / Path(name).name).write_bytes(content)


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
