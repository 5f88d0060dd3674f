"""Says what is wrong with the values of a config: makes a problem with key, place and advice of each pydantic error."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from asyncrl.config.problems import Incoherent, Problem
from asyncrl.config.schema import Config, RewardFunction
from asyncrl.config.sections.evaluate_config import EvaluationSet
from asyncrl.config.sections.model_config import LoraConfig
from asyncrl.config.sections.pools_config import PoolConfig
from asyncrl.config.sections.task_config import SOURCE, SOURCES, MixedSource
from asyncrl.config.sources.keys import all_keys, closest

Entries = Mapping[str, tuple[Any, str]]
"""Values with their places, by dotted key."""


def config_of(entries: Entries) -> Config:
    """Validates a config; raises ValidationError, also for a required key that is missing."""
    # Required sections are always present, so that what is missing is their key.
    tree: dict[str, Any] = {key.name.partition(".")[0]: {} for key in all_keys().values() if key.required}
    for name, (value, _) in entries.items():
        section, _, key = name.rpartition(".")
        table = tree.setdefault(section, {}) if section else tree
        table[key] = value
    return Config.model_validate(tree)


def problems_of_values(entries: Entries) -> list[Problem]:
    """Returns values of one source that are wrong by themselves, whatever the other sources say."""
    by_key: dict[str, list[ErrorDetails]] = {}
    for detail in _details(entries):
        # Another source may bring a missing key, and repair a contradiction, which has no location.
        if detail["loc"] and not (detail["type"] == "missing" and len(detail["loc"]) <= 2):
            by_key.setdefault(_key_of(detail["loc"]), []).append(detail)
    return [Problem(key, entries[key][1], _wrong_value(key, found)) for key, found in by_key.items()]


def problems_of_all(merged: Entries, broken: set[str]) -> list[Problem]:
    """Returns missing keys and contradictions of all sources, without those about `broken` keys, reported already."""
    missing = [key for key in all_keys().values() if key.required and key.name not in merged]
    found = [Problem(key.name, "", f"has no default: write it; {key.doc}") for key in missing if key.name not in broken]
    complete = {**merged, **{key.name: ("?", "") for key in missing}}
    causes = [detail.get("ctx", {}).get("error") for detail in _details(complete)]
    for problem in (problem for cause in causes if isinstance(cause, Incoherent) for problem in cause.problems):
        keys = (problem.key, *problem.others)
        if not any(key == name or key.startswith(f"{name}.") for key in keys for name in broken):
            places = [f"{key} ({merged[key][1]})" for key in keys if key in merged]
            found.append(replace(problem, where=", ".join(places)))
    return sorted(found, key=lambda problem: problem.key)


def _details(entries: Entries) -> list[ErrorDetails]:
    """Returns everything that validation complains about."""
    try:
        config_of(entries)
    except ValidationError as error:
        return error.errors()
    return []


def _key_of(location: tuple[int | str, ...]) -> str:
    for length in (2, 1):
        if (name := ".".join(str(part) for part in location[:length])) in all_keys():
            return name
    raise AssertionError(f"validation complains about {location}, which is no key")


def _wrong_value(key: str, details: Sequence[ErrorDetails]) -> str:
    """Joins all complaints about one value; validation complains once for each member of a union."""
    by_place: dict[str, list[ErrorDetails]] = {}
    for detail in details:
        by_place.setdefault(_place_in_list(detail["loc"][1 + key.count(".") :]), []).append(detail)
    told = "; ".join(
        place + " or ".join(dict.fromkeys(map(_complaint, found))) + _instead_of(found[-1])
        for place, found in by_place.items()
    )
    first = details[0]
    if key == "generation.temperature" and first["type"] == "greater_than" and float(first["input"]) == 0:
        return f"{told}; greedy answers are for evaluation: write evaluate.temperature = 0"
    return told


def _place_in_list(location: Iterable[int | str]) -> str:
    """Returns where in a list the wrong value is, without the names that validation gives to members of a union."""
    union = ("constrained-", "literal[", "int", "str", SOURCES, SOURCE)
    parts = [f"item {part + 1}" if isinstance(part, int) else part for part in location]
    return "".join(f"{part}: " for part in parts if not part.startswith(union))


def _complaint(detail: ErrorDetails) -> str:
    if detail["type"] == "extra_forbidden":
        tables: dict[str, type[BaseModel]] = {"model": LoraConfig, "pools": PoolConfig, "evaluate": EvaluationSet}
        tables["task"] = MixedSource
        near = closest(str(detail["loc"][-1]), tables.get(str(detail["loc"][0]), RewardFunction).model_fields)
        return "there is no such key" + (f"; did you mean {near}?" if near else "")
    if detail["type"] in ("tuple_type", "list_type"):
        return "must be a list, written as [...]"
    if detail["type"] == "too_short":
        return f"must have {detail['ctx']['min_length']} or more entries"
    message = detail["msg"].replace("Input should be", "must be").split(", unable to parse", 1)[0]
    message = message.removeprefix("Value error, ")
    return message[0].lower() + message[1:]


def _instead_of(last: ErrorDetails) -> str:
    if last["type"] in ("extra_forbidden", "missing"):
        return ""
    expected = str(last.get("ctx", {}).get("expected", ""))
    choices = [choice.strip("' ") for choice in expected.replace(" or ", ",").split(",")]
    near = closest(str(last["input"]), choices) if len(choices) > 1 else None
    return f", not {last['input']!r}" + (f"; did you mean {near}?" if near else "")
