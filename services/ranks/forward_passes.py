"""Runs the forward passes of a service over samples, on the compute threads of its ranks."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TypeVar

from asyncrl.engines.pictures.picture_rows import read_pictures
from asyncrl.engines.training.batch.micro_batches import forward_passes
from asyncrl.engines.training.batch.train_rows import token_columns
from asyncrl.engines.training.ranks.rank_mesh import RankMesh
from asyncrl.errors import LostRows
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.protocols.batch import Batch, BatchRef
from asyncrl.protocols.distribute_collect import balanced_parts
from asyncrl.services.ranks.meeting import agree_on_lost_rows

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
    parts = balanced_parts(samples.row_weights(), mesh.rows.size)
    own = parts[mesh.rows.rank]
    share = samples if mesh.rows.size == 1 else samples.take(own)
    rows = await read_share(context, share, columns or token_columns(context.config), mesh)
    pictures = await read_pictures(context.reader, share) if see else []
    passes = forward_passes(rows, context.config) if len(share) else []
    if mesh.size > 1:
        passes = await context.compute.run(mesh.in_step, passes)
    results: dict[int, T] = {}
    for part in passes:
        seen = [[pictures[row] for row in part]] if see else []
        results.update(zip(part, await context.compute.run(forward, rows.take(part), *seen), strict=True))
    found = [results[row] for row in range(len(share))]
    if mesh.rows.size == 1:
        return found
    by_rank = await context.compute.run(mesh.rows.told_by_each, found)
    numbers, all_results = chain.from_iterable(parts), chain.from_iterable(by_rank)
    told = dict(zip(numbers, all_results, strict=True))
    return [told[row] for row in range(len(samples))]


async def read_share(context: WorkerContext, share: BatchRef, columns: Sequence[str], mesh: RankMesh) -> Batch:
    """Reads the rows of this rank. Raises LostRows, on all ranks, when one of them lost rows."""
    if mesh.size == 1:
        return await context.reader.read(share, columns)
    lost: LostRows | None = None
    try:
        rows = await context.reader.read(share, columns)
    except LostRows as own:
        lost = own
    if (lost := await context.compute.run(agree_on_lost_rows, mesh, lost)) is not None:
        raise lost
    return rows
