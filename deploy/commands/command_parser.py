"""Parses the arguments of a command; a mistake in them is one line that names the closest option."""

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import NoReturn

from asyncrl.config.install_hints import program
from asyncrl.errors import ConfigError

_MISSING = "the following arguments are required: "
_UNKNOWN = "unrecognized arguments: "
_ARGUMENT = "argument "
"""Beginnings of the messages of argparse."""
_KINDS = {"int": "whole number", "float": "number"}


class CommandParser(argparse.ArgumentParser):
    """A parser whose mistakes are a ConfigError of one line, in place of the usage and an end of the process."""

    def error(self, message: str) -> NoReturn:
        sentence = self._sentence(message)
        raise ConfigError(f"{sentence}{'' if sentence[-1] == '?' else ';'} `{self.prog} --help` explains the arguments")

    def _sentence(self, message: str) -> str:
        """Returns what is wrong in words of this command."""
        if message.startswith(_MISSING):
            needed = message.removeprefix(_MISSING)
            helps = [each.help for each in self._actions if each.help and needed in (each.metavar, each.dest)]
            return f"`{self.prog}` needs {needed}" + "".join(f": {text.removesuffix('.')}" for text in helps)
        if message.startswith(_UNKNOWN):
            return self._unknown(message.removeprefix(_UNKNOWN).split()[0])
        name, _, wrong = message.removeprefix(_ARGUMENT).partition(": ")
        wrong = wrong.replace("expected one argument", "needs a value")
        if kind := re.fullmatch(r"invalid (\w+) value: (.*)", wrong):
            wrong = f"must be a {_KINDS.get(kind[1], kind[1])}, not {kind[2]}"
        return f"{name}: {wrong}" if wrong else message

    def _unknown(self, given: str) -> str:
        if not given.startswith("-"):
            return f"`{self.prog}` has no use for {given!r}"
        near = difflib.get_close_matches(given, self._option_string_actions, 1)
        return f"`{self.prog}` has no option {given.partition('=')[0]}" + (f"; did you mean {near[0]}?" if near else "")


def asks_for_usage(command: str, text: str, arguments: Sequence[str]) -> bool:
    """Returns whether a command's usage is asked for, and prints it. Raises ConfigError when no experiment is named."""
    if "-h" in arguments or "--help" in arguments:
        print(text)
        return True
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError(f"name an experiment or its TOML file first: `{program()} {command} quickstart`")
    return False


def positive(text: str) -> int:
    """Reads a whole number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, not {text!r}")
    return int(text)
