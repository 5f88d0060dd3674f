"""Makes what the tests of acting share: configs, and environments that step in this process."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config.schema import Config
from asyncrl.config.sources.load_config import load
from asyncrl.engines.acting.acting_loop import ActingPolicy
from asyncrl.engines.acting.acting_trainer import ActingStep, ActingTrainer
from asyncrl.engines.acting.stepping.one_environment import OneEnvironment
from asyncrl.engines.acting.stepping.spaces import Spaces
from asyncrl.engines.acting.transitions import TransitionRow, batch_of, transition_rows
from asyncrl.protocols.batch import BatchRef, RowRef

ENVIRONMENTS = str(Path(__file__).with_name("line_walk.py"))


def acting_config(env: str, steps: int = 100, learning_rate: float = 3e-3, staleness: int = 2, **acting: Any) -> Config:
    values = {"acting": {"env": env, **acting}, "steps": steps, "staleness.limit": staleness}
    return load(None, (), {}, {**values, "training.learning_rate": learning_rate}).config


class PlainActing:
    """Acts in environments of this process, one after the other, and makes the rows that an acting worker makes."""

    def __init__(self, make: Callable[[], Any], config: Config) -> None:
        self.config = config
        self.environments = [OneEnvironment(make, place, config.seed) for place in range(config.acting.environments)]
        self.spaces = self.environments[0].spaces
        self.policy = ActingPolicy(config, self.spaces, config.seed)
        self.states = [environment.begin(0) for environment in self.environments]
        self.episodes = [0] * len(self.environments)
        self.gained = [0.0] * len(self.environments)
        self.steps = [0] * len(self.environments)
        self.group = 0

    def segment(self, version: int) -> list[dict[str, np.ndarray]]:
        """Returns the rows of one group."""
        rows: list[dict[str, list[Any]]] = [
            {name: [] for name in ("observations", "actions", "logprobs", "rewards", "next_observations", "returns")}
            | {name: [] for name in ("terminated", "truncated", "versions", "lengths")}
            for _ in self.environments
        ]
        for _ in range(self.config.acting.transitions):
            stored, logprobs, actions = self.policy.act(np.stack(self.states))
            for place, environment in enumerate(self.environments):
                self._step(place, environment, rows[place], stored[place], logprobs[place], actions[place], version)
        self.group += 1
        kinds = {"terminated": np.uint8, "truncated": np.uint8, "versions": np.int32, "lengths": np.int32}
        return [
            {name: np.array(values, kinds.get(name, np.float32)).reshape(-1) for name, values in row.items()}
            for row in rows
        ]

    def _step(self, place: int, environment: OneEnvironment, row: Any, *acted: Any) -> None:
        stored, logprob, action, version = acted
        stepped = environment.step(action, self.episodes[place])
        assert not stepped.error, stepped.error
        self.gained[place] += stepped.reward
        self.steps[place] += 1
        for name, value in {
            "observations": self.states[place].copy(),
            "actions": stored,
            "logprobs": logprob,
            "rewards": stepped.reward,
            "next_observations": stepped.observation,
            "terminated": stepped.terminated,
            "truncated": stepped.truncated,
            "versions": version,
        }.items():
            row[name].append(value)
        if stepped.terminated or stepped.truncated:
            row["returns"].append(self.gained[place])
            row["lengths"].append(self.steps[place])
            self.gained[place] = 0.0
            self.steps[place] = 0
            self.episodes[place] += 1
        self.states[place] = stepped.following


def rows_of(
    acting: PlainActing, rows: Sequence[dict[str, np.ndarray]], version: int, limit: int = 2
) -> list[TransitionRow]:
    """Returns rows as a trainer at `version` reads them."""
    refs = tuple(
        RowRef(acting.group, member, 0, 1, 0, len(row["rewards"]), 0, 0, "", ()) for member, row in enumerate(rows)
    )
    return transition_rows(BatchRef(refs), batch_of(rows), acting.spaces, 1, version, limit, "mask")


def run_step(trainer: ActingTrainer, rows: Sequence[TransitionRow], version: int) -> ActingStep:
    step = trainer.begin(rows, version)
    while step.advance():
        pass
    return step


def plain_loop(make: Callable[[], Any], config: Config, until: Callable[[ActingTrainer], bool]) -> ActingTrainer:
    """Acts and trains in turns, until a goal is reached or the steps are done."""
    acting = PlainActing(make, config)
    trainer = ActingTrainer(config, acting.spaces)
    for version in range(config.steps):
        acting.policy.load(trainer.named_tensors(), version)
        run_step(trainer, rows_of(acting, acting.segment(version), version), version)
        if until(trainer):
            break
    return trainer


async def until(condition: Callable[[], bool]) -> None:
    """Waits for a condition, and looks at it after every turn of the loop."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.get_running_loop().run_in_executor(None, lambda: None)


def spaces_of_walk() -> Spaces:
    from tests.unit.engines.acting.line_walk import Walk

    return OneEnvironment(Walk, 0, 0).spaces
