"""Runs a coroutine to its end, also where an event loop runs already, as in a notebook, and says errors in Python."""

import asyncio
import re
import sys
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, TypeVar

from asyncrl.deploy.process.stop_signals import interrupt
from asyncrl.errors import AsyncrlError

T = TypeVar("T")
INTERRUPTIBLE = 0.5
"""Seconds between checks of a waiting thread, which an interrupt just before its wait does not wake."""
FLAGS = {
    "--accept-changes": "accept_changes=True",
    "--run-dir": "run_dir",
    "--model.name FOLDER": 'model="FOLDER"',
    "--prompts": "prompts",
    "--step": "step",
}
"""Arguments of calls from Python, by the flags that errors name."""


async def in_python(work: Coroutine[Any, Any, T]) -> T:
    """Awaits work whose errors a caller from Python gets: without the errors of tasks that they came from, for which
    notebooks print a text and no error of the cell, and with arguments in place of flags, outside of commands."""
    try:
        return await work
    except AsyncrlError as error:
        parts = str(error).split("`")
        flags = re.compile("|".join(rf"{re.escape(flag)}(?![\w-]|\.\w)" for flag in FLAGS))
        parts[::2] = [flags.sub(lambda found: FLAGS[found[0]], part) for part in parts[::2]]
        error.args = ("`".join(parts),)
        error.__context__ = None
        raise error.with_traceback(None) from None
    finally:  # Errors of the user's code that runs here are shown as they are.
        if (raised := sys.exception()) is not None and isinstance(raised.__context__, BaseExceptionGroup):
            raised.__context__ = None


def run_here_or_beside(work: Coroutine[Any, Any, T]) -> T:
    """Runs to the end on this thread, or on another thread if an event loop runs here already (Jupyter)."""
    return _run_beside(work) if _is_running_loop() else asyncio.run(in_python(work))


def _is_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _run_beside(work: Coroutine[Any, Any, T]) -> T:
    """Runs on another thread. A notebook interrupts only the waiting thread, which passes the interrupt on and waits:
    the first one ends a run in order, with a checkpoint."""
    interrupts: list[KeyboardInterrupt] = []
    begun: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = []

    async def interruptible() -> T:
        task = asyncio.current_task()
        assert task is not None
        begun.append((asyncio.get_running_loop(), task))
        if interrupts:  # The interrupt came before the task existed.
            task.cancel()
        return await in_python(work)

    supervised = interruptible()
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="asyncrl.train") as beside:
            beside.submit(int).result()  # The thread is there before its work: an executor joins those it has noted.
            try:
                done = beside.submit(asyncio.run, supervised)
            except KeyboardInterrupt as pressed:  # It may be handed over already.
                _pass_on(pressed, interrupts, begun)
                raise
            while not done.done():
                try:
                    wait([done], INTERRUPTIBLE)
                except KeyboardInterrupt as pressed:
                    _pass_on(pressed, interrupts, begun)
            if interrupts:
                raise interrupts[0] from done.exception()
            return done.result()
    finally:
        for each in (supervised, work):  # A coroutine that never started is closed.
            each.close()


def _pass_on(
    pressed: KeyboardInterrupt,
    interrupts: list[KeyboardInterrupt],
    begun: Sequence[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]],
) -> None:
    """Passes an interrupt of this thread on to the task that has begun."""
    interrupts.append(pressed)
    for loop, task in begun:
        with suppress(RuntimeError):  # The loop is closed, because the run has ended.
            loop.call_soon_threadsafe(interrupt, task)
