"""Declares the grid of `asyncrl-bench learning`: tables of cases, and the claim about corrections.

A case is one run. Its key is a digest of all its settings, its experiment file included, so that a result counts in
every table that holds the case, and becomes void when a setting changes.
"""

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from statistics import fmean
from typing import Any

from asyncrl.bench.measurements import differences
from asyncrl.config.sections.algorithm_config import PRESETS
from asyncrl.config.sources.layers import file_layer
from asyncrl.experiments import experiment_text

Values = Mapping[str, Any]
Line = Mapping[str, Any]
Results = Mapping[str, Line]
"""Lines of `learning.jsonl` by the key of their case; the line of a failed run has `failed` and no rewards."""
SYNCHRONOUS = 0
COMPARED_WITH = "synchronous"
"""Name of the row that the others are compared with in a table without limit 0."""


@dataclass(frozen=True, slots=True)
class Case:
    """Describes one run. values: settings that override the experiment of the task; row: their name in a table."""

    task: str
    row: str
    limit: int
    seed: int
    values: Values

    def settings(self, defaults: Values) -> dict[str, Any]:
        """Returns all settings of the run except its folders. `defaults` holds settings of a task under its name. A
        synchronous run has the policy of its task: no token is ever too old, so that all policies give one run."""
        own = {key: value for key, value in self.values.items() if self.limit or key != "staleness.policy"}
        shared = {key: value for key, value in defaults.items() if not isinstance(value, Mapping)}
        given = {**_experiment(self.task), **shared, **defaults.get(self.task, {}), **own}
        return {**given, "staleness.limit": self.limit, "seed": self.seed}

    def key(self, defaults: Values) -> str:
        """Returns 16 hexadecimal digits, which also depend on the settings of the preset."""
        settings = self.settings(defaults)
        preset = PRESETS[settings.get("algorithm.preset", "grpo")]
        text = json.dumps([self.task, settings, dict(preset.parts)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return f"{self.task}, {self.row}, limit {self.limit}, seed {self.seed}"


Parts = Mapping[str, Sequence[Case]]
"""Cases by the name of their table; `search` and `claim` are the parts of the claim."""


@cache
def _experiment(task: str) -> dict[str, Any]:
    """Returns the settings of an experiment by dotted key: {"training.learning_rate": 2e-4, "steps": 250}."""
    return {key: value for key, (value, _) in file_layer(experiment_text(task), task).entries.items()}


@dataclass(frozen=True, slots=True)
class Table:
    """Combines every row with every limit, for each task and seed. base: values of all rows, and of the synchronous run
    that they are compared with if 0 is not among the limits."""

    name: str
    title: str
    tasks: Sequence[str]
    limits: Sequence[int]
    seeds: Sequence[int]
    rows: Mapping[str, Values]
    base: Values
    controls: "Table | None" = None

    def cases(self) -> list[Case]:
        """Returns the synchronous runs of rows without limit 0, the cases of the table and those of its controls. Both
        runs of a pair follow each other; their order alternates by seed."""
        alone = self.controls is None or SYNCHRONOUS in self.limits
        pairs = [] if alone else list(product(self.tasks, self.seeds))
        compared = [Case(task, COMPARED_WITH, SYNCHRONOUS, seed, self.base) for task, seed in pairs]
        own = [
            Case(task, row, limit, seed, self.rows[row])
            for task, seed, row in product(self.tasks, self.seeds, self.rows)
            for limit in self.limits[:: -1 if seed % 2 else 1]
        ]
        return compared + own + (self.controls.cases() if self.controls else [])

    def synchronous_of(self, case: Case) -> Case:
        """Returns the run to compare with: the same setting at limit 0, or the base of a table without limit 0."""
        return replace(case, limit=SYNCHRONOUS, values=case.values if SYNCHRONOUS in self.limits else self.base)


@dataclass(frozen=True, slots=True)
class Candidate:
    """Describes a setting in which staleness may reduce the reward."""

    task: str
    values: Values

    @property
    def name(self) -> str:
        values = ", ".join(f"{key.rpartition('.')[2]} {value:g}" for key, value in self.values.items())
        return f"{self.task}, {values or 'as it is'}"


@dataclass(frozen=True, slots=True)
class Claim:
    """Holds candidates in order of preference, which was fixed before any of them was run, and the loss and reward that
    a setting needs to test the correction. defaults: settings of every run."""

    limit: int
    least_loss: float
    least_reward: float
    search_seeds: Sequence[int]
    seeds: Sequence[int]
    uncorrected: Values
    candidates: Sequence[Candidate]
    defaults: Values

    def search(self) -> list[Case]:
        """Returns the runs without correction that choose the setting."""
        return [case for each in self.candidates for case in self.uncorrected_cases(each, self.search_seeds)]

    def uncorrected_cases(self, candidate: Candidate, seeds: Sequence[int]) -> list[Case]:
        return self._cases(candidate, "uncorrected", {**candidate.values, **self.uncorrected}, seeds)

    def corrected_cases(self, candidate: Candidate) -> list[Case]:
        """Returns the runs with the default correction, which has no effect at limit 0."""
        found = self._cases(candidate, "default correction", candidate.values, self.seeds)
        return [case for case in found if case.limit != SYNCHRONOUS]

    def proof(self, candidate: Candidate) -> list[Case]:
        """Returns the runs that test the claim, with other seeds than the search."""
        return self.uncorrected_cases(candidate, self.seeds) + self.corrected_cases(candidate)

    def is_searched(self, results: Results) -> bool:
        """Checks that every run of the search has a result."""
        return all(case.key(self.defaults) in results for case in self.search())

    def chosen(self, results: Results) -> Candidate | None:
        """Returns the first candidate that learns when synchronous and loses enough when stale; None if no candidate
        does, or the search is not complete. Only uncorrected runs choose the setting that tests the correction."""
        for candidate in self.candidates if self.is_searched(results) else ():
            synchronous, stale = self.rewards(self.uncorrected_cases(candidate, self.search_seeds), results)
            lost = differences(synchronous, stale)
            if lost and fmean(lost) >= self.least_loss and fmean(synchronous.values()) >= self.least_reward:
                return candidate
        return None

    def rewards(self, cases: Sequence[Case], results: Results) -> tuple[dict[int, float], dict[int, float]]:
        """Returns held-out rewards of successful runs by seed: synchronous, and at the large limit."""
        found: dict[int, dict[int, float]] = {SYNCHRONOUS: {}, self.limit: {}}
        for case in cases:
            line = results.get(case.key(self.defaults), {})
            if "held_out" in line:
                found[case.limit][case.seed] = line["held_out"]
        return found[SYNCHRONOUS], found[self.limit]

    def _cases(self, candidate: Candidate, row: str, values: Values, seeds: Sequence[int]) -> list[Case]:
        row = f"{candidate.name}, {row}"
        return [Case(candidate.task, row, limit, seed, values) for seed in seeds for limit in (SYNCHRONOUS, self.limit)]


@dataclass(frozen=True, slots=True)
class Grid:
    """Holds the whole grid. goal: reward up to which time is measured; defaults: settings of every run;
    expected_seconds: of a run, by task."""

    goal: float
    defaults: Values
    expected_seconds: Mapping[str, float]
    tables: Sequence[Table]
    claim: Claim

    def parts(self, results: Results) -> dict[str, list[Case]]:
        """Returns the cases by table, with those of the search and, once it chose a setting, of the proof."""
        found = {table.name: table.cases() for table in self.tables}
        found["search"] = self.claim.search()
        if (candidate := self.claim.chosen(results)) is not None:
            found["claim"] = self.claim.proof(candidate)
        return found

    def possible_parts(self) -> dict[str, list[Case]]:
        """Returns the cases by table, with the proof of every candidate."""
        return {**self.parts({}), "claim": [case for each in self.claim.candidates for case in self.claim.proof(each)]}


def read_grid(text: str) -> Grid:
    """Reads a grid from TOML."""
    given = tomllib.loads(text)
    tables = [_table(each, each.get("controls", given["controls"])) for each in given["tables"]]
    candidates = [Candidate(**each) for each in given["claim"]["candidates"]]
    claim = Claim(**{**given["claim"], "candidates": candidates, "defaults": given["defaults"]})
    return Grid(given["goal"], given["defaults"], given["expected_seconds"], tables, claim)


def _table(given: Mapping[str, Any], controls: Mapping[str, Any] | None) -> Table:
    base: Values = given.get("base", {})
    rows = {row: {**base, **values} for row, values in given["rows"].items()}
    named = {"name": "controls", "title": "Controls"}
    of_controls = _table({**given, **controls, **named}, None) if controls is not None else None
    return Table(**{**given, "base": base, "rows": rows, "controls": of_controls})
