"""Guards find training that goes on and comes to nothing; the section `[guards]` says what each does: warn, stop, off.

    events ──> TrainingHistory ──> each row of GUARDS: trouble, or nothing ──> one sentence, or the end of the run

A guard speaks once, and again only after WINDOW steps without that trouble.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean, median

from asyncrl.config.schema import Config
from asyncrl.controller.journal.ledger import Dropped
from asyncrl.controller.observers.alarms import REWARD, Alarm, failed_in
from asyncrl.controller.observers.events import Event, GroupFinished, SampleScored, StepDone
from asyncrl.controller.observers.step_metrics import batch_metrics, step_of
from asyncrl.environments.transcript import FAILED
from asyncrl.protocols.batch import BatchRef
from asyncrl.rewards.templates import reaches

# ---- what guards look at: metrics of the last trained steps, and counts since the start ----------------------------


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


FEWEST_SAMPLES = 64
"""Samples with equal rewards, from the first step on, after which a constant reward is more likely than chance."""
STREAK_SAMPLES = 512
"""Samples without a gradient after which a collapse is likelier than a row of unlucky small batches."""
STREAK_GROUPS = 128
"""Groups in a row without a signal. With a signal in one of ten groups, one row in a million is as long."""
FEWEST_GROUPS = 32
"""Groups of a window of which that share tells more than chance."""
FEWEST_MEMBERS = 4
"""Samples of a group under which equal rewards are likely even where the reward tells answers apart."""
SAME_TEXTS = 0.5
"""Share of the recorded groups with one text from which the sampling is to blame, and not the reward."""
LEAST_MOVE = 0.1
"""Nats that the log-prob of a token has to move in a run, if every step moves it the same way: a tenth of its
probability. Runs that learn move 0.4 to 29, docs/log.md has them."""
FEWEST_STEPS = 100
"""A short trial is judged as if it had as many steps."""
LARGEST_TRUNCATED = 0.5
ENTROPY_LEFT = 0.02
"""Share of the entropy of the first steps under which the policy hardly samples any more."""


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
                f"{WHO_FAILED[history.failing]} failed for each of the {history.scored} samples scored so far, so that "
                f"all {history.samples} up to step {history.step} got {reward:g}, and none can teach: "
                f"{history.last_error}"
            )
        return (
            f"all {history.samples} samples up to step {history.step} got the same reward, {reward:g}, and none can "
            "teach"
        )
    if history.untrainable == history.samples >= STREAK_SAMPLES:
        equal = ": the samples of each group got equal rewards" if history.mean("reward/equal_groups") == 1 else ""
        return f"the gradient was 0 in every step up to step {history.step}, for {history.samples} samples{equal}"
    return _equal_groups(history)


def _equal_groups(history: TrainingHistory) -> str:
    """Describes a window in which hardly a group taught. A policy that has learnt all, or lost all, is no such case."""
    equal = history.mean("reward/equal_groups", SIGNAL_WINDOW)
    groups = SIGNAL_WINDOW * history.batch // history.members
    if equal is None or equal <= MOST_EQUAL or groups < FEWEST_GROUPS or not history.by_group:
        return ""
    if history.reward_rose or history.reward_fell:
        return ""
    return (
        f"in the {SIGNAL_WINDOW} steps up to step {history.step} the samples of {equal:.0%} of the groups got equal "
        f"rewards (mean {history.mean('reward/mean', SIGNAL_WINDOW):.3g}), and such groups teach nothing"
    )


def _advise_variance(history: TrainingHistory) -> str:
    if history.all_failed:
        return _advise_failures(history)
    if history.equal_texts and (same := fmean(history.equal_texts)) >= SAME_TEXTS:
        return (
            f"the answers to a prompt are one and the same text in {same:.0%} of the recorded groups: raise "
            "generation.temperature"
        )
    if history.members < FEWEST_MEMBERS:
        return (
            f"{history.members} samples of a prompt are often equal by chance: raise task.samples_per_prompt, to 8 for "
            "example"
        )
    differ = "the answers differ, but their rewards do not: " if history.equal_texts else ""
    return f"{differ}look at them with `asyncrl samples RUN`, and make the reward tell better answers from worse ones"


def _no_movement(history: TrainingHistory) -> str:
    steps = max(history.planned, FEWEST_STEPS)
    if (moved := history.moved) is None or steps * moved >= LEAST_MOVE or history.reward_rose:
        return ""
    rate = history.steps[-1]["learning_rate"]
    kl = history.steps[-1].get("mismatch/kl", 0.0)
    return (
        f"the policy hardly moves: at training.learning_rate = {rate:.3g} a step changes the log-prob of a token by "
        f"{moved:.2g} nats (from mismatch/kl, {kl:.2g} in step {history.step}, and the staleness), so that {steps} "
        f"steps change it by at most {steps * moved:.2g}"
    )


WHO_FAILED = {REWARD: "a reward", FAILED: "the environment"}


def _reward_errors(history: TrainingHistory) -> str:
    if history.errors_in_a_row < history.limit:
        return ""
    who = "a reward function" if history.failing == REWARD else WHO_FAILED[history.failing]
    return f"{who} failed on each of the last {history.errors_in_a_row} samples: {history.last_error}"


def _collapse(history: TrainingHistory) -> str:
    entropy = history.mean("policy/entropy")
    first = history.first_entropy
    if not history.reward_fell:
        return ""
    fell = f"the mean reward fell from {history.best:.3g} to {history.mean('reward/mean'):.3g}"
    if STREAK_SAMPLES <= history.untrainable < history.samples:
        return f"the gradient is 0 since {history.untrainable} samples, and {fell}"
    if entropy is not None and entropy < ENTROPY_LEFT * first:
        return f"the entropy of the policy fell from {first:.3g} to {entropy:.3g} nats a token, and {fell}"
    return ""


def _advise_collapse(history: TrainingHistory) -> str:
    order = (
        "if the rows become harder in their order, which task.shuffle = false keeps, write true; else "
        if history.in_order
        else ""
    )
    return (
        f"{order}the policy is broken, and will not recover: resume from a checkpoint before the fall with a smaller "
        "training.learning_rate, or begin again"
    )


def _truncation(history: TrainingHistory) -> str:
    truncated = history.mean("completions/truncated_fraction")
    if truncated is None or truncated <= LARGEST_TRUNCATED:
        return ""
    samples = f"{truncated:.0%} of the samples of the last {WINDOW} steps"
    return f"{samples} had an answer cut off at generation.max_new_tokens"


@dataclass(frozen=True, slots=True)
class Guard:
    """One guard. key: of `[guards]`. sees: describes the trouble, "" without. advice: what to do then. looks_at_steps:
    it looks at trained steps, not at each sample. speaks_once: it stays silent after the first time.
    """

    key: str
    sees: Callable[[TrainingHistory], str]
    advice: str | Callable[[TrainingHistory], str]
    looks_at_steps: bool = True
    speaks_once: bool = False

    def describe(self, history: TrainingHistory) -> str:
        if not (trouble := self.sees(history)):
            return ""
        return f"{trouble}; {self.advice if isinstance(self.advice, str) else self.advice(history)}"


def _advise_failures(history: TrainingHistory) -> str:
    if history.failing == FAILED:
        return (
            'environment.on_error = "zero" counts 0 for such turns, and "ignore" leaves such samples out: mend the '
            "environment; its errors are in logs/environment*.jsonl"
        )
    return 'reward.on_error = "zero" counts 0 for each: correct the function; its errors are in logs/reward*.jsonl'


GUARDS = (
    Guard(
        "no_signal",
        _no_signal,
        "take prompts that are answered right at times, or look for a reward function that always returns one number",
        looks_at_steps=False,
    ),
    Guard("no_variance", _no_variance, _advise_variance),
    Guard(
        "no_movement",
        _no_movement,
        "raise training.learning_rate, tenfold at a time while mismatch/kl stays under 0.01",
        speaks_once=True,
    ),
    Guard("reward_errors", _reward_errors, _advise_failures, looks_at_steps=False),
    Guard("collapse", _collapse, _advise_collapse, speaks_once=True),
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
        return cls(TrainingHistory.of(config, limit), alarm)

    def take_equal_texts(self, share: float) -> None:
        """Takes in which share of the recorded groups of a step have one text; it comes after the step itself."""
        self._history.equal_texts.append(share)

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
        if guard.key in self._quiet_steps and not guard.speaks_once:
            self._quiet_steps[guard.key] += 1
            if self._quiet_steps[guard.key] >= WINDOW:
                del self._quiet_steps[guard.key]
