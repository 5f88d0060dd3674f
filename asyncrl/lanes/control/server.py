"""The worker's side of links: greets callers, runs one task a call, answers with its result or its error."""

import asyncio
import itertools
import math
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from asyncrl.errors import DeadlineExceeded, PeerLost, WireError, lone
from asyncrl.protocols.messages import Call, Cancel, Failure, Hello, Item, More, Ping, Rejected, Reply, Welcome
from asyncrl.wire.answers import STREAM_WINDOW
from asyncrl.wire.deadlines import Deadlines
from asyncrl.wire.ends import CREDIT, Frame, Listener, Signal, pour
from asyncrl.wire.line import Line
from asyncrl.wire.link import LIVENESS

Dispatch = Callable[[Call], Awaitable[Any] | AsyncIterator[Any]]
"""Runs one call: a coroutine for one reply, an async iterator for a stream. May raise anything."""

MAX_CALLERS = 64
"""The controller and the workers of other services that fetch rows."""

HELLO_BYTES = 4096
"""What a stranger may send: MessagePack can declare a few thousand times its size in empty lists."""

TRACEBACK_CHARACTERS = 16_384
MESSAGE_CHARACTERS = 4_096


class Window:
    """How many items a stream may send before its consumer asks for more."""

    def __init__(self) -> None:
        self._room = STREAM_WINDOW
        self._widened = Signal()

    async def enter(self) -> None:
        while self._room == 0:
            await self._widened.wait()
        self._room -= 1

    def widen(self, items: int) -> None:
        if not 0 < items <= STREAM_WINDOW - self._room:
            raise WireError(
                f"{items} more items of a stream were asked for, with {self._room} of {STREAM_WINDOW} to go"
            )
        self._room += items
        self._widened.wake()


class Expiry:
    """Cancels the task inside at `end`, in loop time, and raises TimeoutError there: asyncio.timeout at a fraction of
    its price, for every call has one. reached: whether that happened."""

    __slots__ = ("_before", "_deadlines", "_end", "_number", "_task", "reached")

    def __init__(self, deadlines: Deadlines, number: int, end: float) -> None:
        self._deadlines, self._number, self._end, self.reached = deadlines, number, end, False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "calls are served by tasks"
        self._task, self._before = task, task.cancelling()
        self._deadlines.add(self._number, self._end, self._reach)

    def _reach(self) -> None:
        self.reached = True
        self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._deadlines.discard(self._number)
        if self.reached and self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise TimeoutError from error


@dataclass(eq=False, slots=True)
class Session:
    """One caller that was welcomed, `name` in words. missed: heartbeats since its last message."""

    peer: bytes
    line: Line
    name: str
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    windows: dict[int, Window] = field(default_factory=dict)
    missed: int = 0


class Host:
    """Serves calls that arrive at `listener` by `dispatch`, for callers of the same run, epoch and protocol.

    identity: who answers. credit: calls that each caller may have outstanding. heartbeat: seconds, when the callers are
    remote and send heartbeats themselves; the calls of a silent one are cancelled.
    """

    def __init__(
        self,
        listener: Listener,
        dispatch: Dispatch,
        identity: Hello,
        *,
        credit: int = CREDIT,
        heartbeat: float | None = None,
    ) -> None:
        self.strangers = 0
        self._listener, self._dispatch, self._identity = listener, dispatch, identity
        self._credit, self._heartbeat = credit, heartbeat
        self._sessions: dict[bytes, Session] = {}
        self._deadlines, self._numbers = Deadlines(), itertools.count()

    @property
    def running(self) -> int:
        """Calls being served now."""
        return sum(len(session.tasks) for session in self._sessions.values())

    async def serve(self) -> None:
        """Until it is cancelled or the listener is closed; then every call is cancelled and waited for."""
        try:
            async with asyncio.TaskGroup() as tasks:
                beat = tasks.create_task(self._beat(), name="heartbeats of callers")
                await self._receive(tasks)
                beat.cancel()
        finally:
            self._deadlines.close()
            self._listener.close()

    async def _receive(self, tasks: asyncio.TaskGroup) -> None:
        try:
            await pour(self._listener, lambda message: self._take(tasks, *message))
        except PeerLost:
            for session in list(self._sessions.values()):
                self._forget(session)

    # ---- callers -----------------------------------------------------------------------------------------

    def _take(self, tasks: asyncio.TaskGroup, peer: bytes, frames: list[Frame]) -> None:
        session = self._sessions.get(peer)
        if session is None:
            return self._greet(peer, frames)
        session.missed = 0
        try:
            self._handle(tasks, session, session.line.accept(frames))
        except WireError as error:
            self._forget(session)
            _tell(session.line, Rejected(f"{_name(self._identity)} hangs up: {error}"))

    def _greet(self, peer: bytes, frames: list[Frame]) -> None:
        line = Line(partial(self._listener.offer, peer), partial(self._listener.send, peer))
        try:
            hello = line.accept(frames, HELLO_BYTES)
            reason = self._objection(hello)
        except WireError as error:
            reason = f"{_name(self._identity)} expected a hello: {error}"
        if reason:
            self.strangers += 1
            return _tell(line, Rejected(reason))
        self._sessions[peer] = Session(peer, line, _name(hello))
        _tell(line, Welcome(self._identity.instance, self._credit))

    def _objection(self, hello: Any) -> str:
        """Why this caller is not welcome, "" if it is."""
        if not isinstance(hello, Hello):
            return (
                f"{_name(self._identity)} expected a hello, not a {type(hello).__name__}; was the link cut in between?"
            )
        wrong = [name for name in ("run", "epoch", "protocol") if getattr(hello, name) != getattr(self._identity, name)]
        if wrong:
            return f"{_described(self._identity)} refuses {_described(hello)}: another {' and '.join(wrong)}"
        self._forget_gone()
        if len(self._sessions) >= MAX_CALLERS:
            return f"{_name(self._identity)} has {MAX_CALLERS} callers already"
        return ""

    def _forget_gone(self) -> None:
        """A ping to a caller that is gone fails at once."""
        for session in list(self._sessions.values()):
            try:
                session.line.offer(Ping(0))
            except PeerLost:
                self._forget(session)

    def _forget(self, session: Session) -> None:
        self._sessions.pop(session.peer, None)
        for task in session.tasks.values():
            task.cancel()

    async def _beat(self) -> None:
        while self._heartbeat is not None:
            await asyncio.sleep(self._heartbeat)
            for session in list(self._sessions.values()):
                session.missed += 1
                if session.missed > LIVENESS:
                    self._forget(session)

    # ---- calls -------------------------------------------------------------------------------------------

    def _handle(self, tasks: asyncio.TaskGroup, session: Session, message: Any) -> None:
        match message:
            case Call():
                self._start(tasks, session, message)
            case Cancel(number):
                if number in session.tasks:
                    session.tasks[number].cancel()
            case More(number, items):
                if number in session.windows:
                    session.windows[number].widen(items)
            case Ping():
                _tell(session.line, message)
            case _:
                raise WireError(f"a caller sent a {type(message).__name__}")

    def _start(self, tasks: asyncio.TaskGroup, session: Session, call: Call) -> None:
        if not (math.isfinite(call.deadline) and call.deadline > 0):
            raise WireError(f"call {call.call} of {call.method} has the deadline {call.deadline}")
        if call.call in session.tasks:
            raise WireError(f"call {call.call} came twice")
        # A cancelled call gives its credit back at once, while its task may need a moment to end.
        if len(session.tasks) >= 2 * self._credit:
            raise WireError(f"{len(session.tasks)} calls are running, {self._credit} are allowed")
        task = tasks.create_task(self._serve_call(session, call), name=f"{call.method} for {session.name}")
        session.tasks[call.call] = task
        task.add_done_callback(lambda _: session.tasks.pop(call.call))

    async def _serve_call(self, session: Session, call: Call) -> None:
        answer = await self._outcome(session, call)
        try:
            try:
                await session.line.send(answer)
            except WireError as error:
                await session.line.send(self._failure(call, error))
        except (PeerLost, DeadlineExceeded):
            self._forget(session)

    async def _outcome(self, session: Session, call: Call) -> Reply | Failure:
        """The supervised boundary: whatever a call raises becomes its answer."""
        end = asyncio.get_running_loop().time() + call.deadline
        expiry = Expiry(self._deadlines, next(self._numbers), end)
        try:
            with expiry:
                return Reply(call.call, await self._result(session, call))
        except Exception as error:  # whatever a call raises is the caller's to handle
            overdue = DeadlineExceeded(f"{call.method} was still running after {call.deadline:g} s")
            return self._failure(call, overdue if expiry.reached else error)
        except asyncio.CancelledError as error:
            if _being_cancelled():
                raise
            return self._failure(call, error)

    async def _result(self, session: Session, call: Call) -> Any:
        running = self._dispatch(call)
        if isinstance(running, AsyncIterator):
            return await self._send_items(session, call.call, running)
        return await running

    async def _send_items(self, session: Session, number: int, items: AsyncIterator[Any]) -> None:
        window = session.windows[number] = Window()
        try:
            async for item in items:
                await window.enter()
                await session.line.send(Item(number, item))
        finally:
            del session.windows[number]
            if isinstance(items, AsyncGenerator):
                await items.aclose()

    def _failure(self, call: Call, raised: BaseException) -> Failure:
        error = lone(raised)
        trace = "".join(traceback.format_exception(error))[-TRACEBACK_CHARACTERS:]
        return Failure(
            call=call.call,
            kind=type(error).__name__,
            message=_sendable(str(error)[:MESSAGE_CHARACTERS]),
            service=self._identity.service,
            rank=self._identity.rank,
            traceback=_sendable(trace),
        )


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _sendable(text: str) -> str:
    """Without lone surrogates, which UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _tell(line: Line, message: Any) -> None:
    """Tell a caller without waiting for it. One that is gone, or whose queue is full, need not know: it has a deadline
    for its hello, and any other message is a sign of life as good as a ping."""
    try:
        line.offer(message)
    except PeerLost:
        return


def _name(side: Hello) -> str:
    return f"{side.service}[{side.rank}]"


def _described(side: Hello) -> str:
    return (
        f"{_name(side)} ({side.instance}, asyncrl {side.asyncrl}) of run {side.run}, epoch {side.epoch}, "
        f"protocol {side.protocol}"
    )
