"""Lists the forms in which models write calls of tools."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.config.user_code import suggestion
from asyncrl.environments.tools import json_calls, pythonic
from asyncrl.environments.tools.parsed_calls import Reading, ToolCall, ToolCalls, parse
from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Form:
    """A form of calls. read: adds what an answer has to a `Reading`. render: writes calls that `parse` reads."""

    read: Callable[[str, Reading], None]
    render: Callable[[Sequence[ToolCall]], str]

    def parse(self, text: str, opened: bool = False) -> ToolCalls:
        """Returns the calls of an answer behind its thoughts, and the mistakes in them; never raises. opened: whether
        the prompt had opened the thoughts."""
        return parse(text, self.read, opened)


FORMS: Mapping[str, Form] = {
    "hermes": Form(json_calls.read_hermes, json_calls.render_hermes),
    "llama3": Form(json_calls.read_llama3, json_calls.render_llama3),
    "pythonic": Form(pythonic.read, pythonic.render),
}


def form_named(name: str, where: str) -> Form:
    """Returns the form of this name; raises ConfigError, which begins with `where`, when there is none."""
    if name not in FORMS:
        raise ConfigError(f"{where}: there is no form {name}{suggestion(name, FORMS)}")
    return FORMS[name]
