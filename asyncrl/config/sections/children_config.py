"""The section `[children]` of a config."""

from typing import Literal

from asyncrl.config.sections.algorithm_config import Section


class ChildrenConfig(Section):
    """The processes that run your reward functions and environments. asyncrl's own ones run in other processes."""

    sandbox: Literal["bubblewrap", "none"] = "bubblewrap"
    """Isolation of the processes that run your reward functions and environments. bubblewrap: they can read the
    machine, but reach neither the run directory, nor the fleet's memory, sockets and variables, nor other processes.
    none: they can do all that you can."""
    network: bool = True
    """Lets these processes use the network. A function that calls a remote judge needs it."""
    writable: tuple[str, ...] = ()
    """Folders that these processes may write, such as a cache. Otherwise they can write only to a /tmp, /var/tmp, /run
    and /dev/shm of their own, which are empty at first: what you have in these folders they do not see."""
