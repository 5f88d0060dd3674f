"""Measures whether the controller's work per sample grows: CPU-microseconds of each event, at three sizes of a run.

Sizes are samples in flight, replicas, ranks of the trainer, or calls that wait for one connection. A row's last column
is its value at the largest size over that at the smallest. CPU-seconds of one process, so other load matters little.
"""

import argparse
import asyncio
import gc
import random
import time
import tracemalloc
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from asyncrl.bench.measurements import MachineLoad, at_least, goal_line, number, table
from asyncrl.config.gate_config import GateConfig
from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.journal.audit import Audit
from asyncrl.controller.journal.checkpoints import commit, plan_resume, resume
from asyncrl.controller.journal.journal import Journal, Scan
from asyncrl.controller.journal.ledger import Drawn, Generated, Record, Scored, Trained
from asyncrl.controller.journal.run_storage import MemoryStore
from asyncrl.controller.observers.events import Event, StepDone
from asyncrl.controller.sample_tracker import SampleTracker
from asyncrl.fleet.remote_worker import RemoteWorker
from asyncrl.fleet.replicas import Replicas
from asyncrl.fleet.service_calls import make_handle
from asyncrl.fleet.worker.process_memory import YOUNG_OF_CALLER, gc_frozen
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.message_codec import decode, encode, numbered
from asyncrl.lanes.control.wire import Frame, Frames, Wakeup
from asyncrl.lanes.data.row_store import RowRetention
from asyncrl.protocols.batch import BatchRef, Cuts, Place, RowRef
from asyncrl.protocols.distribute_collect import fan_out
from asyncrl.protocols.hash_chain import chain
from asyncrl.protocols.messages import Call, Checkpointed, Hello, PromptGroup, Reply, Score, Welcome
from asyncrl.protocols.rank_layout import Layout
from asyncrl.protocols.service_contracts import Generation, Lane, Training
from asyncrl.simulation.large_fleet import LargeFleet, WatchedLoop, run_large_fleet

# The way of samples through gate, journal and tracker, with a given number in flight; nothing else runs.


BATCH_GROUPS = 16
BATCH_MEMBERS = 16
BATCH = BATCH_GROUPS * BATCH_MEMBERS
CYCLES = 16
"""Batches that are measured."""


def sample_events(in_flight: int) -> dict[str, float]:
    """Returns CPU-microseconds a sample, by event. in_flight: samples; half of them run, a quarter is ready."""
    pipeline = Pipeline(in_flight // BATCH * BATCH_GROUPS)
    gc.collect()
    for _ in range(2):
        pipeline.cycle()
    pipeline.seconds.clear()
    for _ in range(CYCLES):
        pipeline.cycle()
    return {event: 1e6 * seconds / (CYCLES * BATCH) for event, seconds in pipeline.seconds.items()}


def _nothing() -> None:
    """Wakes nobody."""


class Pipeline:
    """Groups that move on in the order of their draws, one batch in each cycle."""

    def __init__(self, groups: int) -> None:
        config = GateConfig(
            BATCH_GROUPS, BATCH_MEMBERS, groups // BATCH_GROUPS - 1, "mask", slots=0, cut_at=BATCH_MEMBERS // 2
        )
        self.seconds: dict[str, float] = {}
        self.store = MemoryStore()
        self._journal = Journal(self.store)
        self._gate = Gate(config)
        self._tracker = SampleTracker(
            self._gate, self._journal, lambda event: None, lambda names: None, _nothing, _nothing
        )
        self._running = deque(self._tracker.draw() for _ in range(groups))
        self._scoring: deque[list[RowRef]] = deque()
        self._generated(groups // 2)
        self._scored(groups // 4)

    def cycle(self) -> None:
        self._timed("scored", self._scored)
        self._timed("pick and train", self._train)
        self._timed("draw", self._draw)
        self._timed("generated", self._generated)

    def _timed(self, event: str, act: Callable[[], None]) -> None:
        began = time.process_time()
        act()
        self.seconds[event] = self.seconds.get(event, 0.0) + time.process_time() - began

    def _draw(self) -> None:
        self._running.extend(self._tracker.draw() for _ in range(BATCH_GROUPS))

    def _generated(self, groups: int = BATCH_GROUPS) -> None:
        """Takes each sample by itself, as samples of different lengths finish."""
        version = self._gate.version
        for _ in range(groups):
            group = self._running.popleft()
            rows = [row_of(group, member, version) for member in range(BATCH_MEMBERS)]
            for row in rows:
                self._tracker.generated([row])
            self._scoring.append(rows)

    def _scored(self, groups: int = BATCH_GROUPS) -> None:
        for _ in range(groups):
            for row in self._scoring.popleft():
                self._tracker.scored(row, Score(float(row.member % 2), {}))

    def _train(self) -> None:
        cuts = self._tracker.pick()
        assert cuts is not None, "a quarter of the samples is ready"
        names = [row.name for cut in cuts for row in self._tracker.rows(*cut)]
        digest = chain(self._journal.ledger.chain, names).hex()
        self._tracker.trained(cuts, self._gate.version + 1, (0.0,) * len(names), digest)


def row_of(
    group: int, member: int, version: int, owner: str = "shm://asyncrl-run-0-generation0.0-0-00000000"
) -> RowRef:
    place = Place(owner, member, 1, ("prompt_ids", "response_ids", "logprobs", "versions", "text"))
    return RowRef(group, member, 0, 0, 100, 100, version, version, "stop", (place,))


def memory(in_flight: int) -> float:
    """Returns the bytes that gate, ledger, tracker and an audit of the journal hold for a sample, with the journal."""
    gc.collect()
    tracemalloc.start()
    try:
        pipeline = Pipeline(in_flight // BATCH * BATCH_GROUPS)
        audit = Audit(pipeline.store)
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert audit.ok, str(audit)
    return held / in_flight


def release_at_owner(in_flight: int) -> float:
    """Returns CPU-microseconds of the owner for each released row, where it stores so many rows."""
    retention = RowRetention()
    groups = in_flight // BATCH_MEMBERS
    for group in range(groups):
        _store(retention, group)
    began = time.process_time()
    for cycle in range(CYCLES):
        first = cycle * BATCH_GROUPS
        names = [(group, member, 0) for group in range(first, first + BATCH_GROUPS) for member in range(BATCH_MEMBERS)]
        assert len(retention.release(names, first)) == BATCH
        for group in range(groups + first, groups + first + BATCH_GROUPS):
            _store(retention, group)
    return 1e6 * (time.process_time() - began) / (CYCLES * BATCH)


def _store(retention: RowRetention, group: int) -> None:
    for member in range(BATCH_MEMBERS):
        retention.add((group, member, 0), Place("owner", member, 1, ()))


# Calls on services of many replicas and ranks, and calls that wait for credit; workers answer at once.


ROWS = 8192
ROUTED = 4096
CALLS_IN_FLIGHT = 4
"""Calls that each replica has while calls are routed."""


class InstantWorker:
    """A worker that answers every call at once."""

    silence = None

    def __init__(self, instance: str) -> None:
        self.lost = asyncio.Event()
        self.instance = instance

    async def call(self, method: str, args: tuple[Any, ...], deadline: float, *, wants_answer: bool = True) -> Any:
        return None

    async def stream(self, method: str, args: tuple[Any, ...], deadline: float) -> AsyncIterator[Any]:
        (group,) = args
        owner = f"shm://asyncrl-run-0-{self.instance}.rows"
        yield BatchRef(tuple([row_of(group.id, member, 0, owner) for member in group.members]))


def replicas_of(count: int) -> Replicas:
    replicas = Replicas("generation", count, Layout())
    for worker in replicas:
        _connect(worker)
    return replicas


def _connect(worker: RemoteWorker) -> None:
    instance = f"{worker.name}-0-{worker.replica:08x}"
    channel = InstantWorker(instance)
    worker.connected(instance, dict.fromkeys(Lane, channel))


async def route(workers: int) -> float:
    """Returns CPU-microseconds of a call's choice of replica, while others hold a few calls each."""
    replicas = replicas_of(workers)
    running = deque[Any]()
    began = 0.0
    for turn in range(CALLS_IN_FLIGHT * workers + ROUTED):
        if turn == CALLS_IN_FLIGHT * workers:
            began = time.process_time()
        replica = await replicas.least_loaded(1e9)
        replica.__enter__()
        running.append(replica)
        if len(running) > CALLS_IN_FLIGHT * workers:
            running.popleft().__exit__()
    return 1e6 * (time.process_time() - began) / ROUTED


async def generate_and_release(workers: int) -> dict[str, float]:
    """Returns CPU-microseconds a sample of the call that samples its group, and of the release of its row.

    Rows of as many groups as the fewest replicas are released at a time, each by the replica that sampled its group.
    """
    handle = make_handle(Generation, replicas_of(workers), 600.0)
    spent = {"generate call": 0.0, "release call": 0.0}
    groups = 8
    rounds = 64
    for turn in range(rounds):
        names = []
        began = time.process_time()
        for group in range(turn * groups, (turn + 1) * groups):
            async for rows in handle.generate(prompt_group(group)):
                names += [row.name for row in rows]
        between = time.process_time()
        await handle.release(names, turn * groups)
        spent["generate call"] += between - began
        spent["release call"] += time.process_time() - between
    return {event: 1e6 * seconds / (rounds * groups * BATCH_MEMBERS) for event, seconds in spent.items()}


def prompt_group(group: int) -> PromptGroup:
    return PromptGroup(group, 0, 0, "a prompt", tuple(range(BATCH_MEMBERS)), group, 0, 1.0, 100, 600.0)


def step_call(ranks: int) -> dict[str, float]:
    """Returns CPU-microseconds a row of splitting a batch by tokens over the ranks of the trainer, alone and together
    with encoding the calls of all ranks: with one rank there is nothing to split, but as much to encode."""
    step = Training.endpoints["step"].transfer
    rows = tuple(row_of(row // BATCH_MEMBERS, row % BATCH_MEMBERS, row % 97) for row in range(ROWS))
    cuts = Cuts(0, 0, BatchRef(rows), 100 * ROWS, ROWS)
    gc.collect()
    began = time.process_time()
    _, calls = fan_out(step, (cuts,), Layout(dp=ranks))
    split = time.process_time()
    for args in calls:
        encode(Call(0, "step", args, 600.0))
    costs = {"split alone": split - began, "split and encode": time.process_time() - began}
    return {event: 1e6 * seconds / ROWS for event, seconds in costs.items()}


class EchoCaller:
    """The wire of a client whose worker answers each call in the next turn of the loop."""

    address = "inproc://echo"

    def __init__(self) -> None:
        self.room = Wakeup()
        self._handle: Callable[[list[Frame]], None] = lambda frames: None
        self._sent = 0

    def offer(self, frames: Frames) -> bool:
        message = decode([frames[0][8:], *frames[1:]])
        reply = Reply(message.call, None) if isinstance(message, Call) else Welcome("echo0.0-0-00000000", 256)
        asyncio.get_running_loop().call_soon(self._answer, reply)
        return True

    def _answer(self, reply: Any) -> None:
        self._sent += 1
        self._handle(list(numbered(self._sent - 1, encode(reply))))

    async def pump(self, handle: Callable[[list[Frame]], None]) -> None:
        self._handle = handle
        await asyncio.Event().wait()

    def close(self) -> None:
        pass


async def credit(waiting: int) -> float:
    """Returns CPU-microseconds a call where so many calls are made at once on one connection, which grants 256,
    with the collector of garbage as in a run."""
    hello = Hello("run", 0, "controller", 0, "controller-0-00000000", 1, "1")
    with gc_frozen(YOUNG_OF_CALLER):
        return await _credit(hello, waiting)


async def _credit(hello: Hello, waiting: int) -> float:
    async with Client(EchoCaller(), hello, "echo0[0]") as client:
        began = time.process_time()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(waiting):
                tasks.create_task(client.call("release", ([], 0), 600.0))
        return 1e6 * (time.process_time() - began) / waiting


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
FLEET_GROUPS = 64
FLEET_MEMBERS = 16
"""Groups of a step of a whole fleet, and samples of a group."""
STEPS = 9
TIMED_FROM = 3
"""Steps of the run, and the one after which they are timed, because then the first draw is scored."""
STEP_MEMBERS = 8
STEP_GROUPS = 32
"""Samples of a group, and groups of a step, in the journal that is measured."""
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
        groups=FLEET_GROUPS,
        members=FLEET_MEMBERS,
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
    store = asyncio.run(journaled_run(in_flight // STEP_MEMBERS))
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
    for _ in range(RECORDS // (2 * STEP_MEMBERS * STEP_GROUPS)):
        while len(flying) < max(groups, STEP_GROUPS):
            flying.append(ledger.next_group)
            yield Drawn(ledger.next_group, ledger.version, STEP_MEMBERS)
        batch = [flying.popleft() for _ in range(STEP_GROUPS)]
        for group in batch:
            for member in range(STEP_MEMBERS):
                yield Generated(group, 0, ((member, ledger.version, ledger.version, 500),))
                yield Scored(group, member, 0.5)
        members = tuple(range(STEP_MEMBERS))
        link = chain(ledger.chain, [(group, member, 0) for group in batch for member in members])
        cuts = tuple((group, members) for group in batch)
        yield Trained(ledger.version + 1, cuts, (0.0,) * (STEP_MEMBERS * STEP_GROUPS), link.hex())
