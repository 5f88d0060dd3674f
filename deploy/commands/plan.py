"""`asyncrl plan` prints where each worker of an experiment runs, and how many bytes it takes there."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from asyncrl.deploy.commands.command_parser import asks_for_usage

if TYPE_CHECKING:
    from asyncrl.config.problems import Problem
    from asyncrl.config.schema import Config
    from asyncrl.deploy.checks.memory_needs import MemoryNeed, PlannedWorker
    from asyncrl.engines.models.model_shape import Shape

USAGE = f"""\
usage: asyncrl plan NAME|FILE [--section.key value ...]

{__doc__}
Bytes are those of prompts of the mean length, and the most. Prompts are counted where they and the model are on this
machine; else they count as task.max_prompt_tokens. The exit status is 1 when something does not
fit; its line names what to change. Nothing is started."""


def main(arguments: list[str]) -> int:
    if asks_for_usage("plan", USAGE, arguments):
        return 0
    from asyncrl.config.sources import load
    from asyncrl.deploy.checks.memory_needs import unchecked_memory
    from asyncrl.deploy.checks.model_checks import here
    from asyncrl.deploy.preflight import memory_of_run
    from asyncrl.engines.models.model_shape import shape_of
    from asyncrl.engines.ranks.rank_limits import models_of_services, rank_problems
    from asyncrl.errors import ConfigError

    config = load(arguments[0], arguments[1:]).config
    name = str(here(config.model))
    if (shape := shape_of(name)) is None:
        raise ConfigError(
            f"model.name: the size of {config.model.name} is unknown before it is on this machine: name a "
            "folder, or let `asyncrl try` fetch it first"
        )
    print("\n".join(plan(config, shape)))
    problems = [
        *rank_problems(config, models_of_services(config, name)),
        *memory_of_run(config, name),
        *unchecked_memory(config, shape),
        *config.warnings,
        *_absent(config),
    ]
    for problem in problems:
        print(f"{'note' if problem.is_warning else 'does not fit'}: {problem}")
    return int(any(not problem.is_warning for problem in problems))


def _absent(config: "Config") -> "Iterator[Problem]":
    """Yields notes about devices that this machine does not have: the plan may be for another one."""
    from asyncrl.deploy.preflight import missing_devices

    return (replace(problem, is_warning=True) for problem in missing_devices(config))


def plan(config: "Config", shape: "Shape") -> Iterator[str]:
    """Yields the lines to print."""
    from asyncrl.config.placement import ANY_HOST, Placement
    from asyncrl.deploy.checks.machine import size_text
    from asyncrl.deploy.checks.memory_needs import longest_token_of, planned_workers, shared_memory
    from asyncrl.deploy.checks.model_checks import here as folder_of
    from asyncrl.deploy.checks.run_prompts import measured_lengths
    from asyncrl.lanes.host_id import HostId

    model = str(folder_of(config.model))
    lengths = measured_lengths(config, model)
    here = HostId.here()
    workers = list(planned_workers(config, shape, lengths))
    yield f"{config.name}: {config.model.name}, about {shape.parameters / 1e6:.1f}M parameters"
    yield f"prompt tokens: {lengths}"
    rows = [("worker", "host", "device", "fails with", "bytes")]
    for worker in workers:
        sizes = dict.fromkeys((size_text(worker.likely), size_text(worker.bytes)))
        what = " to ".join(sizes) + (f": {parts}" if (parts := _parts(worker.need)) else "")
        domain = f"machine of {here.name}" if worker.domain == here.fault_domain else worker.domain
        rows.append((worker.name, worker.host, worker.device, domain, what))
    yield from _aligned(rows)
    need = shared_memory(config, shape, longest_token_of(model), lengths)
    sizes = dict.fromkeys(size_text(size) for size in (need.likely_rows, need.rows, need.worst_rows))
    yield f"/dev/shm: weights {size_text(need.weights)}, rows {' to '.join(sizes)}"
    for (host, device), size in _totals(workers).items():
        yield f"{host if host != ANY_HOST else 'all hosts that join together'} {device}: {size_text(size)}"
    yield from Placement.of(config).crossings()


def _parts(need: "MemoryNeed") -> str:
    """Returns the bytes of one worker by what takes them, of each phase where there are several."""
    from asyncrl.deploy.checks.machine import size_text

    def text(parts: Mapping[str, int]) -> str:
        return ", ".join(f"{what} {size_text(size)}" for what, size in parts.items() if size)

    if not need.phases:
        return text(need.parts)
    return "; ".join(
        f"{phase} {size_text(sum(parts.values()))} ({text(parts)})" for phase, parts in need.phases.items()
    )


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yields the lines of a table, with two spaces or more between its columns."""
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    for *cells, last in rows:
        yield "".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=False)) + last


def _totals(workers: "list[PlannedWorker]") -> dict[tuple[str, str], int]:
    """Returns the bytes of each device of each host."""
    totals: dict[tuple[str, str], int] = {}
    for worker in workers:
        for device in worker.devices:
            totals[worker.host, device] = totals.get((worker.host, device), 0) + worker.bytes // len(worker.devices)
    return totals
