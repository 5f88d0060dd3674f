"""The caller's side of a connection: calls and streams with deadlines, which all fail when the peer is lost."""

import asyncio
import re
import traceback
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple, Self

from asyncrl import errors
from asyncrl.concurrency import start_task, unwrap
from asyncrl.errors import AsyncrlError, DeadlineExceeded, LostRows, PeerLost, Refused, RemoteError, WireError
from asyncrl.lanes.control.message_codec import MessageSequence
from asyncrl.lanes.control.open_calls import Deadline, Deadlines, PendingReply, PendingStream
from asyncrl.lanes.control.wire import Caller, Frame
from asyncrl.protocols.messages import (
    Call,
    Cancel,
    Failure,
    Hello,
    Item,
    More,
    Ping,
    Progress,
    Rejected,
    Reply,
    Welcome,
)

# Errors as they cross a wire: a worker sends a `Failure`, and its caller raises the error that it describes.


TRACEBACK_CHARACTERS = 16_384
MESSAGE_CHARACTERS = 4_096


def failure_from(raised: BaseException, call: int, worker: Hello) -> Failure:
    """Returns the reply of `worker` to a call that raised this."""
    error = unwrap(raised)
    trace = "".join(traceback.format_exception(error))[-TRACEBACK_CHARACTERS:]
    return Failure(
        call=call,
        kind=type(error).__name__,
        message=_sendable(str(error)[:MESSAGE_CHARACTERS]),
        service=f"{worker.service}{_replica_of(worker)}",
        rank=worker.rank,
        traceback=_sendable(trace),
        lost=error.places if isinstance(error, LostRows) else (),
    )


def error_from(failure: Failure) -> AsyncrlError:
    """Returns the error to raise: the class of asyncrl.errors with that name, caused by a RemoteError, or that."""
    remote = RemoteError(failure.kind, failure.message, failure.service, failure.rank, failure.traceback)
    cls = getattr(errors, failure.kind, None)
    if not (isinstance(cls, type) and issubclass(cls, AsyncrlError)) or cls is RemoteError:
        return remote
    error: AsyncrlError = cls(f"{failure.service}[{failure.rank}]: {failure.message}")
    if isinstance(error, LostRows):
        error.places = failure.lost
    error.__cause__ = remote
    return error


def _replica_of(worker: Hello) -> str:
    """Returns the number of the replica in the name of an instance ("reward1.0-0-feedbeef"), "" where it has none."""
    named = re.match(rf"{re.escape(worker.service)}(\d+)\.{worker.rank}-", worker.instance)
    return named[1] if named else ""


def _sendable(text: str) -> str:
    """Returns the text without lone surrogates, which UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode("utf-8")


# Credit: how many further calls a worker takes on one connection. Calls beyond it wait, first come, first served.


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


HELLO_DEADLINE = 10.0
"""Seconds until a running worker welcomes a caller; the supervisor gives a starting worker more."""

LIVENESS = 3
"""Consecutive heartbeats that a remote peer may miss."""


class Silence(NamedTuple):
    """Heartbeats that a peer has not answered. since: loop time of the first of them."""

    since: float
    heartbeats: int


@dataclass(eq=False)
class Client:
    """A connection to one worker.

    `async with client:` says hello and listens until the block ends. `open` does so inside the caller's TaskGroup; call
    `close` before leaving that group.

    Attributes:
        hello: identity of the caller.
        peer: name of the worker in messages ("generation0[1]").
        instance: the only instance that may answer; None: any.
        queued: whether calls wait for earlier ones at the worker: then an answer to one extends the deadlines of those
            behind it.
        heartbeat: seconds between heartbeats, for peers on other hosts; None for local ones, whose death the kernel
            reports to the supervisor, which calls `fail`.
        lost: set once the connection is broken or closed, with the reason in `reason`.
        late_replies: answers that came for calls given up before.
        silence: heartbeats since the last message of the worker; None: there were none.
    """

    caller: Caller
    hello: Hello
    peer: str
    _: KW_ONLY
    instance: str | None = None
    queued: bool = True
    heartbeat: float | None = None
    lost: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    reason: str = field(default="", init=False)
    late_replies: int = field(default=0, init=False)
    silence: Silence | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._sequence = MessageSequence(self.caller.offer, self.caller.room, self.caller.address)
        self._pending: dict[int, PendingReply | PendingStream] = {}
        self._deadlines = Deadlines()
        self._abandoned: deque[int] = deque()
        self._calls = 0
        self._credit = Credit()
        self._welcome: PendingReply | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.__aexit__)
            await self.open(self._group)
            undo.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        await self._group.__aexit__(None, None, None)

    async def open(self, tasks: asyncio.TaskGroup, deadline: float = HELLO_DEADLINE) -> None:
        """Says hello. Raises Refused, PeerLost (also after `fail`), DeadlineExceeded after `deadline` seconds."""
        self._check()
        self._welcome = PendingReply()
        self._tasks.append(start_task(tasks, self._listen(), f"connection to {self.peer}"))
        with self._within(deadline, "hello", -1):
            await self._sequence.send(self.hello)
            await self._welcome.future
        if self.heartbeat is not None:
            heartbeats = self._send_heartbeats(self.heartbeat)
            self._tasks.append(start_task(tasks, heartbeats, f"heartbeat to {self.peer}"))

    def fail(self, reason: str) -> None:
        """Makes every outstanding call raise PeerLost now, and every later one at once."""
        if self.lost.is_set():
            return
        self.reason = f"{self.peer}: {reason}"
        self.lost.set()
        if self._welcome is not None:
            self._welcome.lose_peer(self.reason)
        for pending in self._pending.values():
            pending.lose_peer(self.reason)
        self._credit.end()

    def close(self) -> None:
        self.fail("the connection was closed")
        for task in self._tasks:
            task.cancel()
        self._deadlines.close()
        self.caller.close()

    def _check(self) -> None:
        if self.lost.is_set():
            raise PeerLost(self.reason)

    async def call(self, method: str, args: tuple[Any, ...], deadline: float, *, wants_answer: bool = True) -> Any:
        """Returns the worker's reply; None, once the call has ended there, without `wants_answer`.

        Raises:
            DeadlineExceeded: the worker answered neither this call nor, if calls are queued there, an earlier one for
                `deadline` seconds, and reported no progress.
            PeerLost: the connection broke.
            WireError: an argument cannot be sent.
            AsyncrlError: what the worker raised: the class of asyncrl.errors by that name, or RemoteError.
        """
        pending = PendingReply()
        call = self._new_call(method, args, deadline, wants_answer)
        try:
            with self._within(deadline, method, call.call):
                await self._send_call(call, pending)
                return await pending.future
        finally:
            self._finish(call.call, pending)

    async def stream(self, method: str, args: tuple[Any, ...], deadline: float) -> AsyncGenerator[Any, None]:
        """Yields the worker's items as they come, at most STREAM_WINDOW ahead of the consumer.

        Closing the generator cancels the call. Raises what `call` raises; the deadline is that of the next item.
        """
        pending = PendingStream()
        call = self._new_call(method, args, deadline, True)
        try:
            with self._within(deadline, method, call.call):
                await self._send_call(call, pending)
            while True:
                with self._within(deadline, method, call.call):
                    if items := pending.grant():
                        await self._sequence.send(More(call.call, items))
                    if not await pending.has_item():
                        return
                yield pending.take_item()
        finally:
            self._finish(call.call, pending)

    def _new_call(self, method: str, args: tuple[Any, ...], deadline: float, wants_answer: bool) -> Call:
        if deadline <= 0:
            raise DeadlineExceeded(f"{self.peer} was not called: the deadline of {method} passed {-deadline:g} s ago")
        self._calls += 1
        return Call(self._calls - 1, method, args, deadline, wants_answer)

    def _within(self, seconds: float, method: str, number: int) -> Deadline:
        def overdue() -> str:
            return f"{self.peer} did not answer {method} within {seconds:g} s; {len(self._pending)} calls wait there"

        return Deadline(self._deadlines, number, seconds, overdue)

    async def _send_call(self, call: Call, pending: PendingReply | PendingStream) -> None:
        if self._abandoned:
            self._cancel_abandoned()
        await self._credit.take()
        self._check()
        self._pending[call.call] = pending
        await self._sequence.send(call)

    def _finish(self, number: int, pending: PendingReply | PendingStream) -> None:
        if self._pending.pop(number, None) is None:
            return
        if pending.settled:
            self._credit.give(1)
        else:
            self._abandoned.append(number)
            self._cancel_abandoned()

    def _cancel_abandoned(self) -> None:
        """Sends Cancel for calls given up, whose credit then returns; when the queue is full, the next call does."""
        try:
            while self._abandoned and not self.lost.is_set() and self._sequence.offer(Cancel(self._abandoned[0])):
                self._abandoned.popleft()
                self._credit.give(1)
        except PeerLost as error:
            self.fail(str(error))

    async def _listen(self) -> None:
        try:
            await self.caller.pump(self._receive)
        except (PeerLost, WireError) as error:
            self.fail(str(error))
        finally:
            self.fail("the connection is no longer read")

    def _receive(self, frames: list[Frame]) -> None:
        self._check()
        self._handle(self._sequence.accept(frames))
        self.silence = None

    def _handle(self, message: Any) -> None:
        match message:
            case Item(number, value):
                if (pending := self._find_pending(number)) is not None:
                    pending.add_item(value)
            case Reply(number, value):
                if (pending := self._find_pending(number)) is not None:
                    pending.complete(value)
            case Failure():
                if (pending := self._find_pending(message.call)) is not None:
                    pending.fail(error_from(message))
            case Welcome():
                self._accept_welcome(message)
            case Rejected(reason):
                if self._welcome is not None:
                    self._welcome.fail(Refused(f"{self.peer}: {reason}"))
                self.fail(reason)
            case Progress():
                self._deadlines.note_progress()
            case Ping():
                pass
            case _:
                raise WireError(f"a worker sent a {type(message).__name__}")

    def _find_pending(self, number: int) -> PendingReply | PendingStream | None:
        """Returns None for a call that was given up: its answer and our Cancel crossed each other."""
        if not 0 <= number < self._calls:
            raise WireError(f"an answer to call {number}, which was never made")
        if self.queued:
            self._deadlines.note_answer(number)
        self.late_replies += number not in self._pending
        return self._pending.get(number)

    def _accept_welcome(self, welcome: Welcome) -> None:
        if self._welcome is None or self._welcome.settled or welcome.credit < 1:
            raise WireError(f"an unexpected {welcome}")
        if self.instance not in (None, welcome.instance):
            raise PeerLost(f"instance {welcome.instance} answers in place of {self.instance}")
        self._credit.give(welcome.credit)
        self._welcome.complete(welcome)

    async def _send_heartbeats(self, seconds: float) -> None:
        """Counts heartbeats in place of seconds, so that a stall of our own loop is no silence of the peer."""
        while not self.lost.is_set():
            since, missed = self.silence or (asyncio.get_running_loop().time(), 0)
            if missed >= LIVENESS:
                return self.fail(f"no sign of life for {LIVENESS} heartbeats of {seconds:g} s")
            self.silence = Silence(since, missed + 1)
            try:
                self._sequence.offer(Ping(missed + 1))
            except PeerLost as error:
                return self.fail(str(error))
            await asyncio.sleep(seconds)
