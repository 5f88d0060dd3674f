"""Runs reward functions that only the caller's process has, of a notebook or script, and lambdas, on threads of that
process. A thread cannot be killed: a function that hangs is reported at its deadline and keeps its thread, of which
there are at most MOST_HUNG."""

import asyncio
import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from asyncrl.children.printed_output import PrintedFile, ThreadOutputs, printing_to
from asyncrl.concurrency import gather
from asyncrl.config.user_code import name_of
from asyncrl.rewards.execution.child_pool import CallSlots
from asyncrl.rewards.execution.function_call import attempt
from asyncrl.rewards.functions import FunctionSpec
from asyncrl.rewards.sample import Function, FunctionResult, Sample, with_columns

GRACE = 0.1
"""Seconds after its deadline in which a coroutine function can end by itself and report where it was."""
THREADS = 4
"""Calls at one time. They share the interpreter with the controller: more would only delay it."""
MOST_HUNG = 64
"""Calls that were given up and still run, each in a thread with a stack of its own. With as many, none is begun."""


class InProcessPool:
    """Has the methods of `ChildPool`, with threads instead of children. named: (name of the term, function). printed:
    file of what the functions print. finished: samples scored so far."""

    def __init__(self, named: Sequence[tuple[str, Function]], deadline: float, printed: Path) -> None:
        self._functions = [function for _, function in named]
        self._deadline = deadline
        self.specs = tuple(FunctionSpec(name, name) for name, _ in named)
        self._slots = CallSlots(THREADS)
        self._file = PrintedFile(printed)
        self._outputs = ThreadOutputs()
        self._hung: list[threading.Thread] = []
        self.finished = 0

    @property
    def queued(self) -> int:
        """Calls that wait for their turn."""
        return self._slots.waiting

    async def start(self) -> None:
        """Begins to keep what the functions print."""
        self._outputs.open()

    async def stop(self) -> None:
        """Prints as before; calls that still run end with their threads."""
        self._outputs.close()

    async def run(self, function: int, samples: Sequence[Sample]) -> list[FunctionResult]:
        """Returns the result of function number `function` for each sample; errors of the function are results too."""
        return list(await gather(*(self._result(function, sample) for sample in samples)))

    async def _result(self, function: int, sample: Sample) -> FunctionResult:
        async with self._slots:
            self._hung = [thread for thread in self._hung if thread.is_alive()]
            if len(self._hung) >= MOST_HUNG:
                self.finished += 1
                return FunctionResult(
                    reason=f"it was not called: {MOST_HUNG} earlier calls hang in threads of this process"
                )
            thread, answered = self._begin(self._functions[function], sample)
            try:
                async with asyncio.timeout(self._deadline + GRACE):
                    return await asyncio.wrap_future(answered)
            except TimeoutError:
                return FunctionResult(reason=f"it hung: no answer within {self._deadline:g} s; its thread goes on")
            finally:
                self.finished += 1
                if not answered.done():
                    self._hung.append(thread)

    def _begin(self, function: Function, sample: Sample) -> tuple[threading.Thread, Future[FunctionResult]]:
        """Begins a call on a daemon thread, so that one that hangs does not keep the process from ending."""
        answered = Future[FunctionResult]()
        answered.set_running_or_notify_cancel()  # A caller that gives up does not cancel it.

        def work() -> None:
            with printing_to(self._file):
                (result,) = asyncio.run(attempt(function, [with_columns(sample)], False, self._deadline))
            answered.set_result(result)

        thread = threading.Thread(target=work, name=f"reward {name_of(function)}", daemon=True)
        thread.start()
        return thread, answered


def named(functions: Sequence[Function]) -> list[tuple[str, Function]]:
    """Gives each function its own name; a second lambda is called `lambda_2`."""
    found: dict[str, Function] = {}
    for function in functions:
        name = name_of(function)
        names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
        found[next(each for each in names if each not in found)] = function
    return list(found.items())
