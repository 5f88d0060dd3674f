"""Plays whole episodes of an evaluation, each in the environment that its number says.

states of environments that have answered ── policy ── actions ──> environments ── answers ──> episodes that ended
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.acting.stepping.answers import Answers, Floats
from asyncrl.engines.acting.stepping.stepped_environments import SteppedEnvironments

TERMINATED = "terminated"
TRUNCATED = "truncated"
LOST = "lost"
TIME_LIMIT = "time_limit"
"""Ends of an episode: by itself, by a limit of the environment, by an error of it, and by the deadline."""


@dataclass(slots=True)
class PlayedEpisode:
    """One episode. number: among those of the evaluation. gained: its return. actions: as the environment got them.
    end: why it ended, "" while it goes on; error: of an environment that lost it."""

    number: int
    gained: float = 0.0
    actions: list[NDArray[np.float32]] = field(default_factory=list)
    end: str = ""
    error: str = ""

    @property
    def steps(self) -> int:
        return len(self.actions)


class EpisodePlayer:
    """Plays episodes 0 to count - 1: environment k of n has the episodes k, k + n, k + 2n ... act: returns actions in
    some states. The environments share one sequence of episodes, and their first ones have just begun."""

    def __init__(
        self, act: Callable[[Floats], Awaitable[Floats]], environments: SteppedEnvironments, count: int
    ) -> None:
        self._act_in = act
        self._environments = environments
        self._count = count
        self._states = environments.states
        self._unanswered: dict[int, NDArray[np.float32]] = {}  # The last action in each environment that has one.
        self._running = {place: PlayedEpisode(place) for place in range(min(count, len(self._states)))}

    async def play(self, seconds: float) -> AsyncIterator[list[PlayedEpisode]]:
        """Yields the episodes as they end; those that go on after so many seconds end there, as `time_limit`. Raises
        EnvironmentFailed as `SteppedEnvironments.answers` does."""
        until = asyncio.get_running_loop().time() + seconds
        await self._act([*self._running])
        while self._running:
            try:
                async with asyncio.timeout_at(until):
                    answered = await self._environments.answers()
            except TimeoutError:
                yield list(self._cut_off())
                return
            ended = [episode for each in answered for episode in self._take(each)]
            await self._act([place for each in answered for place in each.places.tolist()])
            if ended:
                yield ended

    async def _act(self, places: list[int]) -> None:
        """Acts in those of these environments that play an episode. One whose child died meanwhile is in another state,
        which an answer says."""
        ready = sorted(place for place in {*places} if place in self._running and place not in self._unanswered)
        if not ready:
            return
        states = self._states[ready]
        actions = await self._act_in(states)
        same = np.flatnonzero((self._environments.states[ready] == states).all(axis=1))
        self._unanswered |= {ready[index]: actions[index] for index in same}
        if len(same):
            self._environments.act(np.array(ready)[same], actions[same])

    def _take(self, answers: Answers) -> Iterator[PlayedEpisode]:
        """Takes answers, and yields the episodes that they end."""
        for index, place in enumerate(answers.places.tolist()):
            self._states[place] = answers.following[index]
            if (episode := self._running.get(place)) is None:
                continue
            if answers.continued:
                episode.gained += float(answers.rewards[index])
                episode.actions.append(self._unanswered.pop(place))
            if answers.ended[index]:
                episode.error = answers.errors.get(place, "")
                by_itself = TERMINATED if answers.terminated[index] else TRUNCATED
                episode.end = LOST if episode.error else by_itself
                yield self._running.pop(place)
                if (following := episode.number + len(self._states)) < self._count:
                    self._running[place] = PlayedEpisode(following)

    def _cut_off(self) -> Iterator[PlayedEpisode]:
        for episode in self._running.values():
            episode.end = TIME_LIMIT
            yield episode
