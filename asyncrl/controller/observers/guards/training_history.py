"""Collects from events what guards look at: metrics of the last trained steps, and counts since the start."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean, median

from asyncrl.config.schema import Config
from asyncrl.controller.journal.ledger import Dropped
from asyncrl.controller.observers.alarms import failed_in
from asyncrl.controller.observers.events import Event, GroupFinished, SampleScored, StepDone
from asyncrl.controller.observers.step_metrics import batch_metrics, step_of
from asyncrl.protocols.batch import BatchRef
from asyncrl.rewards.templates import reaches

WINDOW = 5
"""Steps over which training is judged: a single batch may be all right or all wrong by chance."""
SIGNAL_WINDOW = 10
"""Steps over which groups with equal rewards and the movement of the policy are judged: both vary more."""
NO_GRADIENT = 1e-9
REWARD_LOST = 0.5
"""Share of the best mean reward, counted from the lowest reward of any sample, whose loss is no success."""
REWARD_GAINED = 0.5
"""Share of the gap between the first mean reward and the highest of any sample whose gain is a success."""
LEAST_STALENESS = 0.2
"""Mean staleness from which the KL of a step measures what weights changed, and not only rounding."""
MOST_EQUAL = 0.8
"""Share of equal groups over which hardly anything is taught; up to it a step should move the policy."""
BY_GROUP = frozenset(("group_mean", "leave_one_out", "group_batch"))
"""Values of algorithm.advantage under which a group with equal rewards teaches nothing."""


@dataclass(slots=True)
class TrainingHistory:
    """Collects what the guards look at. steps: metrics of the last trained steps. Rewards count since this start.

    limit: twice the samples that may be in flight. members, batch: samples of a group and of a step. planned: steps of
    the run; warmup: those in which the learning rate rises. by_group: whether advantages compare the samples of a
    group. in_order: whether rows are drawn in their order. turn_discount: of advantages by turn. equal_texts:
    share of the recorded groups of a step whose texts are all the same. moves: how far log-probs moved in a step, over
    the steps that tell. rewards_varied: whether a batch had unequal rewards. untrainable: samples of the steps in a row
    without a gradient. groups_without_signal, errors_in_a_row:
    counts up to now. scored, failed: samples, and those of them with a failed call of a reward, or a failed
    environment. failing: which of these the last error was of.
    """

    limit: int
    members: int
    batch: int
    planned: int = 100
    warmup: int = 0
    by_group: bool = True
    in_order: bool = False
    turn_discount: float | None = None
    steps: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=SIGNAL_WINDOW))
    equal_texts: deque[float] = field(default_factory=lambda: deque(maxlen=SIGNAL_WINDOW))
    moves: deque[float] = field(default_factory=lambda: deque(maxlen=SIGNAL_WINDOW))
    step: int = 0
    samples: int = 0
    rewards_varied: bool = False
    untrainable: int = 0
    first: float | None = None
    best: float = -float("inf")
    lowest: float = float("inf")
    highest: float = -float("inf")
    first_entropy: float = 0.0
    groups_without_signal: int = 0
    equal_reward: float | None = None
    errors_in_a_row: int = 0
    scored: int = 0
    failed: int = 0
    last_error: str = ""
    failing: str = ""
    _first_rewards: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config, limit: int) -> "TrainingHistory":
        members = config.task.samples_per_prompt
        training = config.training
        return cls(
            limit,
            members,
            members * config.task.prompts_per_step,
            planned=config.steps,
            warmup=training.warmup_steps,
            by_group=config.algorithm.advantage in BY_GROUP,
            in_order=not config.task.shuffle,
            turn_discount=config.algorithm.turn_discount,
        )

    def observe(self, event: Event) -> None:
        match event:
            case SampleScored(sample, score):
                self._scored(sample.group, score.reward, score.error, failed_in(event))
            case Dropped(group, reason="no_signal"):
                self.groups_without_signal += 1
                self.equal_reward = self._first_rewards.pop(group, self.equal_reward)
            case GroupFinished(group):
                self._first_rewards.pop(group, None)
            case StepDone(cuts, report) if not report.skipped:
                metrics = {**report.metrics, **batch_metrics(cuts.batch, turn_discount=self.turn_discount)}
                self._trained(step_of(report), cuts.batch, metrics)

    def mean(self, metric: str, window: int = WINDOW) -> float | None:
        """Returns the mean over the last steps, None before there are as many with this metric."""
        newest = islice(reversed(self.steps), window)
        found = [step[metric] for step in newest if metric in step]
        return fmean(found) if len(found) == window else None

    @property
    def all_failed(self) -> bool:
        """Returns whether a reward failed for every sample."""
        return self.failed == self.scored > 0

    @property
    def reward_fell(self) -> bool:
        """Returns whether the mean reward lost most of what it once had over the lowest."""
        now = self.mean("reward/mean")
        if now is None or reaches(self.lowest, self.best):
            return False
        return reaches(self.best - now, REWARD_LOST * (self.best - self.lowest), abs(self.best))

    @property
    def reward_rose(self) -> bool:
        """Returns whether the mean reward once gained most of what it lacked to the highest at first."""
        if self.first is None or reaches(self.first, self.highest):
            return False
        return reaches(self.best - self.first, REWARD_GAINED * (self.highest - self.first), abs(self.highest))

    @property
    def moved(self) -> float | None:
        """Returns the median move of log-probs in a step, in nats; None before SIGNAL_WINDOW steps tell."""
        return median(self.moves) if len(self.moves) == SIGNAL_WINDOW else None

    def _scored(self, group: int, reward: float | None, error: str, where: str) -> None:
        self.scored += 1
        self.failed += bool(error)
        self.errors_in_a_row = self.errors_in_a_row + 1 if error and where == self.failing else int(bool(error))
        self.failing = where if error else self.failing
        self.last_error = error.partition("\n")[0] or self.last_error
        if reward is not None and reward != self._first_rewards.setdefault(group, reward):
            self.groups_without_signal = 0

    def _trained(self, step: int, batch: BatchRef, metrics: Mapping[str, float]) -> None:
        self.step = step
        self.steps.append(metrics)
        self.samples += len(batch)
        self.groups_without_signal = 0  # What was trained had a signal.
        varied = metrics["reward/std"] > 0 or metrics.get("reward/equal_groups", 1.0) < 1
        self.rewards_varied = self.rewards_varied or varied
        self.untrainable = 0 if metrics.get("grad_norm", 1.0) > NO_GRADIENT else self.untrainable + len(batch)
        rewards = [row.reward for row in batch if row.reward is not None]
        self.lowest = min([self.lowest, *rewards])
        self.highest = max([self.highest, *rewards])
        if (now := self.mean("reward/mean")) is not None:
            self.first = now if self.first is None else self.first
            self.best = max(self.best, now)
            self.first_entropy = self.first_entropy or self.mean("policy/entropy") or 0.0
        if step > self.warmup and (move := _move(metrics)) is not None:
            self.moves.append(move)


def _move(metrics: Mapping[str, float]) -> float | None:
    """Returns how far the log-prob of a sampled token moved in a step, in nats: the root mean square of the difference
    of log-probs between the versions that sampled and that train, which is sqrt(2 KL) for a small one, divided by the
    number of versions between them. None where a step cannot tell: its samples are too fresh, or hardly taught."""
    staleness = metrics.get("staleness/mean", 0.0)
    kl = metrics.get("mismatch/kl")
    taught = metrics.get("grad_norm", 0.0) > NO_GRADIENT and metrics.get("reward/equal_groups", 0.0) <= MOST_EQUAL
    if kl is None or staleness < LEAST_STALENESS or not taught or not metrics.get("learning_rate"):
        return None
    return math.sqrt(2 * max(0.0, kl)) / staleness
