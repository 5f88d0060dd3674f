"""Measures whether the controller's work per sample grows: CPU-microseconds of each event, at three sizes of a run.

Sizes are samples in flight, replicas, ranks of the trainer, or calls that wait for one connection. A row's last column
is its value at the largest size over that at the smallest. CPU-seconds of one process, so other load matters little.
"""

import argparse
import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from asyncrl.bench.measurements import MachineLoad, at_least, goal_line, number, table
from asyncrl.bench.overhead.scale.call_events import credit, generate_and_release, route, step_call
from asyncrl.bench.overhead.scale.sample_events import memory, release_at_owner, sample_events
from asyncrl.controller.journal.audit import Audit
from asyncrl.controller.journal.checkpoints import commit, plan_resume, resume
from asyncrl.controller.journal.journal import Journal, Scan
from asyncrl.controller.journal.ledger import Drawn, Generated, Record, Scored, Trained
from asyncrl.controller.journal.run_storage import MemoryStore
from asyncrl.controller.observers.events import Event, StepDone
from asyncrl.protocols.hash_chain import chain
from asyncrl.protocols.messages import Checkpointed
from asyncrl.simulation.large_fleet import LargeFleet, WatchedLoop, run_large_fleet

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
GROUPS = 64
MEMBERS = 16
STEPS = 9
TIMED_FROM = 3
"""Steps of the run, and the one after which they are timed, because then the first draw is scored."""
MEMBERS = 8
GROUPS = 32
"""Samples of a group, and groups of a step."""
RECORDS = 40_000
"""Records that are measured, besides the draws of what is in flight."""


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


@dataclass
class _Timed:
    """steps: CPU-microseconds a sample of each timed step."""

    steps: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def observe(self, event: Event) -> None:
        if not isinstance(event, StepDone):
            return
        loop = asyncio.get_running_loop()
        assert isinstance(loop, WatchedLoop)
        if loop.controller_scope is not None:
            self.steps.append(1e6 * self.seconds / len(event.cuts.batch))
        elif event.report.version == TIMED_FROM:
            loop.controller_scope = self._time
        self.seconds = 0.0

    def _time(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        began = time.thread_time()
        callback(*args)
        self.seconds += time.thread_time() - began


def _different(chance: random.Random) -> int:
    return chance.randrange(20, 60)


def controller_all_in(workers: int) -> float:
    """Returns the median over steps of CPU-microseconds a sample, with about 100 samples in flight for each worker."""
    scorers = workers * 3 // 10
    shape = LargeFleet(
        groups=GROUPS,
        members=MEMBERS,
        limit=max(1, workers // 10 - 2),
        steps=STEPS,
        step_time=5.0,
        generators=workers - scorers - 1,
        scorers=scorers,
        checkpoint_every=STEPS + 1,
        admission="full",
        lengths=_different,
    )
    timed = _Timed()
    run_large_fleet(shape, timed.observe)
    return median(timed.steps)


def audit_and_resume(in_flight: int) -> dict[str, float]:
    """Returns CPU-microseconds for each record of the journal, with those that the resume itself writes."""
    store = asyncio.run(journaled_run(in_flight // MEMBERS))
    audit = _seconds(lambda: Audit(store))
    audited = Scan(store).count
    resumed = _seconds(lambda: _resume(store))
    return {"audit": 1e6 * audit / audited, "resume": 1e6 * resumed / Scan(store).count}


def _resume(store: MemoryStore) -> None:
    plan = plan_resume(store)
    assert plan is not None
    resume(store, plan)


def _seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


async def journaled_run(groups: int) -> MemoryStore:
    """Returns the store of a run that trained RECORDS // 16 groups and made a checkpoint at its end."""
    store = MemoryStore()
    journal = Journal(store)

    async def write(directory: str) -> Checkpointed:
        return Checkpointed(journal.ledger.version, journal.ledger.chain.hex(), {})

    for record in _records(journal, groups):
        journal.append(record)
    await commit(journal, write, 1)
    return store


def _records(journal: Journal, groups: int) -> Iterator[Record]:
    ledger = journal.ledger
    flying = deque[int]()
    for _ in range(RECORDS // (2 * MEMBERS * GROUPS)):
        while len(flying) < max(groups, GROUPS):
            flying.append(ledger.next_group)
            yield Drawn(ledger.next_group, ledger.version, MEMBERS)
        batch = [flying.popleft() for _ in range(GROUPS)]
        for group in batch:
            for member in range(MEMBERS):
                yield Generated(group, 0, ((member, ledger.version, ledger.version, 500),))
                yield Scored(group, member, 0.5)
        members = tuple(range(MEMBERS))
        link = chain(ledger.chain, [(group, member, 0) for group in batch for member in members])
        cuts = tuple((group, members) for group in batch)
        yield Trained(ledger.version + 1, cuts, (0.0,) * (MEMBERS * GROUPS), link.hex())
