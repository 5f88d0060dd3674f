"""The alarm for policies that drift apart: bounds on the mismatch metrics that warn the user or end the run.

The metrics compare the policy that sampled with the policy that trains, and the generation engine with the trainer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from asyncrl.config.schema import MismatchConfig
from asyncrl.controller.alarms.alarm import Alarm
from asyncrl.errors import PolicyMismatch

NO_BOUNDS = MismatchConfig()
STALE = "a smaller staleness.limit or training.learning_rate brings the policies together; see docs/corrections.md"
FAULTY = (
    "engine and trainer do not compute the same with the same weights: rounding, if model.dtype or training.precision "
    "is bfloat16, else a fault; see docs/troubleshooting.md"
)


@dataclass(frozen=True, slots=True)
class WatchedMetric:
    """The metric `mismatch/<key>` with its bounds `warn_<key>` and `stop_<key>`.

    at_most: whether the bounds are upper bounds. warned: counts the steps in a row that crossed the bound that warns.
    """

    key: str
    at_most: bool
    advice: str
    warned: Alarm = field(default_factory=lambda: Alarm(reported=1))

    @property
    def metric(self) -> str:
        return f"mismatch/{self.key}"

    def crossed(self, metrics: Mapping[str, float], bounds: MismatchConfig, kind: str) -> str:
        """Describes how the bound is crossed; empty: it is not. A value that is not a number crosses every bound."""
        bound, value = getattr(bounds, f"{kind}_{self.key}"), metrics.get(self.metric)
        if bound is None or value is None or (value <= bound if self.at_most else value >= bound):
            return ""
        beyond = "over" if self.at_most else "under"
        return f"{self.metric} is {value:.3g}, {beyond} mismatch.{kind}_{self.key} = {bound:g}"


class PolicyMismatchAlarm:
    """Compares each step with the bounds. It warns once, and again after a step that was within the bounds."""

    def __init__(self, bounds: MismatchConfig) -> None:
        self._bounds = bounds
        self._canary: float | None = None
        self._watched = (
            WatchedMetric("kl", True, STALE),
            WatchedMetric("ess", False, STALE),
            WatchedMetric("canary", True, FAULTY),
        )

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

        A step that trained nothing has no metric but the canary, and leaves the counts of the others as they are.

        Raises:
            PolicyMismatch: a bound that ends the run was crossed.
        """
        for watched in self._watched:
            if crossed := watched.crossed(metrics, self._bounds, "stop"):
                raise PolicyMismatch(f"step {version}: {crossed}; {watched.advice}")
        reported = {}
        for watched in self._watched:
            if watched.metric not in metrics:
                continue
            crossed = watched.crossed(metrics, self._bounds, "warn")
            if not crossed:
                watched.warned.clear()
            elif watched.warned.count():
                reported[crossed] = watched.advice
        advice = "; ".join(dict.fromkeys(reported.values()))
        return f"step {version}: {', '.join(reported)}; {advice}" if reported else None
