"""Seeds and draws: functions of the sample only, never of place, time or neighbours.

run seed -> group seed -> member seed -> one uniform number per position. No generator has a state, so a retried
sample, another slot or another replica draws the same numbers.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

GAMMA = np.uint64(0x9E3779B97F4A7C15)  # odd fraction of the golden ratio: SplitMix64's increment
DRAW_BITS = 48  # few enough that draw * total never rounds up to total in float64


def group_seed(run_seed: int, group: int) -> int:
    """Returns the 63-bit seed of a group of a run."""
    return _digest("group", run_seed, group)


def member_seed(group: int, member: int) -> int:
    """Returns the 63-bit seed of one member; `group` is the group's seed, not its id."""
    return _digest("member", group, member)


def draws(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Returns uniform numbers in the open interval (0, 1), one for each (member seed, position), broadcast.

    SplitMix64's output function on seed + (position + 1) * gamma (Steele, Lea, Flood: Fast splittable pseudorandom
    number generators, OOPSLA 2014, section 3), with the seed mixed once before so that nearby seeds share no sequence.
    """
    with np.errstate(over="ignore"):
        bits = _mix(_mix(seeds) + (positions + np.uint64(1)) * GAMMA)
    return ((bits >> np.uint64(64 - DRAW_BITS)).astype(np.float64) + 0.5) * 2.0**-DRAW_BITS


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _digest(kind: str, *numbers: int) -> int:
    text = ":".join([kind, *map(str, numbers)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
