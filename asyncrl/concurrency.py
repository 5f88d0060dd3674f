"""Runs several coroutines side by side, as one that can fail or be cancelled, and waits for items of queues."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar, overload

from asyncrl.errors import Retryable

T = TypeVar("T")
U = TypeVar("U")


@overload
async def gather(first: Coroutine[Any, Any, T], second: Coroutine[Any, Any, U], /) -> tuple[T, U]: ...


@overload
async def gather(*work: Coroutine[Any, Any, T]) -> tuple[T, ...]: ...


async def gather(*work: Coroutine[Any, Any, Any]) -> tuple[Any, ...]:
    """Returns all results in order. The first error cancels the other coroutines, waits for them, and is raised bare.

    Of errors at the same moment one that is not Retryable is raised. This is no TaskGroup: before Python 3.13 a group
    that ends with errors forgets that its own task was cancelled meanwhile, and a handler of the errors would go on in
    a cancelled task.
    """
    if len(work) <= 1:
        return tuple([await each for each in work])
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        errors = [error for task in tasks if task.done() and (error := _error(task)) is not None]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            _error(task)  # Retrieved, or asyncio would log that it never was.
    if errors:
        raise next((error for error in errors if not isinstance(error, Retryable)), errors[0])
    return tuple(task.result() for task in tasks)


STANDSTILL = 1.0
"""Seconds by which a timer comes late in a process that stood still: stopped, swapped, or held by a file system."""


@asynccontextmanager
async def running_timeout(seconds: float) -> AsyncIterator[None]:
    """Does what asyncio.timeout does, anew once this process itself stood still: answers may wait to be read then."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None

    def wait_until(due: float) -> None:
        nonlocal timer
        timer = loop.call_at(due, reach, due)

    def reach(due: float) -> None:
        if (now := loop.time()) > due + STANDSTILL:
            wait_until(now + seconds)
        else:
            scope.reschedule(due)

    async with asyncio.timeout(None) as scope:
        wait_until(loop.time() + seconds)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()


@asynccontextmanager
async def running_beside(work: Mapping[str, Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Runs coroutines, by the names of their tasks, beside a block, and cancels them at its end.

    Raises the root cause of all errors; the first error of the block or of a task ends the others.
    """
    with one_error():
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(each, name=name) for name, each in work.items()]
            yield
            for task in running:
                task.cancel()


async def next_items(queue: "asyncio.Queue[T]", until: Callable[[], float]) -> list[T]:
    """Waits for the next items of a queue and returns all that are there; none at the time, in loop time, that `until`
    returns, which may move on meanwhile."""
    loop = asyncio.get_running_loop()
    while (deadline := until()) > loop.time():
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                first = await queue.get()
                return [first, *(queue.get_nowait() for _ in range(queue.qsize()))]
    return []


async def to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Runs work that bounds its own time to its end; raises a cancellation of the caller only then."""
    task = asyncio.create_task(work, name="work to its end")
    interrupted: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as cancelled:
            interrupted = cancelled
    task.result()
    if interrupted is not None:
        raise interrupted


def start_task(tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Starts a task of a group. Raises RuntimeError when the group is ending; before Python 3.13 that would leave a
    coroutine behind that nobody awaits."""
    try:
        return tasks.create_task(work, name=name)
    except RuntimeError:
        work.close()
        raise


def unwrap(error: BaseException) -> BaseException:
    """Returns the only error inside nested groups; the error itself when it is no group or holds several."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def root_cause(error: BaseException) -> BaseException:
    """Returns the error to report of those inside nested groups: the first that is not Retryable, else the first.

    A Retryable error follows from other errors more often than it causes them.
    """
    leaves = list(_leaves(error))
    return next((leaf for leaf in leaves if not isinstance(leaf, Retryable)), leaves[0])


@contextmanager
def one_error(choose: Callable[[BaseExceptionGroup[BaseException]], BaseException] = root_cause) -> Iterator[None]:
    """Raises one error, with its own cause, in place of the group of errors with which a TaskGroup inside ends."""
    try:
        yield
    except BaseExceptionGroup as errors:
        raise (error := choose(errors)) from error.__cause__


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _leaves(part)
    else:
        yield error


def _error(task: asyncio.Task[Any]) -> BaseException | None:
    return asyncio.CancelledError() if task.cancelled() else task.exception()
