"""Checks of what an algorithm hands to the controller, before it counts: an error names the call to write instead."""

import math
from collections.abc import Container, Sequence, Sized
from dataclasses import dataclass

from asyncrl.errors import AlgorithmError
from asyncrl.fleet.fleet import Fleet
from asyncrl.protocols.batch import BatchRef, Cuts, RowRef, SampleName
from asyncrl.protocols.messages import Score


@dataclass(frozen=True, slots=True)
class NeededColumn:
    """A column that the trainer reads of each sample, and the call that makes it."""

    column: str
    write: str


LOGPROBS = NeededColumn("reference_logprobs", "samples = control.holds(await fleet.reference.logprobs(samples))")
VALUES = NeededColumn("values", "samples = control.holds(samples.also_at(await fleet.critic.values(samples)))")
COST_VALUES = NeededColumn(
    "cost_values", "samples = control.holds(samples.also_at(await fleet.cost_critic.values(samples)))"
)
SERVICES = {"reference": LOGPROBS, "critic": VALUES, "cost_critic": COST_VALUES}


def refuse_other_cuts(function: str, cuts: Cuts, running: Cuts | None) -> None:
    """Raises AlgorithmError unless these are the cuts of the running iteration."""
    if cuts != running:
        raise AlgorithmError(
            f"{function} got other cuts than those of the iteration that runs: hand on `cuts` of `with iteration as "
            "cuts`, or what `control.credit(cuts, advantages)` made of them"
        )


class AlgorithmChecks:
    """Checks the calls of an algorithm, and remembers which samples it dropped of groups that still roll out."""

    def __init__(self, fleet: Fleet) -> None:
        self._needed = [(name, needed) for name, needed in SERVICES.items() if getattr(fleet, name) is not None]
        self._with_costs = fleet.cost is not None
        self._dropped: dict[int, set[SampleName]] = {}

    def check_ready(self, samples: BatchRef, scores: Sequence[Score], costs: Sequence[Score] | None) -> None:
        """Raises AlgorithmError for a missing score or cost, a sample dropped before, or a sample without a column."""
        self.check_scores("ready", samples, scores)
        if costs is not None:
            self.check_scores("ready", samples, costs, "cost")
        elif self._with_costs:
            raise AlgorithmError(
                "control.ready got no costs, which this algorithm holds under a limit: write "
                "`control.ready(samples, scores, await fleet.cost.score(samples, group.row))`"
            )
        for row, score in zip(samples, scores, strict=True):
            if row.name in self._dropped.get(row.group, ()):
                raise AlgorithmError(
                    f"control.ready got sample {row.key}, which was handed to `control.drop`: call one of them"
                )
            if score.reward is not None:
                self._refuse_without_columns(row)

    def check_scores(self, function: str, samples: BatchRef, scores: Sequence[Score], service: str = "reward") -> None:
        """Raises AlgorithmError unless there is one finite score, or a score without a reward, for each sample."""
        each = scores if isinstance(scores, Sized) else [scores]
        plural = "costs" if service == "cost" else "scores"
        if wrong := next((type(score).__name__ for score in each if not isinstance(score, Score)), ""):
            raise AlgorithmError(
                f"control.{function}: {plural} are what `await fleet.{service}.score(samples, group.row)` answered, "
                f"not {wrong}s"
            )
        if len(samples) != len(each):
            raise AlgorithmError(f"control.{function} got {len(samples)} samples and {len(each)} {plural}")
        for row, score in zip(samples, each, strict=True):
            if score.reward is not None and not math.isfinite(score.reward):
                raise AlgorithmError(
                    f"control.{function} got the {service} {score.reward} for sample {row.key}: write None for a "
                    f"sample without a {service}"
                )

    def check_reason(self, reason: str) -> None:
        """Raises AlgorithmError unless the reason of a drop is a word, under which drops are counted."""
        if not isinstance(reason, str) or not reason.strip():
            raise AlgorithmError(
                f"control.drop got the reason {reason!r}: write a word that data/dropped/WORD shall count"
            )

    def remember_drop(self, row: RowRef, running: Container[int]) -> None:
        """Remembers a sample that the algorithm dropped. running: groups that still roll out; others are forgotten."""
        if row.group not in self._dropped:
            self._dropped = {group: names for group, names in self._dropped.items() if group in running}
        self._dropped.setdefault(row.group, set()).add(row.name)

    def _refuse_without_columns(self, row: RowRef) -> None:
        for service, needed in self._needed:
            if not any(needed.column in place.columns for place in row.places):
                raise AlgorithmError(
                    f"control.ready got sample {row.key} without what the {service} service says of it "
                    f"({needed.column}), which this algorithm trains with: write `{needed.write}` before"
                )
