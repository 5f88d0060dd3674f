"""The caller's side of a link: calls and streams with deadlines, and one end for all of them when the peer is lost."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Self

from asyncrl.errors import DeadlineExceeded, PeerLost, Refused, WireError
from asyncrl.protocols.messages import Call, Cancel, Failure, Hello, Item, More, Ping, Rejected, Reply, Welcome
from asyncrl.wire.answers import Items, Single, error_of
from asyncrl.wire.deadlines import Deadlines
from asyncrl.wire.ends import Caller, Frame, Signal, pour
from asyncrl.wire.line import Line

HELLO_DEADLINE = 10.0
"""Seconds for a worker that is up to welcome a caller; who starts a worker waits for it to be up first."""

LIVENESS = 3
"""Heartbeats that a remote peer may miss."""


class Link:
    """One connection to one worker, `peer` in every message ("generation0[1]").

    `async with link:` says hello and listens until the block ends; `open` does so inside a TaskGroup of somebody else,
    who closes the link before leaving the group. hello: who calls. instance: the only one that may answer, if given.
    heartbeat: seconds, for peers on other hosts; the kernel reports the death of local ones to `fail`.
    """

    def __init__(
        self, caller: Caller, hello: Hello, peer: str, *, instance: str | None = None, heartbeat: float | None = None
    ) -> None:
        self.peer, self.lost, self.reason = peer, asyncio.Event(), ""
        self.late_answers = 0
        self._caller, self._hello, self._instance, self._heartbeat = caller, hello, instance, heartbeat
        self._line = Line(caller.offer, caller.send)
        self._answers: dict[int, Single | Items] = {}
        self._deadlines = Deadlines()
        self._abandoned: list[int] = []
        self._calls = self._credit = 0
        self._room = Signal()
        self._welcome: Single | None = None
        self._missed = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._group = asyncio.TaskGroup()

    # ---- opening and closing -----------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.__aexit__)
            await self.open(self._group)
            undo.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self.close()
        await self._group.__aexit__(None, None, None)

    async def open(self, tasks: asyncio.TaskGroup, deadline: float = HELLO_DEADLINE) -> None:
        """Raises Refused, PeerLost (also when `fail` is called meanwhile), DeadlineExceeded after `deadline` s."""
        self._check()
        self._welcome = Single()
        self._tasks.append(tasks.create_task(self._listen(), name=f"link to {self.peer}"))
        async with self._until(asyncio.get_running_loop().time() + deadline, "hello", deadline):
            await self._line.send(self._hello)
            await self._welcome.future
        if self._heartbeat is not None:
            self._tasks.append(tasks.create_task(self._beat(self._heartbeat), name=f"heartbeat to {self.peer}"))

    def fail(self, reason: str) -> None:
        """Every outstanding call raises PeerLost now, and every later one."""
        if self.lost.is_set():
            return
        self.reason = f"{self.peer}: {reason}"
        self.lost.set()
        if self._welcome is not None:
            self._welcome.lose(self.reason)
        for answer in self._answers.values():
            answer.lose(self.reason)
        self._room.wake()

    def close(self) -> None:
        self.fail("the link was closed")
        for task in self._tasks:
            task.cancel()
        self._deadlines.close()
        self._caller.close()

    def _check(self) -> None:
        if self.lost.is_set():
            raise PeerLost(self.reason)

    # ---- calls -------------------------------------------------------------------------------------------

    async def call(self, method: str, args: tuple[Any, ...], deadline: float) -> Any:
        """The worker's reply. Raises DeadlineExceeded after `deadline` seconds, PeerLost, WireError for arguments that
        may not travel, and what the worker raised: the class of asyncrl.errors by that name, or RemoteError."""
        answer, call = Single(), self._new_call(method, args, deadline)
        end = asyncio.get_running_loop().time() + deadline
        self._deadlines.add(call.call, end, lambda: answer.expire(self._overdue(method, deadline)))
        try:
            if not self._start_at_once(call, answer):
                async with self._until(end, method, deadline):
                    await self._start(call, answer)
            return await answer.future
        finally:
            self._deadlines.discard(call.call)
            self._finish(call.call, answer)

    async def stream(self, method: str, args: tuple[Any, ...], deadline: float) -> AsyncGenerator[Any, None]:
        """The worker's items as they come, at most STREAM_WINDOW ahead of the consumer; closing the generator cancels
        the call. The last item is due `deadline` seconds after the first was asked for. Raises what `call` raises."""
        answer, call = Items(), self._new_call(method, args, deadline)
        end = asyncio.get_running_loop().time() + deadline
        try:
            async with self._until(end, method, deadline):
                await self._start(call, answer)
            while await self._has_more(answer, call, end):
                yield answer.take()
        finally:
            self._finish(call.call, answer)

    def _new_call(self, method: str, args: tuple[Any, ...], deadline: float) -> Call:
        if deadline <= 0:
            raise DeadlineExceeded(f"{self.peer} was not asked for {method}: its deadline passed {-deadline:g} s ago")
        self._calls += 1
        return Call(self._calls - 1, method, args, deadline)

    @asynccontextmanager
    async def _until(self, end: float, method: str, seconds: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout_at(end) as scope:
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise self._overdue(method, seconds) from error

    def _overdue(self, method: str, seconds: float) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"{self.peer} did not answer {method} within {seconds:g} s; {len(self._answers)} calls wait there"
        )

    def _start_at_once(self, call: Call, answer: Single) -> bool:
        """The common case, without a scope for waiting: there is credit and room."""
        if self._abandoned or self._credit == 0 or self.lost.is_set():
            return False
        self._credit -= 1
        self._answers[call.call] = answer
        sent = False
        try:
            sent = self._line.offer(call)
        finally:
            if not sent:
                del self._answers[call.call]
                self._return_credit()
        return sent

    async def _start(self, call: Call, answer: Single | Items) -> None:
        self._cancel_abandoned()
        while self._credit == 0 and not self.lost.is_set():
            await self._room.wait()
        self._check()
        self._credit -= 1
        self._answers[call.call] = answer
        await self._line.send(call)

    async def _has_more(self, answer: Items, call: Call, end: float) -> bool:
        async with self._until(end, call.method, call.deadline):
            if answer.due_grant and not answer.settled:
                await self._line.send(More(call.call, answer.grant()))
            return await answer.more()

    def _finish(self, number: int, answer: Single | Items) -> None:
        if self._answers.pop(number, None) is None:
            return
        if answer.settled:
            self._return_credit()
        else:
            self._abandoned.append(number)
            self._cancel_abandoned()

    def _return_credit(self) -> None:
        self._credit += 1
        self._room.wake()

    def _cancel_abandoned(self) -> None:
        """A call's credit comes back when its Cancel is on its way; where the queue is full, that is tried again."""
        try:
            while self._abandoned and not self.lost.is_set() and self._line.offer(Cancel(self._abandoned[0])):
                self._abandoned.pop(0)
                self._return_credit()
        except PeerLost as error:
            self.fail(str(error))

    # ---- what comes in -----------------------------------------------------------------------------------

    async def _listen(self) -> None:
        try:
            await pour(self._caller, self._receive)
        except (PeerLost, WireError) as error:
            self.fail(str(error))
        finally:
            self.fail("nobody listens any more")

    def _receive(self, frames: list[Frame]) -> None:
        self._check()
        self._take(self._line.accept(frames))
        self._missed = 0
        if self._abandoned:
            self._cancel_abandoned()

    def _take(self, message: Any) -> None:
        match message:
            case Item(number, value):
                if (answer := self._answer(number)) is not None:
                    answer.item(value)
            case Reply(number, value):
                if (answer := self._answer(number)) is not None:
                    answer.reply(value)
            case Failure():
                if (answer := self._answer(message.call)) is not None:
                    answer.fail(error_of(message))
            case Welcome():
                self._accept_welcome(message)
            case Rejected(reason):
                self._accept_rejection(reason)
            case Ping():
                pass
            case _:
                raise WireError(f"a worker sent a {type(message).__name__}")

    def _answer(self, number: int) -> Single | Items | None:
        """None for a call that was given up: its answer and our Cancel crossed each other."""
        if not 0 <= number < self._calls:
            raise WireError(f"an answer to call {number}, which was never made")
        self.late_answers += number not in self._answers
        return self._answers.get(number)

    def _accept_welcome(self, welcome: Welcome) -> None:
        if self._welcome is None or self._welcome.settled or welcome.credit < 1:
            raise WireError(f"an unexpected {welcome}")
        if self._instance not in (None, welcome.instance):
            raise PeerLost(f"instance {welcome.instance} answers in place of {self._instance}")
        self._credit = welcome.credit
        self._welcome.reply(welcome)

    def _accept_rejection(self, reason: str) -> None:
        if self._welcome is not None:
            self._welcome.fail(Refused(f"{self.peer}: {reason}"))
        self.fail(reason)

    async def _beat(self, seconds: float) -> None:
        """Beats are counted, not timed: a stall of our own loop is no silence of the peer."""
        while not self.lost.is_set():
            self._missed += 1
            if self._missed > LIVENESS:
                return self.fail(f"no sign of life for {LIVENESS} heartbeats of {seconds:g} s")
            try:
                self._line.offer(Ping(self._missed))
            except PeerLost as error:
                return self.fail(str(error))
            await asyncio.sleep(seconds)
