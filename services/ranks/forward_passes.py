"""Runs the forward passes of a service over samples, on the compute threads of its ranks."""

from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from typing import TypeVar

from asyncrl.engines.pictures.picture_rows import read_pictures
from asyncrl.engines.pictures.prompt_pictures import PromptPictures
from asyncrl.engines.training.batch.micro_batches import forward_passes
from asyncrl.engines.training.batch.train_rows import token_columns
from asyncrl.engines.training.ranks.rank_mesh import RankMesh
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.protocols.batch import Batch, BatchRef
from asyncrl.protocols.distribute_collect import balanced_parts
from asyncrl.services.ranks.meeting import agreed

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
