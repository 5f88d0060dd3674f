"""Prepares the folder of a policy that acts: the spaces of its environment, as a first instance has them."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from asyncrl.children.containment import containment_of
from asyncrl.concurrency import one_error
from asyncrl.config.schema import Config
from asyncrl.engines.acting.stepping.spaces import SPACES, Spaces, read_spaces, unusable_space, write_spaces
from asyncrl.engines.acting.stepping.stepped_environments import SteppedEnvironments
from asyncrl.errors import ConfigError


async def prepare_spaces(config: Config, target: Path, show: Callable[[str], None]) -> Path:
    """Returns `target` with the spaces of the environment, made at first. Raises ConfigError when the environment
    cannot be made, or the algorithm cannot act in it."""
    if await asyncio.to_thread((target / SPACES).is_file):
        spaces = read_spaces(target)
    else:
        show(f"looking at the spaces of {config.acting.env}")
        spaces = await _looked_at(config, target)
        write_spaces(target / SPACES, spaces)
    if why := unusable_space(spaces.action, config.acting.algorithm):
        raise ConfigError(f"acting.env: {config.acting.env}: {why}")
    return target


async def _looked_at(config: Config, target: Path) -> Spaces:
    """Makes one environment in a child, and begins an episode."""
    run_dir = target.parent
    with one_error():
        async with asyncio.TaskGroup() as tasks:
            environments = SteppedEnvironments(
                config.acting.model_copy(update={"environments": 1, "children": 1}),
                tasks,
                seed=config.seed,
                start_deadline=config.fleet.start_deadline,
                printed=run_dir / "logs" / "spaces.printed",
                containment=containment_of(config, [config.acting.env], run_dir=run_dir),
                variables=config.children.variables,
            )
            await environments.start()
            try:
                return environments.spaces
            finally:
                await environments.stop()
