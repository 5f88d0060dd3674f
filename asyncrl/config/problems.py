"""Problems of a run that are found before it starts: every check reports them in this one form."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from asyncrl.errors import AsyncrlError, ConfigError


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong. key: config key that the problem is about, or "". where: place of the value, e.g.
    "mine.toml:12" or "--steps", or "". text: what is wrong, and what to do. others: further keys that the problem is
    about. is_warning: the run starts nevertheless, and prints this line."""

    key: str
    where: str
    text: str
    others: tuple[str, ...] = ()
    is_warning: bool = False

    @classmethod
    def of_error(cls, error: AsyncrlError, key: str) -> Self:
        """Returns the problem with `key` that an error names at its beginning."""
        return cls(key, "", str(error).removeprefix(f"{key}: "))

    def __str__(self) -> str:
        keys = [key for key in (self.key, *self.others) if key not in self.where]
        some_are_named = len(keys) < 1 + len(self.others)  # A place may name keys: "steps (--steps)".
        place = (", " if some_are_named else ": ").join(filter(None, [self.where, ", ".join(keys)]))
        return f"{place}: {self.text}".removeprefix(": ")


def wrong(keys: str, text: str, is_warning: bool = False) -> Problem:
    """Makes a problem. keys: keys that it is about, separated by spaces. text: may be broken into lines anywhere."""
    key, *others = keys.split()
    return Problem(key, "", " ".join(text.split()), tuple(others), is_warning)


class Incoherent(ValueError):
    """Reports that values of a config contradict each other."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems


def report(problems: Iterable[Problem], kind: str = "problems") -> str:
    """Returns one line for one problem, and an indented list of all of them below a heading for several."""
    lines = [str(problem) for problem in problems]
    return lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} {kind}:", *lines])


def refuse(problems: Iterable[Problem]) -> None:
    """Raises ConfigError with all problems that are not warnings, if there are any."""
    if errors := [problem for problem in problems if not problem.is_warning]:
        raise ConfigError(report(errors))
