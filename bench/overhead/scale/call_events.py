"""Calls on services of many replicas and ranks, and calls that wait for credit; workers answer at once."""

import asyncio
import gc
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from asyncrl.bench.overhead.scale.sample_events import MEMBERS, row_of
from asyncrl.fleet.remote_worker import RemoteWorker
from asyncrl.fleet.replicas import Replicas
from asyncrl.fleet.service_calls import make_handle
from asyncrl.fleet.worker.process_memory import YOUNG_OF_CALLER, gc_frozen
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.message_codec import decode, encode, numbered
from asyncrl.lanes.control.wire import Frame, Frames, Wakeup
from asyncrl.protocols.batch import BatchRef, Cuts
from asyncrl.protocols.distribute_collect import fan_out
from asyncrl.protocols.messages import Call, Hello, PromptGroup, Reply, Welcome
from asyncrl.protocols.rank_layout import Layout
from asyncrl.protocols.service_contracts import Generation, Lane, Training

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
    return {event: 1e6 * seconds / (rounds * groups * MEMBERS) for event, seconds in spent.items()}


def prompt_group(group: int) -> PromptGroup:
    return PromptGroup(group, 0, 0, "a prompt", tuple(range(MEMBERS)), group, 0, 1.0, 100, 600.0)


def step_call(ranks: int) -> dict[str, float]:
    """Returns CPU-microseconds a row of splitting a batch by tokens over the ranks of the trainer, alone and together
    with encoding the calls of all ranks: with one rank there is nothing to split, but as much to encode."""
    step = Training.endpoints["step"].transfer
    rows = tuple(row_of(row // MEMBERS, row % MEMBERS, row % 97) for row in range(ROWS))
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
