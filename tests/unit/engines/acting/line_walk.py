"""Environments without Gymnasium for tests: a walk on a line, a point that is pushed, and troubles on request."""

import ctypes
import os
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class Box:
    low: np.ndarray
    high: np.ndarray
    dtype: type = np.float32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.low.shape


@dataclass
class Discrete:
    n: int
    start: int = 0


def box(size: int, bound: float) -> Box:
    return Box(np.full(size, -bound, np.float32), np.full(size, bound, np.float32))


Stepped = tuple[Any, float, bool, bool, dict[str, Any]]


class Walk:
    """Actions -1, 0 and 1 move on a line; the goal at `goal` ends the episode with 1, each other step costs 0.1."""

    def __init__(self, goal: int = 3, limit: int = 20, noise: float = 0.0) -> None:
        self.observation_space = box(2, 10.0)
        self.action_space = Discrete(3, start=-1)
        self.goal = goal
        self.limit = limit
        self.noise = noise

    def reset(self, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.place = float(np.random.default_rng(seed).integers(-1, 2))
        self.steps = 0
        return self.seen(), {}

    def step(self, action: int) -> Stepped:
        assert action in (-1, 0, 1)
        self.place += action + self.noise * float(np.random.default_rng().random())
        self.steps += 1
        done = self.place >= self.goal
        reward = 1.0 if done else -0.1
        return self.seen(), reward, done, self.steps >= self.limit, {}

    def seen(self) -> np.ndarray:
        return np.array([np.clip(self.place, -10, 10), 1.0], np.float32)

    def close(self) -> None:
        return


class Push:
    """A force in [-2, 2] pushes a point towards 0; the reward is minus its squared distance."""

    def __init__(self, limit: int = 8) -> None:
        self.observation_space = box(1, 20.0)
        self.action_space = Box(np.array([-2.0], np.float32), np.array([2.0], np.float32))
        self.limit = limit

    def reset(self, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.place = float(np.random.default_rng(seed).uniform(-2, 2))
        self.steps = 0
        return np.array([self.place], np.float32), {}

    def step(self, action: np.ndarray) -> Stepped:
        assert action.shape == (1,)
        assert abs(float(action[0])) <= 2.0
        self.place = float(np.clip(self.place + 0.5 * float(action[0]), -20, 20))
        self.steps += 1
        return np.array([self.place], np.float32), -(self.place**2), False, self.steps >= self.limit, {}


class Troubled(Walk):
    """Makes trouble in step `at` of an episode, with a `flag` file once; `moving`: only in a step to the right."""

    def __init__(self, trouble: str, at: int = 2, flag: str = "", moving: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.trouble = trouble
        self.at = at
        self.flag = flag
        self.moving = moving

    def step(self, action: int) -> Stepped:
        observed, reward, done, cut, info = super().step(action)
        if self.steps == self.at and (action == 1 or not self.moving) and self.first_time():
            match self.trouble:
                case "raise":
                    raise RuntimeError("the floor gave way")
                case "crash":
                    ctypes.string_at(0)  # Reads what no process may read.
                case "hang":
                    time.sleep(60)
                case "shape":
                    observed = np.zeros(3, np.float32)
                case "outside":
                    observed = np.array([99.0, 1.0], np.float32)
                case "nan":
                    observed = np.array([float("nan"), 1.0], np.float32)
                case "reward":
                    reward = float("inf")
                case "text":
                    reward = "1.0"  # type: ignore[assignment]
                case "overflow":
                    reward = 1e300
                case "exit":
                    raise SystemExit(0)
        return observed, reward, done, cut, info

    def first_time(self) -> bool:
        """Returns whether no environment made this trouble before; without a flag, always True."""
        if not self.flag:
            return True
        try:
            os.close(os.open(self.flag, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


class NoStart(Walk):
    def reset(self, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        raise ValueError("no start")


class HangingStart(Walk):
    def reset(self, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        time.sleep(60)
        return super().reset(seed)


class Slow(Walk):
    """Each step takes a while, in which other threads run."""

    def __init__(self, seconds: float = 0.05, **options: Any) -> None:
        super().__init__(**options)
        self.seconds = seconds

    def step(self, action: int) -> Stepped:
        time.sleep(self.seconds)
        return super().step(action)


class Meets(Walk):
    """Each step ends once four environments of a process are in theirs."""

    all_four = threading.Barrier(4)

    def step(self, action: int) -> Stepped:
        self.all_four.wait()
        return super().step(action)


def endless() -> Walk:
    return Walk(goal=10**6, limit=10**6)


class Seen(Walk):
    """Shows its place as a bright column; `picture`: what it shows instead, "hangs" for ever, or "dies"."""

    def __init__(self, picture: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.picture = picture

    def render(self) -> Any:
        match self.picture:
            case "text":
                return "a walk"
            case "raises":
                raise RuntimeError("no screen")
            case "hangs":
                time.sleep(60)
            case "dies":
                ctypes.string_at(0)
        shown = np.zeros((40, 840, 3), np.uint8)
        shown[:, 400 + 20 * int(self.place)] = 255
        return shown
