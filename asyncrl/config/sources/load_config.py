"""One config from command line > environment > file > defaults, with every mistake reported at once."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from asyncrl.coherence import Incoherent
from asyncrl.config import Config, RewardFunction
from asyncrl.errors import ConfigError
from asyncrl.settings.keys import all_keys, closest
from asyncrl.settings.layers import Layer, Mistake, environment_layer, file_layer, flags_layer, values_layer
from asyncrl.settings.target import find


@dataclass(frozen=True, slots=True)
class Loaded:
    """sources: where each key that is not at its default came from ("FILE:12", "--steps", ...)."""

    config: Config
    sources: Mapping[str, str]


def load(
    target: str | Path | None = None,
    flags: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    values: Mapping[str, Any] | None = None,
) -> Loaded:
    """Read the experiment `target` (a name, or a TOML file) and put environment and flags over it.

    Args:
        flags: `--section.key value`, as typed.
        environ: looked through for ASYNCRL_SECTION__KEY; by default the process's.
        values: nested or dotted keys from Python, strongest of all.

    Raises:
        ConfigError: with every mistake of all sources, each with its place and what to write instead.
    """
    layers = [*_target_layers(target), environment_layer(os.environ if environ is None else environ)]
    layers += [flags_layer(flags), values_layer(values or {})]
    return resolve(layers)


def read(path: Path) -> Config:
    """The config in one file, alone: neither environment nor flags touch it."""
    return resolve(_target_layers(path)).config


def resolve(layers: Sequence[Layer]) -> Loaded:
    """Put `layers` over one another, weakest first.

    Raises:
        ConfigError: every mistake in any layer and in the whole.
    """
    mistakes = [mistake for layer in layers for mistake in (*layer.mistakes, *_invalid(layer))]
    broken = {mistake.key for mistake in mistakes}
    merged = {key: entry for layer in layers for key, entry in layer.entries.items() if key not in broken}
    sources = {key: source for key, (_, source) in merged.items()}
    try:
        config = Config.model_validate(_nested({key: value for key, (value, _) in merged.items()}))
    except ValidationError as error:
        if all(layer.readable for layer in layers):
            mistakes += _of_the_whole(error, merged, broken)
    if mistakes:
        raise ConfigError(_report(mistakes))
    return Loaded(config, sources)


def _target_layers(target: str | Path | None) -> list[Layer]:
    if target is None:
        return []
    found = find(target)
    return [Layer({"name": (found.name, "the name of the experiment")}, ()), file_layer(found.text, found.place)]


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": 1, "c": 2} -> {"a": {"b": 1}, "c": 2}. Sections that must be there are, if only empty."""
    tree: dict[str, Any] = {key.path[0]: {} for key in all_keys().values() if key.required and len(key.path) > 1}
    for name, value in values.items():
        *section, key = name.split(".")
        table = tree.setdefault(section[0], {}) if section else tree
        table[key] = value
    return tree


def _invalid(layer: Layer) -> list[Mistake]:
    """Values in `layer` that are wrong whatever the other layers say."""
    try:
        Config.model_validate(_nested({key: value for key, (value, _) in layer.entries.items()}))
    except ValidationError as error:
        return _value_mistakes([detail for detail in error.errors() if not _concerns_the_whole(detail)], layer)
    return []


def _concerns_the_whole(detail: ErrorDetails) -> bool:
    """A contradiction, or a key that another layer may bring."""
    return not detail["loc"] or (detail["type"] == "missing" and len(detail["loc"]) <= 2)


def _value_mistakes(details: Iterable[ErrorDetails], layer: Layer) -> list[Mistake]:
    by_key: dict[str, list[ErrorDetails]] = {}
    for detail in details:
        by_key.setdefault(_key_of(detail["loc"]), []).append(detail)
    return [
        Mistake(key, layer.entries[key][1], _wrong_value(found) + _hint(key, found[0])) for key, found in by_key.items()
    ]


def _hint(key: str, detail: ErrorDetails) -> str:
    """What a value that is wrong was probably meant for."""
    if key == "generation.temperature" and detail["type"] == "greater_than" and float(detail["input"]) == 0:
        return "; greedy answers are for evaluation: write evaluate.temperature = 0"
    return ""


def _key_of(location: tuple[int | str, ...]) -> str:
    for length in (2, 1):
        if (name := ".".join(str(part) for part in location[:length])) in all_keys():
            return name
    raise AssertionError(f"validation complains about {location}, which is no key")


def _wrong_value(details: Sequence[ErrorDetails]) -> str:
    """All complaints about one value; a union complains once for each of its members."""
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
    """Where in a list the wrong value is; names that validation gives to the members of a union are left out."""
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


def _of_the_whole(error: ValidationError, merged: Entries, broken: set[str]) -> list[Mistake]:
    """What is missing, and what contradicts each other, leaving out what is reported already."""
    missing = {_key_of(detail["loc"]) for detail in error.errors() if detail["type"] == "missing"}
    found = [Mistake(key, "", f"has no default: write it; {all_keys()[key].doc}") for key in missing - broken]
    for contradiction in _contradictions(error, merged, missing):
        if not broken & set(contradiction.keys):
            places = [f"{key} ({merged[key][1]})" for key in contradiction.keys if key in merged]
            found.append(Mistake(contradiction.keys[0], ", ".join(places), contradiction.text))
    return sorted(found, key=lambda mistake: mistake.key)


def _contradictions(error: ValidationError, merged: Entries, missing: set[str]) -> list[Any]:
    """Contradictions of a config also when something else is missing: that is stood in for."""
    if missing:
        stood_in = {key: value for key, (value, _) in merged.items()} | dict.fromkeys(missing, "?")
        try:
            Config.model_validate(_nested(stood_in))
        except ValidationError as second:
            return _contradictions(second, merged, set())
        return []
    causes = [detail.get("ctx", {}).get("error") for detail in error.errors()]
    return [found for cause in causes if isinstance(cause, Incoherent) for found in cause.contradictions]


def _report(mistakes: Sequence[Mistake]) -> str:
    lines = [str(mistake) for mistake in mistakes]
    if len(lines) == 1:
        return lines[0]
    return "\n".join([f"{len(lines)} mistakes in the configuration:", *(f"  {line}" for line in lines)])
