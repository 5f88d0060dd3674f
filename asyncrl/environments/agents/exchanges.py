"""The requests of an agent in one episode, and which turn of the policy each one goes on after.

A request whose messages begin with a conversation that the policy has answered, and then has new messages, goes on with
the tokens of that conversation. Any other one begins a new context. A request that is sent again gets the same answer.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from asyncrl.environments.agents.chat_completions import ChatAnswer, ChatRequest, RefusedRequest, digests_of
from asyncrl.environments.observation import Observation
from asyncrl.errors import EnvironmentFailed

QUEUED = 32
"""Requests of an agent that wait for the policy, which answers one at a time."""
KEPT = 16
"""Answered requests that are kept for a client that asks again; it does so at once."""
MOST_REQUESTS = 10_000
"""Requests of an episode, refused and repeated ones included; limits on turns end an episode long before."""
COUNTED = ("requests", "repeated", "rewritten", "branches")
FOLLOWING = ("user", "tool")
"""Roles of messages that may follow an answer in a conversation that goes on."""


class AgentFailed(EnvironmentFailed):
    """Reports an agent with which the episode cannot go on."""


@dataclass(eq=False, slots=True)
class Exchange:
    """A request and its answer. waiting: clients that wait for it. delivered: a client has got the answer."""

    request: ChatRequest
    answer: "asyncio.Future[ChatAnswer]"
    waiting: int = 0
    delivered: bool = False


@dataclass(eq=False, slots=True)
class Exchanges:
    """Takes requests in the order of their arrival. counts: what became of them. turns: of the policy so far."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    turns: int = 0
    _queue: "deque[Exchange]" = field(default_factory=deque)
    _kept: "deque[Exchange]" = field(default_factory=lambda: deque(maxlen=KEPT))
    _turn_of: dict[str, int] = field(default_factory=dict)
    _pending: Exchange | None = None
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _error: str = ""

    def count_request(self) -> None:
        """Counts a request before anything of it is read. Raises RefusedRequest for one too many."""
        self.counts["requests"] += 1
        if self.counts["requests"] > MOST_REQUESTS:
            self.fail(f"the agent sent more than {MOST_REQUESTS} requests")
            raise RefusedRequest(f"an episode has at most {MOST_REQUESTS} requests", status=429)

    def arrive(self, request: ChatRequest) -> Exchange:
        """Returns the exchange of a request, for which a client waits: a new one, or that of the request which this one
        repeats. Raises RefusedRequest when too many wait."""
        known = [*self._kept, *([self._pending] if self._pending else []), *self._queue]
        for exchange in reversed(known):
            if exchange.request.digest == request.digest and (request.retry or _given_up(exchange)):
                self.counts["repeated"] += 1
                exchange.waiting += 1
                return exchange
        if len(self._queue) >= QUEUED:
            raise RefusedRequest(f"{QUEUED} requests wait already, and the policy answers one at a time", status=429)
        exchange = Exchange(request, asyncio.get_running_loop().create_future(), waiting=1)
        self._queue.append(exchange)
        self._arrived.set()
        return exchange

    def fail(self, error: str) -> None:
        """Lets `next_request` raise AgentFailed."""
        self._error = self._error or error
        self._arrived.set()

    async def next_request(self) -> ChatRequest:
        """Waits for the request that the policy answers next. Raises AgentFailed."""
        while True:
            await self._arrived.wait()
            if self._error:
                raise AgentFailed(self._error)
            if not self._queue:
                self._arrived.clear()
                continue
            self._pending = self._queue.popleft()
            if not _given_up(self._pending):
                return self._pending.request

    def observation(self, request: ChatRequest) -> Observation:
        """Returns what the policy is shown of a request: new messages only where they follow its newest answer."""
        new = len(request.messages)
        while new and request.messages[new - 1]["role"] in FOLLOWING:
            new -= 1
        # The conversation that is known ends with an answer, behind which there are new messages only.
        turn = self._turn_of.get(request.digests[new - 1], 0) if 0 < new < len(request.messages) else 0
        self.counts["rewritten"] += self.turns > 0 and not turn
        self.counts["branches"] += 0 < turn < self.turns
        shown = list(request.messages[new:] if turn else request.messages)
        follows = None if turn == self.turns else turn
        return Observation(shown, tools=request.tools, follows=follows, info=dict(self.counts))

    def answer(self, read: Callable[[ChatRequest, int], ChatAnswer]) -> None:
        """Answers the pending request. read: returns the answer to a request, of this turn."""
        assert self._pending is not None, "an answer follows a request"
        exchange = self._pending
        self._pending = None
        self.turns += 1
        answer = read(exchange.request, self.turns)
        request = exchange.request
        exchange.request = replace(request, messages=(), digests=request.digests[-1:], tools=())  # Those take memory.
        self._kept.append(exchange)
        if not answer.cut:  # The tokens behind a stop string are in the context of the policy, and not of the agent.
            conversation = (*request.messages, answer.message)
            self._turn_of[digests_of(conversation, request.tools)[-1]] = answer.turn
        if not exchange.answer.done():
            exchange.answer.set_result(answer)

    def close(self) -> None:
        """Lets all clients that wait know that the episode has ended."""
        for exchange in (*([self._pending] if self._pending else []), *self._queue):
            exchange.answer.cancel()
        self._queue.clear()


def _given_up(exchange: Exchange) -> bool:
    """Returns whether no client waits for an answer that none has got."""
    return exchange.waiting == 0 and not exchange.delivered
