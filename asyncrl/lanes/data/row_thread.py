"""The thread that copies many rows, so that the event loop answers meanwhile."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple, Unpack

from asyncrl.protocols.batch import BatchRef

INLINE_TOKENS = 128 * 1024
"""Tokens that are copied on the event loop, in at most a few milliseconds."""

ROW_COST = 512
"""Tokens whose copy takes as long as finding one row."""

_thread = ThreadPoolExecutor(1, thread_name_prefix="rows")
"""Starts its thread at its first use. It is not the compute thread, which a training step occupies for minutes."""

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


async def run_for_rows(refs: BatchRef, function: Callable[[Unpack[Arguments]], Result], *args: *Arguments) -> Result:
    """Returns the result of a function that handles these rows: here when they are few, else in the thread of rows.
    Cancelling the wait does not stop a function that has begun."""
    if sum(row.length + ROW_COST for row in refs) <= INLINE_TOKENS:
        return function(*args)
    return await asyncio.get_running_loop().run_in_executor(_thread, function, *args)
