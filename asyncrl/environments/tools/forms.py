"""Lists the forms in which models write calls of tools."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.config.user_code import suggestion
from asyncrl.environments.tools import hermes, llama3, pythonic
from asyncrl.environments.tools.calls import ToolCall, ToolCalls
from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Form:
    """A form of calls. parse: reads an answer and never raises; render: writes calls that `parse` reads."""

    parse: Callable[[str], ToolCalls]
    render: Callable[[Sequence[ToolCall]], str]


FORMS: Mapping[str, Form] = {
    "hermes": Form(hermes.parse, hermes.render),
    "llama3": Form(llama3.parse, llama3.render),
    "pythonic": Form(pythonic.parse, pythonic.render),
}


def form_named(name: str, where: str) -> Form:
    """Returns the form of this name; raises ConfigError, which begins with `where`, when there is none."""
    if name not in FORMS:
        raise ConfigError(f"{where}: there is no form {name}{suggestion(name, FORMS)}")
    return FORMS[name]
