"""Runs a generation service, with its decode loop, in this process."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.services.generation import GenerationService


@asynccontextmanager
async def running_generation(
    make_context: Callable[[asyncio.TaskGroup], WorkerContext],
) -> AsyncIterator[GenerationService]:
    """Starts a service with this context, and ends it with its decode loop."""
    async with asyncio.TaskGroup() as tasks:
        context = make_context(tasks)
        before = asyncio.all_tasks()
        made = GenerationService(context)
        await made.begin()
        (loop,) = asyncio.all_tasks() - before
        await made.started()
        yield made
        await made.stop()
        loop.cancel()
    context.compute.close()
