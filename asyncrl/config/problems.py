"""Problems of a run that are found before it starts: every check reports them in this one form."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.config.schema import Config


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    key: config key that the problem is about, "" when it is about none. where: place of the value, e.g. "mine.toml:12"
    or "--steps"; "" when it is unknown. text: what is wrong, and what to do. others: further keys that the problem is
    about. is_warning: the run starts nevertheless, and prints this line.
    """

    key: str
    where: str
    text: str
    others: tuple[str, ...] = ()
    is_warning: bool = False

    def __str__(self) -> str:
        keys = ", ".join((self.key, *self.others))
        place = self.where if self.key in self.where else f"{self.where}: {keys}".removeprefix(": ")
        return f"{place}: {self.text}".removeprefix(": ")


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of a table of rules.

    keys: keys that the rule is about, separated by spaces. broken: whether a config breaks the rule. text: why that is
    wrong, and what to write instead; `{c}` stands for the config, `{a}` for its section `algorithm`, `{batch}` for the
    samples of a step. is_warning: nothing reads the value, which changes nothing else.
    """

    keys: str
    broken: Callable[["Config"], bool]
    text: str
    is_warning: bool = False

    def problems(self, config: "Config") -> Iterator[Problem]:
        """Yields one problem when `config` breaks the rule."""
        if self.broken(config):
            key, *others = self.keys.split()
            text = self.text.format(c=config, a=config.algorithm, batch=batch_samples(config))
            yield Problem(key, "", text, tuple(others), self.is_warning)


def batch_samples(config: "Config") -> int:
    """Returns the samples of one training step."""
    return config.task.prompts_per_step * config.task.samples_per_prompt


def report(problems: Iterable[Problem], kind: str = "problems") -> str:
    """Returns one line for one problem, and an indented list below a heading for several."""
    lines = [str(problem) for problem in problems]
    return lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} {kind}:", *lines])


def refuse(problems: Iterable[Problem]) -> None:
    """Raises ConfigError with all problems that are not warnings, if there are any."""
    if errors := [problem for problem in problems if not problem.is_warning]:
        raise ConfigError(report(errors))
