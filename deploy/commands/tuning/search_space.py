"""The values among which a search chooses: `--search KEY=LOW..HIGH`, `KEY=LOW..HIGH:log` or `KEY=A,B,C`."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    """One key of a search: a range from low to high, or choices. log: the logarithm is uniform. whole: of integers."""

    key: str
    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False

    @property
    def ends(self) -> tuple[Any, ...]:
        """Returns all choices, or both ends of the range."""
        if self.choices:
            return self.choices
        return (int(self.low), int(self.high)) if self.whole else (self.low, self.high)

    def suggest(self, trial: Any) -> Any:
        """Returns the value that an optuna.Trial suggests."""
        if self.choices:
            return self.of(trial.suggest_categorical(self.key, list(range(len(self.choices)))))
        if self.whole:
            return self.of(trial.suggest_int(self.key, int(self.low), int(self.high), log=self.log))
        return self.of(trial.suggest_float(self.key, self.low, self.high, log=self.log))

    def of(self, suggested: Any) -> Any:
        """Returns the value for a parameter as Optuna stores it: choices by their number, and other numbers with three
        digits, so that a person can type them."""
        if self.choices:
            return self.choices[suggested]
        return int(suggested) if self.whole else float(f"{suggested:.3g}")


def parse_dimension(text: str) -> Dimension:
    """Parses what stands after `--search`. Raises ConfigError."""
    key, equals, spec = text.partition("=")
    if not equals or not spec:
        raise ConfigError(f"--search {text}: write KEY=LOW..HIGH, KEY=LOW..HIGH:log or KEY=A,B,C")
    if key in UNSEARCHED:
        raise ConfigError(f"--search {text}: {UNSEARCHED[key]}")
    if key not in all_keys():
        raise ConfigError(f"--search {text}: there is no key {key}; {advice(key)}")
    is_number = bool({"integer", "number"} & set(all_keys()[key].kinds))
    return _range(text, key, spec) if is_number and ".." in spec else _choices(text, key, spec)


def _range(text: str, key: str, spec: str) -> Dimension:
    bounds, _, scale = spec.partition(":")
    low, _, high = bounds.partition("..")
    kinds = all_keys()[key].kinds
    if scale not in ("", "log"):
        raise ConfigError(f"--search {text}: there is no scale {scale!r}; write LOW..HIGH or LOW..HIGH:log")
    whole = "number" not in kinds
    try:
        first, last = (float(int(bound) if whole else float(bound)) for bound in (low, high))
    except ValueError:
        raise ConfigError(
            f"--search {text}: {low!r} and {high!r} must be {'integers' if whole else 'numbers'}"
        ) from None
    if not first < last:
        raise ConfigError(f"--search {text}: the first bound must be below the second one")
    if scale == "log" and first <= 0:
        raise ConfigError(f"--search {text}: a logarithmic range begins above 0")
    return Dimension(key, low=first, high=last, log=scale == "log", whole=whole)


def _choices(text: str, key: str, spec: str) -> Dimension:
    choices = _array(spec)
    if len(set(map(repr, choices))) < 2:
        raise ConfigError(f"--search {text}: a search needs two different values at least")
    return Dimension(key, choices)


def _array(spec: str) -> tuple[Any, ...]:
    """Returns the values between commas: TOML values, such as lists, or plain text."""
    try:
        return tuple(tomllib.loads(f"values = [{spec}]")["values"])
    except tomllib.TOMLDecodeError:
        return tuple(_literal(part) for part in spec.split(","))


def _literal(text: str) -> Any:
    """Returns the TOML value of a text, or the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def parse_space(texts: Sequence[str]) -> list[Dimension]:
    """Parses a whole search. Raises ConfigError, also for a key that is given twice."""
    space = [parse_dimension(text) for text in texts]
    for number, dimension in enumerate(space):
        if dimension.key in [each.key for each in space[:number]]:
            raise ConfigError(f"--search: {dimension.key} is given twice; write all of its values in one")
    return space
