"""Calls the chat completions of a server that speaks OpenAI's HTTP API, and tries again what may pass.

call ── place in flight, time of the rate ──> POST ──> 200: the score in the reply
  ^                                             ├──> busy, failed, no answer, no score in it: a pause, and again
  └─────────────────────────────────────────────┘    refused: the end
"""

import asyncio
import json
import random
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from time import monotonic
from typing import Any

from asyncrl.errors import RewardError
from asyncrl.rewards.judge_calls.call_limits import CallLimits, Clock, Sleep

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before the second try, which double with each further one, and the most that they become."""
LARGEST_REPLY = 2**20
"""Bytes of a reply: far more than a judge writes."""
EXCERPT = 200
"""Characters of a reply that an error quotes."""
BUSY = (408, 425, 429)
"""Statuses below 500 that another try may not meet."""


class FailedTry(Exception):
    """Reports one failed call. again: another try may succeed. pause: seconds that the server asks to wait."""

    def __init__(self, why: str, *, again: bool = True, pause: float = 0.0) -> None:
        super().__init__(why)
        self.again = again
        self.pause = pause


def jittered(seconds: float) -> float:
    """Returns half to all of the seconds, at random, so that calls that failed together do not come back together."""
    return seconds * random.uniform(0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Timing:
    """The clock, the sleep and the jitter of calls, which tests replace."""

    clock: Clock = monotonic
    sleep: Sleep = asyncio.sleep
    jitter: Callable[[float], float] = jittered


@dataclass(eq=False, slots=True)
class ChatEndpoint:
    """Asks one server. url: of its chat completions. key: sent as a bearer token, "" for none. tries: calls for one
    question. seconds: for one call. deadline: seconds for all tries, waiting included. varies: the replies to one
    question may differ, so that another try may bring the score that one lacks."""

    url: str
    key: str
    limits: CallLimits
    tries: int
    seconds: float
    deadline: float
    timing: Timing = field(default_factory=Timing)
    varies: bool = True
    _client: Any = None

    async def ask(self, body: bytes, read: Callable[[str], float]) -> float:
        """Returns what `read` makes of the reply; it raises ValueError for a reply that is none. Raises RewardError
        with the last failure."""
        ends = self.timing.clock() + self.deadline
        last = FailedTry("it waited for its turn, which in_flight and per_second give, or for the first answer")
        try:
            async with asyncio.timeout(self.deadline):
                for number in range(1, self.tries + 1):
                    try:
                        return await self._answer(body, read)
                    except FailedTry as failure:
                        last = failure
                    if not last.again:
                        raise RewardError(f"the judge {self.url} cannot be used: {last}")
                    if number < self.tries:
                        await self._wait(number, last, ends)
        except TimeoutError:
            raise RewardError(
                f"the judge {self.url} gave no score within {self.deadline:g} s: {last}; reward.deadline allows more"
            ) from None
        raise RewardError(f"the judge {self.url} gave no score in {self.tries} tries; the last one: {last}")

    async def _answer(self, body: bytes, read: Callable[[str], float]) -> float:
        reply = await self._reply(body)
        try:
            return read(reply)
        except ValueError as mistake:
            if not self.varies:
                raise RewardError(
                    f"the judge {self.url} gave no score, and at temperature 0 it would not with another try: {mistake}"
                ) from None
            raise FailedTry(str(mistake)) from None

    async def _wait(self, number: int, failure: FailedTry, ends: float) -> None:
        """Sleeps before the next try: as long as the server asks for, and longer with each try."""
        asked = failure.pause
        if self.timing.clock() + asked > ends:
            raise RewardError(
                f"the judge {self.url} asks for a pause of {asked:g} s, and less time is left: {failure}; "
                "reward.deadline allows more"
            )
        await self.timing.sleep(asked + self.timing.jitter(min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (number - 1))))

    async def _reply(self, body: bytes) -> str:
        """Makes one call; raises FailedTry."""
        import httpx2  # Here, so that a config is checked without it.

        async with self.limits.call():
            try:
                async with asyncio.timeout(self.seconds) as scope:
                    status, headers, data = await self._post(httpx2, body)
            except TimeoutError:
                if not scope.expired():
                    raise
                raise FailedTry(f"no answer within {self.seconds:g} s") from None
            except (httpx2.HTTPError, httpx2.InvalidURL) as error:
                raise FailedTry(f"the call failed: {type(error).__name__}: {error}") from None
            pause = _seconds_asked(headers.get("retry-after")) if status != 200 else 0.0
            if pause <= self.deadline:
                self.limits.pause(pause)  # Before the next call takes this place.
        if status != 200:
            shown = data.decode(errors="replace")
            shown = shown.replace(self.key, "***") if self.key else shown
            raise FailedTry(f"HTTP {status}: {shown[:EXCERPT]!r}", again=status in BUSY or status >= 500, pause=pause)
        return _content(data)

    async def _post(self, httpx2: Any, body: bytes) -> tuple[int, Any, bytes]:
        if self._client is None:
            self._client = httpx2.AsyncClient(timeout=None, limits=httpx2.Limits(max_connections=None))
        # A compressed reply could be far larger than what is received of it.
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        received = bytearray()
        async with self._client.stream("POST", self.url, content=body, headers=headers) as response:
            if "content-encoding" in response.headers:
                raise FailedTry("the reply is compressed, which the call did not allow", again=False)
            async with aclosing(response.aiter_bytes()) as parts:
                async for part in parts:
                    received += part
                    if len(received) > LARGEST_REPLY:
                        raise FailedTry(f"the reply has more than {LARGEST_REPLY} bytes", again=False)
        return response.status_code, response.headers, bytes(received)


def _seconds_asked(header: str | None) -> float:
    """Returns the seconds of a header Retry-After, a number or a date; 0 where there is none that can be read."""
    if header is None:
        return 0.0
    if (number := header.strip()).isdecimal():
        return float(number)
    try:
        return max(0.0, (parsedate_to_datetime(header) - datetime.now(UTC)).total_seconds())
    except (TypeError, ValueError):
        return 0.0


def _content(data: bytes) -> str:
    try:
        content = json.loads(data)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        content = None
    if not isinstance(content, str):
        raise FailedTry(f"the reply is no chat completion: {data[:EXCERPT].decode(errors='replace')!r}")
    return content
