"""Acts in all environments of a worker with the newest weights, and records the transitions that calls ask for.

    begin ── recordings, a queue for each environment ──┐
                                                         v
    states ── policy ── actions ──> environments ── answers ── transitions of the first recording ──> finished

Synchronous: the policy acts when every environment has answered. Asynchronous: as soon as one has. Weights change
between two actions; each transition has the version that acted.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.engines.acting.networks import Actor, half_widths, performed
from asyncrl.engines.acting.stepping.answers import Answers, Floats
from asyncrl.engines.acting.stepping.spaces import Spaces
from asyncrl.engines.acting.stepping.stepped_environments import SteppedEnvironments
from asyncrl.fleet.worker.compute_thread import ThreadCompute
from asyncrl.lanes.weights.slot_memory import WeightsSpec, spec_of
from asyncrl.protocols.batch import SampleName

Row = dict[str, NDArray[Any]]
NO_WEIGHTS = -1
"""Version before the first weights."""


class ActingPolicy:
    """version: of its weights. Below `random_until` SAC acts at random, uniformly over its box. Not thread-safe."""

    def __init__(self, config: Config, spaces: Spaces, seed: int, version: int = NO_WEIGHTS) -> None:
        settings = config.acting
        self.version = version
        self.spaces = spaces
        self.actor = Actor(spaces, settings.hidden_size, settings.activation).requires_grad_(False)
        self._random = torch.Generator().manual_seed(seed)
        step = config.task.prompts_per_step * settings.environments * settings.transitions
        self.random_until = -(-settings.warm_up // step) if settings.algorithm == "sac" else 0

    @property
    def spec(self) -> WeightsSpec:
        return spec_of(self.actor, "float32")

    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Copies published weights."""
        for name, parameter in self.actor.named_parameters():
            parameter.copy_(tensors[name])
        self.version = version

    @torch.no_grad()
    def act(self, states: Floats, *, greedy: bool = False) -> tuple[Floats, Floats, Floats]:
        """Returns for each state the stored action, its log-prob, and the action as the environment gets it. greedy:
        the likeliest action, or the mean of a Gaussian."""
        if self.random_until and self.version < self.random_until and not greedy:
            return self._at_random(len(states))
        distribution = self.actor.distribution(torch.from_numpy(np.ascontiguousarray(states)))
        stored = distribution.mode() if greedy else distribution.sample(self._random)
        logprobs = distribution.logprobs(stored)
        return stored.numpy(), logprobs.numpy(), performed(stored, self.spaces.action)

    def _at_random(self, count: int) -> tuple[Floats, Floats, Floats]:
        """Draws uniformly from the box; the stored action is what tanh makes of it."""
        space = self.spaces.action
        unit = torch.rand(count, space.size, generator=self._random) * 2 - 1
        stored = unit.clamp(-1 + 1e-6, 1 - 1e-6).atanh()
        density = -half_widths(space) - space.size * float(np.log(2))
        return stored.numpy(), np.full(count, density, np.float32), performed(stored, space)


@dataclass(slots=True)
class Recording:
    """The transitions of one sample as they come. not_before: version from which on it may begin. filled: transitions
    so far. returns, lengths: of episodes that ended here. latest: return of the newest one that ended."""

    name: SampleName
    not_before: int
    columns: Row
    filled: int = 0
    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    latest: float = 0.0

    @classmethod
    def of(cls, name: SampleName, not_before: int, spaces: Spaces, transitions: int) -> "Recording":
        numbers: Row = {
            "observations": np.zeros((transitions, spaces.observation), np.float32),
            "actions": np.zeros((transitions, spaces.action.stored), np.float32),
            "logprobs": np.zeros(transitions, np.float32),
            "rewards": np.zeros(transitions, np.float32),
            "next_observations": np.zeros((transitions, spaces.observation), np.float32),
            "terminated": np.zeros(transitions, np.uint8),
            "truncated": np.zeros(transitions, np.uint8),
            "versions": np.zeros(transitions, np.int32),
        }
        return cls(name, not_before, numbers)

    @property
    def is_full(self) -> bool:
        return self.filled == len(self.columns["rewards"])

    def row(self) -> Row:
        """Returns the columns as rows have them."""
        flat = {name: values.reshape(-1) for name, values in self.columns.items()}
        return {**flat, "returns": np.array(self.returns, np.float32), "lengths": np.array(self.lengths, np.int32)}


@dataclass(slots=True)
class ActedIn:
    """Holds what the loop knows of one environment. action, logprob, version: of the action that is not answered yet,
    if waiting. gained, steps: of the running episode; latest: return of the last one that ended."""

    recordings: deque[Recording] = field(default_factory=deque)
    waiting: bool = False
    action: NDArray[np.float32] | None = None
    logprob: float = 0.0
    version: int = 0
    gained: float = 0.0
    steps: int = 0
    latest: float | None = None


class ActingLoop:
    """Runs on the event loop; the policy computes on the compute thread. finished: takes each recording once it is
    full. failed: takes why an environment lost an episode, by number."""

    def __init__(
        self,
        policy: ActingPolicy,
        environments: SteppedEnvironments,
        compute: ThreadCompute,
        *,
        count: int,
        transitions: int,
        lockstep: bool,
        finished: Callable[[Recording], None],
        failed: Callable[[int, str], None],
    ) -> None:
        self.policy = policy
        self.steps = 0
        self._environments = environments
        self._compute = compute
        self._occupancy = compute.occupancy
        self._transitions = transitions
        self._lockstep = lockstep
        self._finished = finished
        self._failed = failed
        self._acted = [ActedIn() for _ in range(count)]
        self._states = environments.states
        self._paused = False
        self._changed = asyncio.Event()

    @property
    def running(self) -> int:
        """Returns the environments that record a sample."""
        return sum(bool(each.recordings) for each in self._acted)

    @property
    def waiting(self) -> int:
        """Returns the samples that wait for their environment."""
        return sum(max(0, len(each.recordings) - 1) for each in self._acted)

    def record(self, names: Iterable[SampleName], not_before: int) -> None:
        """Records a sample in the environment of each member."""
        for name in names:
            recording = Recording.of(name, not_before, self.policy.spaces, self._transitions)
            self._acted[name[1]].recordings.append(recording)
        self.changed()

    def drop(self, names: Iterable[SampleName]) -> None:
        """Drops samples that nobody waits for; their episodes go on in the next one."""
        for name in names:
            own = self._acted[name[1]].recordings
            for recording in [each for each in own if each.name == name]:
                own.remove(recording)

    def changed(self) -> None:
        """Looks again for environments to act in: there are samples, weights or a resume."""
        self._changed.set()

    def pause(self, paused: bool) -> int:
        """Prevents or allows further actions; returns the number of actions so far."""
        self._paused = paused
        self.changed()
        return self.steps

    async def run(self) -> None:
        """Acts until cancelled. Raises EnvironmentFailed when no episode can begin, or too many were lost in a row."""
        while True:
            await self._act()
            if any(each.waiting for each in self._acted):
                with self._occupancy.computing():
                    answered = await self._environments.answers()
                for each in answered:
                    self._take(each)
            else:
                late = not self._paused and any(each.recordings for each in self._acted)
                with self._occupancy.awaiting_weights() if late else self._occupancy.out_of_work():
                    await self._changed.wait()
                self._changed.clear()

    async def _act(self) -> None:
        """Acts in the environments that have answered and record a sample, all at once or none where they step
        together."""
        if self._paused or (self._lockstep and any(each.waiting for each in self._acted)):
            return
        version = self.policy.version
        ready = [place for place, each in enumerate(self._acted) if self._is_ready(each, version)]
        if not ready:
            return
        places = np.array(ready)
        self.steps += len(ready)
        version, (stored, logprobs, actions) = await self._compute.run(self._policy_actions, self._states[places])
        for index, place in enumerate(ready):
            acted = self._acted[place]
            acted.waiting = True
            acted.action = stored[index]
            acted.logprob = float(logprobs[index])
            acted.version = version
        self._environments.act(places, actions)

    def _policy_actions(self, states: Floats) -> tuple[int, tuple[Floats, Floats, Floats]]:
        """Returns the actions in these states, with the version of the weights that acted, on the compute thread."""
        return self.policy.version, self.policy.act(states)

    def _is_ready(self, acted: ActedIn, version: int) -> bool:
        if acted.waiting or not acted.recordings:
            return False
        first = acted.recordings[0]
        return first.filled > 0 or version >= max(0, first.not_before)

    def _take(self, answers: Answers) -> None:
        for place, why in answers.errors.items():
            self._failed(place, why)
        for index, place in enumerate(answers.places.tolist()):
            acted = self._acted[place]
            if answers.continued:
                self._record(acted, place, answers, index)
            elif acted.recordings and (recording := acted.recordings[0]).filled:
                recording.columns["truncated"][recording.filled - 1] = 1
            self._states[place] = answers.following[index]
            if answers.ended[index]:
                self._end_episode(acted, was_lost=place in answers.errors)
            if acted.recordings and acted.recordings[0].is_full:
                self._finish(acted)

    def _record(self, acted: ActedIn, place: int, answers: Answers, index: int) -> None:
        reward = float(answers.rewards[index])
        acted.waiting = False
        acted.gained += reward
        acted.steps += 1
        if not acted.recordings:  # It was dropped while the environment stepped.
            return
        recording = acted.recordings[0]
        columns = acted.recordings[0].columns
        at = recording.filled
        columns["observations"][at] = self._states[place]
        columns["actions"][at] = acted.action
        columns["logprobs"][at] = acted.logprob
        columns["rewards"][at] = reward
        columns["next_observations"][at] = answers.observations[index]
        columns["terminated"][at] = answers.terminated[index]
        columns["truncated"][at] = answers.truncated[index]
        columns["versions"][at] = acted.version
        recording.filled += 1

    def _end_episode(self, acted: ActedIn, was_lost: bool) -> None:
        """Takes the return of an episode that ended; one that was lost has none."""
        if not was_lost:
            acted.latest = acted.gained
            if acted.recordings:
                acted.recordings[0].returns.append(acted.gained)
                acted.recordings[0].lengths.append(acted.steps)
        acted.gained = 0.0
        acted.steps = 0

    def _finish(self, acted: ActedIn) -> None:
        recording = acted.recordings.popleft()
        recording.latest = acted.gained if acted.latest is None else acted.latest
        self._finished(recording)
