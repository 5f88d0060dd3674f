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
from asyncrl.engines.training.optimizer import Optimizer
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
        named = {"actor": self.actor, "critics": self.critics, "temperature": self.temperature}
        self._optimizers = {name: self.optimizer_of(module, updates) for name, module in named.items()}
        self._target_entropy = -float(spaces.action.size)
        """Minus the number of dimensions, in the box [-1, 1] of squashed actions (arXiv 1812.05905, appendix D)."""

        self._owed = 0.0
        self._sums: dict[str, list[Tensor | float]] = defaultdict(list)

    @property
    def modules(self) -> dict[str, nn.Module]:
        own = {"actor": self.actor, "critics": self.critics}
        return {**own, "targets": self.targets, "temperature": self.temperature}

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        return self._optimizers

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
        observations, stored = drawn.observations, drawn.actions
        temperature = self.temperature.log.exp().detach()
        with torch.no_grad():
            following = self.actor.gaussian(drawn.next_observations)
            then = following.sample()
            next_values = self.targets(drawn.next_observations, then.tanh()).amin(dim=0)
            logprobs = following.unit_logprobs(then)
            targets = soft_targets(
                drawn.rewards, drawn.terminated, next_values, logprobs, temperature, self.settings.gamma
            )
        values = self.critics(observations, stored.tanh())
        of_critics = critics_loss(values, targets, drawn.weights)
        distribution = self.actor.gaussian(observations)
        acted = distribution.with_gradient()
        logprobs = distribution.unit_logprobs(acted)
        norm = self.take(self._optimizers["critics"], of_critics)
        self.critics.requires_grad_(False)  # The gradient of the actor passes through, and stops nowhere there.
        of_actor = actor_loss(logprobs, self.critics(observations, acted.tanh()).amin(dim=0), temperature)
        self.critics.requires_grad_(True)
        if norm is None or self.take(self._optimizers["actor"], of_actor) is None:
            self._optimizers["actor"].discard()
            self.refused += 1
            return
        self.take(
            self._optimizers["temperature"], temperature_loss(self.temperature.log, logprobs, self._target_entropy)
        )
        move_towards(list(self.targets.parameters()), list(self.critics.parameters()), self.settings.tau)
        self.replay.update(drawn, (values - targets).detach().abs().mean(dim=0).double().numpy())
        self.norms.append(norm)
        ages = float(version - drawn.versions.mean())
        measured = {"critic/loss": of_critics, "loss/policy": of_actor, "policy/entropy": -logprobs.mean()}
        for name, value in {**measured, "critic/value_mean": values.mean(), "replay/age_mean": ages}.items():
            self._sums[name].append(value.detach() if isinstance(value, Tensor) else value)
