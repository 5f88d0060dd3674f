"""What a page hands to the gate, checked before it counts: a mistake is named with the call to write instead."""

import math
from collections.abc import Container, Sequence, Sized
from dataclasses import dataclass

from asyncrl.errors import PageError
from asyncrl.fleet import Fleet
from asyncrl.protocols.batch import BatchRef, Cuts, RowRef, SampleName
from asyncrl.protocols.messages import Score


@dataclass(frozen=True, slots=True)
class Needed:
    """A column that the trainer reads of each sample, and the call that makes it."""

    column: str
    write: str


LOGPROBS = Needed("reference_logprobs", "samples = gate.holds(await fleet.reference.logprobs(samples))")
VALUES = Needed("values", "samples = gate.holds(samples.also_at(await fleet.critic.values(samples)))")
COST_VALUES = Needed("cost_values", "samples = gate.holds(samples.also_at(await fleet.cost_critic.values(samples)))")
SERVICES = {"reference": LOGPROBS, "critic": VALUES, "cost_critic": COST_VALUES}


def refuse_other_cuts(function: str, cuts: Cuts, running: Cuts | None) -> None:
    """Raises PageError unless these are the cuts of the iteration that runs."""
    if cuts != running:
        raise PageError(
            f"{function} got other cuts than those of the iteration that runs: hand on `cuts` of `with iteration as "
            "cuts`, or what `gate.credit(cuts, advantages)` made of them"
        )


class PageChecks:
    """Remembers what a page dropped of the groups that still roll out."""

    def __init__(self, fleet: Fleet) -> None:
        self._needed = [(name, needed) for name, needed in SERVICES.items() if getattr(fleet, name) is not None]
        self._with_costs = fleet.cost is not None
        self._dropped: dict[int, set[SampleName]] = {}

    def ready(self, samples: BatchRef, scores: Sequence[Score], costs: Sequence[Score] | None) -> None:
        """Raises PageError: scores of other samples, of none, without costs, or a sample without a column."""
        self.scores("ready", samples, scores)
        if costs is not None:
            self.scores("ready", samples, costs, "cost")
        elif self._with_costs:
            raise PageError(
                "gate.ready got no costs, which this algorithm holds under a limit: write `gate.ready(samples, scores, "
                "await fleet.cost.score(samples, group.row))`"
            )
        for row, score in zip(samples, scores, strict=True):
            if row.name in self._dropped.get(row.group, ()):
                raise PageError(f"gate.ready got sample {row.key}, which was handed to `gate.drop`: call one of them")
            if score.reward is not None:
                self._refuse_without_columns(row)

    def scores(self, function: str, samples: BatchRef, scores: Sequence[Score], service: str = "reward") -> None:
        """Raises PageError unless there is a score for each sample."""
        each = scores if isinstance(scores, Sized) else [scores]
        if wrong := next((type(score).__name__ for score in each if not isinstance(score, Score)), ""):
            raise PageError(
                f"gate.{function}: {'costs' if service == 'cost' else 'scores'} are what `await fleet.{service}.score("
                f"samples, group.row)` answered, not {wrong}s"
            )
        if len(samples) != len(each):
            what = "costs" if service == "cost" else "scores"
            raise PageError(f"gate.{function} got {len(samples)} samples and {len(each)} {what}")
        for row, score in zip(samples, each, strict=True):
            if score.reward is not None and not math.isfinite(score.reward):
                raise PageError(
                    f"gate.{function} got the {service} {score.reward} for sample {row.key}: one without has None"
                )

    def dropping(self, reason: str) -> None:
        """Raises PageError without a reason, under which drops are counted."""
        if not isinstance(reason, str) or not reason.strip():
            raise PageError(f"gate.drop got the reason {reason!r}: write a word that data/dropped/WORD shall count")

    def dropped(self, row: RowRef, rolling: Container[int]) -> None:
        """A page dropped this sample. rolling: groups that still roll out, whose drops are remembered."""
        if row.group not in self._dropped:
            self._dropped = {group: names for group, names in self._dropped.items() if group in rolling}
        self._dropped.setdefault(row.group, set()).add(row.name)

    def _refuse_without_columns(self, row: RowRef) -> None:
        for service, needed in self._needed:
            if not any(needed.column in place.columns for place in row.places):
                raise PageError(
                    f"gate.ready got sample {row.key} without what the {service} service says of it "
                    f"({needed.column}), which this algorithm trains with: write `{needed.write}` before"
                )
