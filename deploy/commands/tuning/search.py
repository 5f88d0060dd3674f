"""Runs a search: rounds of sequential halving, every candidate beside the experiment's own values.

own values: all steps, each seed ──> candidates 9 ──> 3 ──> 1      steps of each 28 ──> 84 ──> 250      (keep one in 3)

DIR/candidates.log    Optuna's journal: the request, the values of each candidate, and how much better they were
DIR/own/seed-0        the run of the experiment's own values with seed 0
DIR/candidate-3/seed-0, candidate-3/seed-0.log    a run and what it printed

Each rung costs about as many steps as the others (Jamieson and Talwalkar, Non-stochastic best arm identification and
hyperparameter optimization, AISTATS 2016, figure 1; Karnin et al., ICML 2013, with a share of 1/2).
"""

import fcntl
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from asyncrl.config.sources import load
from asyncrl.deploy.commands.tuning.search_space import Values, optuna, parse_space, typed
from asyncrl.deploy.commands.tuning.trial_process import CandidateRun
from asyncrl.errors import ConfigError
from asyncrl.telemetry.jsonl import Object

REQUEST = "request"
ROUND = "round"
TRIES = 20
"""Proposals for one candidate, before so few different values are taken to be left that the round goes on without."""
SHARE = 4
"""A score is the mean of the last fourth of the steps."""


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """A search as requested. seeds: each candidate's runs. steps: of the last rung. keep: one in so many goes on."""

    experiment: str
    search: Sequence[str]
    flags: Sequence[str] = ()
    candidates: int = 9
    keep: int = 3
    rounds: int = 1
    seeds: Sequence[int] = (0, 1)
    steps: int = 0
    metric: str = "reward/mean"
    minimize: bool = False

    def problem(self, values: Values) -> str:
        """Returns why the config does not take these values together, or ""."""
        try:
            load(self.experiment, self.flags, values=dict(values))
        except ConfigError as error:
            return str(error)
        return ""


@contextmanager
def open_search(folder: Path, wanted: SearchRequest | None) -> Iterator[tuple[Any, SearchRequest]]:
    """Opens the optuna.Study of a directory for one process, with the request that the search began with. Raises
    ConfigError for a folder that holds something else, and where another process or request has it."""
    path = folder / "candidates.log"
    if wanted is None and not path.exists():
        raise ConfigError(f"{folder} holds no search: name an experiment and what to search")
    if not path.exists() and folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"--to: {folder} is not empty, and holds no search")
    journal = optuna().storages.journal
    optuna().logging.set_verbosity(optuna().logging.WARNING)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--to: {folder} cannot be used: {error.strerror}; name another folder") from error
    try:
        with open(folder / "search.lock", "a+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            storage = journal.JournalStorage(journal.JournalFileBackend(str(path)))
            study = optuna().create_study(
                study_name="search", storage=storage, load_if_exists=True, direction="maximize"
            )
            study.sampler = optuna().samplers.TPESampler(seed=len(study.trials), constant_liar=True)
            yield study, _same_request(folder, study, wanted)
    except BlockingIOError:
        raise ConfigError(f"--to: another process works on the search in {folder}: wait for it, or end it") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is damaged ({error}): begin the search again in another folder") from None


def _same_request(folder: Path, study: Any, wanted: SearchRequest | None) -> SearchRequest:
    if wanted is not None and REQUEST not in study.user_attrs:
        study.set_user_attr(REQUEST, asdict(wanted))
    kept = study.user_attrs[REQUEST]
    for name, value in json.loads(json.dumps(asdict(wanted))).items() if wanted is not None else ():
        if value != kept[name]:
            raise ConfigError(
                f"--to: {folder} holds a search with {name} = {kept[name]!r}, not {value!r}; "
                "leave out everything but --to to go on, or name another folder"
            )
    return SearchRequest(**kept)


def rungs(candidates: int, keep: int, steps: int) -> list[tuple[int, int]]:
    """Returns of each rung how many steps its candidates have trained at its end, and how many candidates begin it."""
    counts = [candidates]
    while counts[-1] >= keep:
        counts.append(counts[-1] // keep)
    last = len(counts) - 1
    return [(max(1, math.ceil(steps / keep ** (last - number))), count) for number, count in enumerate(counts)]


def score(lines: Sequence[Object], metric: str, steps: int) -> float | None:
    """Returns the mean of a metric over the last fourth of the first `steps` steps; None where a run has not trained
    them, does not report the metric in them, or reports no finite number."""
    if not lines or int(lines[-1]["step"]) < steps:
        return None
    first = steps - math.ceil(steps / SHARE) + 1
    found = [line.get(metric) for line in lines if first <= line["step"] <= steps]
    numbers = [float(number) for number in found if number is not None]
    mean = fmean(numbers) if numbers else math.nan
    return mean if math.isfinite(mean) else None


class PairedDifference(NamedTuple):
    """A mean over seeds, with its standard error; None with one seed."""

    mean: float
    error: float | None

    @property
    def is_clear(self) -> bool:
        """Checks whether the mean is over twice its standard error above zero."""
        return self.error is not None and self.mean > 2 * self.error

    def __str__(self) -> str:
        return f"{self.mean:+.4g}" + ("" if self.error is None else f" ± {self.error:.2g}")


def paired(scores: Mapping[int, float], own: Mapping[int, float], sign: int = 1) -> PairedDifference | None:
    """Returns by how much scores are better than those of the experiment's own values, over the seeds that both have;
    None without one. sign: -1 where less is better."""
    differences = [sign * (scores[seed] - own[seed]) for seed in scores if seed in own]
    if not differences:
        return None
    error = stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else None
    return PairedDifference(fmean(differences), error)


@dataclass(eq=False)
class SearchCandidate:
    """Values and what became of them; number 0 has the experiment's own. steps: of the last rung; scores: by seed,
    there; difference: to the experiment's own values. failure: why it could not be trained, or scored."""

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

    @property
    def gain(self) -> float:
        """Returns the mean difference to the experiment's own values; the least number while there is none."""
        return self.difference.mean if self.difference else -math.inf


@dataclass(eq=False)
class Search:
    """A search in a directory. train: trains a run up to its last step and returns why it could not, "" when it has."""

    folder: Path
    request: SearchRequest
    study: Any
    train: Callable[[CandidateRun], str]
    say: Callable[[str], None]

    def run(self) -> tuple[SearchCandidate, list[SearchCandidate]]:
        """Returns the candidate with the experiment's own values, and the others, those that trained longest first and
        of these the best. Raises ConfigError when its own values cannot be trained, and Interrupted."""
        own = SearchCandidate(0, {})
        self._measure(own, self.request.steps)
        if own.failure:
            raise ConfigError(f"the experiment's own values cannot be trained: {own.failure}")
        self.say(f"own values: {self.request.metric} {own.mean:.4g} after {own.steps} steps")
        found = [each for number in range(self.request.rounds) for each in self._round(number)]
        return own, sorted(found, key=lambda each: (each.difference is None, -each.steps, -each.gain))

    def _round(self, number: int) -> list[SearchCandidate]:
        candidates = self.proposed(number)
        going = candidates
        for steps, count in rungs(len(candidates), self.request.keep, self.request.steps):
            going = [each for each in sorted(going, key=lambda each: -each.gain) if not each.failure][:count]
            names = ", ".join(str(each.number) for each in going)
            self.say(f"round {number + 1}, up to step {steps}: candidates {names}")
            for each in going:
                self._measure(each, steps)
                result = each.failure or f"{self.request.metric} {each.mean:.4g}, {each.difference}"
                self.say(f"  candidate {each.number}, {shown_values(each.values)}: {result}")
        for each in candidates:
            if each.difference is not None:  # One that failed is tried again when the search goes on.
                self.study.tell(each.number - 1, each.difference.mean, skip_if_finished=True)
        return candidates

    def proposed(self, number: int) -> list[SearchCandidate]:
        """Returns the candidates of a round: those that were proposed before, and new ones, which the results of
        earlier rounds guide. No two have the same values, and the config takes all."""
        space = parse_space(self.request.search)
        whole = [trial for trial in self.study.trials if ROUND in trial.user_attrs]
        seen = {trial.number + 1: {each.key: each.of(trial.params[each.key]) for each in space} for trial in whole}
        found = [trial.number + 1 for trial in whole if trial.user_attrs[ROUND] == number]
        for _ in range(TRIES * self.request.candidates):
            if len(found) >= self.request.candidates:
                break
            trial = self.study.ask({each.key: each.distribution for each in space})
            values = {each.key: each.of(trial.params[each.key]) for each in space}
            if values in seen.values() or self.request.problem(values):
                self.study.tell(trial, state=optuna().trial.TrialState.FAIL)
                continue
            trial.set_user_attr(ROUND, number)
            found.append(trial.number + 1)
            seen[trial.number + 1] = values
        return [SearchCandidate(each, seen[each]) for each in found]

    def _measure(self, candidate: SearchCandidate, steps: int) -> None:
        """Trains a candidate with each seed up to a step, and compares it there with the experiment's own values."""
        metric = self.request.metric
        runs = {seed: self.run_of(candidate, seed, steps) for seed in self.request.seeds}
        candidate.steps = steps
        candidate.difference = None
        scores: dict[int, float] = {}
        for seed, run in runs.items():
            candidate.failure = self.train(run)
            found = None if candidate.failure else score(run.lines, metric, steps)
            if found is None:
                why = candidate.failure or f"no finite {metric} in its last steps"
                candidate.failure = f"{why} ({run.output})"
                return
            scores[seed] = found
        candidate.scores = scores
        candidate.step_seconds = fmean(_step_seconds(run.lines) for run in runs.values())
        if candidate.number:
            own = SearchCandidate(0, {})
            known = {seed: score(self.run_of(own, seed, steps).lines, metric, steps) for seed in runs}
            sign = -1 if self.request.minimize else 1
            candidate.difference = paired(scores, {k: each for k, each in known.items() if each is not None}, sign)

    def run_of(self, candidate: SearchCandidate, seed: int, steps: int) -> CandidateRun:
        """Returns the run of a candidate with one seed, up to a step."""
        name = f"candidate-{candidate.number}" if candidate.number else "own"
        values = {**candidate.values, "seed": seed}
        folder = self.folder / name / f"seed-{seed}"
        return CandidateRun(self.request.experiment, folder, steps, self.request.flags, values)


def shown_values(values: Values) -> str:
    """Returns values as text for a line: `training.learning_rate=0.00031 staleness.limit=2`."""
    return " ".join(f"{key}={typed(value)}" for key, value in values.items()) or "own values"


def _step_seconds(lines: list[Object]) -> float:
    """Returns the mean time between steps of the newest incarnation of a run."""
    newest = [line for line in lines if line["incarnation"] == lines[-1]["incarnation"]]
    steps = newest[-1]["step"] - newest[0]["step"]
    return float(newest[-1]["time"] - newest[0]["time"]) / steps if steps else math.nan
