"""Runs the forward passes of a service over samples, on its compute thread."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from asyncrl.engines.pictures.picture_rows import read_pictures
from asyncrl.engines.training.batch.micro_batches import forward_passes
from asyncrl.engines.training.batch.train_rows import token_columns
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.protocols.batch import BatchRef

T = TypeVar("T")


async def results_of_forward_passes(
    context: WorkerContext,
    samples: BatchRef,
    forward: Callable[..., Sequence[T]],
    columns: Sequence[str] = (),
    *,
    see: bool = False,
) -> list[T]:
    """Reads the samples, and returns what `forward` computes of each, pass by pass on the compute thread. columns: that
    it reads, by default token ids. see: whether it gets the pictures of the prompts too."""
    rows = await context.reader.read(samples, columns or token_columns(context.config))
    pictures = await read_pictures(context.reader, samples) if see else []
    results: dict[int, T] = {}
    for part in forward_passes(rows, context.config):
        seen = [[pictures[row] for row in part]] if see else []
        results.update(zip(part, await context.compute.run(forward, rows.take(part), *seen), strict=True))
    return [results[row] for row in range(len(samples))]
