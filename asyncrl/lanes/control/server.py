"""The worker's side of connections: welcomes callers, runs one task per call, answers with its result or error."""

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

from asyncrl.errors import DeadlineExceeded, PeerLost, WireError
from asyncrl.lanes.control.client import LIVENESS, failure_from
from asyncrl.lanes.control.message_codec import MessageSequence
from asyncrl.lanes.control.open_calls import STREAM_WINDOW, Deadline, Deadlines
from asyncrl.lanes.control.wire import CALL_BYTES, CREDIT, HIGH_WATER, Frame, Listener, Wakeup
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

Dispatch = Callable[[Call], Awaitable[Any] | AsyncIterator[Any]]
"""Runs one call: a coroutine for one reply, an async iterator for a stream. May raise anything."""

FIRST_SWEEP = 64
"""Callers at which a server first looks for those that are gone."""

HELLO_BYTES = 4096
"""Bytes that an unknown peer may send: MessagePack can declare thousands of times its size in empty lists."""

REPORT_PERIOD = 5.0
SHORTEST_PERIOD = 0.25
REPORTS = 4
"""Longest and shortest seconds between two reports of progress, and reports within the shortest deadline of a call."""

THREADED_BYTES = 64 * 1024
"""Size of a message without its arrays from which it is decoded in a thread: some 700 rows, which take 4 ms."""

UNDECODED_BYTES = 2 * CALL_BYTES
"""Bytes of a caller's messages, without their arrays, that wait to be decoded."""


@dataclass(eq=False, slots=True)
class CallerSession:
    """The state of one welcomed caller. name: for messages. windows: how many items each stream may send before its
    consumer asks for more. missed_heartbeats: since its last message. undecoded: a large message that is being decoded,
    and those that came after it, bounded by the credit of the caller as all its messages are."""

    peer: bytes
    sequence: MessageSequence
    name: str
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    windows: dict[int, asyncio.BoundedSemaphore] = field(default_factory=dict)
    missed_heartbeats: int = 0
    undecoded: deque[list[Frame]] = field(default_factory=deque)


@dataclass(eq=False)
class Server:
    """Serves calls of callers of the same run, incarnation and protocol.

    Attributes:
        listener: where calls arrive.
        dispatch: runs a call.
        identity: of the worker that answers.
        credit: calls that each caller may have outstanding.
        queued: whether calls wait for earlier ones: then an answer to one extends the deadlines of those behind it.
        finished: returns how many parts of its work the worker has finished; callers are told when that rises. None:
            its calls have no parts.
        heartbeat: seconds between the heartbeats of remote callers.
        may_miss: heartbeats that a caller may miss before its calls are cancelled.
        refused: number of peers that were refused.

    Memory and file descriptors bound the number of callers: readers of rows grow with the fleet.
    """

    listener: Listener
    dispatch: Dispatch
    identity: Hello
    _: KW_ONLY
    credit: int = CREDIT
    queued: bool = True
    finished: Callable[[], int] | None = None
    heartbeat: float | None = None
    may_miss: int = LIVENESS
    refused: int = field(default=0, init=False)
    _sessions: dict[bytes, CallerSession] = field(default_factory=dict, init=False)
    _deadlines: Deadlines = field(default_factory=Deadlines, init=False)
    _arrived: int = field(default=0, init=False)
    _report_period: float = field(default=REPORT_PERIOD, init=False)
    _period_shortened: Wakeup = field(default_factory=Wakeup, init=False)
    _sweep_at: int = field(default=FIRST_SWEEP, init=False)

    @property
    def callers(self) -> int:
        """Returns the number of callers that are connected, or gone since the last sweep."""
        return len(self._sessions)

    @property
    def running(self) -> int:
        """Returns the number of calls that are being served now."""
        return sum(len(session.tasks) for session in self._sessions.values())

    async def serve(self) -> None:
        """Runs until it is cancelled or the listener is closed; then cancels every call and waits for it."""
        try:
            async with asyncio.TaskGroup() as tasks:
                beside = [tasks.create_task(self._watch_heartbeats(), name="heartbeats of callers")]
                if self.finished is not None:
                    reports = self._report_progress(self.finished)
                    beside.append(tasks.create_task(reports, name="reports of progress"))
                try:
                    await self.listener.pump(lambda message: self._take(tasks, *message))
                except PeerLost:
                    for session in list(self._sessions.values()):
                        self._forget(session)
                for task in beside:
                    task.cancel()
        finally:
            self._deadlines.close()
            self.listener.close()

    def _take(self, tasks: asyncio.TaskGroup, peer: bytes, frames: list[Frame]) -> None:
        session = self._sessions.get(peer)
        if session is None:
            return self._handshake(peer, frames)
        session.missed_heartbeats = 0
        if session.undecoded or _is_large(frames):
            session.undecoded.append(frames)
            waiting = sum(len(each[0]) for each in session.undecoded if each)
            if len(session.undecoded) > HIGH_WATER or waiting > UNDECODED_BYTES:
                return self._break_off(
                    session, WireError(f"{waiting} bytes of messages came faster than they are read")
                )
            if len(session.undecoded) == 1:
                tasks.create_task(self._take_large(tasks, session), name=f"large message of {session.name}")
            return
        try:
            self._handle(tasks, session, session.sequence.accept(frames))
        except WireError as error:
            self._break_off(session, error)

    async def _take_large(self, tasks: asyncio.TaskGroup, session: CallerSession) -> None:
        """Decodes a large message in a thread, so that others are answered meanwhile, then takes what came after it."""
        loop = asyncio.get_running_loop()
        try:
            while session.undecoded and session.peer in self._sessions:
                frames = session.undecoded[0]
                if _is_large(frames):
                    message = await loop.run_in_executor(None, session.sequence.accept, frames)
                else:
                    message = session.sequence.accept(frames)
                session.undecoded.popleft()
                self._handle(tasks, session, message)
        except WireError as error:
            self._break_off(session, error)

    def _break_off(self, session: CallerSession, error: WireError) -> None:
        self._forget(session)
        _send_soon(session.sequence, Rejected(f"{_name(self.identity)} closes the connection: {error}"))

    def _handshake(self, peer: bytes, frames: list[Frame]) -> None:
        sequence = MessageSequence(partial(self.listener.offer, peer), self.listener.room, f"caller {peer.hex()}")
        try:
            hello = sequence.accept(frames, HELLO_BYTES)
            reason = self._objection(hello)
        except WireError as error:
            reason = f"{_name(self.identity)} expected a hello: {error}"
        if reason:
            self.refused += 1
            return _send_soon(sequence, Rejected(reason))
        self._sessions[peer] = CallerSession(peer, sequence, _name(hello))
        _send_soon(sequence, Welcome(self.identity.instance, self.credit))

    def _objection(self, hello: Any) -> str:
        """Returns why this caller is refused, "" when it is welcome."""
        if not isinstance(hello, Hello):
            received = type(hello).__name__
            return f"{_name(self.identity)} expected a hello, not a {received}; was the connection broken in between?"
        wrong = [
            name for name in ("run", "incarnation", "protocol") if getattr(hello, name) != getattr(self.identity, name)
        ]
        if wrong:
            return f"{_described(self.identity)} refuses {_described(hello)}: another {' and '.join(wrong)}"
        if len(self._sessions) >= self._sweep_at:
            self._forget_gone()
        return ""

    def _forget_gone(self) -> None:
        """Forgets callers that are gone: a ping to one fails at once. Callers double between two sweeps, so that a
        hello costs the same in a large fleet, and at most as many are gone as live."""
        for session in list(self._sessions.values()):
            try:
                session.sequence.offer(Ping(0))
            except PeerLost:
                self._forget(session)
        self._sweep_at = max(FIRST_SWEEP, 2 * len(self._sessions))

    def _forget(self, session: CallerSession) -> None:
        self._sessions.pop(session.peer, None)
        for task in session.tasks.values():
            task.cancel()

    async def _watch_heartbeats(self) -> None:
        while self.heartbeat is not None:
            await asyncio.sleep(self.heartbeat)
            for session in list(self._sessions.values()):
                session.missed_heartbeats += 1
                if session.missed_heartbeats > self.may_miss:
                    self._forget(session)

    async def _report_progress(self, parts: Callable[[], int]) -> None:
        """Lets callers know that the worker makes progress with a long call: they see answers only."""
        reported = parts()
        while True:
            try:
                async with asyncio.timeout(self._report_period):
                    await self._period_shortened.wait()
                continue  # A call with a short deadline has come: it cannot wait for the end of a longer period.
            except TimeoutError:
                pass
            if (finished := parts()) == reported:
                continue
            reported = finished
            self._deadlines.note_progress()
            for session in list(self._sessions.values()):
                if session.tasks:
                    _send_soon(session.sequence, Progress(finished))

    def _handle(self, tasks: asyncio.TaskGroup, session: CallerSession, message: Any) -> None:
        match message:
            case Call():
                self._start(tasks, session, message)
            case Cancel(number):
                if number in session.tasks:
                    session.tasks[number].cancel()
            case More(number, items):
                if number in session.windows:
                    _widen(session.windows[number], items)
            case Ping():
                _send_soon(session.sequence, message)
            case _:
                raise WireError(f"a caller sent a {type(message).__name__}")

    def _start(self, tasks: asyncio.TaskGroup, session: CallerSession, call: Call) -> None:
        if not (math.isfinite(call.deadline) and call.deadline > 0):
            raise WireError(f"call {call.call} of {call.method} has the deadline {call.deadline}")
        if (period := max(SHORTEST_PERIOD, call.deadline / REPORTS)) < self._report_period:
            self._report_period = period
            self._period_shortened.wake()
        if call.call in session.tasks:
            raise WireError(f"call {call.call} came twice")
        # A cancelled call gives its credit back at once, while its task may need a moment to end.
        if len(session.tasks) >= 2 * self.credit:
            raise WireError(f"{len(session.tasks)} calls are running, {self.credit} are allowed")
        self._arrived += 1
        task = tasks.create_task(
            self._serve_call(session, call, self._arrived), name=f"{call.method} for {session.name}"
        )
        session.tasks[call.call] = task
        task.add_done_callback(lambda _: session.tasks.pop(call.call))

    async def _serve_call(self, session: CallerSession, call: Call, arrival: int) -> None:
        answer = await self._outcome(session, call, arrival)
        self._note_answer(arrival)
        try:
            try:
                await session.sequence.send(answer)
            except WireError as error:
                await session.sequence.send(failure_from(error, call.call, self.identity))
        except (PeerLost, DeadlineExceeded):
            self._forget(session)

    async def _outcome(self, session: CallerSession, call: Call, arrival: int) -> Reply | Failure:
        """Runs a call; every error that it raises becomes its answer, which makes this a supervised boundary."""

        def overdue() -> str:
            return f"{call.method} was still running, and nothing was answered, after {call.deadline:g} s"

        try:
            with Deadline(self._deadlines, arrival, call.deadline, overdue):
                running = self.dispatch(call)
                if isinstance(running, AsyncIterator):
                    running = self._send_items(session, call.call, running, arrival)
                answer = await running
                return Reply(call.call, answer if call.wants_answer else None)
        except Exception as error:  # every error of a call is handled by its caller
            return failure_from(error, call.call, self.identity)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling() > 0:
                raise
            return failure_from(error, call.call, self.identity)

    async def _send_items(self, session: CallerSession, number: int, items: AsyncIterator[Any], arrival: int) -> None:
        window = session.windows[number] = asyncio.BoundedSemaphore(STREAM_WINDOW)
        try:
            async for item in items:
                self._note_answer(arrival)
                await window.acquire()
                await session.sequence.send(Item(number, item))
        finally:
            del session.windows[number]
            if isinstance(items, AsyncGenerator):
                await items.aclose()

    def _note_answer(self, arrival: int) -> None:
        if self.queued:
            self._deadlines.note_answer(arrival)


def _is_large(frames: list[Frame]) -> bool:
    return bool(frames) and len(frames[0]) >= THREADED_BYTES


def _widen(window: asyncio.BoundedSemaphore, items: int) -> None:
    """Adds the places that the consumer of a stream granted."""
    try:
        for _ in range(items):
            window.release()
    except ValueError:
        raise WireError(f"{items} more items of a stream were granted than {STREAM_WINDOW} unused ones allow") from None


def _send_soon(sequence: MessageSequence, message: Any) -> None:
    """Sends without waiting, or not at all when the caller is gone or its queue is full.

    Neither needs the message: a caller has a deadline for its hello, and any other message serves it as a heartbeat.
    """
    try:
        sequence.offer(message)
    except PeerLost:
        return


def _name(side: Hello) -> str:
    return f"{side.service}[{side.rank}]"


def _described(side: Hello) -> str:
    return (
        f"{_name(side)} ({side.instance}, asyncrl {side.asyncrl}) of run {side.run}, incarnation {side.incarnation}, "
        f"protocol {side.protocol}"
    )
