"""Runs a generation service, with its decode loop, in this process."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from asyncrl.engines.generation.torch_engine import TorchEngine
from asyncrl.engines.generation.torch_generation import TorchGeneration
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.services.generation import GenerationService


def core_of(service: GenerationService) -> TorchEngine:
    """The engine of a service behind its asynchronous edge."""
    assert isinstance(service._engine, TorchGeneration)
    return service._engine.core


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


async def until(service: GenerationService, condition: Callable[[], bool]) -> None:
    """Waits for a condition, and looks at it after every step of the engine or two, because each look has a turn of the
    compute thread."""
    async with asyncio.timeout(60):
        while not condition():
            await service.context.compute.run(lambda: None)
