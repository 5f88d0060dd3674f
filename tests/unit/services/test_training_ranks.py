"""Two ranks of the training service: they decide together, and whoever calls them sees one trainer."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engines.ranks.rank_mesh import RankMesh
from asyncrl.errors import LostRows, Refused
from asyncrl.fleet.worker.compute_thread import ThreadCompute
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.lanes.data.row_store import RowStore
from asyncrl.protocols.batch import BatchRef, Cuts
from asyncrl.protocols.distribute_collect import fan_out
from asyncrl.protocols.hash_chain import GENESIS, chain
from asyncrl.protocols.messages import Checkpointed, StepReport
from asyncrl.protocols.rank_layout import Layout
from asyncrl.protocols.service_contracts import Training
from tests.unit.services.counting import INCARNATION, CountingService, context_maker, cuts, published_weight, put


class Two:
    """RankMesh in this process, two mostly, each with a compute thread of its own, called as a handle calls them."""

    def __init__(self, ranks: list[CountingService]) -> None:
        self.ranks = ranks

    def calls(self, cuts: Cuts) -> list[Cuts]:
        """Each rank's share."""
        transfer = Training.endpoints["step"].transfer
        return [args[0] for args in fan_out(transfer, (cuts,), Layout(dp=len(self.ranks)))[1]]

    async def step(self, cuts: Cuts) -> StepReport:
        shares = zip(self.ranks, self.calls(cuts), strict=True)
        return StepReport.merge(await together(rank.step(share) for rank, share in shares))


async def together(calls: Any) -> list[Any]:
    """Answers of all; an error only when nobody is at work any more, and in PATIENCE at most."""
    async with asyncio.timeout(PATIENCE):
        answers = await asyncio.gather(*calls, return_exceptions=True)
    if errors := [answer for answer in answers if isinstance(answer, BaseException)]:
        assert len({type(error) for error in errors}) == 1
        assert len(errors) == len(answers), f"ranks must agree: {answers}"
        raise errors[0]
    return answers


PATIENCE = 20.0

ServingTwo = Callable[..., AbstractAsyncContextManager[Two]]


@pytest.fixture
def serving_two(
    worker_context: Callable[..., WorkerContext], thread_ranks: Callable[[int], list[RankMesh]], tmp_path: Path
) -> ServingTwo:
    @asynccontextmanager
    async def serve(size: int = 2) -> AsyncIterator[Two]:
        store = RowStore.private("inproc://rows", 64, 4096)
        async with asyncio.TaskGroup() as tasks:
            services = [
                CountingService(
                    context_maker(worker_context)(
                        tasks,
                        tmp_path,
                        rank=mesh.rank,
                        layout=Layout(dp=size),
                        options={"mesh": mesh},
                        make_compute=ThreadCompute,
                        source=store,
                        open_rows=lambda slots, row_bytes: store,
                    )
                )
                for mesh in thread_ranks(size)
            ]
            await together(service.start() for service in services)
            try:
                yield Two(services)
            finally:
                for service in services:
                    await service.stop()
                    service.context.compute.close()

    return serve


async def test_two_ranks_report_the_step_and_the_chain_of_one(serving_two: ServingTwo) -> None:
    async with serving_two(1) as one:
        expected = [await one.step(cuts(one.ranks[0], 0, 1, 2, 5)), await one.step(cuts(one.ranks[0], 1, 6))]
    async with serving_two() as two:
        batch = cuts(two.ranks[0], 0, 1, 2, 5)
        assert [len(share) for share in two.calls(batch)] == [2, 1]
        found = [await two.step(batch), await two.step(cuts(two.ranks[0], 1, 6))]
        assert found == expected
        assert await published_weight(two.ranks[0]) == 4.0


async def test_rows_that_one_rank_misses_stop_the_step_of_both_and_the_next_is_trained(serving_two: ServingTwo) -> None:
    async with serving_two() as two:
        first = two.ranks[0]
        batch = cuts(first, 0, 1, 2)
        first.context.open_rows(0, 0).free([two.calls(batch)[1].batch.rows[0].places[0]])
        with pytest.raises(LostRows):
            await two.step(batch)
        assert (await two.step(cuts(first, 0, 1, 3))).chain == chain(GENESIS, [(1, 0, 0), (3, 0, 0)]).hex()


async def test_what_was_foreseen_lies_where_the_step_then_asks_for_it(serving_two: ServingTwo) -> None:
    async with serving_two() as two:
        batch = cuts(two.ranks[0], 0, 1, 2, 5)
        shares = fan_out(Training.endpoints["prefetch"].transfer, (batch.batch,), Layout(dp=2))[1]
        held = await together(rank.prefetch(share) for rank, (share,) in zip(two.ranks, shares, strict=True))
        assert held == [[True, True], [True]]
        two.ranks[0].context.open_rows(0, 0).free([place for row in batch.batch for place in row.places])
        assert [sample.group for sample in (await two.step(batch)).samples] == [1, 2, 5]


async def test_a_share_that_comes_again_after_others_lost_rows_is_trained_and_not_taken_for_the_lost_one(
    serving_two: ServingTwo,
) -> None:
    """A handle cancels the other ranks' calls on the first error; the next batch may have the same share for them."""
    async with serving_two() as two:
        one, other = two.ranks
        kept = put(one, 1)
        gone = put(one, 2)
        instead = put(one, 3)
        one.context.open_rows(0, 0).free([gone.places[0]])
        left_behind = asyncio.ensure_future(one.step(Cuts(INCARNATION, 0, BatchRef((kept,)), 6, 2)))
        lost = asyncio.ensure_future(other.step(Cuts(INCARNATION, 0, BatchRef((gone,)), 6, 2)))
        await asyncio.sleep(0)
        left_behind.cancel()
        await asyncio.wait([left_behind])
        report = asyncio.ensure_future(two.step(Cuts(INCARNATION, 0, BatchRef((kept, instead)), 6, 2)))
        with pytest.raises(LostRows):
            await lost
        assert [sample.group for sample in (await report).samples] == [1, 3]


async def test_a_repeated_call_is_answered_by_each_rank_from_its_report(serving_two: ServingTwo) -> None:
    async with serving_two() as two:
        batch = cuts(two.ranks[0], 0, 1, 2)
        first = await two.step(batch)
        for row in batch.batch:
            two.ranks[0].context.open_rows(0, 0).free([row.places[0]])
        assert await two.step(batch) == first
        with pytest.raises(Refused, match="version 0 of incarnation 3"):
            await two.step(cuts(two.ranks[0], 0, 4, 5))


async def test_a_rank_without_rows_takes_part(serving_two: ServingTwo) -> None:
    async with serving_two() as two:
        batch = cuts(two.ranks[0], 0, 7)
        assert [len(share) for share in two.calls(batch)] == [1, 0]
        assert [sample.group for sample in (await two.step(batch)).samples] == [7]
        assert [await rank.step(share) for rank, share in zip(two.ranks, two.calls(batch), strict=True)]


async def test_only_the_first_rank_publishes_and_keeps_leases(serving_two: ServingTwo) -> None:
    async with serving_two() as two:
        one, other = two.ranks
        for rank in two.ranks:
            await rank.using(("slow",), 0)
        await two.step(cuts(one, 0, 1, 2))
        shares = two.calls(cuts(one, 1, 3, 4))
        waiting = asyncio.ensure_future(one.step(shares[0]))
        assert (await other.step(shares[1])).published is None
        assert not waiting.done(), "slow still reads version 0, whose slot version 2 needs"
        for rank in two.ranks:
            await rank.using(("slow",), 1)
        assert (await waiting).published == await one.published()


async def test_a_checkpoint_of_two_ranks_names_the_files_of_both(tmp_path: Path, serving_two: ServingTwo) -> None:
    folder = tmp_path / "tmp-1"
    async with serving_two() as two:
        report = await two.step(cuts(two.ranks[0], 0, 1, 2))
        with pytest.raises(Refused, match="version 0 of incarnation 3"):
            await together(rank.copy_state(INCARNATION, 0) for rank in two.ranks)
        await together(rank.copy_state(INCARNATION, 1) for rank in two.ranks)
        made = await together(rank.checkpoint(str(folder), INCARNATION, 1) for rank in two.ranks)
        assert Checkpointed.merge(made).chain == report.chain
        assert Checkpointed.merge(made).files.keys() == {"state", "rank-1.pt"}
