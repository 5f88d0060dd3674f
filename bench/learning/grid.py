"""The declared grid of `asyncrl-bench learning`: tables of cases, what each is made of, and which are asked for. Pure.

A case is one run. Its key is a digest of every value that it is given, its experiment file included, so that a result
counts in each table that holds the case, and no longer once one of the values is changed.
"""

import hashlib
import json
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from asyncrl.algorithms.presets import PRESETS
from asyncrl.bench.paired import Uncorrected, chosen_setting
from asyncrl.experiments import experiment_text

Values = Mapping[str, Any]
Rewards = Mapping[str, float | None]
"""Final held-out reward by key of the case; None for a run that failed."""
SYNCHRONOUS = 0
COMPARED_WITH = "synchronous"
"""What the row is called that others are compared with where a table has no limit 0."""


@dataclass(frozen=True, slots=True)
class Case:
    """values: keys over those of the task's experiment; row: what a table calls them."""

    task: str
    row: str
    limit: int
    seed: int
    values: Values

    def settings(self, defaults: Values) -> dict[str, Any]:
        """Every key that the run is given, but for its folders. Those of a task lie below its name.

        A synchronous run has the policy of its task: no token is ever too old, so all policies are one run.
        """
        own = {key: value for key, value in self.values.items() if self.limit or key != "staleness.policy"}
        of_all = {key: value for key, value in defaults.items() if not isinstance(value, Mapping)}
        given = {**_experiment(self.task), **of_all, **defaults.get(self.task, {}), **own}
        return {**given, "staleness.limit": self.limit, "seed": self.seed}

    def key(self, defaults: Values) -> str:
        """16 hex digits, of what the preset stands for, too."""
        settings = self.settings(defaults)
        preset = PRESETS[settings.get("algorithm.preset", "grpo")]
        text = json.dumps([self.task, settings, dict(preset.parts)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return f"{self.task}, {self.row}, limit {self.limit}, seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Table:
    """Every row at every limit, for each task and seed. base: values that all rows have, and all that the synchronous
    run has that they are compared with where 0 is none of the limits."""

    name: str
    title: str
    tasks: tuple[str, ...]
    limits: tuple[int, ...]
    seeds: tuple[int, ...]
    rows: Mapping[str, Values]
    base: Values
    controls: "Table | None" = None

    def cases(self) -> list[Case]:
        """The synchronous runs that rows are compared with where they have none, its own, and then those of its
        controls: task by task and seed by seed, both ends of a pair one after the other, in an order that turns around
        with each seed."""
        alone = self.controls is None or SYNCHRONOUS in self.limits
        pairs = [] if alone else list(product(self.tasks, self.seeds))
        compared = [Case(task, COMPARED_WITH, SYNCHRONOUS, seed, self.base) for task, seed in pairs]
        own = [
            Case(task, row, limit, seed, self.rows[row])
            for task, seed, row in product(self.tasks, self.seeds, self.rows)
            for limit in self.limits[:: -1 if seed % 2 else 1]
        ]
        return compared + own + (self.controls.cases() if self.controls else [])


@dataclass(frozen=True, slots=True)
class Candidate:
    """A setting in which staleness may hurt."""

    task: str
    values: Values

    @property
    def name(self) -> str:
        said = ", ".join(f"{key.rpartition('.')[2]} {value:g}" for key, value in self.values.items())
        return f"{self.task}, {said or 'as it is'}"


@dataclass(frozen=True, slots=True)
class Claim:
    """Candidates in order of preference, and what a setting has to show before the correction is looked at there."""

    limit: int
    least_loss: float
    least_reward: float
    search_seeds: tuple[int, ...]
    seeds: tuple[int, ...]
    uncorrected: Values
    candidates: tuple[Candidate, ...]

    def search(self) -> list[Case]:
        """Runs without a correction that choose the setting."""
        return [case for each in self.candidates for case in self.uncorrected_cases(each, self.search_seeds)]

    def uncorrected_cases(self, candidate: Candidate, seeds: Sequence[int]) -> list[Case]:
        return self._cases(candidate, "uncorrected", {**candidate.values, **self.uncorrected}, seeds)

    def corrected_cases(self, candidate: Candidate) -> list[Case]:
        """With the correction that is the default; at limit 0 there is nothing to correct."""
        found = self._cases(candidate, "default correction", candidate.values, self.seeds)
        return [case for case in found if case.limit != SYNCHRONOUS]

    def proof(self, candidate: Candidate) -> list[Case]:
        """Runs that test the claim, with other seeds than those that chose."""
        return self.uncorrected_cases(candidate, self.seeds) + self.corrected_cases(candidate)

    def is_searched(self, held_out: Rewards, defaults: Values) -> bool:
        """Whether every run of the search has ended."""
        return all(case.key(defaults) in held_out for case in self.search())

    def chosen(self, held_out: Rewards, defaults: Values) -> Candidate | None:
        """By the rule above. None as long as the search is not complete, or when no candidate qualifies."""
        if not self.is_searched(held_out, defaults):
            return None
        looked_at = [self._looked_at(each, held_out, defaults) for each in self.candidates]
        name = chosen_setting(looked_at, self.least_loss, self.least_reward)
        return next((each for each in self.candidates if each.name == name), None)

    def _looked_at(self, candidate: Candidate, held_out: Rewards, defaults: Values) -> Uncorrected:
        rewards: dict[int, dict[int, float]] = {SYNCHRONOUS: {}, self.limit: {}}
        for case in self.uncorrected_cases(candidate, self.search_seeds):
            if (reward := held_out[case.key(defaults)]) is not None:
                rewards[case.limit][case.seed] = reward
        return Uncorrected(candidate.name, rewards[SYNCHRONOUS], rewards[self.limit])

    def _cases(self, candidate: Candidate, row: str, values: Values, seeds: Sequence[int]) -> list[Case]:
        row = f"{candidate.name}, {row}"
        return [Case(candidate.task, row, limit, seed, values) for seed in seeds for limit in (SYNCHRONOUS, self.limit)]


@dataclass(frozen=True, slots=True)
class Grid:
    """goal: reward that wall clock counts to; defaults: keys of every run; expected_seconds: of a run, by task."""

    goal: float
    defaults: Values
    expected_seconds: Mapping[str, float]
    tables: tuple[Table, ...]
    claim: Claim

    def parts(self, held_out: Rewards) -> dict[str, list[Case]]:
        """Cases by name of the table, the search for a setting and, once there is one, the proof among them."""
        found = {table.name: table.cases() for table in self.tables}
        found["search"] = self.claim.search()
        if (candidate := self.claim.chosen(held_out, self.defaults)) is not None:
            found["claim"] = self.claim.proof(candidate)
        return found


def read_grid(text: str) -> Grid:
    """From TOML."""
    given = tomllib.loads(text)
    return Grid(
        goal=given["goal"],
        defaults=given["defaults"],
        expected_seconds=given["expected_seconds"],
        tables=tuple(_table(table, given["controls"]) for table in given["tables"]),
        claim=_claim(given["claim"]),
    )


def _table(given: Mapping[str, Any], controls: Mapping[str, Any]) -> Table:
    def table(name: str, title: str, own: Mapping[str, Any], controls: Table | None) -> Table:
        rows = {row: {**base, **values} for row, values in own["rows"].items()}
        return Table(name, title, tuple(given["tasks"]), tuple(own["limits"]), _seeds(own), rows, base, controls)

    base: Values = given.get("base", {})
    return table(given["name"], given["title"], given, table("controls", "Controls", controls, None))


def _claim(given: Mapping[str, Any]) -> Claim:
    return Claim(
        limit=given["limit"],
        least_loss=given["least_loss"],
        least_reward=given["least_reward"],
        search_seeds=_seeds({"first_seed": given["search_first_seed"], "seeds": given["search_seeds"]}),
        seeds=_seeds(given),
        uncorrected=given["uncorrected"],
        candidates=tuple(Candidate(each["task"], each["values"]) for each in given["candidates"]),
    )


def _seeds(given: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(range(given["first_seed"], given["first_seed"] + given["seeds"]))


@cache
def _experiment(task: str) -> dict[str, Any]:
    """Keys of the experiment of that name: {"training.learning_rate": 2e-4, "steps": 250}."""
    tables = tomllib.loads(experiment_text(task))
    flat: dict[str, Any] = {}
    for section, values in tables.items():
        if isinstance(values, Mapping):
            flat |= {f"{section}.{key}": value for key, value in values.items()}
        else:
            flat[section] = values
    return flat


# ---- what is asked for -----------------------------------------------------------------------------------

FILTERS = ("table", "task", "row", "limit", "seed")
BETWEEN = re.compile(r",(?! )")
"""Between values; names of rows have commas with a space."""


@dataclass(frozen=True, slots=True)
class Only:
    """Values by name of a filter; a filter that is not there lets everything through."""

    wanted: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, written: Sequence[str]) -> "Only":
        """From `task=quickstart,longer`, `row=cap, token,cap, sequence` and the like.

        Raises:
            ValueError: a name that is none of FILTERS, or a second name within a value.
        """
        wanted: dict[str, frozenset[str]] = {}
        for each in written:
            name, _, values = each.partition("=")
            if name not in FILTERS or not values:
                raise ValueError(f"--only {each}: write one of {', '.join(FILTERS)}, =, and values with commas")
            if joined := re.search(rf",({'|'.join(FILTERS)})=", values):
                apart = f"{name}={values[: joined.start()]} {values[joined.start() + 1 :]}"
                raise ValueError(f"--only {each}: a space, not a comma, between names: --only {apart}")
            wanted[name] = wanted.get(name, frozenset()) | frozenset(BETWEEN.split(values))
        return cls(wanted)

    def refuse_unknown(self, parts: Mapping[str, Sequence[Case]]) -> None:
        """Raises ValueError for a value that no case of `parts` has."""
        told = [_told(table, case) for table, cases in parts.items() for case in cases]
        for name, values in self.wanted.items():
            there = list(dict.fromkeys(each[name] for each in told))
            if unknown := sorted(values.difference(there)):
                raise ValueError(f"--only {name}={','.join(unknown)}: there are {', '.join(there)}")

    def refuse_nothing(self, parts: Mapping[str, Sequence[Case]]) -> None:
        """Raises ValueError when no case of `parts` is all that is wanted."""
        if not self.of_parts(parts):
            asked = " ".join(f"{name}={','.join(sorted(values))}" for name, values in self.wanted.items())
            raise ValueError(f"--only {asked}: there is nothing to run, no run of the grid is all of that")

    def takes(self, table: str, case: Case) -> bool:
        told = _told(table, case)
        return all(told[name] in values for name, values in self.wanted.items())

    def of_parts(self, parts: Mapping[str, Sequence[Case]]) -> dict[str, list[Case]]:
        """The same parts with what is asked for, without those in which nothing is."""
        found = {name: [case for case in cases if self.takes(name, case)] for name, cases in parts.items()}
        return {name: cases for name, cases in found.items() if cases}


def _told(table: str, case: Case) -> dict[str, str]:
    """What each of FILTERS looks at."""
    return {"table": table, "task": case.task, "row": case.row, "limit": str(case.limit), "seed": str(case.seed)}


def missing(cases: Sequence[Case], defaults: Values, done: Collection[str]) -> Iterator[tuple[str, Case]]:
    """Key and case of each that has no result, once."""
    told = set(done)
    for case in cases:
        if (key := case.key(defaults)) not in told:
            told.add(key)
            yield key, case
