"""Runs a search: rounds of sequential halving, every candidate beside the experiment's own values.

own values: all steps, each seed ──> round: candidates ──> rung: train each, each seed ──> the better ones go on
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from asyncrl.deploy.commands.tuning.halving import PairedDifference, paired, rungs, score, survivors
from asyncrl.deploy.commands.tuning.search_space import Values
from asyncrl.deploy.commands.tuning.study import OWN, SearchRequest, Study, run_path, shown_values
from asyncrl.deploy.commands.tuning.trial_process import CandidateRun
from asyncrl.errors import ConfigError
from asyncrl.telemetry.jsonl import Object
from asyncrl.telemetry.metrics_file import read_metrics


@dataclass(eq=False)
class SearchCandidate:
    """Values and what became of them. steps: of the last rung; scores: by seed, there; difference: to the experiment's
    own values. failure: why it could not be trained, or scored."""

    number: int
    values: Values
    steps: int = 0
    scores: Mapping[int, float] = field(default_factory=dict)
    difference: PairedDifference | None = None
    step_seconds: float = math.nan
    failure: str = ""

    @property
    def mean(self) -> float:
        return fmean(self.scores.values()) if self.scores else math.nan


@dataclass(eq=False)
class Search:
    """A search in a directory. train: trains a run up to its last step and returns why it could not, "" when it has."""

    folder: Path
    request: SearchRequest
    study: Study
    train: Callable[[CandidateRun], str]
    say: Callable[[str], None]

    def run(self) -> tuple[SearchCandidate, list[SearchCandidate]]:
        """Returns the candidate with the experiment's own values, and the others, the best first. Raises ConfigError
        when its own values cannot be trained, and Interrupted."""
        own = SearchCandidate(OWN, {})
        self._measure(own, self.request.steps)
        if own.failure:
            raise ConfigError(f"the experiment's own values cannot be trained: {own.failure}")
        self.say(f"own values: {self.request.metric} {own.mean:.4g} after {own.steps} steps")
        found = [each for number in range(self.request.rounds) for each in self._round(number)]
        return own, sorted(found, key=_rank)

    def _round(self, number: int) -> list[SearchCandidate]:
        proposed = self.study.candidates(number, self.request.candidates)
        candidates = {each: SearchCandidate(each, values) for each, values in proposed.items()}
        going, ladder = list(candidates), rungs(len(candidates), self.request.keep, self.request.steps)
        for place, rung in enumerate(ladder):
            self.say(f"round {number + 1}, up to step {rung.steps}: candidates {', '.join(map(str, going))}")
            for each in going:
                self._compare(candidates[each], rung.steps)
            if place + 1 < len(ladder):
                differences = {each: candidates[each].difference for each in going}
                going = survivors(differences, ladder[place + 1].candidates)
        for each, candidate in candidates.items():
            self.study.tell(each, candidate.difference)
        return list(candidates.values())

    def _compare(self, candidate: SearchCandidate, steps: int) -> None:
        self._measure(candidate, steps)
        own = {seed: found for seed in self.request.seeds if (found := self._score(OWN, seed, steps)) is not None}
        if not candidate.failure:
            candidate.difference = paired(candidate.scores, own, self.request.sign)
        result = candidate.failure or f"{self.request.metric} {candidate.mean:.4g}, {candidate.difference}"
        self.say(f"  candidate {candidate.number}, {shown_values(candidate.values)}: {result}")

    def _measure(self, candidate: SearchCandidate, steps: int) -> None:
        scores = {}
        candidate.steps = steps
        for seed in self.request.seeds:
            run_dir = run_path(self.folder, candidate.number, seed)
            values = {**candidate.values, "seed": seed}
            run = CandidateRun(self.request.experiment, str(run_dir), steps, list(self.request.flags), values)
            if failure := self.train(run):
                return _fail(candidate, f"{failure} ({run.output})")
            if (found := self._score(candidate.number, seed, steps)) is None:
                return _fail(candidate, f"no finite {self.request.metric} in its last steps ({run.output})")
            scores[seed] = found
        candidate.scores = scores
        candidate.step_seconds = fmean(_step_seconds(self._lines(candidate.number, seed)) for seed in scores)

    def _score(self, candidate: int, seed: int, steps: int) -> float | None:
        return score(self._lines(candidate, seed), self.request.metric, steps)

    def _lines(self, candidate: int, seed: int) -> list[Object]:
        return read_metrics(run_path(self.folder, candidate, seed) / "metrics.jsonl")


def _fail(candidate: SearchCandidate, why: str) -> None:
    candidate.failure, candidate.difference = why, None


def _rank(candidate: SearchCandidate) -> tuple[bool, int, float]:
    """Orders those that trained longest first, and of these the best; those that failed come last."""
    better = candidate.difference.mean if candidate.difference else -math.inf
    return candidate.difference is None, -candidate.steps, -better


def _step_seconds(lines: list[Object]) -> float:
    """Returns the mean time between steps of the newest incarnation of a run."""
    newest = [line for line in lines if line["incarnation"] == lines[-1]["incarnation"]]
    steps = newest[-1]["step"] - newest[0]["step"]
    return float(newest[-1]["time"] - newest[0]["time"]) / steps if steps else math.nan
