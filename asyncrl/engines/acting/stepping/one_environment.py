"""One environment in a child: made, reset and stepped, with everything checked that it returns.

Whatever it raises, or returns against its spaces, ends the episode that it happened in and no other: the environment is
made anew, and its next episode begins. Episode k of an environment has a seed of its own, so that it can be played
again from its actions.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.children.child_messages import trace
from asyncrl.engines.acting.stepping.spaces import ActionSpace, Kind, Spaces
from asyncrl.errors import ConfigError, EnvironmentFailed

Vector = NDArray[np.float32]
MAKE = "acting.env"
LARGEST_REWARD = float(np.finfo(np.float32).max)
TOLERANCE = 1e-4
"""Share of a bound by which rounding may carry an observation beyond it."""


@dataclass(slots=True)
class Stepped:
    """The state that a step led to. following: that of the next action, after a reset where the episode ended.
    error: why the episode was ended here, or ""; traceback: of that error."""

    observation: Vector
    reward: float
    terminated: bool
    truncated: bool
    following: Vector
    error: str = ""
    traceback: str = ""


class OneEnvironment:
    """make: makes an instance. index: among the environments of the worker. spaces: those of the policy; None: those of
    the first instance. stride: number of environments that divide one sequence of episodes, of which this one has
    `index`, `index + stride` and so on; 0: each environment has its own."""

    def __init__(
        self, make: Callable[[], Any], index: int, seed: int, spaces: Spaces | None = None, stride: int = 0
    ) -> None:
        self._make = make
        self._index = index
        self._seed = seed
        self._stride = stride
        self._environment = make()
        self.spaces = spaces or spaces_of(self._environment)
        self._refuse_other_spaces()
        self._bounds = _bounds(self._environment.observation_space)
        self._last: Vector = np.zeros(self.spaces.observation, np.float32)

    def begin(self, episode: int) -> Vector:
        """Begins an episode, and returns its first state. Raises whatever the environment raises, and EnvironmentFailed
        for a state that does not fit its space."""
        own = [self._index + self._stride * episode] if self._stride else [self._index, episode]
        seed = int(np.random.SeedSequence([self._seed, *own]).generate_state(1)[0]) % 2**31
        self._last = self._checked(self._environment.reset(seed=seed)[0], "reset")
        return self._last

    def step(self, action: Vector, episode: int) -> Stepped:
        """Acts; where the episode ends, begins the one after `episode`. Raises EnvironmentFailed when that cannot begin
        in a new instance either."""
        before = self._last
        try:
            observed, reward, terminated, truncated, _ = self._environment.step(self._native(action))
            observation = self._checked(observed, "step")
            gained = math.nan if isinstance(reward, str | bytes) else float(reward)
            if not abs(gained) <= LARGEST_REWARD:
                raise EnvironmentFailed(f"`step` gave the reward {reward!r:.100}, which is no finite number")
        except (Exception, SystemExit) as error:  # the user's code: its errors end an episode
            why, where = _described(error)
            return Stepped(before, 0.0, False, True, self._begin_anew(episode + 1), why, where)
        self._last = following = observation
        why = where = ""
        if terminated or truncated:
            following, why, where = self._next_episode(episode + 1)
        return Stepped(observation, gained, bool(terminated), bool(truncated), following, why, where)

    def _next_episode(self, episode: int) -> tuple[Vector, str, str]:
        try:
            return self.begin(episode), "", ""
        except (Exception, SystemExit) as error:  # the user's code: a new instance may begin where this one cannot
            why, where = _described(error)
            return self._begin_anew(episode), why, where

    def _begin_anew(self, episode: int) -> Vector:
        """Begins an episode in a new instance."""
        with suppress(Exception):  # the user's code, which has failed already
            self._environment.close()
        try:
            self._environment = self._make()
            self._refuse_other_spaces()
            return self.begin(episode)
        except (Exception, SystemExit) as error:  # the user's code: nothing is left to try
            why, where = _described(error)
            raise EnvironmentFailed(
                f"environment {self._index} cannot begin an episode: {why}\n{where}".rstrip()
            ) from None

    def frame(self) -> NDArray[np.uint8]:
        """Returns what the environment shows now [height, width, 3]. Raises whatever it raises, and EnvironmentFailed
        where that is no picture."""
        seen = self._environment.render()
        if isinstance(seen, np.ndarray) and seen.dtype == np.uint8 and seen.ndim == 3 and seen.shape[2] == 3:
            return seen
        raise EnvironmentFailed(f"`render` gave {type(seen).__name__}, and no array of bytes [height, width, 3]")

    def close(self) -> None:
        """Lets the environment free what it holds."""
        with suppress(Exception):  # the user's code, as this process ends
            self._environment.close()

    def _native(self, action: Vector) -> Any:
        """Returns an action as the environment's own space has it."""
        space = self.spaces.action
        if space.kind == "discrete":
            return int(action[0])
        return action.reshape(space.shape).astype(getattr(self._environment.action_space, "dtype", np.float32))

    def _checked(self, observed: Any, method: str) -> Vector:
        """Returns an observation as a vector. Raises EnvironmentFailed for one outside its space."""
        space = self._environment.observation_space
        if hasattr(space, "n"):
            return self._one_hot(observed, int(space.n), int(getattr(space, "start", 0)), method)
        vector = np.asarray(observed, np.float32)
        if vector.shape != tuple(space.shape):
            raise EnvironmentFailed(
                f"`{method}` gave an observation of shape {list(vector.shape)}, and the space has {list(space.shape)}"
            )
        vector = vector.reshape(-1)
        low, high = self._bounds
        if not (inside := (vector >= low) & (vector <= high) & np.isfinite(vector)).all():
            wrong = int(np.flatnonzero(~inside)[0])
            why = "outside of its space" if np.isfinite(vector[wrong]) else "which is no finite number"
            raise EnvironmentFailed(f"`{method}` gave {vector[wrong]} as number {wrong} of an observation, {why}")
        return vector

    def _one_hot(self, observed: Any, size: int, start: int, method: str) -> Vector:
        place = int(observed) - start
        if not 0 <= place < size:
            raise EnvironmentFailed(
                f"`{method}` gave the observation {observed!r:.100}, and the space has {size} numbers"
            )
        vector = np.zeros(size, np.float32)
        vector[place] = 1.0
        return vector

    def _refuse_other_spaces(self) -> None:
        found = spaces_of(self._environment)
        if (found.observation, found.action) != (self.spaces.observation, self.spaces.action):
            raise EnvironmentFailed(f"it has the spaces {found.name}, and the policy was made for {self.spaces.name}")


def _described(error: Exception | SystemExit) -> tuple[str, str]:
    """Returns the text of an error and its traceback, which a message of ours does not need."""
    if isinstance(error, EnvironmentFailed):
        return str(error), ""
    return f"{type(error).__name__}: {error}", trace(error)


def spaces_of(environment: Any) -> Spaces:
    """Reads the spaces of an environment, by what they have and not by their class. Raises ConfigError for others than
    boxes and discrete ones."""
    observed = environment.observation_space
    acted = environment.action_space
    name = f"{observed} and {acted}"
    if hasattr(observed, "n"):
        observation = int(observed.n)
    elif _is_box(observed):
        observation = math.prod(observed.shape)
    else:
        raise ConfigError(
            f"{MAKE}: its observations are {observed}; a policy sees boxes and discrete spaces: flatten it with "
            "gymnasium.wrappers.FlattenObservation in a function of your own"
        )
    return Spaces(observation, _action_space(acted), name)


def _action_space(space: Any) -> ActionSpace:
    discrete: Kind = "discrete"
    if hasattr(space, "n") and np.ndim(space.n) == 0:
        return ActionSpace(discrete, int(space.n), int(getattr(space, "start", 0)))
    if _is_box(space):
        low, high = (np.asarray(each, np.float64).reshape(-1) for each in (space.low, space.high))
        if not (np.isfinite(low).all() and np.isfinite(high).all() and (high > low).all()):
            raise ConfigError(
                f"{MAKE}: its actions are {space}, which has no finite bounds: wrap it with "
                "gymnasium.wrappers.RescaleAction in a function of your own"
            )
        return ActionSpace(
            "box", len(low), low=tuple(low.tolist()), high=tuple(high.tolist()), shape=tuple(space.shape)
        )
    raise ConfigError(f"{MAKE}: its actions are {space}; a policy acts in boxes and discrete spaces")


def _is_box(space: Any) -> bool:
    return all(hasattr(space, name) for name in ("low", "high", "shape")) and not hasattr(space, "n")


def _bounds(space: Any) -> tuple[Vector, Vector]:
    """Returns the bounds of observations, a little wider than the space for rounding."""
    if hasattr(space, "n"):
        return np.zeros(0, np.float32), np.zeros(0, np.float32)
    low, high = (np.asarray(each, np.float32).reshape(-1) for each in (space.low, space.high))
    finite_low = np.isfinite(low)
    finite_high = np.isfinite(high)
    slack = TOLERANCE * (1 + np.maximum(np.abs(np.where(finite_low, low, 0)), np.abs(np.where(finite_high, high, 0))))
    return np.where(finite_low, low - slack, low).astype(np.float32), np.where(finite_high, high + slack, high).astype(
        np.float32
    )
