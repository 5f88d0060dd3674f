"""PPO (arXiv 1707.06347) on the transitions of environments: passes of clipped updates over the batch of a step.

The behaviour log-probs are those with which the acting worker sampled, as for tokens, so the ratio of a transition that
an older version made is right too.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from asyncrl.config.schema import Config
from asyncrl.engines.acting.learner import Learner
from asyncrl.engines.acting.networks import ActionDistribution, StateValues
from asyncrl.engines.acting.stepping.spaces import Spaces
from asyncrl.engines.acting.transitions import TransitionRow, joined
from asyncrl.objectives.advantages import trajectory_advantages
from asyncrl.objectives.losses import clipped_loss, explained_variance, log_ratio, value_loss

OF_UPDATES = ("loss/policy", "critic/loss", "loss/entropy", "policy/ratio_mean", "policy/ratio_max", "policy/clip_frac")
"""Metrics that each update adds to, in this order."""
SMALL = 1e-8
"""Added to the standard deviation of advantages."""


@dataclass(frozen=True, slots=True)
class LiveTransitions:
    """An update draws from these: the live transitions of a step, [transitions] or [transitions, numbers]."""

    observations: Tensor
    actions: Tensor
    behaviour: Tensor
    advantages: Tensor
    returns: Tensor
    values: Tensor

    def __len__(self) -> int:
        return len(self.behaviour)

    def at(self, places: Tensor) -> "LiveTransitions":
        return LiveTransitions(*(getattr(self, name)[places] for name in self.__slots__))


class PpoLearner(Learner):
    """Trains policy and values with one optimizer."""

    def __init__(self, config: Config, spaces: Spaces) -> None:
        super().__init__(config, spaces)
        settings = self.settings
        self.values = StateValues(spaces, settings.hidden_size, settings.activation)
        whole = config.task.prompts_per_step * settings.environments * settings.transitions
        self.optimizer = self.optimizer_of([self.actor, self.values], settings.epochs * -(-whole // settings.minibatch))
        self._sums: dict[str, list[float]] = defaultdict(list)

    @property
    def modules(self) -> dict[str, nn.Module]:
        return {"actor": self.actor, "values": self.values}

    def learn(self, rows: Sequence[TransitionRow], version: int) -> Iterator[bool]:
        self._sums.clear()
        batch = self._valued(rows)
        random = np.random.default_rng([self.config.seed, version])
        for _ in range(self.settings.epochs):
            order = torch.from_numpy(random.permutation(len(batch)))
            for places in torch.split(order, self.settings.minibatch):
                self._update(batch.at(places))
                yield True
        for row in rows:
            row.trained = int(row.live.sum()) if self.norms else 0

    def metrics(self) -> dict[str, float]:
        found = {name: fmean(values) for name, values in self._sums.items()}
        if "policy/ratio_max" in self._sums:
            found["policy/ratio_max"] = max(self._sums["policy/ratio_max"])
        return found

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        assert not state, "PPO keeps nothing from step to step but its weights"

    @torch.no_grad()
    def _valued(self, rows: Sequence[TransitionRow]) -> LiveTransitions:
        """Computes advantages of whole trajectories with the present values, and returns the live transitions."""
        names = ("observations", "next_observations", "actions", "logprobs")
        observations, following, actions, behaviour = (torch.from_numpy(joined(rows, name)) for name in names)
        values = self.values(observations)
        next_values = self.values(following)
        lengths = [len(row) for row in rows]
        advantages = np.concatenate(
            [
                trajectory_advantages(
                    row.rewards.astype(np.float64),
                    own.double().numpy(),
                    after.double().numpy(),
                    row.terminated,
                    row.ended,
                    self.settings.gamma,
                    self.settings.gae_lambda,
                )
                for row, own, after in zip(
                    rows, torch.split(values, lengths), torch.split(next_values, lengths), strict=True
                )
            ]
        )
        live = torch.from_numpy(joined(rows, "live"))
        gains = torch.from_numpy(advantages).float()
        returns = gains + values
        moments = [(float(len(x)), float(x.sum()), float(x.square().sum())) for x in (returns.double(), gains.double())]
        self._sums["critic/explained_variance"].append(explained_variance(moments[0], moments[1]))
        return LiveTransitions(*(each[live] for each in (observations, actions, behaviour, gains, returns, values)))

    def _update(self, batch: LiveTransitions) -> None:
        settings = self.settings
        distribution = self.actor.distribution(batch.observations)
        current = distribution.logprobs(batch.actions)
        advantages = (batch.advantages - batch.advantages.mean()) / (batch.advantages.std(correction=0) + SMALL)
        surrogate = clipped_loss(
            log_ratio(current, batch.behaviour), advantages, settings.clip_range, settings.clip_range
        )
        errors, _ = value_loss(self.values(batch.observations), batch.values, batch.returns, 0.0)
        bonus = torch.zeros(())
        if not self.norms and not self.refused:
            self._measure_first(batch, current.detach(), distribution)
        if settings.entropy_bonus > 0:
            bonus = -settings.entropy_bonus * distribution.entropy().mean()
        policy = surrogate.terms.mean()
        values = errors.mean()
        loss = policy + settings.value_coefficient * values + bonus
        if not self.take(loss):
            return
        measured = (
            policy,
            values,
            bonus,
            surrogate.ratio.mean(),
            surrogate.ratio.max(),
            surrogate.clipped.float().mean(),
        )
        for name, value in zip(OF_UPDATES, torch.stack(measured).tolist(), strict=True):
            self._sums[name].append(value)

    @torch.no_grad()
    def _measure_first(self, batch: LiveTransitions, current: Tensor, distribution: ActionDistribution) -> None:
        """Measures the policy as it was before the first update of the step."""
        self._sums["policy/kl_rollout_train"].append(float((batch.behaviour - current).mean()))
        self._sums["policy/entropy"].append(float(distribution.entropy().mean()))
