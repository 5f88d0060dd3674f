"""A replica of two ranks beside event loops: one leads and samples, the other repeats its calls with own weights. Ranks
are threads here; test_sliced_engines.py has processes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial, reduce
from pathlib import Path
from threading import Barrier
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.concurrency import gather
from asyncrl.engines.generation import torch_engine
from asyncrl.engines.generation.engine_interface import NO_WEIGHTS, Completion, SampleRequest
from asyncrl.engines.generation.flat_model import FlatModel, load_model
from asyncrl.engines.generation.ranked_generation import FollowingEngine, FollowingGeneration, LeadingEngine
from asyncrl.engines.generation.torch_engine import TorchEngine
from asyncrl.engines.generation.torch_generation import TorchGeneration
from asyncrl.engines.ranks.rank_mesh import RankMesh
from asyncrl.errors import ConfigError, DeadlineExceeded, PeerLost, Refused
from asyncrl.fleet.worker.compute_thread import ThreadCompute
from asyncrl.lanes.control.message_codec import decode, encode
from asyncrl.lanes.weights.handover import WeightHandover
from tests.unit.conftest import ThreadRank
from tests.unit.engines.generation.conftest import engine_config, make_model
from tests.unit.engines.generation.ranks.engine_process import versions_of
from tests.unit.services.conftest import worker_context as worker_context

SHAPE = {"slots": 4, "max_prompt_tokens": 40, "max_new_tokens": 24}
LIMIT = 60.0


class SummingRanks(ThreadRank):
    """Threads that sum in rank order."""

    def sum(self, values: Tensor) -> Tensor:
        return reduce(torch.add, self.gather_equal(values))


class Replica:
    """Two ranks. told: calls of the leader that its follower has taken."""

    def __init__(self, leader: TorchGeneration, follower: FollowingGeneration, folder: Path) -> None:
        self.leader = leader
        self.follower = follower
        self.done: asyncio.Queue[Completion] = asyncio.Queue()
        self.told: list[str] = []
        self.handovers: list[WeightHandover] = []
        self._weights = [versions_of(folder, rank, 2) for rank in range(2)]

    async def offer(self, version: int, *ranks: int) -> None:
        for rank in ranks:
            await self.handovers[rank].offer(version, self._weights[rank](version))

    async def load(self, version: int) -> None:
        await self.offer(version, 0, 1)
        await gather(self.leader.load_own(version), self.follower.load_own(version))

    async def until(self, true: Callable[[], bool]) -> None:
        while not true():
            await asyncio.get_running_loop().run_in_executor(None, lambda: None)


Start = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(folder: Path, worker_context: Callable[..., Any]) -> Start:
    @asynccontextmanager
    async def started(timeout: float = LIMIT) -> AsyncIterator[Replica]:
        config = engine_config(**SHAPE)
        loop = asyncio.get_running_loop()
        boxes = list[Tensor | None]([None, None])
        barrier = Barrier(2)
        calls = asyncio.Queue[Any]()
        own = [SummingRanks(rank, boxes, barrier) for rank in range(2)]
        ranks = [RankMesh(everyone=each, tensor=each) for each in own]

        def tell(call: Any) -> None:
            (frame,) = encode(call)
            loop.call_soon_threadsafe(calls.put_nowait, decode([frame]))

        async def next_call() -> Any:
            call = await calls.get()
            replica.told.append(call[0])
            return call

        async with asyncio.timeout(LIMIT), asyncio.TaskGroup() as tasks:
            changes = {"model_dir": folder, "make_compute": ThreadCompute}
            workers = [
                worker_context("generation", config, tasks, handover=WeightHandover(), **changes) for _ in range(2)
            ]
            leading = partial(LeadingEngine, ranks=ranks[0], tell=tell)
            leader = await TorchGeneration.open(workers[0], copies=False, engine=leading)
            follower = await FollowingGeneration.open(workers[1], ranks=ranks[1], calls=next_call, timeout=timeout)
            replica = Replica(leader, follower, folder)
            replica.handovers = [cast(WeightHandover, worker.handover) for worker in workers]
            deliver = lambda done: [replica.done.put_nowait(each) for each in done]  # noqa: E731
            running = [tasks.create_task(leader.run(deliver)), tasks.create_task(follower.run(deliver))]
            yield replica
            for task in running:
                task.cancel()
            await asyncio.wait(running)
            for worker in workers:
                worker.compute.close()

    return started


def asked(count: int) -> list[SampleRequest]:
    prompt = np.random.default_rng(0).integers(5, 261, 30).astype(np.int32)
    return [SampleRequest((0, member, 0), prompt, member, 1.0, 24) for member in range(count)]


def pauses_after(steps: int, leader: TorchGeneration) -> list[int]:
    """Has the leader pause after so many steps; returns a list of those that were made."""
    made = list[int]()
    step = leader.core.step

    def counted() -> list[Completion]:
        done = step()
        made.append(len(done))
        if len(made) == steps:
            leader._set_paused(True)
        return done

    leader.core.step = counted  # type: ignore[method-assign]
    return made


async def test_two_ranks_sample_with_weights_of_their_own_hand_over(start: Start, folder: Path) -> None:
    async with start() as replica:
        await replica.load(0)
        await replica.leader.submit(asked(6))
        done = {each.request.key: each for each in [await replica.done.get() for _ in range(6)]}
        one = TorchEngine(folder, engine_config(**SHAPE), 0)
        one.submit(*asked(6))
        while one.active:
            for expected in one.step():
                found = done[expected.request.key]
                assert found.tokens.tolist() == expected.tokens.tolist()
                np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5, rtol=0)
        expected_after = one.logprobs_after(np.arange(5, 9))
        np.testing.assert_allclose(await replica.leader.logprobs_after(np.arange(5, 9)), expected_after, atol=1e-4)


async def test_ranks_put_away_and_load_together_while_samples_run(start: Start) -> None:
    async with start() as replica:
        await replica.load(0)
        steps = pauses_after(3, replica.leader)
        await replica.leader.submit(asked(6))
        await replica.until(lambda: len(steps) == 3)
        await gather(replica.follower.put_away(), replica.leader.put_away())
        running = replica.leader.core.running + replica.leader.core.waiting
        assert running > 0
        assert replica.follower.core.running + replica.follower.core.waiting == running
        assert not replica.follower.core.active
        await replica.load(1)
        await replica.leader.resume()
        done = [await replica.done.get() for _ in range(6)]
        assert max(int(each.versions[-1]) for each in done) == 1


async def test_a_follower_without_the_version_waits_for_it(start: Start) -> None:
    async with start() as replica:
        await replica.offer(0, 0)
        await replica.leader.load_own(0)
        await replica.leader.submit(asked(2))
        await replica.until(lambda: "load" in replica.told)
        assert replica.follower.version == NO_WEIGHTS
        await replica.offer(0, 1)
        await replica.follower.load_own(0)
        assert [int(version) for _ in range(2) for version in {*(await replica.done.get()).versions}] == [0, 0]


async def test_a_version_that_the_leader_leaves_out_is_refused(start: Start) -> None:
    async with start() as replica:
        await replica.load(0)
        await gather(replica.follower.put_away(), replica.leader.put_away())
        await replica.offer(1, 1)
        loading = asyncio.ensure_future(replica.follower.load_own(1))
        await replica.leader.put_away()
        with pytest.raises(Refused, match="did not load version 1"):
            await loading
        await replica.load(2)
        assert replica.follower.version == 2


async def test_a_step_of_the_trainer_waits_for_a_load_that_the_leader_has_made(start: Start) -> None:
    """The next step may begin while ranks take the version before, where their replica has no prompts."""
    async with start() as replica:
        await replica.load(0)
        await gather(replica.follower.put_away(), replica.leader.put_away())
        await replica.offer(1, 0, 1)
        await replica.leader.load_own(1)
        putting_away = asyncio.ensure_future(replica.follower.put_away())
        await replica.until(lambda: replica.told.count("load") == 2)
        assert not putting_away.done(), "the leader may sample with version 1"
        await replica.follower.load_own(1)
        assert not putting_away.done()
        await replica.leader.put_away()
        await putting_away
        assert not replica.follower.core.active


async def test_waits_for_the_leader_end(start: Start) -> None:
    async with start(timeout=0.01) as replica:
        with pytest.raises(DeadlineExceeded, match=r"did not put its weights away within 0\.01 s \(generation0"):
            await replica.follower.put_away()
        await replica.offer(0, 1)
        with pytest.raises(DeadlineExceeded, match="did not load version 0"):
            await replica.follower.load_own(0)


async def test_a_follower_takes_no_requests(start: Start) -> None:
    async with start() as replica:
        with pytest.raises(Refused, match="ask that one for samples"):
            await replica.follower.submit(asked(1))
        with pytest.raises(Refused, match="ask that one for log-probs"):
            await replica.follower.logprobs_after(np.arange(3))


async def test_the_error_of_the_calls_ends_a_follower(start: Start) -> None:
    async with start() as replica:
        for calls, error in ((_ended, None), (_lost, PeerLost), (_loading, DeadlineExceeded)):
            worker = replica.follower._worker
            core = replica.follower.core
            follower = FollowingGeneration(core, worker, calls, 0.01)
            if error is None:
                await follower.run(lambda _: None)
            else:
                with pytest.raises(error):
                    await follower.run(lambda _: None)


async def _ended() -> None:
    return None


async def _lost() -> Any:
    raise PeerLost("the leader is gone")


async def _loading() -> Any:
    return "load", 0.0, 7


def test_the_device_of_a_rank_holds_its_slices_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole model is loaded and compared in the memory of the host."""
    asked_for: list[str] = []

    def loaded(*args: Any) -> Any:
        asked_for.append(args[2])
        raise PeerLost("enough")

    monkeypatch.setattr(torch_engine, "load_model", loaded)
    own = SummingRanks(1, [None] * 2, Barrier(2))
    ranks = RankMesh(everyone=own, tensor=own)
    for group in ({"ranks": ranks}, {}):
        with pytest.raises(PeerLost):
            TorchEngine(folder, engine_config(**SHAPE, device="cuda"), **group)
    assert asked_for == ["cpu", "cuda"]
    flat = FlatModel(load_model(folder, torch.float32, "cpu"), 2, 32, 261)
    flat.share_out(ranks, torch.device("meta"))
    assert {each.device.type for each in flat.model.parameters()} == {flat.device.type} == {"meta"}


@pytest.mark.parametrize(
    ("family", "settings", "ranks", "found"),
    [
        ("llama", {"lora": {"rank": 2}}, 2, "generation.layout: tp = 2 cuts whole weights, and model.lora"),
        ("llama-gelu", {}, 2, r"tiny is another \(llama\); write tp = 1"),
        ("llama", {}, 4, "tp = 4 does not divide num_key_value_heads = 2: write 1 or 2"),
    ],
)
def test_what_ranks_cannot_share_out_is_refused(
    tmp_path: Path, family: str, settings: dict[str, Any], ranks: int, found: str
) -> None:
    own = SummingRanks(1, [None] * ranks, Barrier(ranks))
    group = RankMesh(everyone=own, tensor=own)
    with pytest.raises(ConfigError, match=found):
        FollowingEngine(make_model(family, tmp_path), engine_config(**SHAPE | settings), ranks=group)
