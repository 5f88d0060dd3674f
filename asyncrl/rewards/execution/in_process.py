"""Reward functions that only the caller's process has: of a notebook, a script, a lambda.

The reward service then lives in that process too, and calls them on threads. A thread cannot be killed: a function that
hangs is reported at its deadline and keeps its thread.
"""

import asyncio
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from asyncrl.names import name_of
from asyncrl.rewards.calling import attempt
from asyncrl.rewards.functions import FunctionSpec
from asyncrl.rewards.places import Places
from asyncrl.rewards.sample import Function, Sample, Verdict, with_columns
from asyncrl.together import together

GRACE = 0.1
"""Seconds after its deadline in which a coroutine function can end by itself and say where it was."""
THREADS = 4
"""Calls at one time. They share the interpreter with the controller: more would only delay it."""


def importable_name(function: Callable[..., Any]) -> str | None:
    """`module:function`, when another process finds this very function under that name; else None.

    A script's own functions have none: importing the script would run it again.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module in (None, "__main__") or "." in name:
        return None
    found = getattr(sys.modules.get(module), name, None)
    return f"{module}:{name}" if found is function else None


class HerePool:
    """The twin of `Pool`, with threads in place of children. named: functions with the names of their terms."""

    def __init__(self, named: Sequence[tuple[str, Function]], deadline: float) -> None:
        self._functions, self._deadline = [function for _, function in named], deadline
        self.specs = tuple(FunctionSpec(name, name) for name, _ in named)
        self._places = Places(THREADS)

    @property
    def queued(self) -> int:
        """Calls that wait for their turn."""
        return self._places.waiting

    async def start(self) -> None:
        """Nothing has to be loaded."""

    async def stop(self) -> None:
        """Calls that run on end with their threads."""

    async def run(self, function: int, samples: Sequence[Sample]) -> list[Verdict]:
        """What function number `function` says about each of these samples. Never raises for it."""
        return await together(*(self._verdict(function, sample) for sample in samples))

    async def _verdict(self, function: int, sample: Sample) -> Verdict:
        async with self._places:
            try:
                async with asyncio.timeout(self._deadline + GRACE):
                    return await self._on_a_thread(self._functions[function], sample)
            except TimeoutError:
                return Verdict(reason=f"it hung: no answer within {self._deadline:g} s; its thread goes on")

    async def _on_a_thread(self, function: Function, sample: Sample) -> Verdict:
        """A daemon thread: one that hangs must not keep the process from ending."""
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Verdict] = loop.create_future()

        def answer(verdict: Verdict) -> None:
            if not answered.done():
                answered.set_result(verdict)

        def work() -> None:
            (verdict,) = asyncio.run(attempt(function, [with_columns(sample)], False, self._deadline))
            with suppress(RuntimeError):  # The loop is closed: nobody waits any more.
                loop.call_soon_threadsafe(answer, verdict)

        threading.Thread(target=work, name=f"reward {name_of(function)}", daemon=True).start()
        return await answered


def named(functions: Sequence[Function]) -> list[tuple[str, Function]]:
    """With a name each: of two lambdas the second is `lambda_2`, or they would share a term."""
    names: list[str] = []
    for function in functions:
        name = base = name_of(function)
        number = 1
        while name in names:
            number += 1
            name = f"{base}_{number}"
        names.append(name)
    return list(zip(names, functions, strict=True))
