"""Handles over channels that answer from a script: routing, splitting, repeating, deadlines, streams."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, assert_type

import numpy as np
import pytest

from asyncrl.errors import DeadlineExceeded, FleetFailed, PeerLost, UnknownEndpoint
from asyncrl.fleet.remote_worker import RemoteWorker
from asyncrl.fleet.replicas import Replicas
from asyncrl.fleet.service_calls import GROUP_MARGIN, make_handle
from asyncrl.lanes.control.client import Silence
from asyncrl.protocols.batch import Batch, BatchRef, Column, RowRef
from asyncrl.protocols.distribute_collect import ONE_OF, ONE_TO_ALL, THREE_D_PP_ONLY, Rows, Transfer
from asyncrl.protocols.messages import PromptGroup
from asyncrl.protocols.rank_layout import Layout
from asyncrl.protocols.service_contracts import Contract, Idempotent, Lane, endpoint
from tests.virtual_time import on_virtual_time


def striped(weights: object, layout: Layout) -> list[Rows]:
    count = len(weights)  # type: ignore[arg-type]
    return [list(range(rank, count, layout.size)) for rank in range(layout.size)]


STRIPED = Transfer("STRIPED", striped, lambda layout: list(range(layout.size)))


class Sums(Contract):
    """A contract of its own: handles know nothing of the services of asyncrl."""

    @endpoint(STRIPED, idempotent=Idempotent.PURE)
    async def double(self, rows: Batch, times: int = 2) -> Batch: ...

    @endpoint(ONE_OF, idempotent=Idempotent.PURE)
    async def ask(self, question: str) -> str: ...

    @endpoint(ONE_OF)
    async def spend(self, amount: int) -> int: ...

    @endpoint(ONE_TO_ALL, lane=Lane.CONTROL, idempotent=Idempotent.PURE)
    async def names(self) -> list[str]: ...

    @endpoint(THREE_D_PP_ONLY)
    async def stages(self) -> list[int]: ...

    @endpoint(ONE_OF, idempotent=Idempotent.PURE, stream=True)
    def count(self, group: PromptGroup) -> AsyncIterator[int]: ...


Answer = Callable[..., Awaitable[Any]]
ALONE = Layout()


class ScriptedChannel:
    """Answers calls with a function; notes what was called and which streams were closed."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.lost = asyncio.Event()
        self.silence: Silence | None = None
        self.calls: list[tuple[str, tuple[Any, ...], float]] = []
        self.asked: list[bool] = []
        self.closed: list[str] = []

    async def call(self, method: str, args: tuple[Any, ...], deadline: float, *, wants_answer: bool = True) -> Any:
        self.calls.append((method, args, deadline))
        self.asked.append(wants_answer)
        return await self.answer(*args)

    async def stream(self, method: str, args: tuple[Any, ...], deadline: float) -> AsyncIterator[Any]:
        self.calls.append((method, args, deadline))
        try:
            for number in range(3):
                yield number
        finally:
            self.closed.append(method)


def fleet_of(*channels: ScriptedChannel, layout: Layout = ALONE) -> Replicas:
    workers = Replicas("sums", len(channels) // layout.size, layout)
    for worker, channel in zip(workers, channels, strict=True):
        worker.connected(f"{worker.name}-0-a", {Lane.WORK: channel, Lane.CONTROL: channel})
    return workers


def answering(value: Any) -> ScriptedChannel:
    async def answer(*args: Any) -> Any:
        return value

    return ScriptedChannel(answer)


def numbers(*values: int) -> Batch:
    return Batch({"number": Column.of([np.array([value], np.int64) for value in values])})


def group_of(number: int) -> PromptGroup:
    return PromptGroup(number, 0, 0, "hello", (0,), 1, 0, 1.0, 8, deadline=30.0)


GROUP = group_of(0)


async def dies(*args: Any) -> Any:
    raise PeerLost("killed by SIGKILL")


async def test_an_unknown_endpoint_names_the_nearest() -> None:
    handle = make_handle(Sums, fleet_of(answering(None)), 5.0)
    assert_type(handle, Sums)  # So mypy finds wrong arguments of calls.
    with pytest.raises(UnknownEndpoint, match="Sums has no endpoint 'duoble'; did you mean 'double'"):
        handle.duoble  # type: ignore[attr-defined]  # noqa: B018


async def test_a_wrong_number_of_arguments_fails_before_anything_is_sent() -> None:
    channel = answering("yes")
    with pytest.raises(TypeError):
        await make_handle(Sums, fleet_of(channel), 5.0).ask()  # type: ignore[call-arg]
    assert not channel.calls


async def test_rows_are_split_over_replicas_and_joined_in_order() -> None:
    async def double(rows: Batch, times: int) -> Batch:
        return numbers(*(int(row[0]) * times for row in rows["number"]))

    channels = [ScriptedChannel(double) for _ in range(3)]
    doubled = await make_handle(Sums, fleet_of(*channels), 5.0).double(numbers(1, 2, 3, 4, 5), times=3)
    assert [int(row[0]) for row in doubled["number"]] == [3, 6, 9, 12, 15]
    assert [len(channel.calls[0][1][0]) for channel in channels] == [2, 2, 1]


async def test_ranks_whose_answer_does_not_count_are_not_asked_for_it() -> None:
    channels = [answering([rank]) for rank in range(4)]
    assert await make_handle(Sums, fleet_of(*channels, layout=Layout(pp=2, tp=2)), 5.0).stages() == [0, 2]
    assert [channel.asked for channel in channels] == [[True], [False], [True], [False]]
    alone = answering([7])
    assert await make_handle(Sums, fleet_of(alone), 5.0).stages() == [7]
    assert alone.asked == [True]


@pytest.mark.parametrize(("dead", "answer"), [(1, [0]), (0, None)])
async def test_a_rank_that_was_not_asked_does_not_answer_for_one_that_died(dead: int, answer: list[int] | None) -> None:
    channels = [ScriptedChannel(dies) if rank == dead else answering([rank]) for rank in range(2)]
    call = make_handle(Sums, fleet_of(*channels), 5.0).stages()
    if answer is None:
        with pytest.raises(PeerLost, match="killed"):
            await call
    else:
        assert await call == answer


async def test_one_of_goes_to_the_replica_with_fewest_outstanding_calls() -> None:
    everybody = asyncio.Barrier(6)

    async def slow(question: str) -> str:
        await everybody.wait()
        return question

    first, second, third = (ScriptedChannel(slow) for _ in range(3))
    handle = make_handle(Sums, fleet_of(first, second, third), 5.0)
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(handle.ask(str(number))) for number in range(6)]
    assert [len(channel.calls) for channel in (first, second, third)] == [2, 2, 2]
    assert [task.result() for task in asked] == list("012345")


async def test_a_call_to_one_replica_waits_for_no_other() -> None:
    stuck = answering(["stuck"])
    lives = answering(["lives"])
    workers = fleet_of(stuck, lives)
    instance = workers.worker(1, 0).instance
    sums = make_handle(Sums, workers, 5.0)
    assert await sums.replica_of(instance).names() == ["lives"]
    assert sums.replica_of(instance) is sums.replica_of(instance), "it is made once for all versions of the weights"
    assert not stuck.calls
    workers.worker(1, 0).connected("its successor", {Lane.CONTROL: lives})
    with pytest.raises(PeerLost, match=f"{instance} is no worker of sums any more"):
        sums.replica_of(instance)


async def test_a_dead_instance_is_asked_which_groups_it_worked_for() -> None:
    answered = asyncio.Event()

    async def wait(*_: Any) -> Any:
        await answered.wait()

    workers = fleet_of(ScriptedChannel(wait), answering("free"))
    first, second = (worker.instance for worker in workers)
    rows = BatchRef(tuple(RowRef(group, 0, 0, 0, 1, 1, 0, 0, "stop", ()) for group in (4, 4, 5)))
    async with asyncio.TaskGroup() as tasks:
        for args in ((rows, {}), (group_of(7),), ("neither",)):
            tasks.create_task(workers.worker(0, 0).call(Sums.endpoints["ask"], args, 5.0))
        await asyncio.sleep(0)
        assert sorted(workers.groups_at(first)) == [4, 4, 5, 7]
        assert workers.groups_at(second) == []
        workers.worker(0, 0).connected("its successor", {Lane.WORK: answering("x")})
        assert sorted(workers.groups_at(first)) == [4, 4, 5, 7], "its last calls end after its successor came"
        answered.set()
    assert workers.groups_at(first) == []


@pytest.mark.parametrize(
    ("heartbeats", "present"), [(0, [2, 3]), (1, [1, 2, 3]), (2, [1, 2])], ids=["heard", "one unanswered", "silent"]
)
@on_virtual_time
async def test_a_silent_worker_died_of_a_call_that_came_before_its_silence(heartbeats: int, present: list[int]) -> None:
    """Group 1 gives up its call long before the death is known, and group 3 makes one in the silence."""
    channel = ScriptedChannel(lambda group: asyncio.Event().wait())
    (worker,) = fleet_of(channel)

    def call(group: int) -> asyncio.Task[Any]:
        return tasks.create_task(worker.call(Sums.endpoints["ask"], (group_of(group),), 60.0))

    async with asyncio.TaskGroup() as tasks:
        calls = [call(1), call(2)]
        await asyncio.sleep(4.0)
        channel.silence = Silence(asyncio.get_running_loop().time(), heartbeats) if heartbeats else None
        await asyncio.sleep(2.0)
        calls.append(call(3))
        calls[0].cancel()
        await asyncio.sleep(6.0)
        worker.lost("no sign of life", restarting=True)
        assert sorted(worker.groups_at(worker.instance)) == present
        for each in calls:
            each.cancel()


@on_virtual_time
async def test_a_worker_that_is_heard_on_one_lane_is_not_silent() -> None:
    work, control = (ScriptedChannel(lambda group: asyncio.Event().wait()) for _ in range(2))
    worker = RemoteWorker("sums", 0, 0, lambda: None)
    worker.connected("sums0.0-0-1", {Lane.WORK: work, Lane.CONTROL: control})
    work.silence = Silence(asyncio.get_running_loop().time() - 1.0, 2)
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(worker.call(Sums.endpoints["ask"], (group_of(3),), 60.0))
        await asyncio.sleep(0)
        worker.lost("a gap", restarting=True)
        assert worker.groups_at(worker.instance) == [3]
        call.cancel()


async def test_a_pure_call_is_repeated_once_on_the_restarted_replica() -> None:
    async def dies_and_returns(question: str) -> str:
        worker.lost("killed by SIGKILL", restarting=True)
        asyncio.get_running_loop().call_soon(back)
        raise PeerLost("killed by SIGKILL")

    def back() -> None:
        worker.connected("sums0.0-0-b", {Lane.WORK: second, Lane.CONTROL: second})

    second = answering("from the second instance")
    workers = fleet_of(ScriptedChannel(dies_and_returns))
    worker = workers.worker(0, 0)
    assert await make_handle(Sums, workers, 5.0).ask("who?") == "from the second instance"
    assert len(second.calls) == 1


async def test_a_call_that_changes_state_is_never_repeated() -> None:
    first = ScriptedChannel(dies)
    second = ScriptedChannel(dies)
    handle = make_handle(Sums, fleet_of(first, second), 5.0)
    with pytest.raises(PeerLost):
        await handle.spend(1)
    assert (len(first.calls), len(second.calls)) == (1, 0)
    with pytest.raises(PeerLost):
        await handle.ask("twice, then the caller decides")
    assert len(first.calls) + len(second.calls) == 3


async def test_waiting_for_a_restart_ends_at_the_deadline_and_says_why() -> None:
    workers = fleet_of(answering(1))
    workers.worker(0, 0).lost("killed by SIGKILL", restarting=True)
    with pytest.raises(DeadlineExceeded, match=r"sums0\.0 does not answer: killed by SIGKILL"):
        await make_handle(Sums, workers, 0.01).ask("anybody?")


async def test_a_worker_that_does_not_return_is_not_waited_for() -> None:
    workers = fleet_of(answering(1))
    workers.worker(0, 0).lost("killed by SIGKILL", restarting=False)
    with pytest.raises(FleetFailed, match="SIGKILL"):
        await make_handle(Sums, workers, 60.0).ask("anybody?")


async def test_a_call_to_everybody_leaves_out_who_dies_meanwhile() -> None:
    handle = make_handle(Sums, fleet_of(answering(["a"]), ScriptedChannel(dies), answering(["c"])), 5.0)
    assert await handle.names() == ["a", "c"]


async def test_an_error_of_one_rank_is_raised_bare_and_stops_the_others() -> None:
    stopped = asyncio.Event()

    async def fails(*args: Any) -> Any:
        raise ValueError("this rank cannot")

    async def waits(*args: Any) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    handle = make_handle(Sums, fleet_of(ScriptedChannel(waits), ScriptedChannel(fails)), 5.0)
    with pytest.raises(ValueError, match="this rank cannot"):
        await handle.double(numbers(1, 2))
    assert stopped.is_set()


async def test_closing_a_stream_closes_it_in_the_worker() -> None:
    channel = answering(None)
    handle = make_handle(Sums, fleet_of(channel), 5.0)
    async with aclosing(handle.count(GROUP)) as items:  # type: ignore[type-var]
        async for item in items:
            assert item == 0
            break
        assert not channel.closed
    assert channel.closed == ["count"]
    assert [item async for item in handle.count(GROUP)] == [0, 1, 2]


async def test_deadlines_come_from_the_config_or_from_the_group() -> None:
    channel = answering("x")
    workers = fleet_of(channel)
    handle = make_handle(Sums, workers, 5.0)
    await handle.ask("?")
    async for _ in handle.count(GROUP):
        assert [call.method for call in workers.worker(0, 0).outstanding.values()] == ["count"]
    assert not workers.worker(0, 0).outstanding
    asked, counted = (deadline for _, _, deadline in channel.calls)
    assert 4.5 < asked <= 5.0
    assert 29.5 + GROUP_MARGIN < counted <= 30.0 + GROUP_MARGIN


@pytest.mark.parametrize(("endpoint_name", "worked"), [("ask", True), ("names", False)])
async def test_a_worker_has_worked_once_it_answered_a_call_of_the_work_lane(endpoint_name: str, worked: bool) -> None:
    (worker,) = fleet_of(answering("answer"))
    await worker.call(Sums.endpoints[endpoint_name], (), 1.0)
    assert worker.has_worked == worked
    worker.connected("sums0.0-0-b", dict.fromkeys(Lane, answering("answer")))
    assert not worker.has_worked
