"""Runs reward functions of the user in contained children, and those of asyncrl in children beside them, which may
start sandboxes of their own."""

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from asyncrl.children.containment import Containment
from asyncrl.rewards.execution.child_pool import ChildPool
from asyncrl.rewards.functions import FunctionSpec
from asyncrl.rewards.sample import FunctionResult, Sample

MakePool = Callable[[Sequence[FunctionSpec], Containment | None], ChildPool]


class SplitPool:
    """Has the methods of `ChildPool`, with one of them for each kind of function that there is. containment: of the
    user's functions; None: nothing contains them."""

    def __init__(self, specs: Sequence[FunctionSpec], containment: Containment | None, make: MakePool) -> None:
        self.specs = tuple(specs)
        contained = [containment if spec.is_users else None for spec in self.specs]
        self._pools: list[ChildPool] = []
        self._places: dict[int, tuple[ChildPool, int]] = {}
        for kind in dict.fromkeys(contained):
            numbers = [number for number, each in enumerate(contained) if each is kind]
            pool = make([self.specs[number] for number in numbers], kind)
            self._pools.append(pool)
            self._places |= {number: (pool, place) for place, number in enumerate(numbers)}

    @property
    def finished(self) -> int:
        """Samples scored so far, by all functions."""
        return sum(pool.finished for pool in self._pools)

    @property
    def queued(self) -> int:
        """Calls that wait for their turn."""
        return sum(pool.queued for pool in self._pools)

    async def start(self) -> None:
        """Starts a child of each kind; raises as `ChildPool.start` does."""
        async with AsyncExitStack() as unless_started:
            for pool in self._pools:
                await pool.start()
                unless_started.push_async_callback(pool.stop)
            unless_started.pop_all()

    async def stop(self) -> None:
        """Kills all children; calls that still run end with a result that says so."""
        for pool in self._pools:
            await pool.stop()

    async def run(self, function: int, samples: Sequence[Sample]) -> list[FunctionResult]:
        """Returns the result of function number `function` for each sample; errors of the function are results too."""
        pool, place = self._places[function]
        return await pool.run(place, samples)
