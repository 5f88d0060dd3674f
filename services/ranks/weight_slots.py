"""The two slots for versions of the weights: what to do where they do not fit, and the wait until one is free."""

import asyncio

from asyncrl.errors import ArenaFull, ConfigError, DeadlineExceeded
from asyncrl.lanes.weights.leases import Leases


async def wait_for_slot(leases: Leases, version: int, changed: asyncio.Event, deadline: float) -> None:
    """Waits until no reader uses the slot of `version`, and closes the slot for readers. changed: is set when leases
    change. deadline: twice that after which the controller kills a reader, which has to take effect. Raises
    DeadlineExceeded."""
    try:
        async with asyncio.timeout(deadline):
            while leases.holders(version):
                changed.clear()
                await changed.wait()
            leases.begin_write(version)
    except TimeoutError:
        raise DeadlineExceeded(
            f"weights of version {version} could not be written within {deadline:g} s: "
            f"{', '.join(leases.holders(version))} still read the slot; raise staleness.publish_deadline if they "
            "are only slow"
        ) from None


def no_room_for_weights(full: ArenaFull) -> ConfigError:
    return ConfigError(
        f"two versions of the weights have to fit into shared memory: {full}; or use a smaller model (model.name), or "
        "half the bytes (model.dtype)"
    )
