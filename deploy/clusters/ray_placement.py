"""Finds what each worker that joins asks of a Ray cluster: resources, and the node where its pool names hosts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.config.placement import PlacedWorker, Placement
from asyncrl.config.schema import Config
from asyncrl.config.service_placement import joinable
from asyncrl.errors import ConfigError

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
