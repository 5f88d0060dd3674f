"""Looks into a generation service that runs in this process."""

import asyncio
from collections.abc import Callable

from asyncrl.engines.generation.torch_engine import TorchEngine
from asyncrl.engines.generation.torch_generation import TorchGeneration
from asyncrl.services.generation import GenerationService


def core_of(service: GenerationService) -> TorchEngine:
    """The engine of a service behind its asynchronous edge."""
    assert isinstance(service._engine, TorchGeneration)
    return service._engine.core


async def until(service: GenerationService, condition: Callable[[], bool]) -> None:
    """Waits for a condition, and looks at it after every step of the engine or two, because each look has a turn of the
    compute thread."""
    async with asyncio.timeout(60):
        while not condition():
            await service.context.compute.run(lambda: None)
