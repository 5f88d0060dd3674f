"""Runs work once for each key, however many ask for it at a time, and remembers the newest results."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from functools import partial
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
MOST = 4096
"""Results that are remembered: those of some steps, in which a policy says the same again and again."""


class SharedResults(Generic[K, V]):
    """Work goes on when those that wait for it are cancelled, so it has to end by itself. is_lasting: whether a result
    is remembered."""

    def __init__(self, is_lasting: Callable[[V], bool] = lambda result: True) -> None:
        self._is_lasting = is_lasting
        self._known: OrderedDict[K, V] = OrderedDict()
        self._running: dict[K, asyncio.Task[V]] = {}

    async def of(self, key: K, work: Callable[[], Coroutine[Any, Any, V]]) -> V:
        """Returns the result of the key: the remembered one, that of running work, or that of new work."""
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        if (task := self._running.get(key)) is None:
            task = self._running[key] = asyncio.create_task(work())
            task.add_done_callback(partial(self._finish, key))
        return await asyncio.shield(task)

    def _finish(self, key: K, task: "asyncio.Task[V]") -> None:
        del self._running[key]
        if task.cancelled() or task.exception() is not None or not self._is_lasting(result := task.result()):
            return
        self._known[key] = result
        if len(self._known) > MOST:
            self._known.popitem(last=False)
