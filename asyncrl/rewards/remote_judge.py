"""The template `judge`: asks a language model behind a URL for the score of an answer."""

import asyncio
import hashlib
import json
import math
import os
import random
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

from asyncrl.errors import ConfigError, RewardError
from asyncrl.protocols.answer_text import json_objects, split_thoughts
from asyncrl.rewards.sample import RowError, Sample

# Limits the calls to a server: those at one time, those in a second, and pauses that the server asks for.


Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]


class CallLimits:
    """Lets calls begin one after the other. in_flight: most calls at one time. per_second: calls that begin in a
    second, evenly spaced; 0: any number. clock, sleep: of `asyncio`, unless a test has its own."""

    def __init__(self, in_flight: int, per_second: float, clock: Clock, sleep: Sleep) -> None:
        self._running = asyncio.Semaphore(in_flight)
        self._spacing = 1.0 / per_second if per_second else 0.0
        self._clock = clock
        self._sleep = sleep
        self._next = clock()
        self._paused_until = clock()

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Waits for a free place and for the time of the call, and holds the place during the block."""
        async with self._running:
            begins = max(self._clock(), self._next)
            self._next = begins + self._spacing
            await self._sleep_until(begins)
            while self._clock() < self._paused_until:
                await self._sleep_until(self._paused_until)
            yield

    def pause(self, seconds: float) -> None:
        """Lets no call begin for so many seconds: a server that is too busy for one call is so for all."""
        self._paused_until = max(self._paused_until, self._clock() + seconds)

    async def _sleep_until(self, time: float) -> None:
        if (seconds := time - self._clock()) > 0:
            await self._sleep(seconds)


# Keeps scores by what was asked, so that the same question is not paid for twice.


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


# Reads the score in the reply of a judge.


SCORE = r"(?i)score(?: is| of)?\W{0,8}?(-?\d+(?:\.\d+)?)(?![\d.]* *(?:[-\u2013]|to) *\d|[\d.]*,\d)"
"""Finds the score where neither a pattern nor a field is named. The bounds in `Score (0-10)` are none."""
BEST = re.compile(r" *(?:/|out of) *(\d+(?:\.\d+)?)")
"""Stands behind a score that says what the best one is."""
EXCERPT = 200
"""Characters of a reply that an error quotes."""


class ScoreReader:
    """Finds a score in a reply. pattern: a regular expression, whose first group in the last match is the score.
    field: of a JSON object in the reply. lowest, highest: bounds of the score, which is returned as 0 to 1."""

    def __init__(self, pattern: str, field: str, lowest: float, highest: float) -> None:
        if pattern and field:
            raise ConfigError("pattern and json_field are two ways to find the score; write one of them")
        if not lowest < highest:
            raise ConfigError(f"lowest ({lowest:g}) must be under highest ({highest:g})")
        try:
            self._pattern = re.compile(pattern or SCORE, re.DOTALL)
        except re.error as error:
            raise ConfigError(f"pattern {pattern!r} is no regular expression: {error}") from None
        self._field = field
        self._lowest = lowest
        self._highest = highest

    def score(self, reply: str) -> float:
        """Returns the score behind the thoughts of a reply, 0 to 1; raises ValueError that says what is wrong."""
        shown = split_thoughts(reply)[1]
        found = self._in_field(shown) if self._field else self._by_pattern(shown)
        try:
            if isinstance(found, bool) or "_" in str(found):  # Python converts both.
                raise ValueError
            number = float(found)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"the score is no number but {found!r:.{EXCERPT}}") from None
        if not (math.isfinite(number) and self._lowest <= number <= self._highest):
            raise ValueError(f"the score {number:g} does not lie between {self._lowest:g} and {self._highest:g}")
        return (number - self._lowest) / (self._highest - self._lowest)

    def _by_pattern(self, reply: str) -> str:
        matches = list(self._pattern.finditer(reply))
        if not matches:
            raise ValueError(self._without_score(reply))
        if self._pattern.pattern == SCORE:  # `Score: 7` is the shown, although prose about scores may follow.
            matches = [match for match in matches if re.search("[:=]", match[0])] or matches
            best = BEST.match(reply, matches[-1].end())
            if best is not None and float(best[1]) != self._highest:
                raise ValueError(
                    f"the score is one of {best[1]}, and highest is {self._highest:g}: {reply!r:.{EXCERPT}}"
                )
        return str(matches[-1][min(1, self._pattern.groups)])

    def _without_score(self, reply: str) -> str:
        shown = f"{reply!r:.{EXCERPT}}"
        if self._pattern.pattern != SCORE:
            return f"the pattern {self._pattern.pattern} finds no score in the reply: {shown}"
        return (
            f"the reply has no score such as 'Score: 7': {shown}; let the rubric ask for one, or name its place in the "
            "reply with pattern or json_field"
        )

    def _in_field(self, reply: str) -> Any:
        found = [each[self._field] for each, _ in json_objects(reply) if self._field in each]
        if not found:
            raise ValueError(f"the reply has no JSON object with {self._field}: {reply!r:.{EXCERPT}}")
        return found[-1]


# Calls the chat completions of a server that speaks OpenAI's HTTP API, and tries again what may pass.
#
# call ── place in flight, time of the rate ──> POST ──> 200: the score in the reply
#   ^                                             ├──> busy, failed, no answer, no score in it: a pause, and again
#   └─────────────────────────────────────────────┘    refused: the end


FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0
"""Seconds before the second try, which double with each further one, and the most that they become."""
LARGEST_REPLY = 2**20
"""Bytes of a reply: far more than a judge writes."""
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


PLACE = re.compile(r"\{(\w+)\}")
FILLED = {"prompt", "answer", "conversation"}
"""Places of a rubric that are no columns."""
FLEET = "ASYNCRL_"
"""Beginning of variables that children of a worker do not get."""
COMPLETIONS = "/chat/completions"


@dataclass(eq=False)
class RemoteJudge:
    """Asks for a score of 0 to 1. url: base of an OpenAI-compatible API, as http://localhost:8000/v1. model: its name
    there. rubric: the question, in which {prompt}, {answer}, {conversation} and {COLUMN} of the row are filled in.
    pattern or json_field: the place of the score in the reply, the first group of a regular expression in its last
    match, or a field of the last JSON object with it; default: after the word `score`. Thoughts of the judge do not
    count. lowest, highest: bounds of the scores. key_variable: the environment variable with the API key. body:
    further keys of the request.

    per_second, in_flight: limits of the calls of one reward worker. tries: calls for one answer; a reply without a
    score is asked for again where `body` has another temperature than 0. seconds: for one call. cache: scores that are
    kept for answers that come again. deadline: seconds for all tries, set from reward.deadline.
    """

    url: str
    model: str
    rubric: str = ""
    pattern: str = ""
    json_field: str = ""
    lowest: float = 0.0
    highest: float = 10.0
    key_variable: str = ""
    body: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0})
    per_second: float = 0.0
    in_flight: int = 32
    tries: int = 5
    seconds: float = 30.0
    cache: int = 4096
    deadline: float = 9.0
    timing: Timing = field(init=False, default_factory=Timing, repr=False)

    def __post_init__(self) -> None:
        self._reader = ScoreReader(self.pattern, self.json_field, self.lowest, self.highest)
        self._key = _key(self.key_variable)
        self._loop: asyncio.AbstractEventLoop | None = None
        _check_url(self.url)
        for name in ("in_flight", "tries", "seconds", "deadline"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be over 0")
        for name in ("per_second", "cache"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must not be under 0")
        if self.per_second and self.per_second * self.deadline < 1:
            raise ConfigError(
                f"per_second = {self.per_second:g} is one call in {1 / self.per_second:g} s, and reward.deadline "
                f"leaves {self.deadline:g} s for a score; raise it"
            )

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raises RowError for a column of the rubric that a row lacks."""
        for column in {*PLACE.findall(self.rubric)} - FILLED - {*row}:
            raise RowError.missing(column, row, f"the rubric has {{{column}}}, and ")

    @property
    def overlapping(self) -> int:
        """Returns how many samples are asked for at a time. Others wait outside, where no deadline runs: the last of
        these waits no more than half of its deadline for its turn."""
        in_time = int(self.per_second * self.deadline / 2) if self.per_second else self.in_flight
        return max(1, min(self.in_flight, in_time))

    async def __call__(self, sample: Sample) -> float:
        """Returns the score of a sample; raises RewardError."""
        self._open()
        asked = question(self.rubric or standard_rubric(self.lowest, self.highest), sample)
        messages = [{"role": "user", "content": asked}]
        body = json.dumps({**self.body, "model": self.model, "messages": messages}).encode()

        async def ask() -> float:
            return await self._endpoint.ask(body, self._reader.score)

        return await self._cache.score(hashlib.sha256(body).digest(), ask)

    def _open(self) -> None:
        """Begins with new connections and limits when the event loop is another one."""
        if self._loop is (running := asyncio.get_running_loop()):
            return
        self._loop = running
        self._cache = ScoreCache(self.cache)
        limits = CallLimits(self.in_flight, self.per_second, self.timing.clock, self.timing.sleep)
        url = self.url.rstrip("/")
        url = url if url.endswith(COMPLETIONS) else url + COMPLETIONS
        varies = self.body.get("temperature") != 0
        self._endpoint = ChatEndpoint(
            url, self._key, limits, self.tries, self.seconds, self.deadline, self.timing, varies=varies
        )


def standard_rubric(lowest: float, highest: float) -> str:
    """Returns the question that is asked where the config has none."""
    return (
        f"Rate how well the answer does what is asked, from {lowest:g} (useless) to {highest:g} (perfect).\n\n"
        "Asked:\n{prompt}\n\nAnswer:\n{answer}\n\nEnd with a line that has only `Score: ` and the number."
    )


def question(rubric: str, sample: Sample) -> str:
    """Returns the rubric with {prompt}, {answer}, {conversation} and {COLUMN} of the row filled in, once: braces in
    what is filled in stay as they are. Raises RewardError for a column that the row lacks."""

    def filled(place: re.Match[str]) -> str:
        match place[1]:
            case "prompt":
                return _as_text(sample.prompt)
            case "answer":
                return sample.answer
            case "conversation":
                return "\n".join([_as_text(sample.prompt), _as_text(sample.turns)])
            case column if column in sample.row:
                return str(sample.row[column])
            case column:
                raise RowError.missing(column, sample.row, f"the rubric has {{{column}}}, and ")

    return PLACE.sub(filled, rubric)


def _as_text(messages: str | Sequence[dict[str, Any]]) -> str:
    if isinstance(messages, str):
        return messages
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _key(variable: str) -> str:
    """Returns the API key; raises ConfigError, which never has the key in it."""
    if not variable:
        return ""
    if variable.startswith(FLEET):
        raise ConfigError(f"key_variable is {variable}: reward functions get no variables that begin with {FLEET}")
    if not (key := os.environ.get(variable, "").strip()):
        raise ConfigError(f"the environment variable {variable}, which key_variable names, is not set")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"the environment variable {variable} holds characters that no API key has")
    return key


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise ConfigError(f"url is {url!r}; write the base of the API, as http://localhost:8000/v1")
    if parts.username or parts.password:
        raise ConfigError("url has a password in it; put the key into a variable, and its name into key_variable")
