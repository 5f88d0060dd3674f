"""Selects cases of the grid for `asyncrl-bench learning --only`, and lists those without a result."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.bench.learning.grid import Case, Values

FILTERS = ("table", "task", "row", "limit", "seed")
SEPARATOR = re.compile(r",(?! )")
"""Separates values; a comma before a space is part of the name of a row."""


@dataclass(frozen=True, slots=True)
class CaseFilter:
    """Holds the wanted values by name of a filter; a filter that is not given selects every case."""

    wanted: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, written: Sequence[str]) -> "CaseFilter":
        """Reads `task=quickstart,longer`, `row=cap, token,cap, sequence` and the like.

        Raises:
            ValueError: a name is not one of FILTERS, or a value holds a second name.
        """
        wanted: dict[str, frozenset[str]] = {}
        for each in written:
            name, _, values = each.partition("=")
            if name not in FILTERS or not values:
                raise ValueError(f"--only {each}: write one of {', '.join(FILTERS)}, =, and values with commas")
            if joined := re.search(rf",({'|'.join(FILTERS)})=", values):
                separate = f"{name}={values[: joined.start()]} {values[joined.start() + 1 :]}"
                raise ValueError(f"--only {each}: separate names with a space, not a comma: --only {separate}")
            wanted[name] = wanted.get(name, frozenset()) | frozenset(SEPARATOR.split(values))
        return cls(wanted)

    def refuse_unknown(self, parts: Mapping[str, Sequence[Case]]) -> None:
        """Raises ValueError for a value that no case of `parts` has."""
        known = [_filtered_values(table, case) for table, cases in parts.items() for case in cases]
        for name, values in self.wanted.items():
            choices = list(dict.fromkeys(each[name] for each in known))
            if unknown := sorted(values.difference(choices)):
                raise ValueError(f"--only {name}={','.join(unknown)}: choose from {', '.join(choices)}")

    def refuse_nothing(self, parts: Mapping[str, Sequence[Case]]) -> None:
        """Raises ValueError if the filter selects no case of `parts`."""
        if not self.of_parts(parts):
            written = " ".join(f"{name}={','.join(sorted(values))}" for name, values in self.wanted.items())
            raise ValueError(f"--only {written}: no case of the grid has all these values")

    def selects(self, table: str, case: Case) -> bool:
        filtered = _filtered_values(table, case)
        return all(filtered[name] in values for name, values in self.wanted.items())

    def of_parts(self, parts: Mapping[str, Sequence[Case]]) -> dict[str, list[Case]]:
        """Returns the selected cases of each part, without parts that have none."""
        found = {name: [case for case in cases if self.selects(name, case)] for name, cases in parts.items()}
        return {name: cases for name, cases in found.items() if cases}


def _filtered_values(table: str, case: Case) -> dict[str, str]:
    """Returns the value of a case for each of FILTERS."""
    return {"table": table, "task": case.task, "row": case.row, "limit": str(case.limit), "seed": str(case.seed)}


def missing(cases: Sequence[Case], defaults: Values, done: Collection[str]) -> Iterator[tuple[str, Case]]:
    """Yields the key and the case of each run without a result, once."""
    seen = set(done)
    for case in cases:
        if (key := case.key(defaults)) not in seen:
            seen.add(key)
            yield key, case
