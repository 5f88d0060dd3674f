"""Checks of what an algorithm hands to its `control`: a mistake is named where it is made, with what to write."""

import math
from collections.abc import Container, Sequence, Sized

from asyncrl.errors import AlgorithmError
from asyncrl.fleet.fleet import Fleet
from asyncrl.protocols.batch import BatchRef, RowRef, SampleName
from asyncrl.protocols.messages import Score

COLUMNS = {
    "reference": ("reference_logprobs", "samples = control.holds(await fleet.reference.logprobs(samples))"),
    "critic": ("values", "samples = control.holds(samples.also_at(await fleet.critic.values(samples)))"),
    "cost_critic": ("cost_values", "samples = control.holds(samples.also_at(await fleet.cost_critic.values(samples)))"),
}
"""The column that the trainer reads of each sample where a service is part of the fleet, and the call that makes it."""

EPISODE_COLUMN = "turn_rewards"
"""A column that only an environment makes."""


class AlgorithmChecks:
    """Checks the calls of an algorithm, and remembers which samples it dropped of groups that still roll out. by_token:
    whether the trainer reads the rewards of single tokens."""

    def __init__(self, fleet: Fleet, by_token: bool = False) -> None:
        self._by_token = by_token
        self._needed = [service for service in COLUMNS if getattr(fleet, service) is not None]
        self._with_costs = fleet.cost is not None
        self._with_episodes = fleet.environment is not None
        self._dropped: dict[int, set[SampleName]] = {}

    def check_generated(self, samples: BatchRef) -> None:
        """Raises AlgorithmError for a sample that no environment answered to its end, in a run with one."""
        if not self._with_episodes:
            return
        for row in samples:
            if not row.finish or not any(EPISODE_COLUMN in place.columns for place in row.places):
                raise AlgorithmError(
                    f"control.generated got sample {row.key}, whose episode was not played to its end, and "
                    "environment.use names an environment: write `await play(fleet, control, group, score)`, from "
                    "asyncrl.algorithms.play_episode, in place of `fleet.generation.generate`, or leave "
                    "environment.use out"
                )

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
                self._check_columns(row)
                if self._by_token and score.place is None:
                    raise AlgorithmError(
                        f"control.ready got for sample {row.key} a score without the rewards of its tokens, which a "
                        "reward function gives: change a score of `fleet.reward.score` with dataclasses.replace"
                    )

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

    def remember_drop(self, row: RowRef, running: Container[int]) -> None:
        """Remembers a sample that the algorithm dropped. running: groups that still roll out; others are forgotten."""
        if row.group not in self._dropped:
            self._dropped = {group: names for group, names in self._dropped.items() if group in running}
        self._dropped.setdefault(row.group, set()).add(row.name)

    def _check_columns(self, row: RowRef) -> None:
        for service in self._needed:
            column, write = COLUMNS[service]
            if not any(column in place.columns for place in row.places):
                raise AlgorithmError(
                    f"control.ready got sample {row.key} without what the {service} service says of it ({column}), "
                    f"which this algorithm trains with: write `{write}` before"
                )
