"""Checks whether code of the user can be contained here, where an experiment runs any."""

from collections.abc import Collection, Iterator
from pathlib import Path

from asyncrl.children.containment import Containment, Surroundings, WithoutNetwork, try_containment
from asyncrl.children.sandbox import SandboxError
from asyncrl.config.problems import Problem
from asyncrl.config.schema import Config
from asyncrl.environments.loading import EnvironmentSpec
from asyncrl.errors import ConfigError
from asyncrl.rewards.functions import function_specs

SYSTEM = ("/dev", "/proc", "/sys")


def code_of_user(config: Config, served: Collection[str] = ()) -> list[str]:
    """Returns the names of reward functions and environments that are no part of asyncrl and run on this host. served:
    services that the caller brings."""
    elsewhere = {*served, *config.fleet.joined}
    environment = EnvironmentSpec(config.environment.use, config.environment.options)
    is_here = environment.use and environment.is_users and "environment" not in elsewhere
    names = [environment.use] if is_here else []
    for service in config.scorers:
        try:
            specs = [] if service in elsewhere else function_specs(config, service)
        except ConfigError:  # `function_problems` reports it.
            continue
        names += [spec.use for spec in specs if spec.is_users]
    return names


def containment_problems(config: Config, served: Collection[str] = ()) -> Iterator[Problem]:
    """Yields why code of the user cannot be contained on this machine."""
    section = config.children
    if section.sandbox == "none" or not code_of_user(config, served):
        return
    for folder in section.writable:
        real = Path(folder).resolve()
        if not real.is_dir():
            yield Problem("children.writable", "", f"there is no folder {folder}; make it, or take it off the list")
        elif real == Path("/") or any(real.is_relative_to(system) for system in SYSTEM):
            text = f"{folder} has more than files, the processes of the fleet among it; name folders of your own"
            yield Problem("children.writable", "", text)
            return
    try:
        try_containment(*_layers(config))
    except SandboxError as error:
        yield Problem("children.sandbox", "", str(error))


def _layers(config: Config) -> list[Surroundings]:
    """Returns what contains code of the user, the outer layer first: agents and their child share one network."""
    section = config.children
    inner = Containment(writable=section.writable, network=section.network)
    of_agents = EnvironmentSpec(config.environment.use).is_of_agents
    return [WithoutNetwork(), inner] if of_agents and not section.network else [inner]
