"""Imports the packages of foreign environments."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from asyncrl.config.install_hints import install_extra
from asyncrl.errors import ConfigError

EXTRA = "environments"


def package(name: str, extra: str = EXTRA, key: str = "environment.use") -> Any:
    """Returns a module; raises ConfigError with the command that installs it when it is not there. key: of the config,
    which needs it."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise ConfigError(f"{key}: {error.name} is not installed; run: {install_extra(extra)}") from None


def after_prompt(prompt: Any, shown: str) -> Any:
    """Returns the prompt of a row, text or messages, with the first observation behind it."""
    if isinstance(prompt, str):
        return f"{prompt}\n{shown}" if prompt else shown
    return [*prompt, {"role": "user", "content": shown}]


class OwnRandomness:
    """The state of Python's shared random generator, for an episode whose package draws from it: episodes that run in
    one process would change one another's draws."""

    def __init__(self, seed: int) -> None:
        self._state = random.Random(seed).getstate()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Makes the shared generator go on where the episode left it, for a block without an await."""
        before = random.getstate()
        random.setstate(self._state)
        try:
            yield
        finally:
            self._state = random.getstate()
            random.setstate(before)
