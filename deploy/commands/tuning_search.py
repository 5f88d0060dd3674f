"""Runs a search: rounds of sequential halving, every candidate beside the experiment's own values.

own values: all steps, each seed ──> candidates 9 ──> 3 ──> 1      steps of each 28 ──> 84 ──> 250      (keep one in 3)

DIR/candidates.log    Optuna's journal: the request, the values of each candidate, and how much better they were
DIR/own/seed-0        the run of the experiment's own values with seed 0
DIR/candidate-3/seed-0, candidate-3/seed-0.log    a run and what it printed

Each rung costs about as many steps as the others (Jamieson and Talwalkar, Non-stochastic best arm identification and
hyperparameter optimization, AISTATS 2016, figure 1; Karnin et al., ICML 2013, with a share of 1/2).
"""

import ctypes
import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from asyncrl.config.install_hints import install_extra
from asyncrl.config.sources import load
from asyncrl.config.sources.keys import advice, all_keys
from asyncrl.errors import ConfigError, Interrupted
from asyncrl.telemetry.jsonl import Object, read_metrics

# The values among which a search chooses: `--search KEY=LOW..HIGH`, `KEY=LOW..HIGH:log` or `KEY=A,B,C`.

Values = Mapping[str, Any]
UNSEARCHED = {
    "seed": "all candidates have the same seeds; --seeds says how many",
    "steps": "all candidates are compared after the same steps; --stop-at says which is the last one",
    "name": "a name changes nothing that is learnt",
}
"""Keys of which a search says nothing, and why."""


class Dimension(NamedTuple):
    """One key of a search. distribution: of Optuna, over a range, or over the numbers of the choices."""

    key: str
    distribution: Any
    choices: tuple[Any, ...] = ()

    @property
    def ends(self) -> tuple[Any, ...]:
        """Returns all choices, or both ends of the range."""
        return self.choices or (self.distribution.low, self.distribution.high)

    def of(self, suggested: Any) -> Any:
        """Returns the value of what Optuna proposes: numbers have three digits, so that a person can type them."""
        if self.choices:
            return self.choices[suggested]
        return float(f"{suggested:.3g}") if isinstance(suggested, float) else suggested


def typed(value: object) -> str:
    """Returns a value as a flag has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def optuna() -> Any:
    """Returns the module; raises ConfigError, with the command that installs it, where it is missing."""
    try:
        return import_module("optuna")
    except ModuleNotFoundError as error:
        if error.name != "optuna":
            raise
        raise ConfigError(f"Optuna is not installed; run: {install_extra('tune')}") from None


def parse_space(texts: Sequence[str]) -> list[Dimension]:
    """Parses a whole search. Raises ConfigError, also for a key that is given twice."""
    space: dict[str, Dimension] = {}
    for text in texts:
        key, _, spec = text.partition("=")
        if key in space:
            raise ConfigError(f"--search: {key} is given twice; write all of its values in one")
        try:
            space[key] = _dimension(key, spec)
        except ValueError as mistake:
            raise ConfigError(f"--search {text}: {mistake}") from None
    return list(space.values())


def _dimension(key: str, spec: str) -> Dimension:
    """Raises ValueError, which says what to write."""
    if not spec:
        raise ValueError("write KEY=LOW..HIGH, KEY=LOW..HIGH:log or KEY=A,B,C")
    if key in UNSEARCHED or key not in all_keys():
        raise ValueError(UNSEARCHED.get(key) or f"there is no key {key}; {advice(key)}")
    kinds = {"integer", "number"}.intersection(all_keys()[key].kinds)
    if kinds and ".." in spec:
        return Dimension(key, _range(spec, whole="number" not in kinds))
    choices = tuple(_toml(f"[{spec}]", [_toml(part, part) for part in spec.split(",")]))
    if len(set(map(repr, choices))) < 2:
        raise ValueError("a search needs two different values at least")
    return Dimension(key, optuna().distributions.CategoricalDistribution(range(len(choices))), choices)


def _range(spec: str, *, whole: bool) -> Any:
    bounds, _, scale = spec.partition(":")
    first, _, last = bounds.partition("..")
    if scale not in ("", "log"):
        raise ValueError(f"there is no scale {scale!r}; write LOW..HIGH or LOW..HIGH:log")
    try:
        low, high = map(int if whole else float, (first, last))
    except ValueError:
        raise ValueError(f"{first!r} and {last!r} must be {'integers' if whole else 'numbers'}") from None
    if not -math.inf < low < high < math.inf:
        raise ValueError("the first bound must be below the second one, and both finite")
    if scale and low <= 0:
        raise ValueError("a logarithmic range begins above 0")
    kinds = optuna().distributions
    return (kinds.IntDistribution if whole else kinds.FloatDistribution)(low, high, log=bool(scale))


def _toml(text: str, otherwise: Any) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return otherwise


# Trains one candidate with one seed up to a step, as `asyncrl run --stop-at` in a process of its own.

QUIET = {"ASYNCRL_TELEMETRY__REPORT": "false", "ASYNCRL_TELEMETRY__TRACE": "false"}
"""Keys of every trial, unless flags set them: one report shows the whole search."""
MISTAKE = 2
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class CandidateRun:
    """One run of a search. flags: keys as typed; values: keys over them. last_step: where this run stops."""

    experiment: str
    run_dir: Path
    last_step: int
    flags: Sequence[str]
    values: Values

    @property
    def lines(self) -> list[Object]:
        """Returns the metrics of each step so far."""
        path = self.run_dir / "metrics.jsonl"
        return read_metrics(path) if path.exists() else []

    @property
    def is_trained(self) -> bool:
        lines = self.lines
        return bool(lines) and int(lines[-1]["step"]) >= self.last_step

    @property
    def output(self) -> Path:
        """Returns the file with what the run printed."""
        return self.run_dir.with_name(f"{self.run_dir.name}.log")

    @property
    def command(self) -> list[str]:
        keys = [f"--{key}={typed(value)}" for key, value in self.values.items()]
        stop = ["--run-dir", str(self.run_dir), "--stop-at", str(self.last_step)]
        return [sys.executable, "-m", "asyncrl.deploy.cli", "run", self.experiment, *self.flags, *keys, *stop]


def run_trial(run: CandidateRun) -> str:
    """Trains up to the last step; returns "", or why it could not be trained. A run that fails without a mistake in its
    config goes on once. Raises Interrupted when a signal came, which ends the run with a checkpoint."""
    for _ in range(2):
        if run.is_trained or _run_once(run) == MISTAKE:
            break
    if run.is_trained:
        return ""
    lines = run.output.read_text("utf-8", errors="replace").strip().splitlines()
    return lines[-1].removeprefix("asyncrl: ") if lines else f"see {run.output}"


def _run_once(run: CandidateRun) -> int:
    """Returns the exit code. The run is no part of our terminal, and gets each signal from us. It begins when that of a
    search that was killed has ended: the kernel tells it, and it ends with a checkpoint."""
    run.run_dir.mkdir(parents=True, exist_ok=True)
    with open(run.run_dir / "run.lock", "a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
    received: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        received.append(number)
        child.terminate()

    with run.output.open("ab") as output:
        child = subprocess.Popen(
            run.command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**QUIET, **os.environ},
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        raise Interrupted("the search was interrupted")
    return code


def _end_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


# The search itself: candidates, their scores, and who goes on.

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
