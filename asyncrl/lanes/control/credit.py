"""Credit: how many further calls a worker takes on one connection. Calls beyond it wait, first come, first served."""

import asyncio
from collections import OrderedDict


class Credit:
    """Starts empty. What is given back goes to the call that has waited longest, and wakes no other one, so that the
    cost of a call does not grow with the calls that wait."""

    def __init__(self) -> None:
        self._free = 0
        self._waiting: OrderedDict[asyncio.Future[None], None] = OrderedDict()  # Bounded by the tasks that call.
        self._ended = False

    async def take(self) -> None:
        """Takes credit for one call, waiting for it; returns at once, without any, after `end`."""
        if self._ended:
            return
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = None
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(1)  # It was given to this call in the moment in which the call was cancelled.
            raise
        finally:
            self._waiting.pop(turn, None)

    def give(self, calls: int) -> None:
        """Adds credit for so many calls."""
        self._free += calls
        while self._free and self._waiting:
            turn, _ = self._waiting.popitem(last=False)
            if not turn.done():
                self._free -= 1
                turn.set_result(None)

    def end(self) -> None:
        """Lets all calls go on, which find that the connection is lost."""
        self._ended = True
        while self._waiting:
            turn, _ = self._waiting.popitem(last=False)
            if not turn.done():
                turn.set_result(None)
