"""The values among which a search chooses: `--search KEY=LOW..HIGH`, `KEY=LOW..HIGH:log` or `KEY=A,B,C`."""

import math
import tomllib
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

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
