"""SAC (arXiv 1812.05905): twin critics, a learned temperature, target networks, and a replay of old transitions."""

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.config.schema import Config
from asyncrl.engines.acting.learner import Learner
from asyncrl.engines.acting.networks import TwinCritics
from asyncrl.engines.acting.replay_buffer import DrawnTransitions, ReplayBuffer
from asyncrl.engines.acting.stepping.spaces import Spaces
from asyncrl.engines.acting.transitions import TransitionRow
from asyncrl.objectives.soft_actor_critic import actor_loss, critics_loss, move_towards, soft_targets, temperature_loss


class Temperature(nn.Module):
    """The logarithm of the temperature, which begins at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.zeros(()))


class SacLearner(Learner):
    """Adds the live transitions of a step to the replay, then takes updates in proportion to their number."""

    def __init__(self, config: Config, spaces: Spaces) -> None:
        super().__init__(config, spaces)
        settings = self.settings
        self.critics = TwinCritics(spaces, settings.hidden_size, settings.activation)
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.temperature = Temperature()
        self.replay = ReplayBuffer(settings.replay_size, spaces, config.seed, settings.replay)
        step = config.task.prompts_per_step * settings.environments * settings.transitions
        updates = round(step * settings.updates_per_transition)
        self.optimizer = self.optimizer_of([self.actor, self.critics, self.temperature], updates)
        self._target_entropy = -float(spaces.action.size)
        """Minus the number of dimensions, in the box [-1, 1] of squashed actions (arXiv 1812.05905, appendix D)."""

        self._target_weights: list[Tensor] = [*self.targets.parameters()]
        self._critic_weights: list[Tensor] = [*self.critics.parameters()]
        self._owed = 0.0
        self._sums: dict[str, list[Tensor | float]] = defaultdict(list)

    @property
    def modules(self) -> dict[str, nn.Module]:
        own = {"actor": self.actor, "critics": self.critics}
        return {**own, "targets": self.targets, "temperature": self.temperature}

    def learn(self, rows: Sequence[TransitionRow], version: int) -> Iterator[bool]:
        self._sums.clear()
        for row in rows:
            self.replay.add(row)
            row.trained = int(row.live.sum())
        if self.replay.added < self.settings.warm_up:
            return
        self._owed += self.settings.updates_per_transition * sum(row.trained for row in rows)
        while self._owed >= 1:
            self._owed -= 1
            self._update(self.replay.draw(self.settings.minibatch, self._oldest(version)), version)
            yield True

    def metrics(self) -> dict[str, float]:
        found = {name: fmean(map(float, values)) for name, values in self._sums.items()}
        return {
            **found,
            "replay/transitions": float(len(self.replay)),
            "sac/temperature": float(self.temperature.log.detach().exp()),
        }

    def state(self) -> dict[str, Any]:
        return {"replay": self.replay.state(), "owed": self._owed}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.replay.restore(state["replay"])
        self._owed = state["owed"]

    def _oldest(self, version: int) -> int:
        return version - self.settings.replay_max_age if self.settings.replay_max_age else 0

    def _update(self, drawn: DrawnTransitions, version: int) -> None:
        """Takes one step down the sum of three losses, each with gradients for a network of its own."""
        temperature = self.temperature.log.exp().detach()
        distribution = self.actor.gaussian(drawn.observations)
        acted = distribution.with_gradient()
        logprobs = distribution.unit_logprobs(acted)
        values, targets = self.critics(drawn.observations, drawn.actions.tanh()), self._targets(drawn, temperature)
        of_critics = critics_loss(values, targets, drawn.weights)
        judged = self.critics(drawn.observations, acted.tanh(), trained=False).amin(dim=0)
        of_actor = actor_loss(logprobs, judged, temperature)
        of_temperature = temperature_loss(self.temperature.log, logprobs, self._target_entropy)
        if not self.take(of_critics + of_actor + of_temperature):
            return
        move_towards(self._target_weights, self._critic_weights, self.settings.tau)
        if self.settings.replay == "prioritised":
            self.replay.update(drawn, (values - targets).detach().abs().mean(dim=0).double().numpy())
        ages = float(version - drawn.versions.mean())
        measured = {"critic/loss": of_critics, "loss/policy": of_actor, "policy/entropy": -logprobs.mean()}
        for name, value in {**measured, "critic/value_mean": values.mean(), "replay/age_mean": ages}.items():
            self._sums[name].append(value.detach() if isinstance(value, Tensor) else value)

    @torch.no_grad()
    def _targets(self, drawn: DrawnTransitions, temperature: Tensor) -> Tensor:
        following = self.actor.gaussian(drawn.next_observations)
        then = following.sample()
        values = self.targets(drawn.next_observations, then.tanh()).amin(dim=0)
        logprobs = following.unit_logprobs(then)
        return soft_targets(drawn.rewards, drawn.terminated, values, logprobs, temperature, self.settings.gamma)
