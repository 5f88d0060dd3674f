"""The reward of the end-to-end measurement, for us and for TRL alike: the share of words with an even number.

Imported by reward children and by other systems' interpreters: the standard library only.
"""

import asyncio
from typing import Any

PATIENCE = 0.2
"""Seconds a slow judge takes over a sample."""

_seats: dict[int, asyncio.Semaphore] = {}


def share_of_even(text: str) -> float:
    words = text.split()
    return sum(word[-1] in "02468" for word in words) / max(1, len(words))


def at_once(sample: Any) -> float:
    return share_of_even(sample.text)


async def slowly(sample: Any, seats: int = 32) -> float:
    """As a judge over the network does: `seats` samples at a time; 0: as many as there are."""
    return await judged_slowly(sample.text, seats)


async def judged_slowly(text: str, seats: int) -> float:
    if not seats:
        await asyncio.sleep(PATIENCE)
        return share_of_even(text)
    async with _seats.setdefault(seats, asyncio.Semaphore(seats)):
        await asyncio.sleep(PATIENCE)
    return share_of_even(text)
