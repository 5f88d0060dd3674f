"""Guards find training that goes on and comes to nothing; the section `[guards]` says what each does: warn, stop, off.

    events ──> TrainingHistory ──> each row of GUARDS: trouble, or nothing ──> one sentence, or the end of the run

A guard speaks once, and again only after WINDOW steps without that trouble.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean

from asyncrl.config.schema import Config
from asyncrl.controller.journal.ledger import Dropped
from asyncrl.controller.observers.alarms import Alarm
from asyncrl.controller.observers.events import Event, GroupFinished, SampleScored, StepDone
from asyncrl.controller.observers.step_metrics import batch_metrics, step_of
from asyncrl.protocols.batch import BatchRef

WINDOW = 5
"""Steps over which training is judged: a single batch may be all right or all wrong by chance."""
FEWEST_SAMPLES = 64
"""Samples with equal rewards, from the first step on, after which a constant reward is more likely than chance."""
STREAK_SAMPLES = 512
"""Samples without a gradient after which a collapse is likelier than a row of unlucky small batches."""
STREAK_GROUPS = 128
"""Groups in a row without a signal. With a signal in one of ten groups, one row in a million is as long."""
LARGEST_TRUNCATED = 0.5
NO_GRADIENT = 1e-9
ENTROPY_LEFT = 0.02
"""Share of the entropy of the first steps under which the policy hardly samples any more."""
REWARD_LOST = 0.5
"""Share of the best mean reward, counted from the lowest reward of any sample, whose loss is no success."""


@dataclass(slots=True)
class TrainingHistory:
    """Collects what the guards look at. steps: metrics of the last trained steps. Rewards count since this start.

    rewards_varied: whether a batch had unequal rewards. untrainable: samples of the steps in a row without a gradient.
    groups_without_signal, errors_in_a_row: counts up to now. scored, failed: samples, and those of them with a failed
    call of a reward. limit: twice the samples that may be in flight.
    """

    limit: int
    members: int
    batch: int
    steps: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    step: int = 0
    samples: int = 0
    rewards_varied: bool = False
    untrainable: int = 0
    best: float = -float("inf")
    lowest: float = float("inf")
    first_entropy: float = 0.0
    groups_without_signal: int = 0
    equal_reward: float | None = None
    errors_in_a_row: int = 0
    scored: int = 0
    failed: int = 0
    last_error: str = ""
    _first_rewards: dict[int, float] = field(default_factory=dict)

    def observe(self, event: Event) -> None:
        match event:
            case SampleScored(sample, score):
                self._scored(sample.group, score.reward, score.error)
            case Dropped(group, reason="no_signal"):
                self.groups_without_signal += 1
                self.equal_reward = self._first_rewards.pop(group, self.equal_reward)
            case GroupFinished(group):
                self._first_rewards.pop(group, None)
            case StepDone(cuts, report) if not report.skipped:
                self._trained(step_of(report), cuts.batch, {**report.metrics, **batch_metrics(cuts.batch)})

    def mean(self, metric: str) -> float | None:
        """Returns the mean over the last WINDOW steps, None before there are as many with this metric."""
        found = [step[metric] for step in self.steps if metric in step]
        return fmean(found) if len(found) == WINDOW else None

    @property
    def all_failed(self) -> bool:
        """Returns whether a reward failed for every sample."""
        return self.failed == self.scored > 0

    @property
    def reward_fell(self) -> bool:
        """Returns whether the mean reward lost most of what it once had over the lowest."""
        now = self.mean("reward/mean")
        return (
            now is not None and self.best > self.lowest and self.best - now >= REWARD_LOST * (self.best - self.lowest)
        )

    def _scored(self, group: int, reward: float | None, error: str) -> None:
        self.scored += 1
        self.failed += bool(error)
        self.errors_in_a_row = self.errors_in_a_row + 1 if error else 0
        self.last_error = error.partition("\n")[0] or self.last_error
        if reward is not None and reward != self._first_rewards.setdefault(group, reward):
            self.groups_without_signal = 0

    def _trained(self, step: int, batch: BatchRef, metrics: Mapping[str, float]) -> None:
        self.step = step
        self.steps.append(metrics)
        self.samples += len(batch)
        self.rewards_varied = self.rewards_varied or metrics["reward/std"] > 0
        self.untrainable = 0 if metrics.get("grad_norm", 1.0) > NO_GRADIENT else self.untrainable + len(batch)
        self.lowest = min([self.lowest, *(row.reward for row in batch if row.reward is not None)])
        if (now := self.mean("reward/mean")) is not None:
            self.best = max(self.best, now)
            self.first_entropy = self.first_entropy or self.mean("policy/entropy") or 0.0


def _no_signal(history: TrainingHistory) -> str:
    if history.groups_without_signal < max(STREAK_GROUPS, 4 * history.batch // history.members):
        return ""
    equal = "" if history.equal_reward is None else f", the newest {history.equal_reward:g}"
    return (
        f"{history.groups_without_signal} groups in a row had equal rewards{equal}, and algorithm.dynamic_sampling "
        f"drops such groups, so nothing was trained after step {history.step}"
    )


def _no_variance(history: TrainingHistory) -> str:
    if len(history.steps) < WINDOW:
        return ""
    if not history.rewards_varied and history.samples >= FEWEST_SAMPLES:
        reward = history.steps[-1]["reward/mean"]
        if history.all_failed:
            return (
                f"a reward failed for each of the {history.scored} samples scored so far, so that all "
                f"{history.samples} up to step {history.step} got {reward:g}, and none can teach: {history.last_error}"
            )
        return (
            f"all {history.samples} samples up to step {history.step} got the same reward, {reward:g}, and none can "
            "teach"
        )
    if history.untrainable == history.samples >= STREAK_SAMPLES:
        equal = ": the samples of each group got equal rewards" if history.mean("reward/equal_groups") == 1 else ""
        return f"the gradient was 0 in every step up to step {history.step}, for {history.samples} samples{equal}"
    return ""


def _reward_errors(history: TrainingHistory) -> str:
    if history.errors_in_a_row < history.limit:
        return ""
    return f"a reward function failed on each of the last {history.errors_in_a_row} samples: {history.last_error}"


def _collapse(history: TrainingHistory) -> str:
    entropy, first = history.mean("policy/entropy"), history.first_entropy
    if not history.reward_fell:
        return ""
    fell = f"the mean reward fell from {history.best:.3g} to {history.mean('reward/mean'):.3g}"
    if STREAK_SAMPLES <= history.untrainable < history.samples:
        return f"the gradient is 0 since {history.untrainable} samples, and {fell}"
    if entropy is not None and entropy < ENTROPY_LEFT * first:
        return f"the entropy of the policy fell from {first:.3g} to {entropy:.3g} nats a token, and {fell}"
    return ""


def _truncation(history: TrainingHistory) -> str:
    truncated = history.mean("completions/truncated_fraction")
    if truncated is None or truncated <= LARGEST_TRUNCATED:
        return ""
    return f"{truncated:.0%} of the completions of the last {WINDOW} steps ended at generation.max_new_tokens"


@dataclass(frozen=True, slots=True)
class Guard:
    """One guard. key: of `[guards]`. sees: describes the trouble, "" without. advice: what to do then. looks_at_steps:
    it looks at trained steps, not at each sample. advice_on_failures: in place of the advice where every reward failed.
    """

    key: str
    sees: Callable[[TrainingHistory], str]
    advice: str
    looks_at_steps: bool = True
    advice_on_failures: str = ""

    def describe(self, history: TrainingHistory) -> str:
        """Returns the trouble with the advice, "" without trouble."""
        advice = (history.all_failed and self.advice_on_failures) or self.advice
        return f"{trouble}; {advice}" if (trouble := self.sees(history)) else ""


CORRECT_THE_FUNCTION = (
    'reward.on_error = "zero" counts 0 for each: correct the function; its errors are in logs/reward*.jsonl'
)


GUARDS = (
    Guard(
        "no_signal",
        _no_signal,
        "take prompts that are answered right at times, or look for a reward function that always returns one number",
        looks_at_steps=False,
    ),
    Guard(
        "no_variance",
        _no_variance,
        "look at the answers with `asyncrl samples RUN`, and make the reward tell better answers from worse ones",
        advice_on_failures=CORRECT_THE_FUNCTION,
    ),
    Guard(
        "reward_errors",
        _reward_errors,
        CORRECT_THE_FUNCTION,
        looks_at_steps=False,
    ),
    Guard(
        "collapse",
        _collapse,
        "the policy is broken, and will not recover: resume from a checkpoint before the fall with a smaller "
        "training.learning_rate, or begin again",
    ),
    Guard(
        "truncation",
        _truncation,
        "write a larger generation.max_new_tokens, or generation.stop with what ends an answer",
    ),
)


class TrainingGuards:
    """Observes a run with all guards, which ring an alarm."""

    def __init__(self, history: TrainingHistory, alarm: Alarm) -> None:
        self._history = history
        self._alarm = alarm
        self._quiet_steps: dict[str, int] = {}  # since the last trouble, by guards that have spoken

    @classmethod
    def of(cls, config: Config, limit: int, alarm: Alarm) -> "TrainingGuards":
        members = config.task.samples_per_prompt
        return cls(TrainingHistory(limit, members, members * config.task.prompts_per_step), alarm)

    def observe(self, event: Event) -> None:
        self._history.observe(event)
        match event:
            case SampleScored() | Dropped():
                for guard in GUARDS:
                    if not guard.looks_at_steps:
                        self._look(guard)
            case StepDone(report=report) if not report.skipped:
                for guard in GUARDS:
                    self._look(guard)
                    self._count_quiet_step(guard)

    def _look(self, guard: Guard) -> None:
        if not (trouble := guard.describe(self._history)):
            return
        if guard.key not in self._quiet_steps:
            self._alarm.ring(guard.key, trouble)
        self._quiet_steps[guard.key] = -1

    def _count_quiet_step(self, guard: Guard) -> None:
        if guard.key in self._quiet_steps:
            self._quiet_steps[guard.key] += 1
            if self._quiet_steps[guard.key] >= WINDOW:
                del self._quiet_steps[guard.key]
