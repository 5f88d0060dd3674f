"""Finds what each worker that joins asks of a Ray cluster: resources, and the node where its pool names hosts."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.config.sections.device_pools import Assignment
from asyncrl.config.service_placement import assignment, joinable, pool_names, pools_of
from asyncrl.errors import ConfigError

Resources = Mapping[str, float]

ON_NODE = 0.001
"""Share of the resource that Ray gives each node for its address, which every worker there takes."""


@dataclass(frozen=True, slots=True)
class RayPlace:
    """A worker that joins. name: of its actor. resources: that it asks of a node. host: name of that node; "": any.
    sees_all_gpus: its pool chooses among the GPUs of the node, by their numbers there, instead of Ray."""

    service: str
    name: str
    resources: Resources
    host: str = ""
    sees_all_gpus: bool = False


def places_of(config: Config) -> list[RayPlace]:
    """Returns a place for each worker that may join, or each of the services in `fleet.joined` where that is set."""
    assigned = assignment(config)
    gpu_pools = {name for name, pool in pools_of(config).items() if pool.has_gpus}
    on_gpus = {service for service, pool in pool_names(config).items() if pool in gpu_pools}
    return [
        RayPlace(
            service,
            f"{service}{number}",
            _resources(config, service, assigned, number),
            assigned[service][number][0].host if service in assigned else "",
            service in on_gpus,
        )
        for service, replicas in _wanted(config).items()
        for number in range(replicas)
    ]


def _wanted(config: Config) -> dict[str, int]:
    """Returns the services that are placed, with their replicas."""
    joined = config.fleet.joined
    return {service: count for service, count in joinable(config).items() if not joined or service in joined}


def _resources(config: Config, service: str, assigned: Assignment, number: int) -> Resources:
    """Returns what `fleet.ray_resources` says, or else one CPU, and a GPU where the service computes on one: of a GPU
    that workers of a pool share, its share."""
    if service in config.fleet.ray_resources:
        return config.fleet.ray_resources[service]
    section = getattr(config, "generation" if service == "evaluation" else service)
    if not getattr(section, "device", "cpu").startswith("cuda"):
        return {"CPU": 1.0}
    if service not in assigned:
        return {"CPU": 1.0, "GPU": 1.0}
    own = assigned[service][number]
    users = Counter(device for other in _joining_devices(config, assigned) for device in other)
    return {"CPU": 1.0, "GPU": float(len(own)) if len(own) > 1 else round(1 / users[own[0]] - 5e-5, 4)}


def _joining_devices(config: Config, assigned: Assignment) -> Iterator[Sequence[Any]]:
    """Yields the devices of each worker that joins."""
    for service, count in _wanted(config).items():
        yield from assigned.get(service, ())[:count]


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
