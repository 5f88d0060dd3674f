"""Keeps scores by what was asked, so that the same question is not paid for twice."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from asyncrl.errors import RewardError

Ask = Callable[[], Awaitable[float]]


class ScoreCache:
    """Holds the newest `size` scores by a digest of the request; 0: none. Equal requests at one time are one call.

    It lies in memory: a score takes some 150 bytes, and a child that was replaced asks again."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._scores: OrderedDict[bytes, float] = OrderedDict()
        self._asking: dict[bytes, asyncio.Future[float]] = {}

    async def score(self, digest: bytes, ask: Ask) -> float:
        """Returns the score that is known, or that another call waits for, or else that of `ask`; raises its error."""
        if not self._size:
            return await ask()
        while digest not in self._scores:
            if (other := self._asking.get(digest)) is None:
                return await self._ask(digest, ask)
            await asyncio.wait({other})
            if not other.cancelled():  # If it was, its caller gave up, and this one asks itself.
                return other.result()
        self._scores.move_to_end(digest)
        return self._scores[digest]

    async def _ask(self, digest: bytes, ask: Ask) -> float:
        asking: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._asking[digest] = asking
        try:
            score = await ask()
        except RewardError as error:
            asking.set_exception(error)
            asking.exception()  # Retrieved: perhaps nobody else waits.
            raise
        else:
            asking.set_result(score)
        finally:
            del self._asking[digest]
            asking.cancel()  # Only where it has no result: the call was cancelled.
        self._scores[digest] = score
        if len(self._scores) > self._size:
            self._scores.popitem(last=False)
        return score
