"""Bounds of what lies between the policy that sampled and the one that trains, and between the two engines: warn, or
end the run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.config import Mismatch
from asyncrl.errors import PolicyMismatch
from asyncrl.protocols.messages import Canary

NO_BOUNDS = Mismatch()
STALE = "a smaller staleness.limit or training.learning_rate brings the policies together; see docs/corrections.md"
FAULTY = (
    "engine and trainer do not compute the same with the same weights: rounding, if model.dtype or training.precision "
    "is bfloat16, else a fault; see docs/troubleshooting.md"
)


@dataclass(frozen=True, slots=True)
class Watched:
    """A metric with bounds `warn_<key>` and `stop_<key>`; at_most: upper ones. A step that trained nothing has none but
    the canary, and says nothing of the others."""

    key: str
    at_most: bool
    advice: str

    @property
    def metric(self) -> str:
        return f"mismatch/{self.key}"

    def crossed(self, metrics: Mapping[str, float], bounds: Mismatch, kind: str) -> str:
        """What is said of that; empty: it was not. A number that is none crosses every bound."""
        bound, found = getattr(bounds, f"{kind}_{self.key}"), metrics.get(self.metric)
        if bound is None or found is None or (found <= bound if self.at_most else found >= bound):
            return ""
        beyond = "over" if self.at_most else "under"
        return f"{self.metric} is {found:.3g}, {beyond} mismatch.{kind}_{self.key} = {bound:g}"


WATCHED = (Watched("kl", True, STALE), Watched("ess", False, STALE), Watched("canary", True, FAULTY))


class MismatchWatch:
    """Compares each step with the bounds. A warning is given once, and again after a step that was within them."""

    def __init__(self, bounds: Mismatch) -> None:
        self._bounds = bounds
        self._warned: set[str] = set()
        self._canary: float | None = None

    def heard(self, canary: float) -> None:
        """A reader of weights is so far from the trainer, in nats."""
        self._canary = canary if self._canary is None else float(np.maximum(canary, self._canary))

    def canary(self) -> dict[str, float]:
        """`mismatch/canary`: the largest heard of since the last call; nothing when there was none."""
        canary, self._canary = self._canary, None
        return {} if canary is None else {"mismatch/canary": canary}

    def see(self, metrics: Mapping[str, float], version: int) -> str | None:
        """The metrics of the step that led to `version`; answers with a warning for the user.

        Raises:
            PolicyMismatch: a bound that ends the run was crossed.
        """
        for watched in WATCHED:
            if said := watched.crossed(metrics, self._bounds, "stop"):
                raise PolicyMismatch(f"step {version}: {said}; {watched.advice}")
        news = list(self._news(metrics))
        advice = "; ".join(dict.fromkeys(watched.advice for _, watched in news))
        return f"step {version}: {', '.join(said for said, _ in news)}; {advice}" if news else None

    def _news(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, Watched]]:
        for watched in WATCHED:
            if watched.metric not in metrics:
                continue
            said = watched.crossed(metrics, self._bounds, "warn")
            if said and watched.metric not in self._warned:
                yield said, watched
            self._warned = self._warned | {watched.metric} if said else self._warned - {watched.metric}


def apart(canary: Canary, found: NDArray[np.float32]) -> float:
    """How far an engine that says `found` [vocabulary] is from the trainer: the largest difference, nats."""
    return float(np.abs(found[list(canary.tokens)] - np.array(canary.logprobs)).max())
