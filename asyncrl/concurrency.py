"""Several coroutines side by side, as one that can fail or be cancelled."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from asyncrl.errors import Retryable

T = TypeVar("T")
U = TypeVar("U")


async def together(*work: Coroutine[Any, Any, T]) -> list[T]:
    """The results of all, in order. The first error ends the others, which are waited for, and is raised bare.

    Of errors at the same moment one that is not Retryable is raised. Not a TaskGroup: before Python 3.13 one that ends
    with errors forgets that its own task was cancelled meanwhile, and whoever handles the errors would go on as if
    nobody had asked it to end.
    """
    if len(work) <= 1:
        return [await each for each in work]
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        errors = [error for task in tasks if task.done() and (error := _error(task)) is not None]
    finally:
        await _end(tasks)
    if errors:
        raise next((error for error in errors if not isinstance(error, Retryable)), errors[0])
    return [task.result() for task in tasks]


async def both(one: Coroutine[Any, Any, T], other: Coroutine[Any, Any, U]) -> tuple[T, U]:
    """`together` for two results of different types."""
    work: list[Coroutine[Any, Any, Any]] = [one, other]
    found = await together(*work)
    return found[0], found[1]


def _error(task: asyncio.Task[Any]) -> BaseException | None:
    return asyncio.CancelledError() if task.cancelled() else task.exception()


async def _end(tasks: list[asyncio.Task[T]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        _error(task)  # Looked at, or asyncio would complain that nobody did.
