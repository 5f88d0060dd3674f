"""Alarms report trouble, or end the run: failed rewards, poison, drops, skipped steps, policy mismatch.

    events ──> RewardFailures, PoisonedGroups, AlgorithmDrops, TrainingGuards ──> Alarm ──> a line, or the run's end

A key of `[guards]` says what an alarm does. Skipped steps always end the run, because it would go on for ever; the
bounds of `[mismatch]` are numbers.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from asyncrl.config.schema import GuardsConfig, MismatchConfig
from asyncrl.controller.observers.events import DroppedByAlgorithm, Event, GroupPoisoned, SampleScored, StepDone
from asyncrl.environments.transcript import FAILED
from asyncrl.errors import (
    AlgorithmError,
    AsyncrlError,
    NonFiniteLoss,
    OnlyTruncated,
    PolicyMismatch,
    RewardError,
    TrainingStopped,
)
from asyncrl.protocols.batch import Cuts
from asyncrl.protocols.messages import Score

REWARD = "reward"
REPORTED = 5
"""Number of poisoned groups that are reported one by one."""
EXCERPT = 200
"""Characters of a prompt that are shown."""
NAMED = 3
"""Reasons of drops that the error names; an algorithm may give a new reason for each sample."""
LISTED = 8
"""Samples of broken steps that are listed; samples.jsonl has more."""
SKIPPED_IN_A_ROW = 3
"""Skipped steps in a row, all for one reason, that end the run: a rare batch causes one, the run's settings three."""
POISON_ADVICE = (
    "If its prompt is to blame, take it out of the task. If the reason is a call that was not answered in time, look "
    "into the logs/ of the worker that is named, or raise fleet.call_deadline or generation.deadline"
)
STALE = "a smaller staleness.limit or training.learning_rate brings the policies together; see docs/corrections.md"
FAULTY = (
    "engine and trainer do not compute the same with the same weights: rounding, if model.dtype or training.precision "
    "is bfloat16, else a fault; see docs/troubleshooting.md"
)


ERRORS: Mapping[str, type[AsyncrlError]] = {"unscored": RewardError, "algorithm_drops": AlgorithmError}
"""Class of the error by the key of `[guards]` that raises it, where the user's code has to be corrected. All other keys
raise TrainingStopped."""


@dataclass(slots=True)
class Alarm:
    """Reacts to trouble as its key of `[guards]` says. say: takes warnings."""

    reactions: GuardsConfig
    say: Callable[[str], None]
    _warned: set[str] = field(default_factory=set)

    def ring(self, key: str, trouble: str) -> None:
        """Prints the trouble, with the first of its kind the key's choices; raises an error where the key is "stop"."""
        match getattr(self.reactions, key):
            case "stop":
                raise ERRORS.get(key, TrainingStopped)(f'guards.{key} = "stop" ends the run: {trouble}')
            case "warn":
                choices = f'(guards.{key} = "stop" ends such a run, "off" silences this)'
                self.say(f"guards.{key}: {trouble}" + ("" if key in self._warned else f" {choices}"))
                self._warned.add(key)


WHAT_FAILED = {
    REWARD: "a reward failed",
    FAILED: "an environment failed, which environment.on_error lets pass: mend it",
}
"""Beginning of what is said of a failure."""


def failed_in(scored: SampleScored) -> str:
    """Returns which of WHAT_FAILED the error of a score is of."""
    return FAILED if scored.sample.finish == FAILED else REWARD


@dataclass(slots=True)
class RewardFailures:
    """Rings at the first failed score, at the first failed environment, and after each `limit` samples in a row without
    a reward: samples that could not be scored, and those of groups that were given up as poison, `members` each. Says
    which rows cannot be scored: they end no run. where: names the row of a group."""

    limit: int
    alarm: Alarm
    members: int = 1
    failed: Counter[str] = field(default_factory=Counter)
    unscored: int = 0
    where: Callable[[int], str] = "group {}".format
    bad_rows: set[str] = field(default_factory=set)

    def observe(self, event: Event) -> None:
        if isinstance(event, SampleScored) and event.score.bad_row:
            self._bad_row(self.where(event.sample.group), event.score.error)
        elif isinstance(event, SampleScored):
            self._scored(event.score, failed_in(event))
        elif isinstance(event, GroupPoisoned):
            self._count(self.members, f"group {event.group} was given up as poison: {event.reason}")

    def _bad_row(self, where: str, error: str) -> None:
        if where in self.bad_rows or len(self.bad_rows) > REPORTED:
            return
        self.bad_rows.add(where)
        if len(self.bad_rows) > REPORTED:
            self.alarm.say("further rows cannot be scored; they are counted as data/dropped/bad_row in metrics.jsonl")
            return
        text = "this row cannot be scored, and its group is left out (data/dropped/bad_row); correct or remove it"
        self.alarm.say(f"{where}: {text}:\n{error}")

    def _scored(self, score: Score, where: str) -> None:
        self.failed[where] += bool(score.error)
        if score.error and self.failed[where] == 1:
            scorer = "cost" if where == REWARD and score.error.startswith("cost") else where
            logs = f"logs/{scorer}*.jsonl (the newest 8 to 16 MiB)"
            self.alarm.ring("first_failure", f"{WHAT_FAILED[where]}; further failures are in {logs}:\n{score.error}")
        if score.reward is None:
            self._count(1, score.error)
        else:
            self.unscored = 0

    def _count(self, samples: int, why: str) -> None:
        self.unscored += samples
        if self.unscored >= self.limit:
            text = f"the last {self.unscored} samples could not be scored; the last one:\n{why}"
            self.unscored = 0
            self.alarm.ring("unscored", text)


@dataclass(slots=True)
class PoisonedGroups:
    """Rings for the first poisoned groups one by one, for the very first with advice; the others are only counted."""

    alarm: Alarm
    total: int = 0

    def observe(self, event: Event) -> None:
        if not isinstance(event, GroupPoisoned):
            return
        self.total += 1
        if self.total <= REPORTED:
            prompt = repr(event.prompt)
            excerpt = prompt if len(prompt) <= EXCERPT else f"{prompt[:EXCERPT]}..."
            what = f"group {event.group} is given up as poison, its open samples will not train: {event.reason}"
            advice = [POISON_ADVICE] if self.total == 1 else []
            self.alarm.ring("poison", "\n".join([what, f"  prompt: {excerpt}", *advice]))
        elif self.total == REPORTED + 1:
            further = "further groups are given up as poison; they are counted as data/dropped/poison in metrics.jsonl"
            self.alarm.ring("poison", further)


@dataclass(slots=True)
class AlgorithmDrops:
    """Rings after each `limit` drops of an algorithm without a step, or a group that can train, in between.

    baseline: ready samples that a group needs for its advantages.
    """

    limit: int
    baseline: int
    version: int
    alarm: Alarm
    reasons: Counter[str] = field(default_factory=Counter)
    ready: Counter[int] = field(default_factory=Counter)

    def observe(self, event: Event) -> None:
        match event:
            case DroppedByAlgorithm(members=members, reason=reason):
                self.reasons[reason] += len(members)
                if self.reasons.total() >= self.limit:
                    text = self._message()
                    self._clear()
                    self.alarm.ring("algorithm_drops", text)
            case SampleScored(sample=sample, score=score) if score.reward is not None:
                self.ready[sample.group] += 1
                if self.ready[sample.group] >= self.baseline:
                    self._clear()
            case StepDone(report=report):
                self.version = report.version
                self._clear()

    def _clear(self) -> None:
        self.reasons.clear()
        self.ready.clear()

    def _message(self) -> str:
        reasons = ", ".join(repr(reason) for reason, _ in self.reasons.most_common(NAMED))
        some = "some samples" if self.baseline == 1 else f"{self.baseline} samples or more"
        return (
            f"{self.reasons.total()} samples were dropped as {reasons} and none trained since step {self.version}: "
            "what an algorithm hands to `control.drop` never trains, so hand "
            f"{some} of some groups to `control.ready`"
        )


@dataclass(slots=True)
class SkippedSteps:
    """Ends a run whose steps are skipped again and again for one reason. samples: of the last skipped steps."""

    reason: str = ""
    samples: deque[list[tuple[int, int]]] = field(default_factory=lambda: deque(maxlen=SKIPPED_IN_A_ROW))

    def check(self, cuts: Cuts, reason: str) -> None:
        """Counts a step. Raises OnlyTruncated, PolicyMismatch or NonFiniteLoss when the last steps were all skipped for
        this reason."""
        if reason != self.reason:
            self.samples.clear()
        self.reason = reason
        if reason:
            self.samples.append([row.key for row in cuts.batch])
        if len(self.samples) < SKIPPED_IN_A_ROW:
            return
        where = f"{SKIPPED_IN_A_ROW} steps in a row from version {cuts.version}"
        if reason == "truncated":
            raise OnlyTruncated(
                f"{where} had no sample without an answer that generation.max_new_tokens or generation.deadline cut "
                "off, so algorithm.mask_truncated left nothing to train: write a larger generation.max_new_tokens (or "
                "deadline, where `completions/late_fraction` is over 0), or mask_truncated = false"
            )
        if reason == "rejected":
            raise PolicyMismatch(
                f"{where} trained nothing: the rejection or correction of [algorithm] gave every token the weight 0; "
                f"{STALE}, or write wider bounds, such as algorithm.rejection_high"
            )
        if reason == "not finite":
            keys = [key for keys in self.samples for key in keys]
            more = f" and {len(keys) - LISTED} more" if len(keys) > LISTED else ""
            raise NonFiniteLoss(
                f"{where} had a loss or gradient that is not finite; their samples (group, member) were "
                f"{', '.join(map(str, keys[:LISTED]))}{more}. Try a smaller learning rate or max_grad_norm"
            )


WATCHED = {"kl": (True, STALE), "ess": (False, STALE), "canary": (True, FAULTY)}
"""The metrics `mismatch/<key>`: whether their bounds `warn_<key>` and `stop_<key>` are upper bounds, and the advice."""


NAMED_ON_SCREEN = {"kl": " (kl to engine, k3)"}
"""The screen shows the other estimate, k1, which may even be negative where this one is large."""


class PolicyMismatchAlarm:
    """Compares each step with the bounds between the policies that sampled and train; warns once for each crossing."""

    def __init__(self, bounds: MismatchConfig) -> None:
        self._bounds = bounds
        self._canary: float | None = None
        self._warned = set[str]()

    def add_canary(self, difference: float) -> None:
        """Takes in how far a reader of weights is from the trainer, in nats."""
        self._canary = difference if self._canary is None else float(np.maximum(difference, self._canary))

    def take_canary(self) -> dict[str, float]:
        """Returns `mismatch/canary`, the largest difference since the last call; empty when there was none."""
        canary = self._canary
        self._canary = None
        return {} if canary is None else {"mismatch/canary": canary}

    def check(self, metrics: Mapping[str, float], version: int) -> str | None:
        """Checks the metrics of the step that led to `version`; returns a warning for the user, if there is one.

        A step that trained nothing has no metric but the canary, and leaves what was warned of the others as it is.
        Raises PolicyMismatch when a bound that ends the run was crossed.
        """
        for key, crossed in self._crossed(metrics, "stop").items():
            raise PolicyMismatch(f"step {version}: {crossed}; {WATCHED[key][1]}")
        warned = self._crossed(metrics, "warn")
        reported = {key: crossed for key, crossed in warned.items() if key not in self._warned}
        unmeasured = {key for key in self._warned if f"mismatch/{key}" not in metrics}
        self._warned = unmeasured | warned.keys()
        advice = "; ".join(dict.fromkeys(WATCHED[key][1] for key in reported))
        return f"step {version}: {', '.join(reported.values())}; {advice}" if reported else None

    def _crossed(self, metrics: Mapping[str, float], kind: str) -> dict[str, str]:
        """Describes, by key, the bounds that are crossed. A value that is not a number crosses every bound."""
        crossed = {}
        for key, (at_most, _) in WATCHED.items():
            bound = getattr(self._bounds, f"{kind}_{key}")
            value = metrics.get(f"mismatch/{key}")
            if bound is not None and value is not None and not (value <= bound if at_most else value >= bound):
                beyond = "over" if at_most else "under"
                name = f"mismatch/{key}{NAMED_ON_SCREEN.get(key, '')}"
                crossed[key] = f"{name} is {value:.3g}, {beyond} mismatch.{kind}_{key} = {bound:g}"
        return crossed
