"""The section `[children]` of a config."""

from typing import Literal

from asyncrl.config.algorithm_config import Section


class ChildrenConfig(Section):
    """The processes that run reward functions and environments of yours. Those of asyncrl itself run beside them."""

    sandbox: Literal["bubblewrap", "none"] = "bubblewrap"
    """Containment of these processes. bubblewrap: they read the machine, and reach neither the run directory, the
    fleet's memory, sockets and variables, nor other processes. none: they may do what you may."""
    network: bool = True
    """Lets these processes use the network, which functions need that ask a judge elsewhere."""
    writable: tuple[str, ...] = ()
    """Folders that these processes may write, such as a cache. They write elsewhere to an empty /tmp of their own
    only."""
