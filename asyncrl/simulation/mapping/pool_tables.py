"""Writes a mapping as the tables of an experiment file: `[pools]`, and which service runs in which pool."""

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

from pydantic import ValidationError

from asyncrl.config.schema import Config
from asyncrl.config.service_placement import layouts
from asyncrl.config.toml_writer import value_text
from asyncrl.engines.rank_limits import layout_refusals
from asyncrl.errors import ConfigError
from asyncrl.simulation.mapping.job_file import PlannedJob
from asyncrl.simulation.mapping.search import FoundMapping, PlacedSet
from asyncrl.simulation.mapping.strategies import GENERATING, Strategy

Tables = dict[str, dict[str, Any]]
FROZEN = ("reference", "reward", "cost")
"""Roles whose models score and do not change."""
ALL_ROLES: Mapping[str, Mapping[str, Any]] = {
    "model": {"name": "m"},
    "algorithm": {"preset": "ppo", "kl": 0.1, "constraint": "lagrangian"},
    "reward": {"model": "m"},
    "cost": {"model": "m", "limit": 1.0},
}
"""Tables of an experiment in which each role has a service."""


def devices_of(found: FoundMapping) -> list[dict[str, tuple[int, ...]]]:
    """Returns the numbers of the GPUs of each set by host. Large sets get whole hosts first, and what is smaller than a
    host fills one in falling powers of two, so that every GPU is used once."""
    placed: list[dict[str, tuple[int, ...]]] = [{} for _ in found.sets]
    for group in found.job.groups:
        numbered = [(index, each) for index, each in enumerate(found.sets) if each.group is group]
        free = iter([(host, number) for host in group.hosts for number in range(group.each)])
        for index, each in sorted(numbered, key=lambda pair: -pair[1].gpus):
            for _ in range(each.gpus):
                host, number = next(free)
                placed[index][host] = (*placed[index].get(host, ()), number)
    return placed


def pool_tables(found: FoundMapping) -> str:
    """Returns TOML text: pools, and services in them with the layouts that were found. Raises ConfigError for a layout
    that no experiment has, which a search with `runs` leaves out."""
    spread, sections, joined = _is_spread(found.job), list[str](), dict[str, int]()
    for each in found.sets:
        for role, strategy in zip(each.roles, each.strategies, strict=True):
            tables, note = role_tables(role, strategy), ""
            if why := refusal(role, tables, found.job):
                if not _is_lone(role, found.job):
                    raise ConfigError(f"no experiment has the layout that was found for {role}, {strategy}: {why}")
                tables, note = {role: {}}, f"  # has one rank where it joins, and not the layout found: {strategy}"
            for name, values in tables.items():
                joined[name] = _workers(values)
                keys = {"pool": pool_name(each)} | values
                sections += ["", f"[{name}]{note}", *(f"{key} = {value_text(value)}" for key, value in keys.items())]
    lines = [f"# {found.name}", f"# {found.job.tables.objective}: {found.predicted} s, predicted"]
    if spread:
        needed = f'fleet.wire = "tcp", fleet.listen, and fleet.joined = {value_text(joined)}'
        lines.append(f"# Workers join from these hosts, for which an experiment has {needed}")
    for each, hosts in zip(found.sets, devices_of(found), strict=True):
        lines += ["", *_pool(each, hosts, one_host=not spread)]
    return "\n".join([*lines, *sections]) + "\n"


def role_tables(role: str, strategy: Strategy) -> Tables:
    """Returns the tables of an experiment that say in which layout the services of a role run."""
    generate, degrees = strategy.generate, strategy.degrees
    layout = {"pp": degrees.pp, "tp": degrees.tp, "ep": degrees.ep, "dp": degrees.dp // degrees.ep}
    found: Tables = {}
    if role in GENERATING:
        # Stages of workers that sample are no layout of an experiment, as a key that there is none of tells.
        split = {"engine": "vllm", "layout_tp": generate.tp} if generate.tp > 1 else {}
        found["generation"] = {"replicas": generate.dp} | split | ({"pp": generate.pp} if generate.pp > 1 else {})
    if role in FROZEN:  # Copies are replicas, which answer each for itself.
        found[role] = {"replicas": layout.pop("dp")} | _layout(layout)
    elif role != "generation":
        found["training" if role == "actor" else role] = _layout(layout)
    return found


def _layout(axes: dict[str, int]) -> dict[str, Any]:
    chosen = {axis: size for axis, size in axes.items() if size > 1}
    return {"layout": chosen} if chosen else {}


def runs(job: PlannedJob) -> Callable[[str, Strategy], bool]:
    """Returns a function that tells whether an experiment has the layout of a role, by the rules of experiments."""
    known: dict[tuple[Any, ...], bool] = {}

    def tells(role: str, strategy: Strategy) -> bool:
        train = strategy.degrees
        # More copies than two are refused like two, unless there are more than samples.
        copies = min(train.dp // train.ep, 2), train.dp > job.work.samples
        key = role, train.pp, train.tp, train.ep, strategy.generate.pp, strategy.generate.tp, copies
        if key not in known:
            known[key] = _is_lone(role, job) or not refusal(role, role_tables(role, strategy), job)
        return known[key]

    return tells


def refusal(role: str, tables: Tables, job: PlannedJob) -> str:
    """Returns why an experiment would be refused for the tables of a role; "" if it has such a layout."""
    work = job.work
    given: dict[str, dict[str, Any]] = {name: dict(values) for name, values in ALL_ROLES.items()}
    given["task"] = {"prompts": "p", "prompts_per_step": max(1, work.samples // work.samples_per_prompt)}
    given["task"]["samples_per_prompt"] = work.samples_per_prompt
    for name, values in tables.items():
        given[name] = given.get(name, {}) | values
    if _is_spread(job):
        joined = {name: _workers(values) for name, values in tables.items()}
        given["fleet"] = {"wire": "tcp", "listen": "tcp://127.0.0.1:7000", "joined": joined}
    try:
        config = Config.model_validate(given)
    except ValidationError as error:
        return "; ".join(each["msg"] for each in error.errors())
    ranks = layouts(config)
    refused = (
        text for name in tables if name in ranks for text in layout_refusals(job.sizes[role].config, ranks[name])
    )
    return "; ".join(refused)


def _workers(values: Mapping[str, Any]) -> int:
    """Returns the workers of a service with these values."""
    sizes: Mapping[str, int] = values.get("layout", {})
    return int(values.get("replicas", 1)) * prod(sizes.values())


def _is_lone(role: str, job: PlannedJob) -> bool:
    """Returns whether the service of a role has one rank, whatever is found: critics that join."""
    return role in ("critic", "cost_critic") and _is_spread(job)


def _is_spread(job: PlannedJob) -> bool:
    """Returns whether workers are on several hosts, and so join."""
    return sum(len(group.hosts) for group in job.groups) > 1


def pool_name(placed: PlacedSet) -> str:
    return "_".join(placed.roles)


def _pool(placed: PlacedSet, hosts: dict[str, tuple[int, ...]], *, one_host: bool) -> Iterator[str]:
    numbers = next(iter(hosts.values()))
    yield f"[pools.{pool_name(placed)}]  # {placed.group.name}"
    yield f"devices = {value_text([f'cuda:{number}' for number in numbers])}"
    if not one_host:
        yield f"hosts = {value_text(list(hosts))}"
