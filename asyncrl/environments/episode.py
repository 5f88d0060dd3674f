"""One episode inside a child: the environment of a user, called turn by turn, and the check of what it answers."""

import asyncio
import inspect
import json
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from types import coroutine
from typing import Any

import msgpack

from asyncrl.children.child_messages import trace, where_to_write
from asyncrl.environments.loading import CLOSE, OPENED, SAMPLED, WAITS, MakeEnvironment, takes
from asyncrl.environments.observation import Message, Observation
from asyncrl.environments.transcript import (
    CONTEXT,
    LARGEST_INFO,
    POLICY,
    SampledAnswer,
    context_message,
    cut_messages,
    messages_of,
)
from asyncrl.errors import EnvironmentFailed
from asyncrl.protocols.batch import LARGEST_REWARD

# Deadlines of the user's calls in a child, with one timer for all of them.


GRACE = 1.0
"""Seconds in which a late coroutine may end after its cancellation."""


@dataclass(eq=False, slots=True)
class UserCall:
    """A call of the user's code. late: it was cancelled, because it took too long. given_up: it went on all the same,
    and nobody waits for it."""

    late: bool = False
    given_up: bool = False
    task: "asyncio.Task[Any] | None" = None


@dataclass(eq=False, slots=True)
class CallDeadlines:
    """Cancels calls that wait for longer than `seconds`, and does so again when one has not ended GRACE seconds later.
    Each may take as long as the others, so that they are due in the order in which they began."""

    seconds: float
    _due: dict[UserCall, float] = field(default_factory=dict)
    _timer: asyncio.TimerHandle | None = None

    def begin(self, call: UserCall) -> None:
        """Watches a call from its first wait on. It runs in the current task, which is cancelled."""
        loop = asyncio.get_running_loop()
        call.task = asyncio.current_task()
        self._due[call] = loop.time() + self.seconds
        if self._timer is None:
            self._timer = loop.call_at(self._due[call], self._cancel_late)

    def end(self, call: UserCall) -> None:
        """Forgets a call that has ended, or never waited."""
        self._due.pop(call, None)
        call.task = None

    def _cancel_late(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._timer = None
        for call, due in list(self._due.items()):
            if due > now:
                self._timer = loop.call_at(due, self._cancel_late)
                return
            del self._due[call]
            call.late = True
            _cancel(call)
            loop.call_later(GRACE, self._give_up, call)

    def _give_up(self, call: UserCall) -> None:
        call.given_up = True
        _cancel(call)


def _cancel(call: UserCall) -> None:
    if call.task is not None:
        call.task.cancel()


LARGEST_OPENING = 2**22
"""Bytes of an opening: more than any model reads."""
MESSAGE_KEYS = ("role", "content")

Answer = dict[str, Any]
"""Plain values of an observation, or `error` and `traceback`; and the seconds that it took."""
Mark = Callable[[], None]


class NoObservation(Exception):
    """Reports why a call of the user's code gave no Observation: what it returned instead, or that it hung."""


class Episode:
    """Calls one environment. turns: answers of the policy that it has taken. last: its newest answer. taken: held by
    the call that plays or closes it.

    most: bytes of an answer, which is cut off there. deadlines: of all calls of a child. `mark_with` comes before any
    call.
    """

    def __init__(self, make: MakeEnvironment, most: int, deadlines: CallDeadlines) -> None:
        self._make = make
        self._most = most
        self._deadlines = deadlines
        self._environment: Any = None
        self.turns = 0
        self.last: Answer = {}
        self.taken = asyncio.Lock()

    def mark_with(self, begin: Mark, end: Mark) -> None:
        """Takes what is called around each stretch of the user's code that holds the event loop, so that the worker
        knows whose code a child was in when it hung or died."""
        self._begin = begin
        self._end = end

    async def reset(self, row: dict[str, Any], seed: int) -> Answer:
        self.last = await self._answer("reset", row, seed)
        return self.last

    async def step(self, message: str, sampled: dict[str, Any] | None = None, opened: bool = False) -> Answer:
        """Takes what the policy said. sampled: the fields of a SampledAnswer, for environments that take one. opened:
        whether the message begins inside thoughts, for those that ask."""
        further = {SAMPLED: SampledAnswer(**sampled) if sampled else None, OPENED: opened}
        taken = {name: value for name, value in further.items() if takes(self._environment, name)}
        self.last = await self._answer("step", message, **taken)
        self.turns += 1
        return self.last

    async def close(self) -> Answer:
        """Calls the method `close` of the environment, if it has one, so that it frees what it holds."""
        if not callable(getattr(type(self._environment), CLOSE, None)):
            return {}
        return await self._checked(CLOSE, lambda _: {})

    async def _answer(self, method: str, *arguments: Any, **further: Any) -> Answer:
        def check(returned: Any) -> Answer:
            if isinstance(returned, Observation) and returned.follows is not None:
                self._check_follows(method, returned.follows)
            return plain(returned, method, self._most)

        return await self._checked(method, check, *arguments, **further)

    def _check_follows(self, method: str, follows: Any) -> None:
        turns = self.turns + (method == "step")
        if method == "reset" or not isinstance(follows, int) or not 0 <= follows <= turns:
            raise NoObservation(
                f"`{method}` gave follows = {_shown(follows)}, which is one of the {turns} turns so far, from 1, or 0"
            )

    async def _checked(self, method: str, check: Callable[[Any], Answer], *arguments: Any, **further: Any) -> Answer:
        """Returns the checked answer; turns errors of the user's code into answers."""
        began = monotonic()
        try:
            answer = check(await self._in_time(method, *arguments, **further))
        except NoObservation as mistake:
            answer = {"error": str(mistake), "traceback": ""}
        except EnvironmentFailed as failed:  # Said by an adapter of ours, whose lines tell nobody anything.
            answer = {"error": f"`{method}` failed: {failed}", "traceback": ""}
        except Exception as error:  # the user's code: its errors are answers of its episode
            raised = f"`{method}` raised {type(error).__name__}: {error}{where_to_write(error)}"
            answer = {"error": raised, "traceback": trace(error)}
        return answer | {"seconds": monotonic() - began}

    async def _in_time(self, method: str, *arguments: Any, **further: Any) -> Any:
        """Returns what the user's code returns, and raises what it raises. A call that is late is cancelled, and given
        up if it goes on all the same."""
        call = UserCall()
        try:
            result = self._marked(partial(self._enter, **further), method, *arguments)
            if inspect.iscoroutine(result):
                result = await self._resumed(result, call)
        except (Exception, asyncio.CancelledError) as error:  # the user's code; passed on where it is not late
            if isinstance(error, asyncio.CancelledError) and not call.late:
                raise NoObservation(f"`{method}` raised CancelledError, of a task of its own") from None
            if not call.late:
                raise
        if call.late:
            waits = getattr(self._environment, WAITS, "")
            seconds = self._deadlines.seconds
            raise NoObservation(f"`{method}` hung: no answer within {seconds:g} s" + (f"; {waits}" if waits else ""))
        return result

    def _enter(self, method: str, *arguments: Any, **further: Any) -> Any:
        if method == "reset":
            self._environment = self._make()
        return getattr(self._environment, method)(*arguments, **further)

    @coroutine
    def _resumed(self, user: Coroutine[Any, Any, Any], call: UserCall) -> Generator[Any, Any, Any]:
        """Awaits a coroutine of the user's, marking each stretch between two of its waits. One that never waits needs
        no deadline, for nothing could interrupt it."""
        resume: Callable[..., Any] = user.send
        value: Any = None
        try:
            while True:
                try:
                    waits_for = self._marked(resume, value)
                except StopIteration as returned:
                    return returned.value
                if call.task is None:
                    self._deadlines.begin(call)
                try:
                    resume = user.send
                    value = yield waits_for
                except BaseException as thrown:  # passed on: the user's code decides what a cancellation does
                    resume = user.throw
                    value = thrown
                if call.given_up:
                    with suppress(Exception):  # the user's code, whose last word nobody waits for
                        self._marked(user.close)
                    raise asyncio.CancelledError
        finally:
            self._deadlines.end(call)

    def _marked(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function. The mark stays where that ends the process."""
        self._begin()
        try:
            result = function(*arguments)
        except (Exception, asyncio.CancelledError):  # marked on; both pass through
            self._end()
            raise
        self._end()
        return result


def plain(returned: Any, method: str, most: int) -> Answer:
    """Returns the plain values of an observation: the opening as it is, an answer as messages of at most `most` bytes,
    none where the episode ends without a word. Raises NoObservation that says what is wrong with it."""
    if not isinstance(returned, Observation):
        raise NoObservation(
            f"`{method}` returned {_shown(returned)}, and has to return an Observation: "
            "write `return asyncrl.Observation(text)`"
        )
    if isinstance(returned.reward, str | bytes) or not hasattr(returned.reward, "__float__"):
        raise NoObservation(f"`{method}` gave a reward that is not a number but {_shown(returned.reward)}")
    if not abs(reward := float(returned.reward)) <= LARGEST_REWARD:
        raise NoObservation(
            f"`{method}` gave the reward {reward:g}: a reward is finite, and {LARGEST_REWARD:g} at most"
        )
    if not isinstance(returned.info, Mapping):
        raise NoObservation(f"the info of `{method}` is no dict but {_shown(returned.info)}")
    text = _checked_text(returned.text, method, begins=returned.follows is not None)
    answer = {
        "text": text if method == "reset" else _messages(returned, text, most),
        "info": dict(returned.info),
        "reward": reward,
        "done": bool(returned.done),
        "tools": [dict(tool) for tool in returned.tools],
    }
    try:
        size = len(msgpack.packb(answer))
        noted = 0
        if _has_more_than_texts(answer):
            json.dumps(answer, allow_nan=False)  # Transcripts are JSON.
            noted = len(json.dumps(answer["info"]).encode())
    except (TypeError, ValueError, OverflowError) as error:
        raise NoObservation(f"an observation of `{method}` holds what is no plain value: {error}") from None
    if size > LARGEST_OPENING + most:
        raise NoObservation(f"`{method}` returned an observation of {size} bytes")
    if noted > LARGEST_INFO:
        raise NoObservation(f"the info of `{method}` has {noted} bytes in JSON; at most {LARGEST_INFO} are kept")
    return answer


def _has_more_than_texts(answer: Answer) -> bool:
    """Returns whether an answer has values that were not checked with its text: fields beside role and content, info or
    tools. Most have none, and encoding those as JSON too would be a tenth of a small turn."""
    fields = 0 if isinstance(answer["text"], str) else max(map(len, answer["text"]), default=0)
    return fields > len(MESSAGE_KEYS) or bool(answer["info"]) or bool(answer["tools"])


def _messages(returned: Observation, text: str | list[Message], most: int) -> list[Message]:
    """Returns the messages of a step, cut off after `most` bytes; those that begin a context are whole, or refused."""
    if returned.done and not text:
        return []
    messages = messages_of(text)
    if returned.follows is None:
        return cut_messages(messages, most)
    if not messages:
        raise NoObservation("`step` began a context without a message")
    context = context_message(messages, returned.tools, returned.follows)
    if (size := len(json.dumps(context, ensure_ascii=False, default=str).encode("utf-8", "replace"))) > most:
        raise NoObservation(
            f"`step` began a context of {size} bytes, and is not cut off there: raise environment.max_bytes, {most} now"
        )
    return [context]


def _checked_text(text: Any, method: str, *, begins: bool) -> str | list[Message]:
    if isinstance(text, str):
        return text.encode("utf-8", "replace").decode()
    if not isinstance(text, list | tuple):
        raise NoObservation(f"the text of `{method}` is no string and no list of messages, but {_shown(text)}")
    for message in text:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(key), str) for key in MESSAGE_KEYS):
            raise NoObservation(
                f'a message of `{method}` is {_shown(message)}; write {{"role": "user", "content": "a text"}}'
            )
        if method == "step" and message["role"] == POLICY and not begins:
            raise NoObservation(f"a message of `step` has the role {POLICY}, which is the policy's own")
        if message["role"] == CONTEXT:
            raise NoObservation(f"a message of `{method}` has the role {CONTEXT}; write Observation(..., follows=0)")
    return [dict(message) for message in text]


def _shown(value: Any) -> str:
    return repr(value)[:80]
