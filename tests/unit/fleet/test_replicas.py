"""The choice of a replica: the freest live one, that of a group, those that hold rows; at any number of replicas."""

import asyncio
import random
from collections import deque
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.errors import DeadlineExceeded, PeerLost
from asyncrl.fleet.replicas import Replica, Replicas, RowHolders
from asyncrl.fleet.service_calls import make_handle
from asyncrl.protocols.batch import BatchRef, Place, RowRef, SampleName
from asyncrl.protocols.messages import PromptGroup, SampleText
from asyncrl.protocols.rank_layout import Layout
from asyncrl.protocols.service_contracts import Environment, Generation, GroupReward, Lane, Reference
from tests.instruction_count import counting


class Worker:
    """Answers calls at once. released: samples of each release; dead: whether calls find it dead; late: whether a
    release is not answered in time; held: set while scores are not answered."""

    silence = None

    def __init__(self) -> None:
        self.lost = asyncio.Event()
        self.calls: list[tuple[str, Any]] = []
        self.dead = False
        self.late = False
        self.answering = asyncio.Event()
        self.answering.set()

    async def call(self, method: str, args: tuple[Any, ...], deadline: float, *, wants_answer: bool = True) -> Any:
        self.calls.append((method, args[0]))
        if self.dead:
            raise PeerLost("killed")
        if self.late:
            raise DeadlineExceeded("no answer")
        await self.answering.wait()
        if method == "texts":
            return [SampleText(row.group, row.member, "", "") for row in args[0]]
        return args[0] if isinstance(args[0], BatchRef) else None

    async def stream(self, method: str, args: tuple[Any, ...], deadline: float) -> Any:
        (group,) = args
        self.calls.append((method, group.id))
        yield rows(*((group.id, member, group.attempt) for member in group.members))

    def of(self, method: str) -> list[Any]:
        return [argument for called, argument in self.calls if called == method]


def rows(*names: SampleName) -> BatchRef:
    place = Place("owner", 0, 1, ("text",))
    return BatchRef(tuple([RowRef(*name, 0, 1, 1, 0, 0, "stop", (place,)) for name in names]))


def service(count: int, ranks: int = 1) -> tuple[Replicas, list[Worker]]:
    replicas = Replicas("generation", count, Layout(tp=ranks))
    workers = [Worker() for _ in range(count * ranks)]
    for remote, worker in zip(replicas, workers, strict=True):
        remote.connected(f"{remote.name}-0-a", dict.fromkeys(Lane, worker))
    return replicas, workers


def group(number: int, attempt: int = 0, members: tuple[int, ...] = (0, 1), not_before: int = 0) -> PromptGroup:
    return PromptGroup(number, attempt, 0, "", members, 0, not_before, 1.0, 8, 30.0)


async def test_a_replica_that_is_left_out_takes_calls_to_itself_only_until_it_is_back_or_replaced() -> None:
    replicas, workers = service(2)
    handle = make_handle(Generation, replicas, 5.0)
    out, other = [worker.instance for worker in replicas]
    replicas.leave_out(out, out=True)
    for number in range(4):
        await generate(handle, group(number))
    assert [worker.of("generate") for worker in workers] == [[], [0, 1, 2, 3]]
    await handle.replica_of(out).use_weights(group(7))  # type: ignore[attr-defined]
    assert len(workers[0].of("use_weights")) == 1, "the weights are offered to it"
    replicas.leave_out(other, out=True)
    async with asyncio.TaskGroup() as tasks:
        waits = tasks.create_task(generate(handle, group(4)))
        await asyncio.sleep(0)
        assert not waits.done()
        replicas.leave_out(out, out=False)
    assert workers[0].of("generate") == [4]
    replicas.leave_out(out, out=True)
    replicas.worker(0, 0).connected("generation0.0-0-b", dict.fromkeys(Lane, workers[0]))
    replicas.leave_out(out, out=True)
    await generate(handle, group(5))
    assert workers[0].of("generate") == [4, 5], "its next instance has not failed"


async def test_prompts_of_groups_are_split_over_the_ranks_that_sample_themselves() -> None:
    replicas, workers = service(4)
    replicas.trainer = Layout(tp=2, dp=2, generation_pp=1, generation_tp=1)
    handle = make_handle(Generation, replicas, 5.0)
    with replicas.replicas[1]:  # The freest one would be another.
        for number in range(8):
            await generate(handle, group(number))
    assert [worker.of("generate") for worker in workers] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    replicas.drain(2)
    await generate(handle, group(10))
    assert not any(10 in worker.of("generate") for worker in workers[2:3])
    assert sum(10 in worker.of("generate") for worker in workers) == 1


async def test_the_first_ranks_of_replicas_get_the_prompts_whichever_ranks_of_the_trainer_they_are_in() -> None:
    replicas, workers = service(2, ranks=2)
    replicas.trainer = Layout(tp=4, dp=2)
    handle = make_handle(Generation, replicas, 5.0)
    for number in range(4):
        await generate(handle, group(number))
    assert [worker.of("generate") for worker in workers] == [[0, 2], [], [1, 3], []]


async def generate(handle: Generation, prompts: PromptGroup) -> list[SampleName]:
    return [row.name async for found in handle.generate(prompts) for row in found]


# ---- one that drains --------------------------------------------------------------------------------------


async def test_a_replica_that_drains_takes_what_goes_on_there_and_nothing_new_until_its_rows_are_released() -> None:
    replicas, workers = service(2)
    handle = make_handle(Generation, replicas, 10.0)
    assert len(await generate(handle, group(0))) == 2
    (held,) = [number for number, worker in enumerate(workers) if worker.calls]
    assert not replicas.is_idle(held), "it holds rows"
    assert replicas.is_idle(1 - held)
    replicas.drain(held)
    for number in range(1, 4):
        await generate(handle, group(number))
    assert len(workers[held].of("generate")) == 1
    await generate(handle, replace(group(0), continues=rows((0, 0, 0), (0, 1, 0))))
    assert len(workers[held].of("generate")) == 2
    await handle.release([(0, 0, 0), (0, 1, 0)], 0)
    assert replicas.is_idle(held)


async def test_an_isolated_group_avoids_a_replica_that_drains() -> None:
    replicas, workers = service(2)
    replicas.drain(0)
    replicas.isolated = {0: frozenset()}
    await generate(make_handle(Generation, replicas, 10.0), group(0))
    assert [len(worker.calls) for worker in workers] == [0, 1]


async def test_new_work_waits_when_the_only_replica_drains() -> None:
    replicas, (worker,) = service(1)
    replicas.drain(0)
    waiting = asyncio.get_running_loop().create_task(generate(make_handle(Generation, replicas, 10.0), group(0)))
    (remote,) = replicas
    for _ in range(3):
        await asyncio.sleep(0)
    assert not worker.calls
    remote.lost("it left", restarting=True)
    remote.connected("generation0.0-0-b", dict.fromkeys(Lane, worker))
    assert len(await waiting) == 2


# ---- the freest one --------------------------------------------------------------------------------------


async def test_the_chosen_replica_is_live_and_has_the_fewest_calls_whatever_happens() -> None:
    for seed in range(10):
        chance = random.Random(seed)
        replicas, _ = service(5)
        running: list[Replica] = []
        for _ in range(300):
            worker = replicas.worker(chance.randrange(5), 0)
            match chance.choice(["call", "call", "answer", "die", "break", "come back"]):
                case "call" if any(replica.alive for replica in replicas.replicas):
                    chosen = await replicas.least_loaded(10)
                    assert chosen.alive
                    assert chosen.load == min(replica.load for replica in replicas.replicas if replica.alive)
                    chosen.__enter__()
                    running.append(chosen)
                case "answer" if running:
                    running.pop(chance.randrange(len(running))).__exit__()
                case "die":
                    worker.lost("killed", restarting=True)
                case "break" if worker.alive:
                    worker.channels[Lane.WORK].lost.set()
                case "come back":
                    worker.connected(f"{worker.name}-0-{chance.random()}", dict.fromkeys(Lane, Worker()))


async def test_the_choice_of_a_replica_costs_no_more_among_a_thousand() -> None:
    few = await _instructions_of_choices(8)
    many = await _instructions_of_choices(1000)
    assert many <= 1.1 * few


async def _instructions_of_choices(count: int) -> int:
    replicas, _ = service(count)
    running = deque[Replica]()

    async def call() -> None:
        replica = await replicas.least_loaded(10)
        replica.__enter__()
        running.append(replica)
        if len(running) > 2 * count:
            running.popleft().__exit__()

    for _ in range(2 * count):
        await call()
    with counting() as counted:
        for _ in range(200):
            await call()
    return counted.instructions


# ---- that of a group -------------------------------------------------------------------------------------


async def test_the_samples_of_a_group_meet_in_one_replica_while_one_of_them_waits_there() -> None:
    replicas, workers = service(3)
    reward = make_handle(GroupReward, replicas, 5.0)
    for worker in workers:
        worker.answering.clear()
    async with asyncio.TaskGroup() as tasks:
        for member in range(4):
            for number in range(3):
                tasks.create_task(reward.score(rows((number, member, 0)), {}))
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        for worker in workers:
            assert len({batch.rows[0].group for batch in worker.of("score")}) == 1
            assert len(worker.of("score")) == 4
            worker.answering.set()
    assert replicas.affinity.replica(0) is None


async def test_when_the_replica_of_a_group_dies_its_samples_gather_at_another_one() -> None:
    replicas, workers = service(3)
    reward = make_handle(GroupReward, replicas, 5.0)
    for worker in workers:
        worker.answering.clear()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(reward.score(rows((0, 0, 0)), {}))
        await asyncio.sleep(0)
        (first,) = [worker for worker in workers if worker.calls]
        first.dead = True
        replicas.worker(workers.index(first), 0).lost("killed", restarting=True)
        for member in (1, 2):
            tasks.create_task(reward.score(rows((0, member, 0)), {}))
        await asyncio.sleep(0)
        assert sorted(len(worker.calls) for worker in workers) == [0, 1, 2]
        for worker in workers:
            worker.answering.set()


# ---- those that hold rows --------------------------------------------------------------------------------


async def test_a_release_goes_to_the_replicas_that_hold_the_rows_and_to_no_other() -> None:
    replicas, workers = service(4)
    generation = make_handle(Generation, replicas, 5.0)
    names = [name for number in range(3) for name in await generate(generation, group(number))]
    await generation.release(names, 0)
    assert [worker.of("release") for worker in workers] == [[names[0:2]], [names[2:4]], [names[4:6]], []]
    await generation.release(names, 0)
    assert sum(len(worker.of("release")) for worker in workers) == 3, "what was freed is freed once"
    assert not len(replicas.holders)


async def test_rows_of_a_call_that_failed_are_released_too() -> None:
    """Its answer was lost, and perhaps the row was made."""
    replicas, (first, second) = service(2)
    reference = make_handle(Reference, replicas, 5.0)
    first.dead = True
    await reference.logprobs(rows((7, 0, 0)))
    first.dead = False
    await reference.release([(7, 0, 0)], 0)
    assert first.of("release") == second.of("release") == [[(7, 0, 0)]]


async def test_a_release_of_an_old_attempt_leaves_the_newer_one() -> None:
    replicas, (first, second) = service(2)
    generation = make_handle(Generation, replicas, 5.0)
    old = await generate(generation, group(1))
    new = await generate(generation, group(1, attempt=1))
    await generation.release(old, 0)
    assert (first.of("release"), second.of("release")) == ([old], [])
    await generation.release(new, 0)
    assert second.of("release") == [new]


async def test_a_release_that_one_replica_does_not_answer_is_repeated_there_only() -> None:
    replicas, (first, second) = service(2)
    generation = make_handle(Generation, replicas, 5.0)
    names = await generate(generation, group(1)) + await generate(generation, group(2))
    first.late = True
    with pytest.raises(DeadlineExceeded):
        await generation.release(names, 0)
    first.late = False
    await generation.release(names, 0)
    assert (len(first.of("release")), len(second.of("release"))) == (2, 1)


async def test_the_rows_of_a_dead_replica_are_forgotten_and_its_successor_hears_nothing_of_them() -> None:
    replicas, (first, second) = service(2)
    generation = make_handle(Generation, replicas, 5.0)
    names = await generate(generation, group(1)) + await generate(generation, group(2))
    replicas.worker(0, 0).lost("killed", restarting=True)
    await generation.release(names, 0)
    assert (first.of("release"), second.of("release")) == ([], [names[2:]])
    assert not len(replicas.holders)


async def test_texts_are_asked_of_those_who_hold_them() -> None:
    replicas, workers = service(4)
    generation = make_handle(Generation, replicas, 5.0)
    for number in range(3):
        await generate(generation, group(number))
    texts = await generation.texts(rows((2, 1, 0), (0, 0, 0)))
    assert sorted((text.group, text.member) for text in texts) == [(0, 0), (2, 1)]
    assert [len(worker.of("texts")) for worker in workers] == [1, 0, 1, 0]


def test_the_greedy_answer_of_a_group_is_held_like_its_samples() -> None:
    holders = RowHolders[str]()
    holders.add("a", group(1, members=(-1,)))
    holders.add("b", group(1))
    assert holders.split([(1, -1, 0), (1, 1, 0)]) == {"a": [0], "b": [1]}


# ---- that of the newest rows -----------------------------------------------------------------------------


def served(workers: list[Worker], method: str) -> list[int]:
    return [len(worker.of(method)) for worker in workers]


async def test_an_episode_goes_on_where_its_newest_turn_was_sampled() -> None:
    replicas, workers = service(3)
    generation = make_handle(Generation, replicas, 5.0)
    for number in range(3):
        await generate(generation, group(number))
    for turn in range(2, 5):
        await generate(generation, replace(group(1, members=(1,)), continues=rows((1, 1, 0))))
        assert served(workers, "generate") == [1, turn, 1]
    replicas.worker(1, 0).lost("killed", restarting=True)
    for turns in (2, 3):
        await generate(generation, replace(group(1, members=(1,)), continues=rows((1, 1, 0))))
        assert served(workers, "generate") == [turns, 4, 1], "the others stay where the first went"
        replicas.worker(1, 0).connected("its successor", dict.fromkeys(Lane, workers[1]))
    await generate(generation, replace(group(1, members=(0,)), continues=rows((1, 0, 0))))
    assert served(workers, "generate") == [3, 5, 1], "another member has its newest rows elsewhere"


async def test_a_group_that_continues_nothing_goes_to_the_freest_replica() -> None:
    replicas, workers = service(3)
    generation = make_handle(Generation, replicas, 5.0)
    for _ in range(3):
        await generate(generation, group(1))
    assert served(workers, "generate") == [1, 1, 1]
    await generate(generation, replace(group(1, attempt=1), continues=rows((1, 0, 1))))
    assert served(workers, "generate") == [2, 1, 1], "rows of an earlier attempt are not gone on with"


async def test_an_episode_is_answered_where_it_was_begun_and_elsewhere_after_a_death() -> None:
    replicas, workers = service(3)
    environment = make_handle(Environment, replicas, 5.0)
    await environment.reset(group(4), {})
    await environment.reset(group(5), {})
    for _ in range(2):
        await environment.step(rows((5, 0, 0)), {})
    assert served(workers, "step") == [0, 2, 0]
    workers[1].dead = True
    replicas.worker(1, 0).lost("killed", restarting=True)
    for _ in range(2):
        await environment.step(rows((5, 0, 0)), {})
    assert sorted(served(workers, "step")) == [0, 2, 2]


async def test_an_isolated_group_has_the_replica_of_an_episode_for_itself() -> None:
    replicas, workers = service(2)
    generation = make_handle(Generation, replicas, 5.0)
    await generate(generation, group(1))
    replicas.isolated = {9: frozenset()}
    async with replicas.reserved(9, 1.0) as reserved:
        assert reserved is replicas.replicas[0]
        await generate(generation, replace(group(1, members=(0,)), continues=rows((1, 0, 0))))
    assert served(workers, "generate") == [1, 1]


def test_the_newest_holder_is_the_one_that_was_called_last_for_most_of_the_samples() -> None:
    holders = RowHolders[str]()
    assert holders.newest([(1, 0, 0)]) is None
    holders.add("a", group(1, members=(-1, 0, 1, 2)))
    holders.add("b", group(1, members=(1, 2)))
    assert holders.newest([(1, 0, 0)]) == holders.newest([(1, -1, 0)]) == "a"
    assert holders.newest([(1, 0, 0), (1, 1, 0), (1, 2, 0)]) == "b"
    holders.add("a", group(1, members=(2,)))
    assert [holders.newest([(1, member, 0)]) for member in (1, 2)] == ["b", "a"]
    holders.forget("a", [(1, 2, 0)])
    assert holders.newest([(1, 2, 0)]) is None
