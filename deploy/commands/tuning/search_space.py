"""The values among which a search chooses: `--search KEY=LOW..HIGH`, `KEY=LOW..HIGH:log` or `KEY=A,B,C`."""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from asyncrl.config.install_hints import install_extra
from asyncrl.config.sources.keys import advice, all_keys
from asyncrl.errors import ConfigError

Values = Mapping[str, Any]
UNSEARCHED = {
    "seed": "all candidates have the same seeds; --seeds says how many",
    "steps": "all candidates are compared after the same steps; --stop-at says which is the last one",
    "name": "a name changes nothing that is learnt",
}
"""Keys of which a search says nothing, and why."""


@dataclass(frozen=True, slots=True)
class Dimension:
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
    try:
        return import_module("optuna")
    except ModuleNotFoundError as error:
        if error.name != "optuna":
            raise
        raise ConfigError(f"Optuna is not installed; run: {install_extra('tune')}") from None


def parse_space(texts: Sequence[str]) -> list[Dimension]:
    """Parses a whole search. Raises ConfigError, also for a key that is given twice."""
    space = {dimension.key: dimension for dimension in map(_parsed, texts)}
    for key in space:
        if sum(text.startswith(f"{key}=") for text in texts) > 1:
            raise ConfigError(f"--search: {key} is given twice; write all of its values in one")
    return list(space.values())


def _parsed(text: str) -> Dimension:
    key, _, spec = text.partition("=")
    if not spec:
        raise _mistake(text, "write KEY=LOW..HIGH, KEY=LOW..HIGH:log or KEY=A,B,C")
    if key in UNSEARCHED:
        raise _mistake(text, UNSEARCHED[key])
    if key not in all_keys():
        raise _mistake(text, f"there is no key {key}; {advice(key)}")
    kinds = {"integer", "number"}.intersection(all_keys()[key].kinds)
    if kinds and ".." in spec:
        return Dimension(key, _range(text, spec, whole="number" not in kinds))
    choices = tuple(_toml(f"[{spec}]", [_toml(part, part) for part in spec.split(",")]))
    if len(set(map(repr, choices))) < 2:
        raise _mistake(text, "a search needs two different values at least")
    return Dimension(key, optuna().distributions.CategoricalDistribution(range(len(choices))), choices)


def _range(text: str, spec: str, *, whole: bool) -> Any:
    bounds, _, scale = spec.partition(":")
    first, _, last = bounds.partition("..")
    if scale not in ("", "log"):
        raise _mistake(text, f"there is no scale {scale!r}; write LOW..HIGH or LOW..HIGH:log")
    try:
        low, high = (int(first), int(last)) if whole else (float(first), float(last))
    except ValueError:
        raise _mistake(text, f"{first!r} and {last!r} must be {'integers' if whole else 'numbers'}") from None
    if not -math.inf < low < high < math.inf:
        raise _mistake(text, "the first bound must be below the second one, and both finite")
    if scale == "log" and low <= 0:
        raise _mistake(text, "a logarithmic range begins above 0")
    distributions = optuna().distributions
    kind = distributions.IntDistribution if whole else distributions.FloatDistribution
    return kind(low, high, log=scale == "log")


def _mistake(text: str, problem: str) -> ConfigError:
    return ConfigError(f"--search {text}: {problem}")


def _toml(text: str, otherwise: Any) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return otherwise
