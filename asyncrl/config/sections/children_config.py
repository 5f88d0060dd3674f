"""The section `[children]` of a config."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator

from asyncrl.config.sections.algorithm_config import Section


def _variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or name.startswith("ASYNCRL_"):
        raise ValueError("must be the name of an environment variable, and none that begins with ASYNCRL_")
    return name


VariableName = Annotated[str, AfterValidator(_variable)]


class ChildrenConfig(Section):
    """The processes that run your reward functions and environments."""

    sandbox: Literal["bubblewrap", "none"] = "bubblewrap"
    """Isolation of these processes. bubblewrap: they read the machine, but reach neither run directory, keys and
    tokens, nor the fleet or other processes. none: they can do all that you can."""
    network: bool = True
    """Lets these processes use the network."""
    variables: tuple[VariableName, ...] = ()
    """Environment variables that these processes get, such as the key of an API, beside harmless ones."""
    writable: tuple[str, ...] = ()
    """Folders that these processes may write, beside a /tmp, /var/tmp, /run and /dev/shm of their own, which are empty
    at first."""
