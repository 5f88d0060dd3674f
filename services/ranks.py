"""Services whose replicas have several ranks: where the ranks meet, how the first one leads, and what they compute.

    rank 0     run("values", rows) ── announces ──> values(rows) ──> returns what it found
    rank 1                              └─────────> values(rows)

Every rank gets every call of the controller, but only rank 0 acts on it. The ranks agree on whether they have their
rows, and each runs forward passes over its share.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import torch

from asyncrl.concurrency import start_task
from asyncrl.engines.models.prompt_pictures import PromptPictures, read_pictures
from asyncrl.engines.ranks.rank_mesh import Announcements, RankMesh, RankPlace, connect_beside, connect_mesh
from asyncrl.engines.training.micro_batches import forward_passes
from asyncrl.engines.training.train_rows import token_columns
from asyncrl.errors import LostRows, PeerLost
from asyncrl.fleet.remote_worker import DEATH_NOTICE
from asyncrl.fleet.worker.rank_meeting import MeetingPlace
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.protocols.batch import Batch, BatchRef
from asyncrl.protocols.distribute_collect import balanced_parts
from asyncrl.protocols.rank_layout import Layout

Rows = TypeVar("Rows")


async def find_meeting(context: WorkerContext) -> MeetingPlace | None:
    """Waits until the controller has said where the ranks meet; returns None where there is one alone."""
    if context.spec.layout.size == 1:
        return None
    return await context.rank_meeting.place(context.config.fleet.start_deadline)


def open_mesh(context: WorkerContext, meeting: MeetingPlace | None, *, is_led: bool = False) -> RankMesh:
    """Connects the ranks, where there are several. is_led: rank 0 announces what all ranks compute."""
    if meeting is None:
        return RankMesh(service=context.spec.service)
    return connect_mesh(meeting, _place(context, is_led=is_led))


def open_mesh_beside(context: WorkerContext, meeting: MeetingPlace | None) -> RankMesh:
    """Connects the ranks of a replica whose processes have ranks of another service too. Rank 0 announces what all of
    them compute."""
    assert meeting is not None, "there are several ranks"
    sizes = context.config.generation.layout
    return connect_beside(meeting, replace(_place(context, is_led=True), layout=Layout(sizes.pp, sizes.tp)))


def _place(context: WorkerContext, *, is_led: bool) -> RankPlace:
    fleet = context.config.fleet
    return RankPlace(
        context.spec.rank,
        context.spec.layout,
        context.spec.device,
        waiting=context.occupancy.exchanging,
        start=fleet.start_deadline,
        exchange=fleet.call_deadline,
        has_own_gpu=bool(context.spec.devices),
        zero=context.config.training.zero_stage if context.spec.service == "training" else 0,
        service=context.spec.service,
        is_led=is_led,
    )


def warn_of_whole_load(context: WorkerContext, reason: str) -> None:
    """Logs at rank 0 why ranks that take parts of a model loaded all of it, if they did."""
    if reason and context.spec.rank == 0:
        context.log.warning("each rank loaded the whole model to take its part", reason=reason)


def agree_on_lost_rows(mesh: RankMesh, own: LostRows | None) -> LostRows | None:
    """Returns on all ranks an error that names what any of them lost, because the caller sees that of one rank; None
    where none lost rows. own: what this rank lost."""
    if not mesh.everyone.largest(torch.tensor([float(own is not None)])).item():
        return None
    named = mesh.everyone.told_by_each([] if own is None else [[owner, slot] for owner, slot in own.places])
    unique = dict.fromkeys((owner, slot) for places in named for owner, slot in places)
    return LostRows(str(own or f"another rank of the {mesh.service} lost rows of its share"), unique)


async def agreed(context: WorkerContext, mesh: RankMesh, reading: Awaitable[Rows]) -> Rows:
    """Returns what this rank reads. Raises LostRows, on all ranks, when one of them lost rows."""
    if mesh.size == 1:
        return await reading
    lost: LostRows | None = None
    try:
        found = await reading
    except LostRows as own:
        lost = own
    if (lost := await context.compute.run(agree_on_lost_rows, mesh, lost)) is not None:
        raise lost
    return found


# ---- the first rank leads the others (Announcements in engines/ranks/rank_mesh.py) ----------------------------------


Work: TypeAlias = Callable[..., Awaitable[Any]]


class LedRanks:
    """The end of one rank. work: what all ranks can be asked for, by name, with plain values or messages. A worker ends
    when an exchange fails, because the ranks have no common position any more.

    One piece of work runs at a time, on all ranks in the order of announcements. Services with ranks call it.
    """

    def __init__(self, context: WorkerContext, mesh: RankMesh, work: Mapping[str, Work]) -> None:
        self._context = context
        self._mesh = mesh
        self._work = work
        self._running = asyncio.Lock()
        if mesh.announcements is not None and mesh.rank > 0:
            start_task(context.tasks, self._follow(mesh.announcements), "work of rank 0")

    @property
    def follows(self) -> bool:
        """Returns whether this rank acts on nothing but what rank 0 announces."""
        return self._mesh.rank > 0

    async def run(self, name: str, *args: Any) -> Any:
        """Returns what this work gives at rank 0. Work that has begun goes on when its caller ends, because other ranks
        wait for this one. Raises LostRows of any rank."""
        if self._mesh.announcements is None:
            return await self._work[name](*args)
        task = start_task(self._context.tasks, self._lead(self._mesh.announcements, name, args), name)
        found = await asyncio.shield(task)
        if isinstance(found, LostRows):
            raise found
        return found

    async def idle(self) -> None:
        """Waits for the work that this rank has begun."""
        async with self._running:
            pass

    async def stop(self) -> None:
        """Ends the waits for announcements."""
        if self._mesh.announcements is not None:
            await end_announcements(self._mesh.announcements)

    async def _lead(self, announcements: Announcements, name: str, args: tuple[Any, ...]) -> Any:
        async with self._running:
            try:
                async with death_noticed():
                    await self._context.compute.run(announcements.tell, (name, args))
                    return await self._work[name](*args)
            except LostRows as lost:
                return lost

    async def _follow(self, announcements: Announcements) -> None:
        async with death_noticed():
            while (announced := await next_announced(announcements)) is not None:
                name, args = announced
                async with self._running:
                    with suppress(LostRows):  # Rank 0 says so.
                        await self._work[name](*args)


@asynccontextmanager
async def death_noticed() -> AsyncIterator[None]:
    """Raises PeerLost of the block once the death of another rank had time to be reported, because the ranks have no
    common position any more."""
    try:
        yield
    except PeerLost:
        await asyncio.sleep(DEATH_NOTICE)
        raise


async def end_announcements(announcements: Announcements) -> None:
    """Ends the waits for announcements."""
    with suppress(RuntimeError):  # The store is gone, or a rank that is dead reads nothing.
        await asyncio.to_thread(announcements.end)


async def next_announced(announcements: Announcements) -> Any:
    """Waits for the next announcement on a thread that does not keep the process from ending. Raises PeerLost when rank
    0 is gone."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Any] = loop.create_future()

    def take() -> None:
        try:
            message = announcements.next()
            error = None
        except RuntimeError as lost:
            message = None
            error = PeerLost(f"rank 0 announces nothing any more: {lost}")
        with suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(_settle, found, message, error)

    threading.Thread(target=take, name="announcements", daemon=True).start()
    return await found


def _settle(found: "asyncio.Future[Any]", message: Any, error: PeerLost | None) -> None:
    if found.done():
        return
    if error is None:
        found.set_result(message)
    else:
        found.set_exception(error)


# ---- forward passes over samples, on the compute threads of the ranks ----------------------------------------------


T = TypeVar("T")
ONE_RANK = RankMesh()


async def results_of_forward_passes(
    context: WorkerContext,
    samples: BatchRef,
    forward: Callable[..., Sequence[T]],
    columns: Sequence[str] = (),
    *,
    see: bool = False,
    mesh: RankMesh = ONE_RANK,
) -> list[T]:
    """Reads the samples, and returns what `forward` computes of each, pass by pass on the compute thread. columns: that
    it reads, by default token ids. see: whether it gets the pictures of the prompts too. mesh: of the ranks that all
    run this together, each on its share; `forward` without rows takes part in a pass of the others.

    Raises LostRows, on all ranks, when rows of any share are gone.
    """

    async def read(share: BatchRef) -> tuple[Batch, list[PromptPictures | None]]:
        rows = await context.reader.read(share, columns or token_columns(context.config))
        return rows, await read_pictures(context.reader, share) if see else []

    async def compute(own: Sequence[int]) -> list[T]:
        share = samples.take(own)
        rows, pictures = await agreed(context, mesh, read(share))

        def run(part: list[int]) -> Sequence[T]:
            return forward(rows.take(part), *([[pictures[row] for row in part]] if see else []))

        return await in_passes(context, mesh, forward_passes(rows, context.config) if own else [], run)

    return await on_all_ranks(context, mesh, samples.row_weights(), compute)


async def on_all_ranks(
    context: WorkerContext,
    mesh: RankMesh,
    weights: Sequence[int],
    compute: Callable[[Sequence[int]], Awaitable[list[T]]],
) -> list[T]:
    """Returns a result of each row: `compute` gives those of the rows of its rank. weights: of all rows."""
    parts = balanced_parts(weights, mesh.rows.size)
    found = await compute(parts[mesh.rows.rank])
    if mesh.rows.size == 1:
        return found
    by_rank = await context.compute.run(mesh.rows.told_by_each, found)
    told = dict(zip(chain.from_iterable(parts), chain.from_iterable(by_rank), strict=True))
    return [told[row] for row in range(len(weights))]


async def in_passes(
    context: WorkerContext, mesh: RankMesh, passes: list[list[int]], run: Callable[[list[int]], Sequence[T]]
) -> list[T]:
    """Returns a result of each row of all passes, in order of the rows. run: computes a pass, or without rows takes
    part in one of other ranks."""
    if mesh.size > 1:
        passes = await context.compute.run(mesh.in_step, passes)
    results: dict[int, T] = {}
    for part in passes:
        results.update(zip(part, await context.compute.run(run, part), strict=True))
    return [results[row] for row in sorted(results)]
