"""Loads a config from command line > environment > file > defaults, and reports all mistakes at once."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from asyncrl.config.problems import Problem, report
from asyncrl.config.rules import Incoherent
from asyncrl.config.schema import Config, RewardFunction
from asyncrl.config.sources.experiment_file import find
from asyncrl.config.sources.keys import all_keys, closest
from asyncrl.config.sources.layers import ConfigLayer, environment_layer, file_layer, flags_layer, values_layer
from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Loaded:
    """A config and its sources.

    sources: place of each key that is not at its default ("FILE:12", "--steps", ...).
    """

    config: Config
    sources: Mapping[str, str]


def load(
    target: str | Path | None = None,
    flags: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    values: Mapping[str, Any] | None = None,
) -> Loaded:
    """Reads the experiment `target` (a name, or a TOML file) and puts environment and flags over it.

    Args:
        flags: `--section.key value`, as typed.
        environ: environment variables ASYNCRL_SECTION__KEY; default: those of the process.
        values: nested or dotted keys from Python, which are stronger than all other sources.

    Raises:
        ConfigError: names every mistake of all sources, each with its place and what to write instead.
    """
    layers = [*_target_layers(target), environment_layer(os.environ if environ is None else environ)]
    layers += [flags_layer(flags), values_layer(values or {})]
    return resolve(layers)


def read(path: Path) -> Config:
    """Reads the config of one file, without environment and flags."""
    return resolve(_target_layers(path)).config


def resolve(layers: Sequence[ConfigLayer]) -> Loaded:
    """Puts `layers` over one another, the weakest first.

    Raises:
        ConfigError: names every mistake in a layer and every contradiction between them.
    """
    problems = [problem for layer in layers for problem in (*layer.problems, *_invalid(layer))]
    broken = {problem.key for problem in problems}
    merged = {key: entry for layer in layers for key, entry in layer.entries.items() if key not in broken}
    sources = {key: source for key, (_, source) in merged.items()}
    try:
        config = Config.model_validate(_nested({key: value for key, (value, _) in merged.items()}))
    except ValidationError as error:
        if all(layer.readable for layer in layers):
            problems += _problems_of_all(error, merged, broken)
    if problems:
        raise ConfigError(report(problems, "mistakes in the configuration"))
    return Loaded(config, sources)


def _target_layers(target: str | Path | None) -> list[ConfigLayer]:
    if target is None:
        return []
    found = find(target)
    return [ConfigLayer({"name": (found.name, "the name of the experiment")}, ()), file_layer(found.text, found.place)]


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": 1, "c": 2} -> {"a": {"b": 1}, "c": 2}. Required sections are always present."""
    tree: dict[str, Any] = {key.path[0]: {} for key in all_keys().values() if key.required and len(key.path) > 1}
    for name, value in values.items():
        *section, key = name.split(".")
        table = tree.setdefault(section[0], {}) if section else tree
        table[key] = value
    return tree


def _invalid(layer: ConfigLayer) -> list[Problem]:
    """Returns values of `layer` that are wrong by themselves, whatever the other layers say."""
    try:
        Config.model_validate(_nested({key: value for key, (value, _) in layer.entries.items()}))
    except ValidationError as error:
        return _value_problems([detail for detail in error.errors() if not _concerns_all_layers(detail)], layer)
    return []


def _concerns_all_layers(detail: ErrorDetails) -> bool:
    """Returns whether this is a contradiction, or a missing key that another layer may bring."""
    return not detail["loc"] or (detail["type"] == "missing" and len(detail["loc"]) <= 2)


def _value_problems(details: Iterable[ErrorDetails], layer: ConfigLayer) -> list[Problem]:
    by_key: dict[str, list[ErrorDetails]] = {}
    for detail in details:
        by_key.setdefault(_key_of(detail["loc"]), []).append(detail)
    return [
        Problem(key, layer.entries[key][1], _wrong_value(found) + _hint(key, found[0])) for key, found in by_key.items()
    ]


def _hint(key: str, detail: ErrorDetails) -> str:
    """Returns advice about a wrong value whose purpose can be guessed."""
    if key == "generation.temperature" and detail["type"] == "greater_than" and float(detail["input"]) == 0:
        return "; greedy answers are for evaluation: write evaluate.temperature = 0"
    return ""


def _key_of(location: tuple[int | str, ...]) -> str:
    for length in (2, 1):
        if (name := ".".join(str(part) for part in location[:length])) in all_keys():
            return name
    raise AssertionError(f"validation complains about {location}, which is no key")


def _wrong_value(details: Sequence[ErrorDetails]) -> str:
    """Joins all complaints about one value; validation complains once for each member of a union."""
    by_place: dict[str, list[ErrorDetails]] = {}
    for detail in details:
        by_place.setdefault("".join(f"{part}: " for part in _inside(detail["loc"][2:])), []).append(detail)
    return "; ".join(
        where + " or ".join(dict.fromkeys(map(_complaint, found))) + _instead_of(found[-1])
        for where, found in by_place.items()
    )


def _complaint(detail: ErrorDetails) -> str:
    if detail["type"] == "extra_forbidden":
        near = closest(str(detail["loc"][-1]), RewardFunction.model_fields)
        return "there is no such key" + (f"; did you mean {near}?" if near else "")
    message = detail["msg"].replace("Input should be", "must be").split(", unable to parse", 1)[0]
    return message[0].lower() + message[1:]


def _inside(location: Sequence[int | str]) -> list[str]:
    """Returns the place of the wrong value in a list, without the names that validation gives to members of a union."""
    union = ("constrained-", "literal[", "int", "str")
    parts = [f"item {part + 1}" if isinstance(part, int) else part for part in location]
    return [part for part in parts if not part.startswith(union)]


def _instead_of(last: ErrorDetails) -> str:
    if last["type"] in ("extra_forbidden", "missing"):
        return ""
    choices = [choice.strip("' ") for choice in _expected(last).replace(" or ", ",").split(",")]
    near = closest(str(last["input"]), choices) if len(choices) > 1 else None
    return f", not {last['input']!r}" + (f"; did you mean {near}?" if near else "")


def _expected(detail: ErrorDetails) -> str:
    return str(detail.get("ctx", {}).get("expected", ""))


Entries = Mapping[str, tuple[Any, str]]
"""Dotted key -> (value, place)."""


def _problems_of_all(error: ValidationError, merged: Entries, broken: set[str]) -> list[Problem]:
    """Returns missing keys and contradictions, without those about keys that are reported already."""
    missing = {_key_of(detail["loc"]) for detail in error.errors() if detail["type"] == "missing"}
    found = [Problem(key, "", f"has no default: write it; {all_keys()[key].doc}") for key in missing - broken]
    for problem in _contradictions(error, merged, missing):
        keys = (problem.key, *problem.others)
        if not broken.intersection(keys):
            places = [f"{key} ({merged[key][1]})" for key in keys if key in merged]
            found.append(replace(problem, where=", ".join(places)))
    return sorted(found, key=lambda problem: problem.key)


def _contradictions(error: ValidationError, merged: Entries, missing: set[str]) -> list[Problem]:
    """Returns the contradictions of a config; placeholders take the place of missing keys."""
    if missing:
        values = {key: value for key, (value, _) in merged.items()} | dict.fromkeys(missing, "?")
        try:
            Config.model_validate(_nested(values))
        except ValidationError as second:
            return _contradictions(second, merged, set())
        return []
    causes = [detail.get("ctx", {}).get("error") for detail in error.errors()]
    return [problem for cause in causes if isinstance(cause, Incoherent) for problem in cause.problems]
