"""Writes a mapping as the tables of an experiment file: `[pools]`, and which service runs in which pool."""

from collections.abc import Iterator
from typing import Any

from asyncrl.config.toml_writer import value_text
from asyncrl.simulation.mapping.search import FoundMapping, PlacedSet
from asyncrl.simulation.mapping.strategies import GENERATING, Strategy


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
    """Returns TOML text. asyncrl trains with data parallel ranks only, so that other degrees stand in comments."""
    one_host = sum(len(group.hosts) for group in found.job.groups) == 1
    lines = [f"# {found.name}", f"# {found.job.tables.objective}: {found.predicted} s, predicted"]
    for each, hosts in zip(found.sets, devices_of(found), strict=True):
        lines += ["", *_pool(each, hosts, one_host=one_host)]
    for each in found.sets:
        for role, strategy in zip(each.roles, each.strategies, strict=True):
            lines += ["", *_sections(role, strategy, pool_name(each))]
    return "\n".join(lines) + "\n"


def pool_name(placed: PlacedSet) -> str:
    return "_".join(placed.roles)


def _pool(placed: PlacedSet, hosts: dict[str, tuple[int, ...]], *, one_host: bool) -> Iterator[str]:
    numbers = next(iter(hosts.values()))
    yield f"[pools.{pool_name(placed)}]  # {placed.group.name}"
    yield f"devices = {value_text([f'cuda:{number}' for number in numbers])}"
    if not one_host:
        yield f"hosts = {value_text(list(hosts))}"


def _sections(role: str, strategy: Strategy, pool: str) -> Iterator[str]:
    def section(name: str, values: dict[str, Any], note: str = "") -> Iterator[str]:
        yield f"[{name}]" + (f"  # {note}" if note else "")
        yield from (f"{key} = {value_text(value)}" for key, value in ({"pool": pool} | values).items())

    generate, degrees = strategy.generate, strategy.degrees
    note = f"layout found: {degrees}" if degrees.replica > 1 else ""
    if role in GENERATING:
        values: dict[str, Any] = {"replicas": generate.dp * generate.pp}
        values |= {"engine": "vllm", "layout_tp": generate.tp} if generate.tp > 1 else {}
        yield from section("generation", values)
    if role in ("actor", "training"):
        yield from section("training", {"layout": {"dp": degrees.dp}}, note)
    elif role != "generation":
        yield from section(role, {}, note)
