"""The template `judge`: asks a language model behind a URL for the score of an answer."""

import asyncio
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from asyncrl.errors import ConfigError
from asyncrl.rewards.judge_calls.call_limits import CallLimits
from asyncrl.rewards.judge_calls.chat_endpoint import ChatEndpoint, Timing
from asyncrl.rewards.judge_calls.score_cache import ScoreCache
from asyncrl.rewards.judge_calls.score_reader import ScoreReader
from asyncrl.rewards.sample import RowError, Sample

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
