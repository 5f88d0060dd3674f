"""Measures whether the controller's work per sample grows: CPU-microseconds of each event, at three sizes of a run.

Sizes are samples in flight, replicas, ranks of the trainer, or calls that wait for one connection. A row's last column
is its value at the largest size over that at the smallest. CPU-seconds of one process, so other load matters little.
"""

import argparse
import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from asyncrl.bench.measurements import MachineLoad, at_least, goal_line, number, table
from asyncrl.bench.overhead.scale.call_events import credit, generate_and_release, route, step_call
from asyncrl.bench.overhead.scale.fleet_events import controller_all_in
from asyncrl.bench.overhead.scale.journal_events import audit_and_resume
from asyncrl.bench.overhead.scale.sample_events import memory, release_at_owner, sample_events

IN_FLIGHT = (1_024, 10_240, 102_400)
WORKERS = (8, 64, 1_000)
RANKS = (1, 64, 512)
WAITING = (1_000, 4_000, 16_000)
FLAT = 1.5
"""Largest ratio of a row: cold caches cost more at 100,000 samples than at 1,000; a search costs a hundred times."""


ALL_IN = 250.0
"""CPU-microseconds that the controller may spend on a sample."""
MEMORY = 1000.0
"""Megabytes that it may hold with 100,000 samples in flight."""


class EventCost(NamedTuple):
    """CPU-microseconds of one event at each size."""

    event: str
    values: tuple[float, ...]

    @property
    def ratio(self) -> float:
        return self.values[-1] / self.values[0]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("asyncrl-bench scale", description=__doc__)
    parser.add_argument("--rounds", type=at_least(1), default=3, help="of each measurement, of which the least counts")
    parser.add_argument("--largest", type=at_least(1), default=3, help="sizes that are measured, from the smallest")
    asked = parser.parse_args(arguments)
    machine = MachineLoad()
    rows: list[EventCost] = []
    for title, sizes, measure in (
        ("samples in flight", IN_FLIGHT, of_samples),
        ("replicas", WORKERS, of_workers),
        ("ranks", RANKS, of_ranks),
        ("waiting calls", WAITING, of_waiting_calls),
        ("workers of a run", WORKERS, of_fleets),
    ):
        rows += _print_rows(title, sizes[: asked.largest], measure, asked.rounds)
    all_in = rows[-1].values[-1]
    print(goal_line("controller all in, µs a sample", all_in, ALL_IN, at_most=True))
    most = IN_FLIGHT[: asked.largest][-1]
    held = most * memory(most) / 1e6
    print(goal_line(f"gate, ledger, tracker and audit of {most:,} samples, MB", held, MEMORY, at_most=True))
    for row in rows:
        print(goal_line(f"{row.event}: largest over smallest", row.ratio, FLAT, at_most=True))
    print(f"  {machine}")


Measure = Callable[[int], dict[str, float]]


def _print_rows(title: str, sizes: Sequence[int], measure: Measure, rounds: int) -> list[EventCost]:
    by_size = []
    for size in sizes:
        found = [measure(size) for _ in range(rounds)]
        by_size.append({name: min(each[name] for each in found) for name in found[0]})
    rows = [EventCost(name, tuple(each[name] for each in by_size)) for name in by_size[0]]
    head = (title, *(f"{size:,}" for size in sizes), "ratio")
    cells = [(f"{row.event}, µs", *map(number, row.values), f"{row.ratio:.2f}") for row in rows]
    print(table(head, cells), flush=True)
    return rows


def of_samples(in_flight: int) -> dict[str, float]:
    events = {f"{event}, a sample": value for event, value in sample_events(in_flight).items()}
    journal = {f"{event}, a record": value for event, value in audit_and_resume(in_flight).items()}
    return {**events, **journal, "release at the owner, a row": release_at_owner(in_flight)}


def of_workers(workers: int) -> dict[str, float]:
    calls = asyncio.run(generate_and_release(workers))
    return {"route, a call": asyncio.run(route(workers)), **{f"{name}, a sample": each for name, each in calls.items()}}


def of_ranks(ranks: int) -> dict[str, float]:
    return {f"{event}, a row": value for event, value in step_call(ranks).items()}


def of_fleets(workers: int) -> dict[str, float]:
    return {"controller all in, a sample": controller_all_in(workers)}


def of_waiting_calls(waiting: int) -> dict[str, float]:
    return {"wait for credit, a call": asyncio.run(credit(waiting))}
