"""Bounds of what lies between the policy that sampled and the one that trains: warn, or end the run."""

from collections.abc import Iterator, Mapping

from asyncrl.config import Mismatch
from asyncrl.errors import PolicyMismatch

ADVICE = "a smaller staleness.limit or training.learning_rate brings the policies together; see docs/corrections.md"


NO_BOUNDS = Mismatch()
WATCHED = frozenset({"mismatch/kl", "mismatch/ess"})
"""A step that trained nothing has neither, and says nothing of the bounds."""


class MismatchWatch:
    """Compares each step with the bounds. A warning is given once, and again after a step that was within them."""

    def __init__(self, bounds: Mismatch) -> None:
        self._bounds = bounds
        self._warned = False

    def see(self, metrics: Mapping[str, float], version: int) -> str | None:
        """The metrics of the step that led to `version`; answers with a warning for the user.

        Raises:
            PolicyMismatch: a bound that ends the run was crossed.
        """
        bounds = self._bounds
        if not metrics.keys() & WATCHED:
            return None
        for said in _crossed(metrics, bounds.stop_kl, bounds.stop_ess, "stop"):
            raise PolicyMismatch(f"step {version}: {said}; {ADVICE}")
        found = list(_crossed(metrics, bounds.warn_kl, bounds.warn_ess, "warn"))
        news, self._warned = found and not self._warned, bool(found)
        return f"step {version}: {', '.join(found)}; {ADVICE}" if news else None


def _crossed(metrics: Mapping[str, float], kl: float | None, ess: float | None, kind: str) -> Iterator[str]:
    found_kl, found_ess = metrics.get("mismatch/kl"), metrics.get("mismatch/ess")
    if kl is not None and found_kl is not None and found_kl > kl:
        yield f"mismatch/kl is {found_kl:.3g}, over mismatch.{kind}_kl = {kl:g}"
    if ess is not None and found_ess is not None and found_ess < ess:
        yield f"mismatch/ess is {found_ess:.3g}, under mismatch.{kind}_ess = {ess:g}"
